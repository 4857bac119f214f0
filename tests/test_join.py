"""Sums as large as a state: joined, they are the same values, by no more products, and what is free stands apart."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_associate import products, same
from test_differentiate import LAYERS, forms

from ttmdsl.builder import Builder
from ttmdsl.ir import Node, Program, depends_on, verify
from ttmdsl.join import joined


class Tiles:
    """Tensors of tokens and a state's cotangent, and sums of products that are as large as that."""

    def __init__(self) -> None:
        self.b = b = Builder(["i", "j"])
        self.a = [b.leaf("token", f"a{n}", ("t", "i")) for n in range(3)]
        self.d = [b.leaf("token", f"d{n}", ("t", "j")) for n in range(2)]
        self.along = {axis: b.leaf("token" if axis == "t" else "param", axis, (axis,)) for axis in ("t", "i", "j")}
        self.end = b.leaf("cocarry", "S", ("i", "j"))
        self.chained = b.contract(self.d[0], self.end, {"j"})  # [t, i]
        self.none = self.program({})

    def program(self, outputs: dict[str, Node]) -> Program:
        return Program("chunk", ("i", "j"), self.b, outputs)

    def dot(self, x: Node, y: Node) -> Node:
        return self.b.contract(x, y, {"t"})

    def sum(self, *terms: Node) -> Node:
        return functools.reduce(self.b.add, terms)

    def joined(self, *terms: Node, **others: Node) -> Program:
        """The program whose carry is the sum of these, joined; it has the same values."""
        program = self.program({"carry:S": self.sum(*terms), **others})
        new = joined(program, self.none)
        verify(new)
        same(program, new)
        assert joined(new, self.none).outputs == new.outputs  # there is no more to join
        return new


def test_scales_move_to_the_other_operand() -> None:
    o = Tiles()
    b, t, i, j = o.b, *o.along.values()
    first, second = o.dot(o.a[0], b.mul(t, o.d[0])), b.mul(i, o.dot(o.a[1], o.d[0]))
    (product,) = products(o.joined(o.end, first, second))
    assert o.d[0] in product.args
    assert len(products(o.joined(o.end, b.mul(j, first), b.neg(b.mul(j, second))))) == 1
    assert len(products(o.joined(o.end, b.mul(j, first), second))) == 2  # along the axis of what they share


def test_of_several_ways_the_one_that_joins_most() -> None:
    o = Tiles()
    terms = [o.dot(o.a[0], o.d[1]), o.dot(o.a[0], o.d[0]), o.dot(o.a[1], o.d[0]), o.dot(o.a[2], o.d[0])]
    assert len(products(o.joined(o.end, *terms))) == 2


def test_what_is_joined_may_be_joined_again() -> None:
    o = Tiles()
    terms = [o.dot(a, d) for a, d in ((o.a[0], o.d[0]), (o.a[0], o.d[1]), (o.a[1], o.d[0]), (o.a[1], o.d[1]))]
    assert len(products(o.joined(o.end, *terms))) == 1


def test_what_is_taken_elsewhere_stays() -> None:
    o = Tiles()
    first, second = o.dot(o.a[0], o.d[0]), o.dot(o.a[1], o.d[0])
    assert {first, second} <= products(o.joined(o.end, first, second, other=o.b.mul(first, first)))
    assert {first, second} <= products(o.joined(o.end, first, second, other=second))
    program = o.program({"carry:S": o.sum(o.end, first, second)})
    assert {first, second} <= products(joined(program, o.program({"other": first})))


def test_what_is_free_stands_apart() -> None:
    o = Tiles()
    b, d = o.b, o.d[0]
    free = [o.dot(o.a[0], d), o.dot(o.a[1], o.d[1])]
    bound = [o.dot(o.chained, d), b.mul(o.along["i"], o.end)]
    new = o.joined(bound[0], free[0], bound[1], free[1])
    chained = depends_on(new.outputs.values(), [o.end])
    (border,) = (a for n in new.nodes if n.op == "add" and n in chained for a in n.args if a not in chained)
    assert border is o.sum(*free)
    assert bound[0] in new.nodes  # though it shares an operand with what is free


def test_one_free_addend_is_left_where_it_is() -> None:
    o = Tiles()
    program = o.program({"carry:S": o.sum(o.end, o.dot(o.a[0], o.d[0]), o.dot(o.chained, o.d[0]))})
    assert joined(program, o.none).outputs == program.outputs


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sum(data: st.DataObject) -> None:
    o = Tiles()
    b, (t, i, j) = o.b, o.along.values()

    def term() -> Node:
        x = data.draw(st.sampled_from([*o.a, o.chained]))
        y = data.draw(st.sampled_from(o.d))
        if data.draw(st.booleans()):
            y = b.mul(y, y)
        for scale in data.draw(st.lists(st.sampled_from([t, i, j]), max_size=4)):
            x, y = (b.mul(scale, z) if {*scale.axes} <= {*z.axes} else z for z in (x, y))
        found = o.dot(x, y)
        return b.neg(found) if data.draw(st.booleans()) else found

    terms = [
        data.draw(st.sampled_from([o.end, b.mul(i, o.end), b.neg(b.add(o.end, b.const(2.0)))])),
        *(term() for _ in range(data.draw(st.integers(1, 5)))),
    ]
    data.draw(st.randoms()).shuffle(terms)
    others = {"other": data.draw(st.sampled_from(terms))} if data.draw(st.booleans()) else {}
    program = o.program({"carry:S": o.sum(*terms), **others})
    assert len(products(o.joined(*terms, **others))) <= len(products(program))


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    for form in forms(name, consts).values():
        for program, kept in ((form.forward, form.backward), (form.backward, form.forward)):
            new = joined(program, kept)
            verify(new)
            same(program, new)
            assert len(products(new)) <= len(products(program))


@pytest.mark.parametrize("way", ["dec", "enc", "sim"])
def test_states_divided_by_their_length_take_a_product_less(way: str) -> None:
    form = forms(f"lattice_{way}", {"b": 4, "project": 0})["chunk"]
    new = joined(form.backward, form.forward)
    assert len(products(new)) == len(products(form.backward)) - 1
