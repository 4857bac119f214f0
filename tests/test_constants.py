"""Shipped layers at constants that nobody declared, and at sizes that go badly with them: outputs, final states and all
gradients are those of the reference."""

from __future__ import annotations

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ttmdsl
from ttmdsl.check import check
from ttmdsl.drawing import Shape
from ttmdsl.loader import read
from ttmdsl.parity import parity
from ttmdsl.parse import parse

# units of several tokens, groups of several units, groups that no unit divides; windows longer than a unit or a state
VALUES = {"b": (1, 2, 3, 16, 17, 65, 100, 130), "c": (1, 2, 7, 20), "n": (1, 2, 3), "p": (2, 3), "project": (0, 1)}


@functools.cache
def declared(name: str) -> tuple[str, ...]:
    """The constants of a layer that the test varies."""
    text, filename = read(name)
    return tuple(const for const in check(parse(text), text, filename).consts if const in VALUES)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, int], Shape]:
    name = draw(st.sampled_from([layer for layer in ttmdsl.layers() if declared(layer)]))
    consts = {const: draw(st.sampled_from(VALUES[const])) for const in declared(name)}
    tokens, heads = draw(st.sampled_from((2, 5, 17, 33, 70))), draw(st.integers(1, 2))
    dims = tuple(draw(st.permutations((2, 3, 4, 5)))[:3])
    packed = draw(st.booleans())
    lengths = tuple(draw(st.lists(st.sampled_from((0, 1, 9, tokens)), min_size=2, max_size=3))) if packed else ()
    cuts = () if packed else tuple(draw(st.lists(st.integers(0, tokens), max_size=2, unique=True).map(sorted)))
    state = packed or bool(cuts) or draw(st.booleans())
    return name, consts, Shape("drawn", 1, tokens, heads, dims, cuts, lengths if any(lengths) else (), state=state)


@settings(deadline=None, max_examples=16)
@given(cases())
def test_torch_is_the_reference(case: tuple[str, dict[str, int], Shape]) -> None:
    name, consts, shape = case
    rows = parity(ttmdsl.load(name, **consts), dtypes=(torch.float64,), shapes=(shape,), backends=("torch",))
    assert [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok] == []
