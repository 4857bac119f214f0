"""Sums over three tiles by other ways: the same gradients, no product more, and those gone that gates alone took."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_eval import Interpreter, draw_leaf
from test_differentiate import LAYERS, forms

from ttmdsl.associate import associated, shortened
from ttmdsl.builder import Builder
from ttmdsl.ir import Node, Program, Role, is_product, reachable, tied, verify

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


# ---- what a walk waits for ------------------------------------------------------------------------------------


def waits(program: Program, role: Role) -> int:
    """How many products, one after the other, a carry's end takes that depend on the carry."""
    chained, depth = tied(program, role), dict[Node, int]()
    for n in program.nodes:
        depth[n] = max((depth[a] for a in n.args), default=0) + (is_product(n) and n in chained)
    return max(map(depth.__getitem__, program.ends().values()))


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_a_layer_waits_for_no_more(name: str, consts: dict[str, float]) -> None:
    roles: tuple[Role, Role] = ("carry", "cocarry")
    for form in forms(name, consts).values():
        for program, role in zip((form.forward, form.backward), roles, strict=True):
            other = shortened(program, role)
            verify(other)
            same(program, other)
            assert waits(other, role) <= waits(program, role)
            assert shortened(other, role) is other
            kept = {k: v for k, v in program.outputs.items() if not k.startswith("carry:")}
            assert kept.items() <= other.outputs.items()


def test_a_normalised_memory_waits_for_two_products() -> None:
    """Of Lattice's e S^T, whose sum with k is S with k^T e, y alone is left (its eq 11, at a frozen point)."""
    form = forms("lattice_dec", {"b": 4, "project": 0})["chunk"]
    other = shortened(form.forward, "carry")
    assert [waits(p, "carry") for p in (form.forward, other)] == [2, 2]
    taken = [
        len(products(p.with_outputs({f"carry:{k}": v for k, v in p.ends().items()}))) for p in (form.forward, other)
    ]
    assert taken == [3, 2]


class Walk:
    """A state [i, j] that tokens k [t, i] and e [t, j] are written to."""

    def __init__(self) -> None:
        self.b = b = Builder(["i", "j"])
        self.start = b.leaf("carry", "S", ("i", "j"))
        self.k, self.e = b.leaf("token", "k", ("t", "i")), b.leaf("token", "e", ("t", "j"))
        self.f = b.leaf("token", "f", ("t", "i"))
        self.w = [b.leaf("token", f"w{n}", ("t",)) for n in range(3)]

    def read(self) -> Node:
        return self.b.contract(self.start, self.e, {"j"})  # [t, i]

    def end(self, total: Node, write: Node, **outputs: Node) -> Program:
        end = self.b.add(self.b.mul(total, self.start), write)
        return Program("chunk", ("i", "j"), self.b, {"carry:S": end, **outputs})


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=3), st.permutations(range(3)), st.booleans(), st.booleans(), st.booleans())
def test_by_a_product_that_is_there(
    weights: list[int], order: list[int], negative: bool, beside: bool, rest: bool
) -> None:
    """However factors are grouped, of either sign, and where other addends stay as they are."""
    o = Walk()
    b = o.b
    scales = [o.w[i] for i in weights]
    write = b.contract(b.product([*scales, o.e]), o.k, {"t"})
    read = b.add(o.read(), o.f) if rest else o.read()
    tile = b.neg(read) if negative else read
    for i in [i for i in order if i in weights]:
        for _ in range(weights.count(i)):
            tile = b.mul(o.w[i], tile)
    program = o.end(b.contract(o.k, tile, {"t"}), write, **({"y": b.sum(o.read(), {"t"})} if beside else {}))
    other = shortened(program, "carry")
    verify(other)
    same(program, other)
    assert [waits(p, "carry") for p in (program, other)] == [1, 0]
    assert (o.read() in other.nodes) == beside


def test_no_product_is_made_for_it() -> None:
    o = Walk()
    total = o.b.contract(o.k, o.read(), {"t"})  # [i]
    for write in (o.b.contract(o.e, o.f, {"t"}), o.b.contract(o.e, o.b.mul(o.w[0], o.k), {"t"})):
        program = o.end(total, write)
        assert shortened(program, "carry") is program
    scaled = o.end(total, o.b.contract(o.e, o.b.mul(total, o.k), {"t"}))  # by the product without its scale
    assert o.read() not in shortened(scaled, "carry").nodes
