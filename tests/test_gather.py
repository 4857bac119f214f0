"""Sums over the products of one tile with several others: gathered, they are the same values by fewer sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_associate import same
from test_differentiate import LAYERS, forms

from ttmdsl.builder import Builder
from ttmdsl.gather import gathered
from ttmdsl.ir import Node, Program, is_product
from ttmdsl.kernels import Kernel
from ttmdsl.plan import plan


def kernel(b: Builder, **outputs: Node) -> Kernel:
    return Kernel("_kernel", "map", Program("chunk", ("i", "j"), b, outputs), outputs=tuple(outputs.items()))


def alike(old: Kernel, new: Kernel) -> None:
    """That they store the same values, and are given the same."""
    assert [name for name, _ in new.outputs] == [name for name, _ in old.outputs]
    assert new.saves == old.saves
    assert set(new.given) <= set(old.given)
    same(*(k.program.with_outputs(dict(k.outputs)) for k in (old, new)))


def sums(k: Kernel) -> list[Node]:
    """Vectors that are sums over the product of two tiles."""
    nodes = [n for n in k.nodes if n not in k.given]
    return [n for n in nodes if n.op == "contract" and len(n.axes) == 1 and all(len(a.axes) == 2 for a in n.args)]


def work(k: Kernel) -> int:
    return sum(map(is_product, k.nodes))


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    for form_name, form in forms(name, consts).items():
        program = form.backward
        whole = Kernel("_kernel", "map", program, outputs=tuple(program.outputs.items()))
        planned = [k for k in plan(form_name, form).backward if k.kind == "map"] if form_name == "chunk" else []
        for k in (whole, *planned):
            new = gathered(k)
            alike(k, new)
            assert len(sums(new)) <= len(sums(k))
            assert work(new) <= work(k)


def test_a_plan_has_them_gathered() -> None:
    (k,) = (k for k in plan("chunk", forms("gated_delta_net", {})["chunk"]).backward if k.outputs)
    assert len(sums(k)) == 6  # of q, of k three times, of v, and of the state: there were nine
    assert gathered(k) is k
    (q,) = (n for n in k.nodes if n.name == "q")
    assert [s for s in sums(k) if set(s.args) == {q, dict(k.outputs)["q"]}]


class Tiles:
    """Two vectors for each token, and what they are multiplied with."""

    def __init__(self) -> None:
        self.b = b = Builder(["t", "s", "i", "j"])
        self.k, self.x, self.y, self.z = (b.leaf("token", name, ("t", "i")) for name in "kxyz")
        self.r, self.w = (b.leaf("token", name, ("t",)) for name in "rw")

    def dot(self, a: Node, x: Node) -> Node:
        return self.b.contract(a, x, {"i"})


def test_by_a_vector() -> None:
    o = Tiles()
    old = kernel(o.b, d=o.b.sub(o.dot(o.k, o.x), o.b.mul(o.r, o.dot(o.k, o.y))))
    new = gathered(old)
    alike(old, new)
    (found,) = sums(new)
    assert set(found.args) == {o.k, o.b.sub(o.x, o.b.mul(o.r, o.y))}


def test_in_the_same_shares_of_several() -> None:
    o = Tiles()
    b, x, y = o.b, o.dot(o.k, o.x), o.dot(o.k, o.y)
    both = b.add(x, b.mul(o.r, y))
    old = kernel(b, d=b.mul(b.const(2.0), both), e=b.sub(b.mul(o.w, x), b.mul(b.neg(b.mul(o.r, o.w)), y)))
    new = gathered(old)
    alike(old, new)
    assert len(sums(new)) == 1


def test_in_other_shares_each_stays() -> None:
    o = Tiles()
    b, x, y = o.b, o.dot(o.k, o.x), o.dot(o.k, o.y)
    for e in (b.add(x, y), x, b.map("exp2", y)):
        old = kernel(b, d=b.add(x, b.mul(o.r, y)), e=e)
        assert gathered(old) is old


def test_of_other_tiles_each_stays() -> None:
    o = Tiles()
    old = kernel(o.b, d=o.b.add(o.dot(o.k, o.x), o.dot(o.z, o.y)))
    assert gathered(old) is old


def test_one_that_scales_another_stays() -> None:
    o = Tiles()
    x, y = o.dot(o.k, o.x), o.dot(o.k, o.y)
    old = kernel(o.b, d=o.b.add(x, o.b.mul(x, y)))
    assert gathered(old) is old


def test_a_gradient_takes_what_the_tiles_add_up_to() -> None:
    o = Tiles()
    b = o.b
    d = b.add(o.dot(o.k, o.x), b.mul(o.r, o.dot(o.k, o.y)))
    gradient = b.sub(b.sub(o.z, b.mul(o.w, o.x)), b.mul(b.mul(o.w, o.r), o.y))
    old = kernel(b, d=d, g=gradient)
    new = gathered(old)
    alike(old, new)
    (found,) = sums(new)
    (total,) = set(found.args) - {o.k}
    assert dict(new.outputs)["g"] is b.sub(o.z, b.mul(o.w, total))


def test_a_gradient_in_other_shares_stays() -> None:
    o = Tiles()
    b = o.b
    gradient = b.add(o.x, o.y)
    old = kernel(b, d=b.add(o.dot(o.k, o.x), b.mul(o.r, o.dot(o.k, o.y))), g=gradient)
    new = gathered(old)
    alike(old, new)
    assert dict(new.outputs)["g"] is gradient


def test_what_is_saved_for_others_stays_what_it_is() -> None:
    o = Tiles()
    d = o.b.add(o.dot(o.k, o.x), o.b.mul(o.r, o.dot(o.k, o.y)))
    old = kernel(o.b, d=d)
    assert gathered(old) is not old
    saving = replace(old, saves=(o.b.map("exp2", d),))
    assert gathered(saving) is saving


def test_what_is_given_stays_what_it_is() -> None:
    o = Tiles()
    x, y = o.dot(o.k, o.x), o.dot(o.k, o.y)
    old = replace(kernel(o.b, d=o.b.add(x, y)), given=(y,))
    assert gathered(old) is old
