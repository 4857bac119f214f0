"""What a loop computes, collected: the same values of fewer operations, and none new as large as a state."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from ir_eval import Interpreter, draw_leaf
from test_differentiate import LAYERS, forms

from ttmdsl.builder import Builder
from ttmdsl.collect import collect
from ttmdsl.ir import TOKEN_AXES, Node, Program, depends_on, reachable

SIZES = {"t": 4, "i": 3, "j": 2, "d_k": 3, "d_v": 5, "d": 3, "m": 2, "h": 5}


def collected(program: Program, role: str) -> tuple[dict[Node, Node], set[Node]]:
    """What stands for the carries handed on, and what depends on a carry."""
    carries = {n for n in program.leaves() if n.role == role}
    roots = [v for k, v in program.outputs.items() if k.startswith("carry:")]
    made = collect(program.builder.fork(), roots, depends_on(roots, carries))
    new = [made.get(r, r) for r in roots]
    return dict(zip(roots, new, strict=True)), depends_on(new, carries)


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    for form in forms(name, consts).values():
        for program, role in ((form.forward, "carry"), (form.backward, "cocarry")):
            made, bound = collected(program, role)
            before = depends_on(made, [n for n in program.leaves() if n.role == role])
            assert work(bound) <= 1.05 * work(before)
            generator = torch.Generator().manual_seed(0)
            leaves = sorted({n for n in reachable([*made, *made.values()]) if n.op == "leaf"}, key=lambda n: n.id)
            value = Interpreter({n: draw_leaf(n, SIZES, generator) for n in leaves}, SIZES)
            for old, new in made.items():
                assert new.axes == old.axes
                torch.testing.assert_close(value(new), value(old), rtol=1e-9, atol=1e-9)
            assert len(states(bound)) <= len(states(before))


def states(bound: set[Node]) -> set[Node]:
    """The free values as large as a state that the loop takes."""
    free = {a for n in bound for a in n.args} - bound
    return {n for n in free if len(n.axes) == 2 and set(TOKEN_AXES).isdisjoint(n.axes)}


def work(nodes: set[Node]) -> int:
    """How many operations there are: a sum computes one of its products, a difference its negative."""
    users = Counter(a for n in nodes for a in n.args)
    bare = [{a.args[0] if a.op == "neg" else a for a in n.args} for n in nodes if n.op == "add"]
    joined = sum(any(a.op == "mul" and users[a] == 1 for a in some) for some in bare)
    return sum(n.op not in ("leaf", "neg", "expand", "rename") for n in nodes) - joined


class Case:
    """Values of one unit: a carry's read x, bound; p and q of tokens, c of channels and a state, free."""

    def __init__(self) -> None:
        self.b = b = Builder(("i", "j"))
        self.S, self.frozen = b.leaf("carry", "S", ("i", "j")), b.leaf("token", "frozen", ("i", "j"))
        self.k, self.r = b.leaf("token", "k", ("t", "i")), b.leaf("token", "r", ("t", "i"))
        self.p, self.q = b.leaf("token", "p", ("t", "j")), b.leaf("token", "q", ("t", "j"))
        self.c = b.leaf("token", "c", ("j",))
        self.x, self.y = b.contract(self.k, self.S, {"i"}), b.contract(self.r, self.S, {"i"})

    def loop(self, *roots: Node) -> list[str]:
        """The operations of the loop, leaves and reads aside, operands first."""
        bound = depends_on(roots, [self.S])
        made = collect(self.b, roots, bound)
        new = [made[r] for r in roots]
        inside = depends_on(new, [self.S])
        return [n.op for n in reachable(new) if n in inside and n not in (self.S, self.x, self.y)]


def test_free_factors_meet_before_the_loop() -> None:
    case = Case()
    b = case.b
    product = b.make("mul", (case.p, b.make("mul", (case.q, b.mul(case.c, case.x)), case.x.axes)), case.x.axes)
    assert case.loop(product) == ["mul"]


def test_terms_with_one_bound_value_are_one() -> None:
    case = Case()
    b = case.b
    total = b.add(b.mul(case.p, case.x), b.add(b.mul(case.q, case.y), b.mul(case.c, case.x)))
    assert sorted(case.loop(total)) == ["add", "mul", "mul"]
    assert case.loop(b.sub(total, b.mul(case.q, case.y))) == ["mul"]


def test_what_is_summed_over_the_same_axes_is_added_first() -> None:
    case = Case()
    b = case.b
    sums = [b.contract(case.p, case.x, {"t"}), b.mul(case.c, b.contract(case.q, case.x, {"t"}))]
    assert case.loop(b.add(*sums)) == ["mul", "sum"]


def test_a_value_with_users_is_multiplied_out_where_that_is_less() -> None:
    case = Case()
    b = case.b
    value = b.add(b.mul(case.p, case.x), case.q)
    first, second = b.add(value, b.mul(case.q, case.x)), b.sub(b.mul(case.c, case.x), value)
    assert sorted(case.loop(first, second)) == ["add", "add", "mul", "mul"]
    dear = b.add(b.mul(case.p, case.x), b.mul(case.q, case.y))
    assert sorted(case.loop(b.map("tanh", dear), b.mul(case.p, dear))) == ["add", "mul", "mul", "mul", "tanh"]


def test_no_coefficient_is_as_large_as_a_state() -> None:
    case = Case()
    b = case.b
    sums = b.sum(case.x, {"t"})
    outer = b.mul(b.mul(case.c, case.frozen), sums)
    bound = depends_on([outer], [case.S])
    made = collect(b, [outer], bound)[outer]
    inside = depends_on([made], [case.S])
    assert {a for n in inside for a in n.args} - inside <= {case.c, case.frozen, case.k}


def test_a_product_of_two_bound_values_is_one_value() -> None:
    case = Case()
    b = case.b
    squared = b.make("mul", (b.mul(case.p, case.x), b.mul(case.q, case.y)), case.x.axes)
    assert case.loop(squared) == ["mul", "mul"]


def test_a_deep_program() -> None:
    case = Case()
    node = case.x
    for i in range(3000):
        node = case.b.make("add", (node, case.b.const(float(i))), node.axes)
    assert case.loop(node) == ["add"]
