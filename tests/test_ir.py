"""The IR: canonical axes, algebra that keeps the meaning, and a verifier that catches what breaks the grammar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_eval import Interpreter, draw_leaf, spread
from torch import Tensor

from ttmdsl.builder import Builder, substitute
from ttmdsl.ir import Axes, Node, Program, addends, depends_on, factors, reachable, verify

DIMS = ("i", "j", "k")
SIZES = {"t": 3, "i": 2, "j": 4, "k": 3}


@pytest.fixture
def b() -> Builder:
    return Builder(DIMS)


# ---- construction -------------------------------------------------------------------------------------------


def test_axes_have_one_order(b: Builder) -> None:
    assert b.leaf("token", "x", ("k", "t", "i")).axes == ("t", "i", "k")
    assert b.mul(b.leaf("token", "x", ("j",)), b.leaf("token", "y", ("i", "t"))).axes == ("t", "i", "j")
    assert b.rename(b.leaf("carry", "S", ("j", "i")), "i", "i'").axes == ("i'", "j")
    assert b.rename(b.leaf("carry", "S", ("j", "i")), "i", "k").axes == ("j", "k")


def test_equal_nodes_are_one(b: Builder) -> None:
    x, y = b.leaf("token", "x", ("t", "i")), b.leaf("token", "y", ("t", "i"))
    assert b.leaf("token", "x", ("i", "t")) is x
    assert b.add(x, y) is b.add(x, y)
    assert b.contract(x, y, {"i"}) is b.contract(y, x, {"i"})
    assert b.leaf("cot", "x", ("t", "i")) is not x


def test_a_name_is_given_once(b: Builder) -> None:
    x = b.leaf("token", "x", ("t",))
    node = b.label(b.neg(x), "first")
    b.label(node, "second")
    b.label(x, "leaf")
    assert b.labels == {node: "first"}


x2, y2 = ("t", "i"), ("t", "j")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda b, x, y: b.add(x, b.const(0)), lambda b, x, y: x),
        (lambda b, x, y: b.add(b.zero(y.axes), x), lambda b, x, y: b.expand(x, y.axes)),
        (lambda b, x, y: b.sub(x, x), lambda b, x, y: b.zero(x.axes)),
        (lambda b, x, y: b.neg(b.neg(x)), lambda b, x, y: x),
        (lambda b, x, y: b.mul(x, b.const(1)), lambda b, x, y: x),
        (lambda b, x, y: b.mul(b.const(-1), x), lambda b, x, y: b.neg(x)),
        (lambda b, x, y: b.mul(x, b.zero(y.axes)), lambda b, x, y: b.zero(("t", "i", "j"))),
        (lambda b, x, y: b.mul(b.neg(x), b.neg(y)), lambda b, x, y: b.mul(x, y)),
        (lambda b, x, y: b.recip(b.map("sqrt", x)), lambda b, x, y: b.rsqrt(x)),
        (lambda b, x, y: b.rename(b.rename(x, "i", "k"), "k", "i"), lambda b, x, y: x),
        (lambda b, x, y: b.mask(b.mask(x, "lower"), "lower"), lambda b, x, y: b.mask(x, "lower")),
        (lambda b, x, y: b.cumsum(b.zero(x.axes)), lambda b, x, y: b.zero(x.axes)),
        (lambda b, x, y: b.sum(x, {"j"}), lambda b, x, y: x),
        (lambda b, x, y: b.sum(b.neg(x), {"i"}), lambda b, x, y: b.neg(b.sum(x, {"i"}))),
        (lambda b, x, y: b.sum(b.expand(x, {"k"}), {"k"}), lambda b, x, y: b.mul(b.size("k"), x)),
        (lambda b, x, y: b.contract(x, y, {"i"}), lambda b, x, y: b.mul(b.sum(x, {"i"}), y)),
        (lambda b, x, y: b.select(b.const(1), x, y), lambda b, x, y: x),
        (lambda b, x, y: b.select(b.const(0), x, y), lambda b, x, y: y),
        (lambda b, x, y: b.pow(x, 0), lambda b, x, y: b.expand(b.const(1), x.axes)),
        (lambda b, x, y: b.pow(x, 4), lambda b, x, y: b.mul(b.mul(x, x), b.mul(x, x))),
        (lambda b, x, y: b.pow(x, -3), lambda b, x, y: b.pow(b.recip(x), 3)),
        (lambda b, x, y: b.map("exp2", b.const(3)), lambda b, x, y: b.const(8)),
        (lambda b, x, y: b.map("log2", b.expand(b.const(8), x.axes)), lambda b, x, y: b.expand(b.const(3), x.axes)),
    ],
)
def test_algebra(b: Builder, made: Callable[..., Node], expected: Callable[..., Node]) -> None:
    x, y = b.leaf("token", "x", x2), b.leaf("token", "y", y2)
    assert made(b, x, y) is expected(b, x, y)


def test_a_constant_without_a_value_is_left_alone(b: Builder) -> None:
    assert b.map("log2", b.const(0)).op == "log2"
    assert b.map("sqrt", b.const(-1)).op == "sqrt"
    assert b.recip(b.const(0)).op == "recip"
    assert b.map("exp2", b.const(1e9)).op == "exp2"


def test_a_scalar_stays_outside_of_a_product_of_tiles(b: Builder) -> None:
    x, y, rate = b.leaf("token", "x", ("t", "i")), b.leaf("carry", "S", ("i", "j")), b.leaf("token", "rate", ("t",))
    found = b.contract(b.mul(rate, x), y, {"i"})
    assert found is b.mul(rate, b.contract(x, y, {"i"}))


def test_a_chunks_length_is_no_number_of_the_program(b: Builder) -> None:
    with pytest.raises(AssertionError, match="schedule"):
        b.sum(b.expand(b.leaf("token", "x", ("i",)), {"t"}), {"t"})


# ---- meaning ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A value worked out without the builder: a tensor and its axes."""

    value: Tensor
    axes: Axes


@dataclass(frozen=True)
class Both:
    """One expression twice: through the builder's algebra, and literally."""

    node: Node
    tile: Tile


class Twin:
    """Builds expressions both ways."""

    def __init__(self, seed: int) -> None:
        self.b = Builder(DIMS)
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves: dict[Node, Tensor] = {}

    def leaf(self, name: str, axes: Axes) -> Both:
        node = self.b.leaf("token", name, axes)
        if node not in self.leaves:
            self.leaves[node] = draw_leaf(node, SIZES, self.generator)
        return Both(node, Tile(self.leaves[node], node.axes))

    def const(self, value: float) -> Both:
        return Both(self.b.const(value), Tile(torch.tensor(value, dtype=torch.float64), ()))

    def _aligned(self, x: Both, axes: Axes) -> Tensor:
        return spread(x.tile.value, x.tile.axes, axes).expand([SIZES[a] for a in axes])

    def binary(self, op: str, x: Both, y: Both) -> Both:
        axes = self.b.order((*x.tile.axes, *y.tile.axes))
        u, v = self._aligned(x, axes), self._aligned(y, axes)
        value = {"add": u + v, "sub": u - v, "mul": u * v}[op]
        return Both(getattr(self.b, op)(x.node, y.node), Tile(value, axes))

    def unary(self, op: str, x: Both) -> Both:
        node = self.b.neg(x.node) if op == "neg" else self.b.map(op, x.node)
        return Both(node, Tile({"neg": torch.neg, "tanh": torch.tanh}[op](x.tile.value), x.tile.axes))

    def expand(self, x: Both, axis: str) -> Both:
        axes = self.b.order((*x.tile.axes, axis))
        return Both(self.b.expand(x.node, {axis}), Tile(self._aligned(x, axes), axes))

    def sum(self, x: Both, over: set[str]) -> Both:
        over = over & set(x.tile.axes)
        dims = [x.tile.axes.index(a) for a in over]
        value = x.tile.value.sum(dims) if dims else x.tile.value
        return Both(self.b.sum(x.node, over), Tile(value, tuple(a for a in x.tile.axes if a not in over)))

    def contract(self, x: Both, y: Both, over: set[str]) -> Both:
        product = self.binary("mul", x, y).tile
        over = over & set(product.axes)
        value = product.value.sum([product.axes.index(a) for a in over]) if over else product.value
        node = self.b.contract(x.node, y.node, over)
        return Both(node, Tile(value, tuple(a for a in product.axes if a not in over)))


def expressions(draw: st.DrawFn, twin: Twin, depth: int) -> Both:
    """A random expression over four tensors, both ways."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        kind = draw(st.integers(0, 5))
        if kind == 5:
            return twin.const(draw(st.sampled_from([0.0, 1.0, -1.0, 2.0, -0.5])))
        name, axes = [("g", ("t",)), ("x", ("t", "i")), ("y", ("t", "j")), ("S", ("i", "j")), ("A", ("j", "k"))][kind]
        return twin.leaf(name, axes)
    op = draw(st.sampled_from("add sub mul neg tanh expand sum contract contract".split()))
    x = expressions(draw, twin, depth - 1)
    match op:
        case "neg" | "tanh":
            return twin.unary(op, x)
        case "expand":
            return twin.expand(x, draw(st.sampled_from(DIMS)))
        case "sum":
            return twin.sum(x, draw(st.sets(st.sampled_from(DIMS), min_size=1)))
        case "contract":
            return twin.contract(x, expressions(draw, twin, depth - 1), draw(st.sets(st.sampled_from(DIMS))))
        case _:
            return twin.binary(op, x, expressions(draw, twin, depth - 1))


@st.composite
def twins(draw: st.DrawFn) -> tuple[Twin, Both]:
    twin = Twin(draw(st.integers(0, 9)))
    return twin, expressions(draw, twin, draw(st.integers(1, 5)))


@settings(max_examples=150, deadline=None)
@given(twins())
def test_algebra_keeps_the_meaning(case: tuple[Twin, Both]) -> None:
    twin, both = case
    found = Interpreter(twin.leaves, SIZES)(both.node)
    assert both.node.axes == both.tile.axes
    torch.testing.assert_close(found, both.tile.value.expand(found.shape), rtol=1e-10, atol=1e-10)
    verify(Program("chunk", DIMS, twin.b, {"out": both.node}))


@settings(max_examples=150, deadline=None)
@given(twins())
def test_addends_are_the_value_multiplied_out(case: tuple[Twin, Both]) -> None:
    twin, both = case
    interpreter = Interpreter(twin.leaves, SIZES)
    total = torch.zeros([SIZES[a] for a in both.node.axes], dtype=torch.float64)
    for number, parts in addends(both.node, lambda n: False):
        assert not any(p.op in ("add", "neg", "mul", "const") for p in parts)
        term = torch.tensor(number, dtype=torch.float64)
        for p in parts:
            term = term * spread(interpreter(p), p.axes, both.node.axes)
        total = total + term
    torch.testing.assert_close(total, interpreter(both.node), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("exponent", [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 16.0])
def test_whole_powers_of_negative_numbers(exponent: float) -> None:
    b = Builder(DIMS)
    x = b.leaf("token", "x", ("t",))
    values = torch.tensor([-1.5, -0.25, 2.0], dtype=torch.float64)
    torch.testing.assert_close(Interpreter({x: values}, SIZES)(b.pow(x, exponent)), values**exponent)
    assert all(n.op != "pow" for n in reachable([b.pow(x, exponent)]))


def test_expands_stay_outside() -> None:
    """No value holds an axis by an expand alone: backends make no tile of one."""
    b = Builder(DIMS)
    x, y, S = b.leaf("token", "x", ("t",)), b.leaf("token", "y", ("t", "j")), b.leaf("carry", "S", ("i", "j"))
    wide = b.expand(x, {"i"})
    assert b.map("exp2", wide) is b.expand(b.map("exp2", x), {"i"})
    assert b.map("max", wide, x) is b.expand(b.map("max", x, x), {"i"})
    assert b.mul(wide, b.expand(b.map("tanh", x), {"i"})) is b.expand(b.mul(x, b.map("tanh", x)), {"i"})
    assert b.contract(b.mul(wide, b.map("exp2", wide)), S, {"i"}).op == "mul"  # times the sum over i
    assert b.contract(b.expand(y, {"i"}), b.leaf("token", "z", ("t", "j")), {"j"}).op == "expand"


def test_factors() -> None:
    b = Builder(DIMS)
    x, y, z = (b.leaf("token", name, ("t",)) for name in "xyz")
    assert set(factors(b.mul(x, b.mul(y, z)))) == {x, y, z}
    assert factors(b.add(x, y)) == [b.add(x, y)]
    assert factors(b.expand(b.mul(x, y), {"i"})) == [x, y]


# ---- traversals ---------------------------------------------------------------------------------------------


def test_operands_come_before_users(b: Builder) -> None:
    x = b.leaf("token", "x", ("t",))
    node = x
    for i in range(3000):  # deeper than Python's stack
        node = b.make("add", (node, b.const(float(i))), node.axes)
    order = reachable([node, x])
    place = {n: i for i, n in enumerate(order)}
    assert len(place) == len(order)
    assert all(place[a] < place[n] for n in order for a in n.args)


def test_dependence(b: Builder) -> None:
    x, y = b.leaf("token", "x", ("t",)), b.leaf("token", "y", ("t",))
    left, right = b.map("tanh", x), b.map("tanh", y)
    assert depends_on([b.add(left, right)], [x]) == {x, left, b.add(left, right)}
    assert depends_on([right], [x]) == set()


def test_a_program_prints(b: Builder) -> None:
    x = b.leaf("token", "x", ("t", "i"))
    total = b.label(b.sum(x, {"i"}), "total")
    text = str(Program("chunk", DIMS, b, {"y": total}))
    assert "v0[t i] = leaf(; token, x)" in text
    assert "# total" in text
    assert text.endswith(f"return y = {total!r}")


# ---- verify -------------------------------------------------------------------------------------------------


def node(op: str, args: tuple[Node, ...], axes: Axes, *attr: object) -> Node:
    """A node that no builder checks."""
    return Node(1000, op, args, axes, attr)


@pytest.mark.parametrize(
    ("broken", "unit"),
    [
        (lambda x, y: node("twirl", (x,), x.axes), "chunk"),
        (lambda x, y: node("add", (x, y), ("t", "i")), "chunk"),
        (lambda x, y: node("tanh", (x,), ("t", "i", "j")), "chunk"),
        (lambda x, y: node("sum", (x,), ("t", "i"), ()), "chunk"),
        (lambda x, y: node("sum", (x,), ("t",), ("j",)), "chunk"),
        (lambda x, y: node("contract", (x, y), ("t", "j"), ("i",)), "chunk"),
        (lambda x, y: node("expand", (x,), ("i", "t")), "chunk"),
        (lambda x, y: node("tanh", (node("expand", (x,), ("t", "i", "j")),), ("t", "i", "j")), "chunk"),
        (lambda x, y: x, "token"),
    ],
)
def test_verify_catches(broken: Callable[[Node, Node], Node], unit: str, b: Builder) -> None:
    value = broken(b.leaf("token", "x", ("t", "i")), b.leaf("token", "y", ("t", "j")))
    with pytest.raises(AssertionError):
        verify(Program(unit, DIMS, b, {"y": value}))  # type: ignore[arg-type]


def test_verify_compares_a_carry_with_its_leaf(b: Builder) -> None:
    S = b.leaf("carry", "S", ("i", "j"))
    verify(Program("chunk", DIMS, b, {"y": b.sum(S, {"i"}), "carry:S": b.mul(S, S)}))
    with pytest.raises(AssertionError):
        verify(Program("chunk", DIMS, b, {"y": b.sum(S, {"i"}), "carry:S": b.sum(S, {"i"})}))


def test_numbers_fold_as_they_compute() -> None:
    b = Builder(DIMS)
    for op, f in (("tanh", math.tanh), ("erf", math.erf), ("sqrt", math.sqrt), ("abs", abs)):
        assert b.map(op, b.const(0.7)).value == pytest.approx(f(0.7))
    assert b.map("softplus", b.const(-0.7)).value == pytest.approx(math.log(1 + math.exp(-0.7)))
    assert b.map("max", b.const(2), b.const(-3)).value == 2
    assert b.map("step", b.const(0)).value == 0
    assert b.map("sign", b.const(-2)).value == -1


@pytest.mark.parametrize("op", ["erf", "amax", "sum"])
def test_what_is_made_anew_has_its_operands_axes(op: str) -> None:
    b = Builder(("i",))
    x, rows = b.leaf("token", "x", ("i",)), b.leaf("token", "x", ("t", "i"))
    node = b.map(op, x) if op == "erf" else b.make(op, (x,), (), ("i",))
    found = substitute(b, node, {x: rows})
    assert found.axes == (("t", "i") if op == "erf" else ("t",))
