"""Lowering: the class of each recurrence with its reason, and the chunk form against the token form, interpreted."""

from __future__ import annotations

import pytest
import torch
from ir_eval import Interpreter, draw_leaf
from torch import Tensor

from ttmdsl.check import check
from ttmdsl.derive import derive
from ttmdsl.ir import Node, Program, depends_on, verify
from ttmdsl.loader import read
from ttmdsl.lower import TITLES, Lowered, lower
from ttmdsl.parse import parse

SIZES = {"t": 5, "d_k": 3, "d_v": 2, "d": 3, "m": 2, "h": 4}


def lowered(text: str, **consts: float) -> Lowered:
    found = lower(derive(check(parse(text, "<spec>"), text, "<spec>", consts)))
    assert isinstance(found, Lowered)
    return found


def shipped(name: str, **consts: float) -> Lowered:
    return lowered(read(name)[0], **consts)


PROJECTED = "the projection after every token needs the memory at every token"
NOT_AFFINE = "the gradient at every token is not affine in the memory"
TOO_MANY = "the gradient at every token writes more than 2 vectors that follow from the state"
OTHERS = "what the gradient at every token writes is read through other vectors than it is written along"
NOT_A_SCALAR = "the gradient at every token is not a scalar times a read of the memory"


@pytest.mark.parametrize(
    ("name", "consts", "recurrence", "reason"),
    [
        ("linear_attention", {}, "additive", ""),
        ("mamba2", {}, "additive", ""),
        ("gla", {}, "additive", ""),
        ("delta_net", {}, "affine", ""),
        ("gated_delta_net", {}, "affine", ""),
        ("titans_linear", {}, "frozen", ""),
        ("lattice_dec", {}, "sequential", PROJECTED),
        ("lattice_enc", {}, "sequential", PROJECTED),
        ("lattice_sim", {}, "sequential", PROJECTED),
        ("lattice_dec", {"b": 16, "project": 0}, "frozen", ""),
        ("lattice_enc", {"b": 16, "project": 0}, "frozen", ""),
        ("lattice_sim", {"b": 16, "project": 0}, "frozen", ""),
        ("lattice_dec", {"b": 16}, "frozen", ""),
        ("lattice_enc", {"b": 16}, "frozen", ""),
        ("lattice_sim", {"b": 16}, "frozen", ""),
        ("trellis", {}, "frozen", ""),
        ("trellis", {"b": 1}, "sequential", NOT_AFFINE),
    ],
)
def test_shipped_layers(name: str, consts: dict[str, float], recurrence: str, reason: str) -> None:
    found = shipped(name, **consts)
    assert (found.recurrence, found.reason) == (recurrence, reason)
    assert found.title.startswith(TITLES[found.recurrence])
    assert (found.chunk is None) == (recurrence == "sequential")
    assert (found.resumed is None) == (recurrence != "frozen")
    assert found.batch == int(found.rule.spec.passes[0].optimizer.batch)
    inverted = found.chunk is not None and any(n.op == "tri_inv" for n in found.chunk.forward.nodes)
    assert inverted == (recurrence == "affine")


def spec(*clauses: str) -> str:
    declared = {
        "dim": "dim d_k, d_v",
        "input": "input q[d_k], k[d_k], v[d_v]",
        "gate": "gate alpha: decay, eta: unit",
        "memory": "memory S[d_v, d_k]",
        "bias": "bias 1/2 * |S @ k - v|^2",
        "read": "read S @ q",
    }
    order = "dim input gate param const fn memory bias retention optimizer project read".split()
    declared |= {clause.split()[0]: clause for clause in clauses}
    return "layer L {\n" + "\n".join(declared[key] for key in order if key in declared) + "\n}\n"


UNIT, AT_POINT = ["fn unit(s)[i] = s[i] / sqrt(sum(j, s[j]^2))"], "optimizer gd(rate = eta, batch = 8)"
TWO = ["memory S[d_v, d_k], A[d_v, d_k]", "retention (alpha * S, alpha * A)", "read S @ q + A @ k"]
GD, RETAINED = "optimizer gd(rate = eta)", "optimizer gd(rate = eta, at = retained)"


@pytest.mark.parametrize(
    ("clauses", "recurrence", "reason"),
    [
        (["bias -<S @ k, v>", "retention alpha * S", GD], "additive", ""),
        (["bias -<S @ k, v>", "retention sigmoid(eta) * alpha * S", GD], "additive", ""),
        (["retention alpha * S", GD], "affine", ""),
        (["retention alpha * S", RETAINED], "affine", ""),
        (["gate alpha: decay, eta[d_v]: unit", "bias 1/2 * |eta * (S @ k) - v|^2", "optimizer gd(rate = 1)"],
         "sequential", NOT_A_SCALAR),
        (["bias 1/2 * |S @ k - v|^2 + 1/2 * <v, S @ k>^2", GD], "sequential", NOT_A_SCALAR),
        (["bias 1/2 * |S @ k - v|^2 + 1/3 * <v, S @ k>^3", GD], "sequential", NOT_AFFINE),
        (["bias 1/2 * |S @ k - v|^2 + 1/2 * |S @ q - v|^2", GD], "affine", ""),
        (["bias 1/2 * |S @ k - v|^2 + 1/2 * |S @ q - v|^2 + 1/2 * |S @ (k - q)|^2", GD], "sequential", TOO_MANY),
        (["bias 1/2 * |S @ k - v|^2 + 1/2 * |S^T @ v - k|^2", GD], "sequential", NOT_A_SCALAR),
        (["bias 1/2 * |S @ k - v|^2 + 1/2 * |S @ k + S @ q - v|^2", GD], "sequential", OTHERS),
        (["bias 1/2 * |S @ k - v|^2 + 1/2 * |S @ (eta * q) - v|^2", GD], "affine", ""),
        ([*TWO, "bias 1/2 * |S @ k + A @ q - v|^2", GD], "affine", ""),
        ([*TWO, "bias 1/2 * |S @ k - v|^2 - <A @ k, stop(S @ k)>", GD], "affine", ""),
        ([*TWO, "bias 1/2 * |S @ k - v|^2 - <A @ k, stop(tanh(S @ k))>", GD], "sequential", NOT_AFFINE),
        ([*TWO, "bias 1/2 * |S @ (A^T @ v) - v|^2", GD], "sequential", NOT_AFFINE),
        (["bias 1/3 * |S @ k - v|_3^3", GD], "sequential", NOT_AFFINE),
        (["bias 1/2 * |tanh(S @ k) - v|^2", GD], "sequential", NOT_AFFINE),
        (["bias 1/2 * |tanh(S @ k) - v|^2", "optimizer gd(rate = eta, batch = 8)"], "frozen", ""),
        (["gate alpha[d_v]: decay, eta: unit", "retention alpha * S", GD],
         "sequential", "a decay per channel of the read makes one triangular system for every channel"),
        (["gate alpha[d_k]: decay, eta: unit", "retention alpha * S", GD], "affine", ""),
        (["gate alpha: decay, eta: real", "bias -<S @ k, v>", "retention eta * S"],
         "sequential", "a retention factor that may be negative has no logarithm"),
        (["retention alpha * tanh(S)", GD], "sequential", "the retention of S is no product of S and a decay"),
        (["bias -<S @ k, v>", "retention alpha * S", "optimizer momentum(decay = alpha, rate = eta)"], "additive", ""),
        (["gate alpha[d_k]: decay, theta: decay", "bias -<S @ k, v>", "retention alpha * S",
          "optimizer momentum(decay = theta, rate = 1)"],
         "sequential", "momentum over a decay per channel has no factored form"),
        (["gate alpha[d_k]: decay, mu[d_v]: decay", "bias -<S @ k, v>", "retention mu * (alpha * S)"],
         "sequential", "a decay of its own for every entry of the memory has no factored form"),
        ([*UNIT, "bias -<S @ k, v>", "retention alpha * S", AT_POINT, "project columns(unit, S)"], "frozen", ""),
        ([*UNIT, "bias -<S @ k, v>", "retention alpha * S", AT_POINT, "project rows(unit, S)"], "frozen", ""),
        ([*UNIT, "bias -<S @ k, v>", GD, "project columns(unit, S)"], "sequential", PROJECTED),
        ([*UNIT, "gate alpha[d_k]: decay, eta: unit", "retention alpha * S", AT_POINT, "project columns(unit, S)"],
         "frozen", ""),
        ([*UNIT, "gate alpha[d_v]: decay, eta: unit", "retention alpha * S", AT_POINT, "project columns(unit, S)"],
         "sequential", "a projection along the channels that decay each on their own has no factored form"),
        ([*UNIT, "retention alpha * S", "optimizer momentum(decay = alpha, rate = eta, batch = 8)",
          "project columns(unit, S)"],
         "sequential", "momentum under a projection after every token has no factored form"),
        ([*UNIT, "bias 1/2 * |S @ k - v|^2 - <S @ q, v>", AT_POINT, "project columns(unit, S)"],
         "sequential", "a projection after every token, and more writes than one outer product and one matrix"),
        (["retention alpha * S", AT_POINT, "project columns(softmax, S)"],
         "sequential", "the projection of S after every token is no scaling of its vectors to unit length"),
    ],
)  # fmt: skip
def test_classes(clauses: list[str], recurrence: str, reason: str) -> None:
    found = lowered(spec(*clauses))
    assert (found.recurrence, found.reason) == (recurrence, reason)
    for form in (found.token, found.chunk, found.resumed):
        if form is not None:
            verify(form.forward)
            verify(form.backward)


# ---- chunk form against token form ---------------------------------------------------------------------------

CHUNKED = [
    *("linear_attention", "mamba2", "gla", "delta_net", "gated_delta_net"),
    *("titans_linear:5", "lattice_dec:5", "lattice_enc:5", "lattice_sim:5", "trellis:5"),
    *("lattice_dec:5:0", "lattice_enc:5:0", "lattice_sim:5:0"),
]


def variant_of(text: str) -> Lowered:
    """A shipped layer, with its batch, with its choice of projection."""
    name, *consts = text.split(":")
    return shipped(name, **dict(zip(("b", "project"), map(float, consts), strict=False)))


def tokens(program: Program, tensors: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The token program, run over the tokens one by one."""
    ys = []
    for t in range(SIZES["t"]):
        leaves: dict[Node, Tensor] = {}
        for leaf in program.leaves():
            match leaf.role:
                case "token":
                    leaves[leaf] = tensors[leaf.name][t]
                case "carry":
                    leaves[leaf] = state[leaf.name]
                case "fresh":
                    leaves[leaf] = torch.tensor(float(t == 0), dtype=torch.float64)
        interpreter = Interpreter(leaves, SIZES)
        ys.append(interpreter(program.outputs["y"]))
        state = state | {k[6:]: interpreter(v) for k, v in program.outputs.items() if k.startswith("carry:")}
    return torch.stack(ys), state


@pytest.mark.parametrize("variant", CHUNKED)
@pytest.mark.parametrize("form", ["chunk", "resumed"])
def test_a_chunk_is_its_tokens(variant: str, form: str) -> None:
    found = variant_of(variant)
    chosen = getattr(found, form)
    if chosen is None:
        assert form == "resumed"
        assert ":" not in variant
        return
    generator = torch.Generator().manual_seed(1)
    chunk = chosen.forward
    leaves = {leaf: draw_leaf(leaf, SIZES, generator) for leaf in chunk.leaves()}
    carried = {leaf.name: leaves[leaf] for leaf in chunk.leaves() if leaf.role == "carry"}
    for leaf in found.token.forward.leaves():  # the points: carries of the token form alone
        if leaf.role == "carry" and leaf.name not in carried:
            carried[leaf.name] = draw_leaf(leaf, SIZES, generator)
    tensors = {leaf.name: leaves[leaf] for leaf in chunk.leaves() if leaf.role == "token"}
    y, end = tokens(found.token.forward, tensors, carried)
    interpreter = Interpreter(leaves, SIZES)
    torch.testing.assert_close(interpreter(chunk.outputs["y"]), y, rtol=1e-9, atol=1e-9)
    for key, value in chunk.outputs.items():
        if key.startswith("carry:"):
            torch.testing.assert_close(interpreter(value), end[key[6:]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", CHUNKED)
def test_tokens_that_are_not_there_change_nothing(variant: str) -> None:
    found = variant_of(variant)
    assert found.chunk is not None
    chunk = found.chunk.forward
    generator = torch.Generator().manual_seed(2)
    leaves = {leaf: draw_leaf(leaf, SIZES, generator) for leaf in chunk.leaves()}
    live = next(leaf for leaf in leaves if leaf.role == "live")
    leaves[live] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    before = Interpreter(leaves, SIZES)
    changed = {leaf: x.clone() for leaf, x in leaves.items()}
    for leaf, x in changed.items():
        if leaf.role == "token":
            x[3:] = draw_leaf(leaf, SIZES, generator)[3:]
    after = Interpreter(changed, SIZES)
    for key, value in chunk.outputs.items():
        a, b = before(value), after(value)
        a, b = (a[:3], b[:3]) if key == "y" else (a, b)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mamba2", "delta_net", "titans_linear", "trellis"])
def test_a_decay_is_never_divided_by(name: str) -> None:
    """No power of two of a positive exponent: differences of logarithms are masked before the exponential."""
    chunk = shipped(name).chunk
    assert chunk is not None
    logs = [n for n in chunk.forward.leaves() if n.name.startswith("log_")]
    tainted = depends_on(chunk.forward.outputs.values(), logs)
    assert not any(n.op == "recip" and n.args[0] in tainted and n.args[0].op == "exp2" for n in chunk.forward.nodes)


def test_tiles_have_those_dims_first_along_which_sums_over_states_lie() -> None:
    def dims(variant: str) -> set[tuple[str, ...]]:
        found = variant_of(variant)
        return {form.forward.dims for form in (found.token, found.chunk, found.resumed) if form}

    assert dims("lattice_dec:5:0") == {("m", "d")}  # columns are normalised; all forms, which hand on their states
    assert dims("lattice_dec") == {("d", "m")}  # token by token
    assert dims("gla") == {("d_k", "d_v")}  # whose rows are scaled as they lie
