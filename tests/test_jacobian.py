"""Jacobians of vector functions: against autodiff, of least rank, and under their names."""

from __future__ import annotations

import pytest
import sympy
import torch
from evaluate import Evaluator
from hypothesis import given, settings
from hypothesis import strategies as st

from ttmdsl.check import check
from ttmdsl.errors import DeriveError, Span
from ttmdsl.expr import CBinary, CConst, CElem, CMap, CMean, CNum, Comp, CRef, CSum, VectorFn
from ttmdsl.functions import Y, aggregate
from ttmdsl.jacobian import jacobian, softmax_jacobian, symbolic_jacobian
from ttmdsl.parse import parse
from ttmdsl.spec import LayerSpec

SPEC = """
layer Probe {{
  dim    d_k, d_v
  input  q[d_k], k[d_k], v[d_v]
  param  w[d_v], c[d_v], lam
  const  eps = 0.01, p = 3
  {fns}
  memory S[d_v, d_k]
  bias   1/2 * |f(S @ k) - v|^2
  read   S @ q
}}
"""

CENTERED = "fn centered(x)[i] = x[i] - mean(j, x[j])"
LAYER_NORM = "centered(x)[i] / sqrt(mean(j, centered(x)[j]^2) + 1e-5)"

# formula, rank, title
TABLE = {
    "l2": (
        "fn f(s)[i] = s[i] / sqrt(sum(j, s[j]^2))",
        1,
        "projection onto the orthogonal complement of s, divided by |s|",
    ),
    "l2 eps": (
        "fn f(s)[i] = s[i] / sqrt(sum(j, s[j]^2) + eps)",
        1,
        "damped projection onto the orthogonal complement of s, divided by sqrt(|s|^2 + eps)",
    ),
    "l2 scaled": (
        "fn f(s)[i] = 3 * s[i] / sqrt(sum(j, s[j]^2))",
        1,
        "projection onto the orthogonal complement of s, times 3 / |s|",
    ),
    "l2 of silu": (
        "fn f(s)[i] = silu(s[i]) / sqrt(sum(j, silu(s[j])^2))",
        1,
        "projection onto the orthogonal complement of silu(s), divided by |silu(s)|, after diag(silu'(s))",
    ),
    "rms": (
        "fn f(x)[i] = x[i] / sqrt(mean(j, x[j]^2))",
        1,
        "projection onto the orthogonal complement of x, times sqrt(n) / |x|",
    ),
    "rms with weight": (
        "fn f(x)[i] = w[i] * x[i] / sqrt(mean(j, x[j]^2) + eps)",
        1,
        "damped projection onto the orthogonal complement of x, times sqrt(n) / sqrt(|x|^2 + eps*n), then diag(w)",
    ),
    "centering": (
        "fn f(x)[i] = x[i] - mean(j, x[j])",
        1,
        "centering: projection onto the orthogonal complement of 1",
    ),
    "layer norm": (
        f"{CENTERED}\n  fn f(x)[i] = {LAYER_NORM}",
        2,
        "layer norm: damped projection onto the orthogonal complement of 1 and of the centred x, divided by the "
        "standard deviation",
    ),
    "affine layer norm": (
        f"{CENTERED}\n  fn f(x)[i] = w[i] * {LAYER_NORM} + c[i]",
        2,
        "layer norm: damped projection onto the orthogonal complement of 1 and of the centred x, divided by the "
        "standard deviation, then diag(w)",
    ),
    "softmax by hand": (
        "fn f(x)[i] = exp(x[i]) / sum(j, exp(x[j]))",
        1,
        "diag(y) - y y^T, the covariance of a draw from y",
    ),
    "elementwise": ("fn f(x)[i] = tanh(x[i]) + lam", 0, "diagonal"),
    "l1": ("fn f(x)[i] = x[i] / sum(j, abs(x[j]))", 1, ""),
    "powers": ("fn f(x)[i] = x[i]^p / sum(j, abs(x[j])^p)", 1, ""),
    "powers of lengths": ("fn f(x)[i] = sign(x[i]) * abs(x[i])^1.5 / (1 + sum(j, abs(x[j])^1.5))", 1, ""),
    "weighted sum": ("fn f(x)[i] = x[i] * sum(j, w[j] * x[j])", 1, ""),
    "two sums": ("fn f(x)[i] = x[i] * sum(j, x[j]^2) + sum(k, x[k]) * mean(l, tanh(x[l]))", 2, ""),
    "clipped": ("fn f(x)[i] = min(max(x[i], 0 - lam), lam) * mean(j, x[j])", 1, ""),
    "exp of mean": ("fn f(x)[i] = log(1 + exp(x[i] - mean(j, x[j])))", 1, ""),
    "cancelling": ("fn f(x)[i] = x[i] + sum(j, x[j]) - sum(k, x[k])", 0, "diagonal"),
}


def _spec(fns: str) -> LayerSpec:
    text = SPEC.format(fns=fns)
    return check(parse(text), text)


def _compare(fn: VectorFn, spec_consts: dict[str, float], tolerance: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = draw(5)
    env = {"w": draw(5), "c": draw(5), "lam": torch.tensor(0.7, dtype=torch.float64)}
    at = Evaluator(env, {}, {fn.name: fn}, {fn.name: jacobian(fn, spec_consts)})
    actual = torch.stack([at.pull_back(fn.name, x, row) for row in torch.eye(5, dtype=torch.float64)])
    expected = torch.autograd.functional.jacobian(lambda z: at.apply(fn.name, z), x)
    scale = float(expected.abs().max()) + 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("case", TABLE)
def test_against_autodiff(case: str) -> None:
    spec = _spec(TABLE[case][0])
    _compare(spec.fns["f"], spec.consts, 1e-12)


@pytest.mark.parametrize("case", TABLE)
def test_rank_and_title(case: str) -> None:
    fns, rank, title = TABLE[case]
    found = jacobian(_spec(fns).fns["f"])
    assert len(found.low_rank) == rank
    assert found.title == title


def test_lattice_equation_5() -> None:
    """J = (1/|s|) (I - s s^T / |s|^2)."""
    found, _ = symbolic_jacobian(_spec(TABLE["l2"][0]).fns["f"])
    length = sympy.sqrt(aggregate(0))
    assert found.diagonal == 1 / length
    assert found.low_rank == ((-Y / length, Y),)


def test_softmax_is_built_in() -> None:
    built_in, by_hand = softmax_jacobian(), jacobian(_spec(TABLE["softmax by hand"][0]).fns["f"])
    assert (built_in.diagonal, built_in.low_rank) == (by_hand.diagonal, by_hand.low_rank)


def test_constants_enter_by_value() -> None:
    fn = _spec(TABLE["l2 eps"][0]).fns["f"]
    assert jacobian(fn).value.has(sympy.Rational(1, 100))
    assert jacobian(fn, {"eps": 0.5}).value.has(sympy.Rational(1, 2))
    assert {s.name for s in symbolic_jacobian(fn)[0].value.free_symbols} == {"x", "s0", "eps"}


def test_nothing_divides_by_a_component() -> None:
    """silu(0) = 0: the Jacobian of silu(x) / |silu(x)| must not be written with a quotient by it."""
    fn = _spec("fn f(x)[i] = silu(x[i]) / sqrt(sum(j, silu(x[j])^2) + eps)").fns["f"]
    at = Evaluator({}, {}, {"f": fn}, {"f": jacobian(fn)})
    assert torch.isfinite(
        at.pull_back("f", torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    ).all()


def test_a_double_sum_is_refused() -> None:
    there = Span(3, 14, 4)
    body = CSum("j", CBinary("mul", CElem("i", span=there), CElem("j")))
    with pytest.raises(DeriveError) as caught:
        jacobian(VectorFn("f", "x", "i", body))
    (problem,) = caught.value.diagnostics
    assert problem.span == there
    assert "x[i] stands inside a sum over j" in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (CNum(2.0), "does not depend on its argument"),
        (CBinary("sub", CElem("i"), CElem("i")), "does not depend on its argument"),
        (CMap("sign", CElem("i")), "does not depend on its argument"),
        (CBinary("div", CElem("i"), CBinary("sub", CElem("i"), CElem("i"))), "infinite or undefined"),
    ],
)
def test_functions_without_a_derivative(body: Comp, message: str) -> None:
    with pytest.raises(DeriveError, match=message):
        jacobian(VectorFn("f", "x", "i", body))


def test_a_param_may_not_take_the_derivations_names() -> None:
    with pytest.raises(DeriveError, match="rename the param"):
        jacobian(VectorFn("f", "x", "i", CBinary("mul", CRef("s1", ""), CElem("i"))))


def test_a_constant_may_have_any_name() -> None:
    body = CBinary("mul", CConst("n", 3.0), CBinary("div", CElem("i"), CSum("j", CMap("abs", CElem("j")))))
    _compare(VectorFn("f", "x", "i", body), {"n": 3.0}, 1e-12)


# ---- functions drawn at random ------------------------------------------------------------------------------


def _formulas(index: str, depth: int) -> st.SearchStrategy[Comp]:
    leaf = st.one_of(
        st.just(CElem(index)),
        st.just(CRef("w", index)),
        st.just(CRef("lam", "")),
        st.sampled_from([0.5, 2.0, 1e-3, -1.5]).map(CNum),
        st.just(CConst("eps", 0.25)),
    )
    if depth == 0:
        return leaf
    sub = _formulas(index, depth - 1)
    inner = _formulas(index + "j", depth - 1)
    smooth = st.sampled_from(["tanh", "sigmoid", "silu", "gelu", "softplus"])
    return st.one_of(
        leaf,
        st.builds(CMap, smooth, sub),
        st.builds(CBinary, st.sampled_from(["add", "sub", "mul"]), sub, sub),
        st.builds(lambda body: CSum(index + "j", body), inner),
        st.builds(lambda body: CMean(index + "j", body), inner),
        st.builds(lambda a, b: CBinary("div", a, CBinary("add", CNum(1.0), CBinary("mul", b, b))), sub, sub),
        st.builds(lambda b: CMap("sqrt", CBinary("add", CNum(1.0), CBinary("mul", b, b))), sub),
    )


@settings(max_examples=40, deadline=None)
@given(_formulas("i", 3), st.integers(0, 3))
def test_random_functions_against_autodiff(body: Comp, seed: int) -> None:
    # every function depends on its argument: no formula drawn cancels this
    at_x = CBinary("add", body, CBinary("mul", CNum(0.137), CElem("i")))
    _compare(VectorFn("f", "x", "i", at_x), {"eps": 0.25}, 1e-9, seed)
