"""Every shipped layer's Triton kernels, and drawn ones, against the reference: in Triton's interpreter, on a CPU.

They run in the process of the fixture `interpreter`.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

import ttmdsl

SHAPES: tuple[dict[str, Any], ...] = (
    {"label": "T=21, cut at 6", "tokens": 21, "heads": 2, "dims": (12, 20, 9), "cuts": (6,)},
    {"label": "packed 5+0+1", "dims": (5, 3), "lengths": (5, 0, 1)},
    {"label": "T=9, dims 60 and 24", "tokens": 9, "dims": (60, 24), "state": False},
)


def misses(layer: str, consts: dict[str, float]) -> list[str]:
    """What a layer misses; in the other process."""
    import torch

    from ttmdsl.drawing import Shape
    from ttmdsl.parity import parity

    torch.set_num_threads(1)
    shapes = [Shape(**shape) for shape in SHAPES]
    rows = parity(ttmdsl.load(layer, **consts), dtypes=(torch.float32,), shapes=shapes, backends=("triton",))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


@pytest.mark.parametrize("layer", ttmdsl.layers())
def test_kernels_are_the_reference(layer: str, interpreter: ProcessPoolExecutor) -> None:
    # a group of 5 tokens: several of them in a sequence, and one cut in two
    grouped = ttmdsl.load(layer).CONSTS.get("b", 1) > 1
    assert interpreter.submit(misses, layer, {"b": 5} if grouped else {}).result() == []
