"""For the tests of those who use or invent layers: parity as an assertion, and inputs or whole layers drawn by
hypothesis.

Input: a generated module. Output: an AssertionError with a table of what missed, or a hypothesis strategy for `op`'s
keywords. Needs no pytest; needs hypothesis only for `layer_inputs` and `layer_specs`.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttmdsl.drawing import Shape, dims_of, draw
from ttmdsl.parity import Row, parity
from ttmdsl.strategies import layer_specs

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["check_layer", "layer_inputs", "layer_specs"]

# Values at, or next to, the ends of each range; a decay as its logarithm.
_EDGES = {
    "decay": (0.0, -1e-6, -20.0),
    "unit": (0.0, 1.0),
    "positive": (1e-4, 10.0),
    "real": (0.0,),
}


def check_layer(module: Any, **options: Any) -> None:
    """Hold every backend that can run here against the reference, as `ttmdsl check` does.

    Options are `ttmdsl.parity.parity`'s: dtypes, shapes, backends, device, seed. Raises AssertionError with one line
    for each quantity outside of its tolerance.
    """
    rows = parity(module, **options)
    misses = [row for row in rows if not row.ok]
    if misses:
        raise AssertionError(f"{len(misses)} of {len(rows)} quantities differ from the reference\n{_report(misses)}")


def _report(misses: list[Row]) -> str:
    from rich.console import Console
    from rich.table import Table

    out = Table()
    for heading in ("backend", "dtype", "shape", "quantity", "error", "tolerance"):
        out.add_column(heading, justify="right" if heading in ("error", "tolerance") else "left")
    for row in sorted(misses, key=lambda row: (row.backend, row.dtype)):
        out.add_row(row.backend, row.dtype, row.shape, row.quantity, f"{row.error:.1e}", f"{row.tolerance:.0e}")
    console = Console(file=io.StringIO(), width=120)
    console.print(out)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def layer_inputs(
    module: Any,
    *,
    max_batch: int = 2,
    max_tokens: int = 40,
    max_heads: int = 2,
    max_dim: int = 16,
    dtype: torch.dtype = torch.float64,
) -> SearchStrategy[dict[str, Any]]:
    """A hypothesis strategy for keywords that `op` takes: sizes, gates (often at the ends of their ranges), and now and
    then an initial state. Call it as `module.op(**keywords)`.
    """
    try:
        from hypothesis import strategies as st
    except ImportError as error:
        raise ImportError("layer_inputs needs hypothesis: pip install 'ttmdsl[testing]'") from error

    @st.composite
    def keywords(pick: DrawFn) -> dict[str, Any]:
        count = max(1, sum(not fixed for fixed in dims_of(module).values()))
        shape = Shape(
            "drawn",
            batch=pick(st.integers(1, max_batch)),
            tokens=pick(st.integers(1, max_tokens)),
            heads=pick(st.integers(1, max_heads)),
            dims=tuple(pick(st.lists(st.integers(1, max_dim), min_size=count, max_size=count))),
            state=pick(st.booleans()),
        )
        drawn = draw(module, shape, dtype=dtype, seed=pick(st.integers(0, 2**16)))
        chosen: dict[str, Any] = {}
        for key, tensor in drawn.x.items():
            edges = () if key in module.INPUTS else _EDGES[module.RANGES[key]]
            edge = pick(st.sampled_from((None, *edges)))
            chosen[key] = tensor if edge is None else _at_edge(tensor, edge, everywhere=pick(st.booleans()))
        if drawn.state is not None:
            chosen["initial_state"] = drawn.state
        return chosen

    return keywords()


def _at_edge(tensor: Tensor, edge: float, *, everywhere: bool) -> Tensor:
    """The tensor with that value in every place, or in every second."""
    places = torch.arange(tensor.numel()).reshape(tensor.shape) % 2 == 0
    return torch.full_like(tensor, edge) if everywhere else torch.where(places, edge, tensor)
