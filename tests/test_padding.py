"""What the padding analysis says of a tile beyond its dims' ends, against what interpreted programs leave there."""

from __future__ import annotations

import pytest
import torch
from ir_eval import BEFORE, Interpreter, draw_leaf
from test_differentiate import LAYERS, forms

from ttmdsl.builder import Builder
from ttmdsl.ir import PAST, UNIT_AXES, Node, Program, base_dim
from ttmdsl.padding import PaddingAnalysis

SIZES = {"t": 4, "i": 3, "j": 2, "d_k": 3, "d_v": 5, "d": 3, "m": 2, "h": 5, PAST: BEFORE}
TILE = 8


def check(programs: list[Program], seed: int) -> dict[str, int]:
    """Holds every claim about every value of the programs against the interpreter; counts the claims."""
    leaves = {leaf for p in programs for leaf in p.leaves()}
    generator = torch.Generator().manual_seed(seed)
    given = {leaf: draw_leaf(leaf, SIZES, generator) for leaf in sorted(leaves, key=lambda n: n.id)}
    padded, exact = Interpreter(given, SIZES, tile=TILE), Interpreter(given, SIZES)
    analysis = PaddingAnalysis()
    claims = {"zero": 0, "finite": 0, "wild": 0}
    for program in programs:
        for node in program.nodes:
            if set(node.axes) <= set(UNIT_AXES):
                continue
            value = padded(node)
            here = tuple(slice(exact.length(x)) for x in node.axes)
            torch.testing.assert_close(value[here], exact(node), rtol=1e-9, atol=1e-9, equal_nan=True)
            for axis in (x for x in node.axes if x not in UNIT_AXES):
                beyond = _beyond(value, node, axis)
                claim = analysis.of(node, axis)
                claims[claim] += 1
                if claim == "zero":
                    assert (beyond == 0).all(), (node, node.op, axis)
                elif claim == "finite":
                    assert beyond.isfinite().all(), (node, node.op, axis)
    return claims


def _beyond(value: torch.Tensor, node: Node, axis: str) -> torch.Tensor:
    """The value beyond the end of one axis, and before the ends of the others."""
    return value[
        tuple(
            slice(None)
            if x in UNIT_AXES
            else slice(SIZES[base_dim(x)], None)
            if x == axis
            else slice(SIZES[base_dim(x)])
            for x in node.axes
        )
    ]


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    for kind, form in forms(name, consts).items():
        if any(n.op == "norm_scan" for n in form.forward.nodes):
            continue  # a form that no kernel takes
        claims = check([form.forward, form.backward], seed=len(kind))
        assert 2 * claims["zero"] > claims["wild"]  # an analysis that knew nothing would mask everything


CASES = [
    ("a leaf", lambda b, x, p: x, "zero"),
    ("a leaf and a number", lambda b, x, p: b.add(x, b.const(1)), "finite"),
    ("a product with a leaf", lambda b, x, p: b.mul(x, b.map("sigmoid", x)), "zero"),
    ("what is infinite at zero is masked", lambda b, x, p: b.recip(x), "zero"),
    ("the logarithm too", lambda b, x, p: b.map("log2", b.mul(x, x)), "zero"),
    ("a broadcast value", lambda b, x, p: b.mul(b.expand(b.sum(x, {"i"}), {"i"}), b.map("exp2", x)), "finite"),
    ("1 at zero", lambda b, x, p: b.map("exp2", x), "finite"),
    ("log 2 at zero", lambda b, x, p: b.map("softplus", x), "finite"),
    ("a power of any other number", lambda b, x, p: b.map("exp2", b.sub(x, b.sum(x, {"i"}))), "wild"),
    ("softmax", lambda b, x, p: b.map("exp2", b.sub(x, b.amax(x, {"i"}))), "wild"),
    ("a root of any number", lambda b, x, p: b.map("sqrt", b.sub(x, b.sum(x, {"i"}))), "wild"),
    ("a root", lambda b, x, p: b.map("sqrt", b.mul(x, x)), "zero"),
    ("a running sum over tokens", lambda b, x, p: b.cumsum(x), "zero"),
    ("another axis", lambda b, x, p: b.rename(b.mul(x, p), "i", "i'"), "zero"),
    ("a token's mask", lambda b, x, p: b.mask(x, "lower"), "zero"),
    ("a token's mask of minus infinity", lambda b, x, p: b.mask(x, "lower", float("-inf")), "wild"),
    ("tokens before", lambda b, x, p: b.contract(b.diagonal(b.sum(x, {"i"}), 2, PAST), x, {"t"}), "zero"),
    ("a mask of tokens long ago", lambda b, x, p: b.behind(x, 2), "zero"),
    ("that of minus infinity", lambda b, x, p: b.behind(x, 2, fill=float("-inf")), "wild"),
    ("maximum with a number", lambda b, x, p: b.map("max", x, b.const(0.5)), "finite"),
]


@pytest.mark.parametrize(("made", "claim"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_claims(made: object, claim: str) -> None:
    b = Builder(("i", "j"))
    x, p = b.leaf("token", "x", ("t", "i")), b.leaf("param", "p", ("i",))
    node = made(b, x, p)  # type: ignore[operator]
    axis = "i'" if "i'" in node.axes else "i"
    assert PaddingAnalysis().of(node, axis) == claim
    check([Program("chunk", ("i", "j"), b, {"y": node})], seed=1)


def test_a_softmax_of_large_negative_logits_overflows_beyond_its_end() -> None:
    """Why a power of two of a number that is not zero there is wild: 2^(0 - max) is infinite, and times zero is NaN."""
    b = Builder(("i", "j"))
    x, S = b.leaf("token", "x", ("t", "i")), b.leaf("carry", "S", ("i", "j"))
    weights = b.map("exp2", b.sub(x, b.amax(x, {"i"})))
    leaves = {x: torch.full((4, 3), -2000.0, dtype=torch.float64), S: torch.ones(3, 2, dtype=torch.float64)}
    assert Interpreter(leaves, SIZES, tile=TILE)(weights)[:, 3:].isinf().all()
    read = Interpreter(leaves, SIZES, tile=TILE)(b.contract(weights, S, {"i"}))
    torch.testing.assert_close(read[:, :2], torch.full((4, 2), 3.0, dtype=torch.float64))


def test_a_deep_program() -> None:
    b = Builder(("i",))
    node = b.leaf("token", "x", ("t", "i"))
    for i in range(3000):
        node = b.make("add", (node, b.const(float(i))), node.axes)
    assert PaddingAnalysis().of(node, "i") == "finite"
