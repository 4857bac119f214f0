"""Gates next to 0 and 1, decays of e^-20, keys of norm 10: finite, and no further off than rounding explains."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from tiers import beyond, thorough

import ttmdsl
from ttmdsl import edges
from ttmdsl.edges import EDGES, Edge, at_edges, main, page

# those whose kernels take another way where decays are strong, and those that take logarithms of a state
KERNELS = [("gla", 37), ("gsa", 37), ("rwkv7", 37), ("lattice_dec:5", 7), ("mamba2", 70), ("memora", 20)]


def misses(rows: list[Edge]) -> list[str]:
    """What is not finite, or has lost more than ten times what the reference has lost in the same dtype."""
    assert rows
    assert {row.edge for row in rows} <= set(EDGES)
    bad = [r for r in rows if not r.diverges and not (r.finite and (r.error < 1e-2 or r.error < 10 * r.lost))]
    return [f"{r.edge}: {'finite' if r.finite else 'not finite'}, {r.error:.1e}, reference {r.lost:.1e}" for r in bad]


def interpreted(variant: str, tokens: int) -> list[str]:
    """The kernels' misses; in the process with Triton's interpreter."""
    torch.set_num_threads(1)
    name, _, b = variant.partition(":")
    module = ttmdsl.load(name, **({"b": float(b)} if b else {}))
    return misses(list(at_edges(name, module, tokens=tokens, dtype=torch.float32, backend="triton")))


@pytest.mark.parametrize("layer", beyond(ttmdsl.layers(), "atlas", "atlas_pp"))
def test_torch(layer: str) -> None:
    assert misses(list(at_edges(layer, ttmdsl.load(layer), tokens=20, dtype=torch.float32))) == []


@pytest.mark.parametrize(("variant", "tokens"), beyond(KERNELS, ("gsa", 37), ("rwkv7", 37), ("memora", 20)))
def test_kernels(variant: str, tokens: int, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(interpreted, variant, tokens).result() == []


@pytest.mark.parametrize("name", ["gla", "rwkv7"])
def test_moderate_decays_keep_their_digits(name: str, interpreter: ProcessPoolExecutor) -> None:
    """On both sides of the distances at which the kernels turn from chunks to blocks, and to tokens one by one."""
    for decay in (-0.01, -2.5, -2.9, -8.0, -9.0, -12.0):
        assert interpreter.submit(error_at, name, decay).result() < 1e-5


def error_at(name: str, decay: float) -> float:
    """Error of y where every channel decays by e^decay per token on average; in the other process."""
    from ttmdsl.drawing import Shape, draw

    module = ttmdsl.load(name)
    x = draw(module, Shape("", tokens=50, heads=2, dims=(12, 20), state=False)).x
    x["log_alpha"] = 2 * decay * torch.rand(x["log_alpha"].shape, generator=torch.Generator().manual_seed(1)).double()
    exact, _ = module.op(**x, backend="torch")
    y, _ = module.op(**{key: t.float() for key, t in x.items()}, backend="triton")
    return float((y - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_what_grows_is_said_to_diverge() -> None:
    rows = {r.edge: r for r in at_edges("delta_net", ttmdsl.load("delta_net"), tokens=64, dtype=torch.float32)}
    assert rows["keys of norm 10"].diverges
    assert not rows["gates of 1e-6"].diverges
    assert "decays of e^-20" not in rows


@pytest.mark.parametrize("diverging", [True, False])
def test_what_is_not_finite_later_is_looked_for_in_float64(diverging: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In longer and longer beginnings, until the recurrence is seen to diverge."""
    looked: list[int] = []

    def results(module: Any, x: dict[str, torch.Tensor], state: Any, backend: str) -> list[torch.Tensor]:
        count = x["q"].shape[1]
        if backend != "torch":
            return [torch.full((3,), float("nan") if count > 20 else 1.0)] * 2
        looked.append(count)
        return [torch.full((3,), 1e31 if diverging and count > 20 else 1.0, dtype=torch.float64)] * 2

    monkeypatch.setattr(edges, "_results", results)
    how: dict[str, Any] = {"tokens": 70, "dtype": torch.float32, "backend": "triton", "compared": 10}
    row = next(at_edges("mamba2", ttmdsl.load("mamba2"), **how))
    assert (row.finite, row.diverges, row.error) == (False, diverging, 0.0)
    assert looked == ([10, 20, 40] if diverging else [10, 20, 40, 70])


@thorough
def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "5", "--layers", "mamba2,delta_net"]) == 0
    text = capsys.readouterr().out
    assert "5 tokens, float32, cpu" in text
    assert "| mamba2 |" in text
    assert main(["--tokens", "9", "--layers", "gla,mamba2", "--compared", "5", "--jobs", "2"]) == 0
    part = capsys.readouterr().out
    assert "errors: over the first 5" in part
    assert "inf" not in part
    row = Edge("mine", "no decay", finite=False, diverges=False, error=float("nan"), lost=float("nan"))
    assert "**not finite**" in page([row], 5, "float32", "cpu")
