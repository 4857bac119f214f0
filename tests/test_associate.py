"""Sums over three tiles by other ways: the same gradients, no product more, and those gone that gates alone took."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from ir_eval import Interpreter, draw_leaf
from test_differentiate import LAYERS, forms

from ttmdsl.associate import associated
from ttmdsl.builder import Builder
from ttmdsl.ir import Node, Program, is_product, reachable

SIZES = {"t": 4, "i": 3, "j": 2, "d_k": 3, "d_v": 5, "d": 3, "m": 2, "h": 5}


def same(program: Program, other: Program) -> None:
    generator = torch.Generator().manual_seed(0)
    roots = [*program.outputs.values(), *other.outputs.values()]
    leaves = sorted({n for n in reachable(roots) if n.op == "leaf"}, key=lambda n: n.id)
    value = Interpreter({n: draw_leaf(n, SIZES, generator) for n in leaves}, SIZES)
    assert other.outputs.keys() == program.outputs.keys()
    for name, old in program.outputs.items():
        new = other.outputs[name]
        assert new.axes == old.axes
        torch.testing.assert_close(value(new), value(old), rtol=1e-9, atol=1e-9)


def products(program: Program) -> set[Node]:
    return {n for n in program.nodes if is_product(n)}


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    for form in forms(name, consts).values():
        program = form.backward
        other = associated(program)
        same(program, other)
        tiles = [v for v in program.outputs.values() if len(v.axes) > 1]
        assert tiles == [v for v in other.outputs.values() if len(v.axes) > 1]
        assert len(products(other)) <= len(products(program))


@pytest.mark.parametrize("name", ["retnet", "mamba2", "gated_delta_net"])
def test_gates_alone_take_no_read_of_the_state(name: str) -> None:
    program = forms(name, {})["chunk"].backward
    (read,) = (n for n in products(program) if {a.name for a in n.args} == {"S", "q"})
    other = associated(program)
    assert read not in other.nodes
    assert len(products(other)) < len(products(program))


@pytest.mark.parametrize("name", ["linear_attention", "delta_net"])
def test_what_is_shortest_stays(name: str) -> None:
    program = forms(name, {})["chunk"].backward
    assert associated(program) is program


@pytest.mark.parametrize("kind", ["lower", "strict"])
@pytest.mark.parametrize("over", ["t", "s"])
def test_a_mask_stays_where_no_factor_has_it(over: str, kind: Literal["lower", "strict"]) -> None:
    b = Builder(["d_k"])
    q, k = (b.leaf("token", name, ("t", "d_k")) for name in ("q", "k"))
    w = b.leaf("token", "w", "t")
    past = b.rename(k, "t", "s")
    scores = b.contract(q, past, {"d_k"})
    has = b.mask(b.sub(w, b.rename(w, "t", "s")), "strict")
    lacks = b.map("tanh", b.add(w, b.rename(w, "t", "s")))
    gate = b.sub(b.mask(b.mul(scores, has), kind), b.mask(b.mul(b.const(3.0), b.mul(scores, lacks)), kind))
    masked = [has, b.mask(lacks, kind)]
    outputs = {f"d:q{i}": b.contract(tile, past, {"s"}) for i, tile in enumerate(masked)}
    outputs |= {f"d:k{i}": b.contract(tile, q, {"t"}) for i, tile in enumerate(masked)}
    program = Program("chunk", ("d_k",), b, {**outputs, "d:g": b.sum(gate, {over})})
    other = associated(program)
    assert scores in program.nodes
    assert scores not in other.nodes
    same(program, other)
