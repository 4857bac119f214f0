"""The scalar functions of the language, as sympy formulas.

Input: a function's name, with one prime for each derivative taken ("silu", "silu'", "gelu''"). Output: `ScalarFn`, its
formula in the symbol `X` with its printed names. Builds symbols from tables, never from text by `sympify`; knows
nothing of vectors (jacobian.py) or of code generation.

A formula holds only arithmetic (Add, Mul, Pow), Abs, sign, Max, Min, exp, log, tanh, erf and two functions of our own,
`sigmoid` and `softplus`: these are what a lowering has to print. While a formula is being derived, silu, gelu, relu
and tanh stay whole (`call`), so that results read like the papers; `expand` turns them into their formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import sympy
from sympy.core.function import ArgumentIndexError


def symbol(name: str) -> sympy.Symbol:
    """The real symbol of that name; the same name is always the same symbol."""
    return sympy.Symbol(name, real=True)


X = symbol("x")  # the argument's component
Y = symbol("y")  # the result's component
N = symbol("n")  # the length of the vector


def aggregate(r: int) -> sympy.Symbol:
    """The symbol of aggregate `r`, a sum over the vector's components."""
    return symbol(f"s{r}")


class sigmoid(sympy.Function):  # type: ignore[misc]
    """1 / (1 + exp(-x)); whole, because its derivative reads better in itself."""

    nargs = 1
    is_real = True

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        if argindex != 1:
            raise ArgumentIndexError(self, argindex)
        return self * (1 - self)

    @classmethod
    def eval(cls, arg: sympy.Expr) -> sympy.Expr | None:
        return sympy.Rational(1, 2) if arg.is_zero else None

    def _eval_rewrite_as_exp(self, arg: sympy.Expr, **kwargs: object) -> sympy.Expr:
        return 1 / (1 + sympy.exp(-arg))

    def _eval_evalf(self, prec: int) -> sympy.Expr:
        return self.rewrite(sympy.exp)._eval_evalf(prec)


class softplus(sympy.Function):  # type: ignore[misc]
    """log(1 + exp(x)); whole, because that formula overflows."""

    nargs = 1
    is_real = True

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        if argindex != 1:
            raise ArgumentIndexError(self, argindex)
        return sigmoid(self.args[0])

    @classmethod
    def eval(cls, arg: sympy.Expr) -> sympy.Expr | None:
        return sympy.log(2) if arg.is_zero else None

    def _eval_rewrite_as_exp(self, arg: sympy.Expr, **kwargs: object) -> sympy.Expr:
        return sympy.log(1 + sympy.exp(arg))

    def _eval_evalf(self, prec: int) -> sympy.Expr:
        return self.rewrite(sympy.exp)._eval_evalf(prec)


@dataclass(frozen=True)
class ScalarFn:
    """A function of one number. `at_zero` is its value at 0, infinite at a pole: what padding with zeros turns into."""

    name: str
    formula: sympy.Expr
    latex: str
    text: str
    at_zero: float


def _operator(name: str) -> str:
    return rf"\operatorname{{{name}}}"


_HALF = sympy.Rational(1, 2)

# name -> (formula, LaTeX, whole): whole functions stay applications of a named function until `expand`
_TABLE: dict[str, tuple[sympy.Expr, str, bool]] = {
    "exp": (sympy.exp(X), r"\exp", False),
    "log": (sympy.log(X), r"\log", False),
    "sqrt": (sympy.sqrt(X), _operator("sqrt"), False),
    "abs": (sympy.Abs(X), _operator("abs"), True),
    "sign": (sympy.sign(X), _operator("sign"), True),
    "sigmoid": (sigmoid(X), r"\sigma", False),
    "silu": (X * sigmoid(X), _operator("silu"), True),
    "tanh": (sympy.tanh(X), r"\tanh", True),
    "gelu": (X * (1 + sympy.erf(X / sympy.sqrt(2))) * _HALF, _operator("gelu"), True),
    "relu": (sympy.Max(X, 0), _operator("relu"), True),
    "softplus": (softplus(X), _operator("softplus"), False),
}

NAMES: tuple[str, ...] = tuple(_TABLE)


def _derivative(base: str, order: int) -> sympy.Expr:
    if order == 0:
        return _TABLE[base][0]
    if base in ("sign", "relu") and order > (base == "relu"):
        return sympy.Integer(0)
    if base == "relu":
        return sympy.Max(sympy.sign(X), 0)  # 0 at 0, as every framework has it
    if base == "abs":
        return sympy.sign(X) if order == 1 else sympy.Integer(0)
    return sympy.diff(_derivative(base, order - 1), X)


@cache
def scalar_fn(name: str) -> ScalarFn:
    """The function of that name; each prime at its end differentiates once. KeyError where there is none."""
    base = name.rstrip("'")
    _, latex, _ = _TABLE[base]
    primes = name[len(base) :]
    derived = _derivative(base, len(primes))
    return ScalarFn(name, derived, latex + primes, name, _at_zero(derived))


def formula(name: str) -> sympy.Expr:
    """The function's formula in `X`."""
    return scalar_fn(name).formula


def _at_zero(derived: sympy.Expr) -> float:
    value = derived.subs(X, 0)
    if derived == sympy.log(X):
        return -math.inf
    return float(value) if value.is_finite else math.inf


def is_scalar_fn(name: str) -> bool:
    """Whether `scalar_fn` knows the name."""
    return name.rstrip("'") in _TABLE


def is_piecewise_constant(name: str) -> bool:
    """Whether the derivative is zero wherever there is one, as for sign and relu'."""
    return bool(formula(name + "'") == 0)


@cache
def _whole(name: str) -> type[sympy.Function]:
    def fdiff(self: sympy.Function, argindex: int = 1) -> sympy.Expr:
        return call("sign" if name == "abs" else name + "'", self.args[0])

    return type(name, (sympy.Function,), {"fdiff": fdiff, "nargs": 1, "is_real": True, "whole": name})


def call(name: str, arg: sympy.Expr) -> sympy.Expr:
    """The function applied to `arg`, whole where that reads better."""
    own = formula(name)
    if _TABLE[name.rstrip("'")][2] and own.has(X):
        return _whole(name)(arg)
    return own.subs(X, arg)


def whole_name(expr: sympy.Expr) -> str | None:
    """The name of the function of which `expr` is a whole application, as `call` makes them, or None."""
    name: str | None = getattr(type(expr), "whole", None)
    return name


def expand(expr: sympy.Expr) -> sympy.Expr:
    """The expression with every whole function replaced by its formula."""
    is_whole: Callable[[sympy.Basic], bool] = lambda e: whole_name(e) is not None  # noqa: E731
    return expr.replace(is_whole, lambda e: formula(str(whole_name(e))).subs(X, e.args[0]))
