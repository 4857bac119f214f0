"""Scalar functions: formulas against torch, derivatives against autograd, and what lowerings may rely on."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from evaluate import TORCH_MAPS, torch_formula

from ttmdsl import functions
from ttmdsl.functions import X, call, expand, formula, is_piecewise_constant, is_scalar_fn, scalar_fn, softplus

POINTS = torch.linspace(-3.1, 2.9, 25, dtype=torch.float64)
PRIMITIVES = {"Abs", "sign", "Max", "Min", "exp", "log", "tanh", "erf", "sigmoid", "softplus"}


def _points(name: str) -> torch.Tensor:
    return POINTS.abs() + 0.1 if name in ("log", "sqrt") else POINTS


@pytest.mark.parametrize("name", functions.NAMES)
def test_formula_is_the_torch_function(name: str) -> None:
    x = _points(name)
    torch.testing.assert_close(torch_formula(formula(name), {"x": x}), TORCH_MAPS[name](x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", functions.NAMES)
def test_primes_differentiate(name: str) -> None:
    x = _points(name).requires_grad_()
    value = TORCH_MAPS[name](x)
    for primes in ("'", "''"):
        derivative = torch_formula(formula(name + primes), {"x": x.detach()}) * torch.ones_like(x)
        if value.requires_grad:
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True, allow_unused=True)
        else:
            value = torch.zeros_like(x)
        torch.testing.assert_close(derivative, value.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n + p for n in functions.NAMES for p in ("", "'", "''")])
def test_formulas_hold_primitives_alone(name: str) -> None:
    found = {type(f).__name__ for f in formula(name).atoms(sympy.Function)}
    assert found <= PRIMITIVES
    assert not formula(name).has(sympy.Derivative, sympy.Heaviside, sympy.DiracDelta)


@pytest.mark.parametrize(
    ("name", "value"),
    [("exp", 1.0), ("log", -math.inf), ("sqrt", 0.0), ("sqrt'", math.inf), ("sigmoid", 0.5), ("silu'", 0.5),
     ("gelu", 0.0), ("gelu'", 0.5), ("relu'", 0.0), ("softplus", math.log(2)), ("sign", 0.0), ("tanh'", 1.0)],
)  # fmt: skip
def test_value_at_zero(name: str, value: float) -> None:
    assert scalar_fn(name).at_zero == pytest.approx(value)


def test_whole_functions_stay_whole_until_expanded() -> None:
    s = functions.symbol("s")
    whole = call("silu", s)
    assert str(whole.diff(s)) == "silu'(s)"
    assert str(whole.diff(s, 2)) == "silu''(s)"
    assert sympy.simplify(expand(whole.diff(s)) - sympy.diff(s * functions.sigmoid(s), s)) == 0
    assert expand(call("gelu", s)).has(sympy.erf)


def test_relu_and_sign_flatten() -> None:
    assert is_piecewise_constant("sign")
    assert is_piecewise_constant("relu'")
    assert not is_piecewise_constant("relu")
    assert formula("relu''") == 0


def test_own_functions_evaluate() -> None:
    assert float(functions.sigmoid(sympy.Integer(2)).evalf()) == pytest.approx(1 / (1 + math.exp(-2)))
    assert float(softplus(sympy.Integer(2)).evalf()) == pytest.approx(math.log(1 + math.exp(2)))
    assert softplus(X).diff(X) == functions.sigmoid(X)


def test_unknown_names() -> None:
    assert not is_scalar_fn("sin")
    assert is_scalar_fn("silu''")
    with pytest.raises(KeyError):
        scalar_fn("sin")


def test_names_in_print() -> None:
    assert scalar_fn("silu'").latex == r"\operatorname{silu}'"
    assert scalar_fn("sigmoid").latex == r"\sigma"
    assert scalar_fn("gelu'").text == "gelu'"
