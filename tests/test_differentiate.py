"""Reverse mode: every rule of the table, and whole programs, against autograd through the IR's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ir_eval import Interpreter, draw_leaf
from test_lower import shipped
from torch import Tensor

from ttmdsl.builder import Builder
from ttmdsl.differentiate import DIFFERENTIABLE, RULES, differentiate, gradients, values_alone
from ttmdsl.ir import PAST, Node, Program, constant, earlier, reachable, verify
from ttmdsl.lower import Form

DIMS = ("i", "j")
SIZES = {"t": 4, "i": 3, "j": 2, "d_k": 3, "d_v": 2, "d": 3, "m": 2, "h": 4}


class Inputs:
    """The tensors that the cases are written in."""

    def __init__(self) -> None:
        self.b = b = Builder(DIMS)
        self.x, self.y = b.leaf("token", "x", ("t", "i")), b.leaf("token", "y", ("t", "i"))
        self.v = b.leaf("token", "v", ("t", "j"))
        self.g = b.leaf("token", "log_g", ("t", "i"))
        self.before = b.leaf("before", "before", (PAST, "i"))
        self.S = b.leaf("carry", "S", ("i", "j"))
        self.p = b.leaf("param", "p", ("i",))
        self.positive = b.add(b.mul(self.x, self.x), b.const(0.3))

    def pairs(self, x: Node, y: Node) -> Node:
        """[t, s]: products of two tokens' vectors."""
        return self.b.contract(x, self.b.rename(y, "t", "s"), {"i"})

    def later(self, x: Node) -> Node:
        return self.b.rename(x, "t", "s")

    def number(self, x: Node) -> Node:
        """[t]: one for each token."""
        return self.b.sum(self.b.map("tanh", x), {"i"})

    def total(self) -> Node:
        return self.b.cumsum(self.g)


def solve(n: Inputs, b: Builder, right: Node) -> Node:
    """(I - N)^-1 times one vector for every token."""
    return b.contract(b.tri_inv(b.mask(n.pairs(n.x, n.y), "strict")), n.later(b.map("tanh", right)), {"s"})


CASES: dict[str, Callable[[Inputs, Builder], Node]] = {
    "add": lambda n, b: b.add(n.x, n.p),
    "neg": lambda n, b: b.make("neg", (n.x,), n.x.axes),
    "mul": lambda n, b: b.mul(n.x, n.p),
    "max": lambda n, b: b.map("max", n.x, n.y),
    "min": lambda n, b: b.map("min", n.x, b.const(0.1)),
    "pow": lambda n, b: b.pow(n.positive, 1.7),
    "recip": lambda n, b: b.recip(n.positive),
    "exp2": lambda n, b: b.map("exp2", n.x),
    "log2": lambda n, b: b.map("log2", n.positive),
    "sqrt": lambda n, b: b.map("sqrt", n.positive),
    "rsqrt": lambda n, b: b.rsqrt(n.positive),
    "tanh": lambda n, b: b.map("tanh", n.x),
    "erf": lambda n, b: b.map("erf", n.x),
    "sigmoid": lambda n, b: b.map("sigmoid", n.x),
    "softplus": lambda n, b: b.map("softplus", n.x),
    "abs": lambda n, b: b.map("abs", n.x),
    "sign": lambda n, b: b.mul(b.map("sign", n.x), n.y),
    "step": lambda n, b: b.mul(b.map("step", n.x), n.y),
    "amax": lambda n, b: b.mul(b.zero(()), b.amax(n.x, {"i"})),  # constant under differentiation
    "select": lambda n, b: b.select(b.leaf("fresh", "f", ()), n.x, n.y),
    "expand": lambda n, b: b.map("tanh", b.expand(n.p, {"t"})),
    "rename": lambda n, b: b.map("tanh", b.rename(n.x, "i", "i'")),
    "sum": lambda n, b: b.sum(b.map("tanh", n.x), {"i"}),
    "contract": lambda n, b: b.contract(n.x, n.S, {"i"}),
    "contract of one vector with itself": lambda n, b: b.contract(n.x, n.x, {"i"}),
    "contract over tokens": lambda n, b: b.contract(n.x, n.v, {"t"}),
    "mask": lambda n, b: b.mask(n.pairs(n.x, n.y), "strict"),
    "mask before exp2": lambda n, b: b.map("exp2", b.mask(n.pairs(n.x, n.y), "lower", float("-inf"))),
    "diagonal": lambda n, b: b.diagonal(b.map("tanh", n.x), 2),
    "diagonal of tokens before": lambda n, b: b.contract(b.diagonal(n.g, 2, PAST), n.before, {PAST}),
    "behind": lambda n, b: b.behind(n.pairs(n.x, n.y), 2),
    "behind before exp2": lambda n, b: b.map("exp2", b.behind(n.pairs(n.x, n.y), 1, fill=float("-inf"))),
    "behind by tokens before": lambda n, b: b.contract(b.behind(n.number(n.x), 3, PAST), n.before, {PAST}),
    "shift": lambda n, b: b.shift(n.number(n.x), 2),
    "shift back": lambda n, b: b.shift(n.later(n.number(n.x)), 1),
    "shift to tokens before": lambda n, b: b.mul(n.before, b.shift(n.number(n.x), 2, PAST)),
    "shift from tokens before": lambda n, b: b.shift(b.sum(b.map("tanh", n.before), {"i"}), 1, PAST),
    "cumsum": lambda n, b: b.cumsum(n.x),
    "cumsum backwards": lambda n, b: b.cumsum(n.x, reverse=True),
    "newton_schulz": lambda n, b: b.make("newton_schulz", (n.S,), n.S.axes, "j", 3),
    "implicit": lambda n, b: b.implicit(b.map("tanh", n.x), b.mul(n.x, n.y)),
    "tri_inv": lambda n, b: b.tri_inv(b.mask(n.pairs(n.x, n.y), "strict")),
    "tri_inv of solves": lambda n, b: b.add(solve(n, b, n.x), b.mul(n.g, b.neg(solve(n, b, n.y)))),
    "tri_inv of a solve and a sum": lambda n, b: b.add(
        solve(n, b, n.x), b.sum(b.tri_inv(b.mask(n.pairs(n.x, n.y), "strict")), {"s"})
    ),
    "mask of earlier groups": lambda n, b: b.mask(n.pairs(n.x, n.y), earlier(3)),
    "decay_dot": lambda n, b: b.decay_dot(n.x, n.later(n.y), n.total(), n.later(n.total()), "lower", "i"),
    "decay_mix": lambda n, b: b.decay_mix(
        n.pairs(n.x, n.y), n.later(n.y), n.total(), n.later(n.total()), "strict"
    ),
    "norm_scan": lambda n, b: b.norm_scan(
        b.add(b.mul(n.x, n.x), b.const(9.0)), n.g, n.y, n.pairs(n.y, n.y), n.x, b.mul(n.y, n.p), b.mul(n.x, n.y)
    ),
    "norm_scan of writes without an outer product": lambda n, b: b.norm_scan(
        b.add(b.mul(n.x, n.x), b.const(9.0)), n.g, n.y, b.zero({"t", "s"}), b.zero(n.x.axes), n.y, b.mul(n.x, n.p)
    ),
    "decay_mix_t": lambda n, b: b.decay_mix_t(n.pairs(n.x, n.y), n.y, n.total(), n.later(n.total()), "lower"),
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    found = {case.split()[0] for case in CASES}
    assert found == set(RULES)
    for name, case in CASES.items():
        inputs = Inputs()
        node = case(inputs, inputs.b)
        assert name == "amax" or name.split()[0] in {n.op for n in reachable([node])}, name


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    inputs = Inputs()
    value = CASES[name](inputs, inputs.b)
    compare(Program("chunk", DIMS, inputs.b, {"y": value}), seed=len(name))


def compare(forward: Program, seed: int = 0) -> None:
    """The derived gradients against autograd, from the same cotangents."""
    backward = differentiate(forward)
    verify(backward)
    generator = torch.Generator().manual_seed(seed)
    leaves: dict[Node, Tensor] = {}
    for leaf in sorted({*forward.leaves(), *backward.leaves()}, key=lambda n: n.id):
        leaves[leaf] = draw_leaf(leaf, SIZES, generator).requires_grad_(leaf.role in DIFFERENTIABLE)
    interpreter = Interpreter(leaves, SIZES)
    b = forward.builder
    loss = torch.zeros((), dtype=torch.float64)
    for name, value in forward.outputs.items():
        carry = name.removeprefix("carry:")
        cotangent = (
            b.leaf("cocarry", carry, value.axes) if name.startswith("carry:") else b.leaf("cot", name, value.axes)
        )
        if cotangent in leaves:  # no other cotangent has any effect
            loss = loss + (interpreter(value) * leaves[cotangent]).sum()
    wanted = [n for n in forward.leaves() if n.role in DIFFERENTIABLE]
    found = torch.autograd.grad(loss, [leaves[n] for n in wanted], allow_unused=True) if loss.requires_grad else ()
    for leaf, expected in zip(wanted, found, strict=bool(found)):
        output = backward.outputs.get(f"carry:{leaf.name}" if leaf.role == "carry" else f"d:{leaf.name}")
        gradient = torch.zeros_like(leaves[leaf]) if output is None else interpreter(output)
        expected = torch.zeros_like(leaves[leaf]) if expected is None else expected
        torch.testing.assert_close(
            gradient, expected, rtol=1e-9, atol=1e-9, msg=lambda m, leaf=leaf: f"{leaf.name}: {m}"
        )


def test_what_is_done_has_values_alone() -> None:
    inputs = Inputs()
    b = inputs.b
    y = b.label(b.implicit(b.map("tanh", inputs.x), b.mul(inputs.x, inputs.y)), "y")
    forward = Program("chunk", DIMS, b, {"y": b.mul(y, inputs.y)})
    compare(forward)
    for program in (forward, differentiate(forward)):
        done = values_alone(program)
        assert "implicit" not in {n.op for n in done.nodes}
        assert done.outputs.keys() == program.outputs.keys()
    value = values_alone(forward).outputs["y"]
    assert value is b.mul(b.map("tanh", inputs.x), inputs.y)
    assert b.labels[b.map("tanh", inputs.x)] == "y"


def test_the_interpreters_own_gradients_are_right() -> None:
    """Autograd is the oracle here, so it is held against finite differences once."""
    inputs = Inputs()
    value = CASES["tri_inv"](inputs, inputs.b)
    generator = torch.Generator().manual_seed(3)
    x, y = (draw_leaf(n, SIZES, generator).requires_grad_() for n in (inputs.x, inputs.y))
    assert torch.autograd.gradcheck(lambda x, y: Interpreter({inputs.x: x, inputs.y: y}, SIZES)(value), (x, y))


def test_several_uses_add_up() -> None:
    b = Builder(DIMS)
    x = b.leaf("token", "x", ("t",))
    found = gradients(b, [(b.add(b.mul(x, x), x), b.leaf("cot", "y", ("t",)))])
    assert set(found) == {x}
    values = torch.tensor([1.0, 2.0, 3.0, -1.0], dtype=torch.float64)
    leaves = {x: values, b.leaf("cot", "y", ("t",)): torch.ones(4, dtype=torch.float64)}
    torch.testing.assert_close(Interpreter(leaves, SIZES)(found[x]), 2 * values + 1)


def test_what_has_no_effect_has_no_gradient() -> None:
    b = Builder(DIMS)
    x, y = b.leaf("token", "x", ("t",)), b.leaf("token", "unused", ("t",))
    b.mul(x, y)
    backward = differentiate(Program("chunk", DIMS, b, {"y": b.map("tanh", x)}))
    assert set(backward.outputs) == {"d:x"}


def test_flags_are_constants() -> None:
    b = Builder(DIMS)
    x, live = b.leaf("token", "x", ("t",)), b.leaf("live", "live", ("t",))
    assert set(differentiate(Program("chunk", DIMS, b, {"y": b.mul(x, live)})).outputs) == {"d:x"}


def test_a_gradient_has_its_leafs_axes() -> None:
    b = Builder(DIMS)
    p = b.leaf("param", "p", ("i",))
    d = differentiate(Program("token", DIMS, b, {"y": b.sum(p, {"i"})})).outputs["d:p"]
    assert d.axes == ("i",)
    assert constant(d) is None


# ---- whole layers -------------------------------------------------------------------------------------------

LAYERS = [
    ("linear_attention", {}), ("mamba2", {}), ("gla", {}), ("delta_net", {}), ("gated_delta_net", {}),
    ("titans_linear", {"b": 4}), ("lattice_dec", {}), ("lattice_dec", {"b": 4}), ("lattice_sim", {"b": 4}),
    ("lattice_dec", {"b": 4, "project": 0}), ("lattice_enc", {"b": 4, "project": 0}),
    ("lattice_sim", {"b": 1, "project": 0}), ("trellis", {"b": 4}), ("omega_linear", {"b": 4}), ("swla", {}),
]  # fmt: skip


def forms(name: str, consts: dict[str, float]) -> dict[str, Form]:
    lowered = shipped(name, **consts)
    found = {"token": lowered.token, "chunk": lowered.chunk, "resumed": lowered.resumed}
    return {k: v for k, v in found.items() if v is not None}


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    for kind, form in forms(name, consts).items():
        verify(form.forward)
        compare(form.forward, seed=len(kind))
