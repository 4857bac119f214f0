"""Layers that are in no paper, under examples/invented: right in every backend, and they train."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from tiers import beyond

import ttmdsl
from ttmdsl.drawing import Shape
from ttmdsl.parity import parity

FOLDER = Path(__file__).parent.parent / "examples" / "invented"
INVENTED = sorted(path.stem for path in FOLDER.glob("*.ttm"))
SHAPES = (
    Shape("T=13, cut at 5", batch=2, tokens=13, heads=2, dims=(6, 4, 5), cuts=(5,)),
    Shape("packed 4+9", dims=(4, 6, 3), lengths=(4, 9)),
)


def misses(name: str, triton: bool) -> list[str]:
    torch.set_num_threads(1)
    dtype, backend = (torch.float32, "triton") if triton else (torch.float64, "torch")
    rows = parity(ttmdsl.load(FOLDER / f"{name}.ttm"), dtypes=(dtype,), shapes=SHAPES, backends=(backend,))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


def test_there_are_six() -> None:
    assert len(INVENTED) >= 6
    assert not set(INVENTED) & set(ttmdsl.layers())


@pytest.mark.parametrize("name", INVENTED)
def test_torch_is_the_reference(name: str) -> None:
    assert misses(name, triton=False) == []


@pytest.mark.parametrize("name", beyond(INVENTED, "lp_gated_mlp"))
def test_kernels_are_the_reference(name: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(misses, name, triton=True).result() == []


@pytest.mark.parametrize("name", beyond(INVENTED, "lp_gated_mlp"))
def test_it_trains(name: str) -> None:
    """Every token shall say the token before it: nothing but a memory can."""
    torch.manual_seed(0)
    layer = ttmdsl.load(FOLDER / f"{name}.ttm").Layer(16, 2)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    x = torch.randn(4, 24, 16)
    losses = []
    for _ in range(30):
        loss = (layer(x)[0][:, 1:] - x[:, :-1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0], losses
