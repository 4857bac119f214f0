"""Chains of cotangents in few steps: the same ends, and less for a unit to compute and to load."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_eval import Interpreter, draw_leaf
from test_associate import same
from test_differentiate import LAYERS, forms

from ttmdsl.affine import SPARED, affine, work
from ttmdsl.builder import Builder
from ttmdsl.ir import Node, Program, depends_on, is_product, verify

SIZES = {"t": 4, "d": 3, "m": 5}


def chain(program: Program) -> set[Node]:
    return depends_on(program.ends().values(), [n for n in program.leaves() if n.role == "cocarry"])


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    for form in forms(name, consts).values():
        program = form.backward
        found = affine(program)
        if found is program:
            continue
        verify(found)
        same(program, found)
        assert work(found) + SPARED <= work(program)
        others = {k: v for k, v in program.outputs.items() if not k.startswith("carry:")}
        assert others.items() <= found.outputs.items()
        products = [sum(map(is_product, chain(p))) for p in (program, found)]
        assert products[1] <= products[0]


def test_a_normalised_activation_takes_two_sums_and_three_products() -> None:
    """phi(K k) - a of Trellis: its second derivative is a diagonal and two vectors."""
    program = forms("trellis", {"b": 16})["chunk"].backward
    found = affine(program.with_outputs({"carry:K": program.outputs["carry:K"]}))
    left = [n for n in chain(found) if "t" in n.axes and n.op != "leaf"]
    assert sum(n.op == "contract" and n.axes == ("t",) for n in left) == 2
    assert sum(n.op == "mul" and n.axes == ("t", "m") for n in left) <= 4  # with what scales the cotangent itself


@pytest.mark.parametrize("name", ["linear_attention", "gated_delta_net", "gla"])
def test_what_is_linear_in_the_state_stays(name: str) -> None:
    program = forms(name, {})["chunk"].backward
    assert affine(program) is program


@st.composite
def chains(draw: st.DrawFn) -> Program:
    """A carry S[m, d]: what a product makes of it goes through steps that are linear in it, and back."""
    b = Builder(["d", "m"])
    state = b.leaf("cocarry", "S", ("m", "d"))
    k = b.leaf("token", "k", ("t", "d"))
    tiles = [b.leaf("saved", name, ("t", "m")) for name in "xyz"]
    vectors = [b.leaf("saved", name, ("t",)) for name in "uv"]
    tiles += [b.map("sigmoid", tiles[0]), b.add(b.const(1.0), b.neg(tiles[1])), b.mul(vectors[0], tiles[2])]
    rows = [b.leaf("saved", "w", ("m",)), *vectors]
    made = [b.contract(state, k, {"d"})]
    for _ in range(draw(st.integers(1, 14))):
        x = draw(st.sampled_from(made))
        match draw(st.sampled_from(["scale", "weigh", "add", "bias", "neg", "sum"])):
            case "scale":
                x = b.mul(x, draw(st.sampled_from(tiles)))
            case "weigh":
                x = b.mul(draw(st.sampled_from(rows)), x)
            case "add":
                x = b.add(x, draw(st.sampled_from(made)))
            case "bias":
                x = b.add(x, draw(st.sampled_from(tiles)))
            case "neg":
                x = b.neg(x)
            case "sum":
                total = b.sum(b.mul(x, draw(st.sampled_from(tiles))), {"m"})
                x = b.mul(total, draw(st.sampled_from(tiles)))
        made.append(x)
    end = b.add(b.mul(b.leaf("saved", "g", ()), state), b.contract(made[-1], k, {"t"}))
    return Program("chunk", ("d", "m"), b, {"carry:S": b.expand(end, ("m", "d")), "d:k": b.sum(state, {"m", "d"})})


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(chains())
def test_drawn_chains(program: Program) -> None:
    found = affine(program)
    verify(found)
    generator = torch.Generator().manual_seed(0)
    leaves = sorted({n for p in (program, found) for n in p.leaves()}, key=lambda n: n.id)
    value = Interpreter({n: draw_leaf(n, SIZES, generator) for n in leaves}, SIZES)
    torch.testing.assert_close(value(found.outputs["carry:S"]), value(program.outputs["carry:S"]), rtol=1e-9, atol=1e-9)
    assert work(found) <= work(program)
