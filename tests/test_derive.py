"""Derived gradients: the papers' equations symbolically, autodiff numerically, and the losses that have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from evaluate import Evaluator

from ttmdsl.check import check
from ttmdsl.derive import derive, gradient
from ttmdsl.errors import DeriveError
from ttmdsl.expr import Binary, Expr, Map, Num, Outer, Ref, Transpose
from ttmdsl.functions import sigmoid
from ttmdsl.parse import parse
from ttmdsl.resources import folder
from ttmdsl.rule import UpdateRule
from ttmdsl.simplify_expr import columns_jact, jact, matvec, mul, neg, outer
from ttmdsl.spec import Memory
from ttmdsl.walk_expr import walk

LAYERS = (
    "linear_attention", "mamba2", "gla", "delta_net", "gated_delta_net", "titans_linear",
    "lattice_dec", "lattice_enc", "lattice_sim", "trellis",
)  # fmt: skip
SIZES = {"d_k": 3, "d_v": 2, "d": 3, "m": 2, "h": 4}


def _rule(text: str) -> UpdateRule:
    return derive(check(parse(text), text))


def _layer(name: str) -> UpdateRule:
    return _rule((Path(folder("layers")) / f"{name}.ttm").read_text(encoding="utf-8"))


def _square(bias: str, memory: str = "S[d_v, d_k]", more: str = "") -> str:
    return f"""layer Probe {{
      dim d_k, d_v
      input q[d_k], k[d_k], v[d_v]
      gate alpha, beta, by_row[d_v], by_column[d_k]
      param w[d_v], c[d_v]
      const delta = 0.5, eps = 0.01
      {more}
      memory {memory}
      bias {bias}
      read S @ q
    }}"""


def _deep(bias: str, memory: str = "W1[d, h], W2[h, d]", read: str = "W1 @ gelu(W2 @ q)") -> str:
    return f"""layer Deep {{
      dim d, h
      input q[d], k[d], v[d]
      memory {memory}
      bias {bias}
      read {read}
    }}"""


# ---- the shipped layers, against the papers -----------------------------------------------------------------


def _symbols(name: str, *shape: int) -> Any:
    return np.array(sympy.symbols(f"{name}:{':'.join(map(str, shape))}", real=True), dtype=object).reshape(shape)


def _symbolic(rule: UpdateRule) -> Evaluator:
    """Symbols for everything that the spec names."""
    spec = rule.spec
    shapes = {t.name: t.shape for t in spec.tensors} | {m.name: m.shape for m in spec.memories}
    env = {name: _symbols(name, *(SIZES[d] for d in shape)) for name, shape in shapes.items() if shape}
    env |= {name: sympy.Symbol(name, real=True) for name, shape in shapes.items() if not shape}
    return Evaluator(env, SIZES, spec.fns, rule.jacobians, symbolic=True)


def _outer(a: Any, b: Any) -> Any:
    return np.array([[x * y for y in b] for x in a], dtype=object)


def _length(s: Any) -> sympy.Expr:
    return sympy.sqrt(sum(x**2 for x in s))


def _normalised_columns(s: Any) -> Any:
    return np.stack([column / _length(column) for column in s.T]).T


def _orthogonal_update(s: Any, h: Any, c: Any) -> Any:
    """Lattice eq 10: column i is c_i P(s_i) h / |s_i|, with P of eq 5."""
    columns = []
    for s_i, c_i in zip(s.T, c, strict=True):
        projection = np.eye(len(s_i), dtype=int) - _outer(s_i, s_i) / _length(s_i) ** 2
        columns.append(c_i * (projection @ h) / _length(s_i))
    return np.stack(columns).T


def _silu(x: sympy.Expr) -> sympy.Expr:
    return x * sigmoid(x)


def _trellis_phi(x: Any) -> list[sympy.Expr]:
    size = sympy.sqrt(sum(_silu(z) ** 2 for z in x) + sympy.Rational(1, 100))
    return [_silu(z) / size for z in x]


def _trellis_gradient(memory: Any, key: Any, target: Any) -> Any:
    """Trellis eqs 5-6: u k^T with u = J_phi(M k)^T (phi(M k) - a), the Jacobian by differentiating phi itself."""
    z = sympy.symbols(f"z:{len(memory)}", real=True)
    phi = sympy.Matrix(_trellis_phi(z))
    e = phi - sympy.Matrix(list(target))
    u = phi.jacobian(z).T * e
    return _outer([x.subs(dict(zip(z, memory @ key, strict=True))) for x in u], key)


def _paper(layer: str, x: dict[str, Any]) -> dict[str, Any]:
    """The gradient as its paper prints it; the factors 2 are resolved as in equations.md."""
    match layer:
        case "linear_attention" | "mamba2" | "gla":  # Atlas table 1 and eq 46, Lattice eq 14: S + v k^T
            return {"S": -_outer(x["v"], x["k"])}
        case "delta_net" | "gated_delta_net" | "titans_linear":  # Atlas eq 47, Lattice eq 12; Atlas eq 12
            s, k, v = x["S"], x["k"], x["v"]
            return {"S": s @ _outer(k, k) - _outer(v, k)}
        case "lattice_dec":  # Lattice eqs 3-5
            e = _normalised_columns(x["S"]) @ x["k"] - x["v"]
            return {"S": _orthogonal_update(x["S"], e, x["k"])}
        case "lattice_enc":  # Lattice eqs 6-7
            e = _normalised_columns(x["S"]).T @ x["v"] - x["k"]
            return {"S": _orthogonal_update(x["S"], x["v"], e)}
        case "lattice_sim":  # Lattice eqs 8-9: the step is plus
            return {"S": _orthogonal_update(x["S"], -x["v"], x["k"])}
        case "trellis":
            return {"K": _trellis_gradient(x["K"], x["k"], x["a"]), "V": _trellis_gradient(x["V"], x["v"], x["a"])}
    raise AssertionError(layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_papers_equation(layer: str) -> None:
    rule = _layer(layer)
    evaluator = _symbolic(rule)
    expected = _paper(layer, evaluator.env)
    for p in rule.passes:
        for name, derived in evaluator.gradients(p).items():
            for a, b in zip(np.ravel(derived), np.ravel(expected[name]), strict=True):
                assert _is_zero(a - b), (layer, name)


def _is_zero(e: sympy.Expr) -> bool:
    return sympy.expand(e) == 0 or sympy.cancel(sympy.together(e)) == 0


# ---- factored forms -----------------------------------------------------------------------------------------


def _ref(name: str, *shape: str, kind: Any = "input") -> Ref:
    return Ref(name, kind, shape)


S, K, V, E = (
    _ref("S", "d", "m", kind="memory"),
    _ref("k", "m"),
    _ref("v", "d"),
    _ref("e", "d", kind="let"),
)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("delta_net", outer(_ref("e", "d_v", kind="let"), _ref("k", "d_k"))),
        ("linear_attention", neg(outer(_ref("v", "d_v"), _ref("k", "d_k")))),
        ("lattice_dec", columns_jact("phi", S, outer(E, K))),
        ("lattice_enc", columns_jact("phi", S, outer(V, _ref("e", "m", kind="let")))),
        ("lattice_sim", neg(columns_jact("phi", S, outer(V, K)))),
    ],
)
def test_factored_form(layer: str, expected: Expr) -> None:
    assert _layer(layer).passes[0].gradients["S"] == expected


def test_trellis_pulls_the_residual_back_once() -> None:
    keys, values = _layer("trellis").passes
    h, e, u = (_ref(name, "m", kind="let") for name in "heu")
    assert [name for name, _ in keys.definitions] == ["h", "e", "u"]
    assert dict(keys.definitions)["u"] == jact("phi", h, e)
    assert keys.gradients["K"] == outer(u, _ref("k", "d_k"))
    assert values.gradients["V"] == outer(u, _ref("v", "d_v"))


def test_mlp_memory() -> None:
    """equations.md section 1: dW1 = r a^T, dW2 = ((W1^T r) * act'(h)) x^T."""
    rule = _rule(_deep("1/2 * |k + W1 @ gelu(W2 @ k) - v|^2")).passes[0]
    names = [name for name, _ in rule.definitions]
    assert names == ["h1", "a", "e"]  # h is a dim
    h, a = _ref("h1", "h", kind="let"), _ref("a", "h", kind="let")
    e, k, w1 = _ref("e", "d", kind="let"), _ref("k", "d"), _ref("W1", "d", "h", kind="memory")
    assert rule.gradients["W1"] == outer(e, a)
    back = matvec(Transpose(w1, ("h", "d")), e)
    assert rule.gradients["W2"] == outer(mul(back, Map("gelu'", h, ("h",))), k)


def test_gated_mlp_memory_shares_what_flows_back() -> None:
    text = _deep("1/2 * |k + W1 @ (gelu(W2 @ k) * (W3 @ k)) - v|^2", "W1[d, h], W2[h, d], W3[h, d]")
    rule = _rule(text).passes[0]
    assert sum(isinstance(body, type(matvec(S, K))) for _, body in rule.definitions) == 3
    assert all(isinstance(g, Outer) for g in rule.gradients.values())
    r, a = _ref("r", "h", kind="let"), _ref("a", "h", kind="let")
    assert rule.gradients["W3"] == outer(mul(r, a), _ref("k", "d"))


def test_names_never_meet_the_specs_own() -> None:
    text = _square("1/2 * |S @ k - e|^2").replace("v[d_v]", "e[d_v]")
    assert [name for name, _ in _rule(text).passes[0].definitions] == ["e1"]


def test_two_residuals_are_numbered() -> None:
    text = _square("alpha * |S @ k - v|^2 + beta * |S @ q - v|^2")
    assert sorted(name for name, _ in _rule(text).passes[0].definitions) == ["e1", "e2"]


def test_ridge_keeps_the_memory_whole() -> None:
    rule = _rule(_square("-<S @ k, v> + alpha / 2 * |S|^2")).passes[0]
    assert not any(isinstance(n, Num) and n.value == 0 for g in rule.gradients.values() for n in walk(g))
    assert rule.definitions == ()


# ---- every derived gradient against autodiff ----------------------------------------------------------------

LAYER_NORM = """fn centered(x)[i] = x[i] - mean(j, x[j])
      fn ln(x)[i] = w[i] * centered(x)[i] / sqrt(mean(j, centered(x)[j]^2) + 1e-5) + c[i]"""
UNIT = "fn unit(x)[i] = x[i] / sqrt(sum(j, x[j]^2) + eps)"

BIASES = {
    "l3": _square("1/3 * |S @ k - v|_3^3"),
    "l4": _square("1/4 * |S @ k - v|_4^4"),
    "l1": _square("|S @ k - v|_1"),
    "l1 squared": _square("|S @ k - v|_1^2"),
    "length": _square("|S @ k - v|"),
    "length cubed": _square("|S @ k - v|^3"),
    "pseudo-Huber": _square("delta * sqrt(|S @ k - v|^2 + delta^2)"),
    "vector Huber": _square("1/2 * min(|S @ k - v|, delta)^2 + delta * (|S @ k - v| - min(|S @ k - v|, delta))"),
    "coordinate Huber": _square(
        "sum(1/2 * min(abs(S @ k - v), delta)^2 + delta * (abs(S @ k - v) - min(abs(S @ k - v), delta)))"
    ),
    "cosine": _square("-<S @ k, v> / |S @ k|"),
    "cross entropy": _square("log(sum(exp(S @ k))) - <S @ k, v>"),
    "cross entropy by softmax": _square("-<log(softmax(S @ k)), v>"),
    "layer norm": _square("1/2 * |ln(S @ k) - v|^2", more=LAYER_NORM),
    "unit rows": _square("1/2 * |rows(unit, S) @ k - v|^2", more=UNIT),
    "unit columns of the decayed memory": _square("1/2 * |columns(unit, by_column * S) @ k - v|^2", more=UNIT),
    "ridge": _square("-<S @ k, v> + alpha / 2 * |S|^2"),
    "mean": _square("mean((S @ k) * v)"),
    "bare sum": _square("sum(S @ k)"),
    "gated rows": _square("1/2 * |(by_row * S) @ k - v|^2"),
    "gated columns": _square("1/2 * |(by_column * S) @ k - v|^2"),
    "elementwise": _square("1/2 * |tanh(S) @ k - v|^2"),
    "own length": _square("1/2 * |(S / |S|) @ k - v|^2"),
    "quadratic": _square("1/2 * |S^T @ (S @ k) - k|^2"),
    "powers": _square("sum((1 + (S @ k)^2)^-1.5 + abs(S @ k)^p)", more="const p = 3"),
    "largest": _square("sum(max(S @ k, v))"),
    "scaled residual": _square("1/2 * |(S @ k - v) / (1 + |S @ k|^2)|^2"),
    "definition": _square("1/2 * |S @ z - v|^2", more="let z = silu(k) / (1 + sum(k * k))"),
    "activations": _square("sum(sigmoid(S @ k) * silu(S @ k) + relu(S @ k) + softplus(S @ k) + gelu(S @ k))"),
    "mlp": _deep("1/2 * |k + W1 @ gelu(W2 @ k) - v|^2"),
    "gated mlp": _deep("1/2 * |k + W1 @ (gelu(W2 @ k) * (W3 @ k)) - v|^2", "W1[d, h], W2[h, d], W3[h, d]"),
    "tied mlp": _deep("1/2 * |W1 @ silu(W1^T @ k) - v|^2", "W1[d, h]", "W1 @ (W1^T @ q)"),
    "three layers": _deep("1/2 * |W1 @ silu(W2 @ silu(W3 @ k)) - v|^2", "W1[d, h], W2[h, d], W3[d, d]"),
}


def _numbers(rule: UpdateRule, seed: int) -> Evaluator:
    generator = torch.Generator().manual_seed(seed)
    spec = rule.spec
    shapes = {t.name: t.shape for t in spec.tensors} | {m.name: m.shape for m in spec.memories}
    env = {
        name: torch.randn([SIZES[d] for d in shape], generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    evaluator = Evaluator(env, SIZES, spec.fns, rule.jacobians)
    for name, value in spec.lets:
        env[name] = evaluator(value)
    return evaluator


def _compare_with_autodiff(rule: UpdateRule) -> None:
    for seed in range(3):
        evaluator = _numbers(rule, seed)
        for p, derived in zip(rule.spec.passes, rule.passes, strict=True):
            memories = [evaluator.env[m.name].requires_grad_() for m in p.memories]
            expected = torch.autograd.grad(evaluator(p.bias), memories)
            with torch.no_grad():
                found = evaluator.gradients(derived)
            for m, exact in zip(p.memories, expected, strict=True):
                scale = 1.0 + float(exact.abs().max())
                torch.testing.assert_close(found[m.name], exact, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("layer", LAYERS)
def test_shipped_layers_against_autodiff(layer: str) -> None:
    _compare_with_autodiff(_layer(layer))


@pytest.mark.parametrize("bias", BIASES)
def test_biases_against_autodiff(bias: str) -> None:
    _compare_with_autodiff(_rule(BIASES[bias]))


# ---- losses without a gradient ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (_square("<sign(S @ k), v>"), "no derivative with respect to S", "sign is piecewise constant"),
        (_square("<S @ k, v> - <S @ k, v>"), "no derivative with respect to S", "S cancels out"),
        (
            _square("1/2 * |f(S @ k) - v|^2", more="fn f(x)[i] = sum(j, x[i] * x[j])"),
            "stands inside a sum over j",
            "its own index alone",
        ),
    ],
)
def test_underivable(text: str, message: str, hint: str) -> None:
    with pytest.raises(DeriveError) as caught:
        _rule(text)
    (problem,) = caught.value.diagnostics
    assert message in problem.message
    assert hint in problem.hint
    assert problem.span.line > 0
    assert "^" in str(caught.value)


def test_every_reason_is_reported_at_once() -> None:
    more = "fn f(x)[i] = sum(j, x[i] * x[j])"
    text = _square("1/2 * |f(S @ k) - v|^2 + <sign(R @ k), v>", "S[d_v, d_k], R[d_v, d_k]", more)
    with pytest.raises(DeriveError) as caught:
        _rule(text)
    assert len(caught.value.diagnostics) == 2


def test_a_memory_that_the_bias_never_meets() -> None:
    """`check` refuses this; a spec built by hand gets here."""
    spec = check(parse(_square("<S @ k, v>")), "")
    with pytest.raises(DeriveError, match="does not depend on memory R"):
        derive(replace(spec, passes=(replace(spec.passes[0], memories=(Memory("R", ("d_v", "d_k")),)),)))


def test_an_exponent_may_depend_on_the_memory() -> None:
    x = Ref("x", "memory", ())
    bias = Binary("pow", Num(2.0), x, ())
    assert gradient(bias, (Memory("x", ()),))["x"] == mul(bias, Map("log", Num(2.0), ()))
