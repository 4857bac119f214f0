"""Recognise what a Jacobian is: a projection, a centering, a layer norm, a softmax.

Input: a vector function's value and Jacobian in symbolic formulas (as in rule.py, vector params being `Component`s).
Output: `Structure` and its one-line title. A guess read off the value is verified against the Jacobian, at random
points and with the aggregates as independent variables; without a verified guess the title is empty.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import mpmath  # type: ignore[import-untyped]
import sympy
from typing_extensions import assert_never

from ttmdsl.functions import N, X, Y, aggregate, expand, symbol

Kind = Literal["projection", "centering", "layer norm", "softmax", "diagonal"]
LowRank = tuple[tuple[sympy.Expr, sympy.Expr], ...]


class Component(sympy.Symbol):  # type: ignore[misc]
    """A vector param's component: like x, it varies along the vector."""


def varying(e: sympy.Expr) -> set[sympy.Symbol]:
    """The symbols of `e` that differ from component to component."""
    return {s for s in e.free_symbols if s in (X, Y) or isinstance(s, Component)}


def aggregates_in(e: sympy.Expr) -> set[sympy.Symbol]:
    """The aggregate symbols of `e`."""
    return {s for s in e.free_symbols if s.name[0] == "s" and s.name[1:].isdigit()}


@dataclass(frozen=True)
class Structure:
    """diag(outer) (1 / sqrt(gain)) P / sqrt(|g|^2 + damping) diag(slope), with P as `kind` says and g = `inner`.

    projection: P = I - g g^T / (|g|^2 + damping). layer norm: the same, less the mean, with g the centred values.
    centering: P = I - 1 1^T / n and no division. softmax: diag(y) - y y^T. diagonal: no P at all.
    """

    kind: Kind
    inner: sympy.Expr = X
    slope: sympy.Expr = sympy.S.One
    gain: sympy.Expr = sympy.S.One
    damping: sympy.Expr = sympy.S.Zero
    outer: sympy.Expr = sympy.S.One

    def title(self, arg: str) -> str:
        """The name of the structure, in the words a paper would use."""
        s, t = symbol(arg), symbol("t")

        def text(e: sympy.Expr) -> str:
            return str(e.subs({X: t}).subs({t: s}))

        inner, damped = text(self.inner), "damped " if self.damping != 0 else ""
        after = f", after diag({text(self.slope)})" if self.slope != 1 else ""
        then = f", then diag({text(self.outer)})" if self.outer != 1 else ""
        match self.kind:
            case "projection":
                length = f"|{inner}|" if self.damping == 0 else f"sqrt(|{inner}|^2 + {text(self.damping)})"
                size = sympy.Symbol("n", positive=True)
                factor = text(1 / sympy.sqrt(self.gain.subs(N, size)))
                by = f"divided by {length}" if factor == "1" else f"times {factor} / {length}"
                return f"{damped}projection onto the orthogonal complement of {inner}, {by}{after}{then}"
            case "layer norm":
                return (
                    f"layer norm: {damped}projection onto the orthogonal complement of 1 and of the centred {inner}, "
                    f"divided by the standard deviation{after}{then}"
                )
            case "centering":
                return f"centering: projection onto the orthogonal complement of 1{after}{then}"
            case "softmax":
                return "diag(y) - y y^T, the covariance of a draw from y"
            case "diagonal":
                return "diagonal"
            case _:
                assert_never(self.kind)


def recognise(
    aggregates: tuple[sympy.Expr, ...], value: sympy.Expr, diagonal: sympy.Expr, low_rank: LowRank
) -> Structure | None:
    """The structure of the Jacobian diagonal + low_rank of a function of that value."""
    if not low_rank:
        return Structure("diagonal", slope=diagonal)
    if diagonal == Y and low_rank == ((-Y, Y),):
        return Structure("softmax")
    outer, core = _affine(value)
    scale, g = core.as_independent(*varying(core), as_Add=False) if varying(core) else (core, sympy.Integer(1))
    guess = _guess(aggregates, g, scale, outer)
    if guess is None:
        return None
    return guess if _verify(guess, g, value, diagonal, low_rank) else None


def _affine(value: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """value = outer * core + a constant vector, outer being the product of the vector params in front."""
    terms = sympy.Add.make_args(value)
    moving = [t for t in terms if t.has(X) or aggregates_in(t)]
    shifts = [t for t in terms if t not in moving]
    if not shifts and len(moving) > 1:
        return sympy.Integer(1), value
    core = sympy.Add(*moving)
    factors = sympy.Mul.make_args(core)
    front = [f for f in factors if isinstance(f, Component)]
    outer = sympy.Mul(*front)
    return outer, core / outer


def _guess(aggregates: tuple[sympy.Expr, ...], g: sympy.Expr, scale: sympy.Expr, outer: sympy.Expr) -> Structure | None:
    inner, mean = _centred(aggregates, g)
    if any(isinstance(s, Component) for s in inner.free_symbols):
        return None
    slope = sympy.diff(inner, X)
    if scale == 1:
        return Structure("centering", inner, slope, outer=outer) if mean else None
    for r, summand in enumerate(aggregates):
        share = sympy.simplify(summand / g**2) if summand.has(X) else X
        square = sympy.simplify(scale**-2)
        slope_by_square = sympy.diff(square, aggregate(r)) * share
        if varying(share) or slope_by_square == 0 or aggregates_in(slope_by_square):
            continue
        damping = sympy.simplify(square / slope_by_square - aggregate(r) / share)
        if aggregates_in(damping):
            continue
        kind: Kind = "layer norm" if mean else "projection"
        return Structure(kind, inner, slope, slope_by_square, damping, outer)
    return None


def _centred(aggregates: tuple[sympy.Expr, ...], g: sympy.Expr) -> tuple[sympy.Expr, bool]:
    """(h, True) where g = h - mean(h), else (g, False)."""
    for r, summand in enumerate(aggregates):
        if sympy.expand(g - summand + aggregate(r) / N) == 0:
            return summand, True
    return g, False


def _verify(guess: Structure, g: sympy.Expr, value: sympy.Expr, diagonal: sympy.Expr, low_rank: LowRank) -> bool:
    """Whether the guess gives the same Jacobian, tried at random points."""
    other = {s: sympy.Dummy(s.name, real=True) for s in varying(value + g + diagonal) | {X}}

    def at_j(e: sympy.Expr) -> sympy.Expr:
        return e.subs(Y, value).subs(other)

    claimed_diagonal, claimed = _claim(guess, g, value, at_j)
    actual = sympy.Add(*(left.subs(Y, value) * at_j(right) for left, right in low_rank))
    return _equal(claimed_diagonal, diagonal.subs(Y, value)) and _equal(claimed, actual)


def _claim(
    guess: Structure, g: sympy.Expr, value: sympy.Expr, at_j: Callable[[sympy.Expr], sympy.Expr]
) -> tuple[sympy.Expr, sympy.Expr]:
    """What the structure says of the diagonal and of the rest."""
    mean = sympy.Integer(0) if guess.kind == "projection" else 1 / N
    if guess.kind == "centering":
        return guess.outer * guess.slope, -guess.outer * mean * at_j(guess.slope)
    _, core = _affine(value)
    scale = core.as_independent(*varying(core), as_Add=False)[0]
    square = scale**-2 / guess.gain  # |g|^2 + damping
    off = -(mean + g * at_j(g) / square)
    return guess.outer * scale * guess.slope, guess.outer * scale * off * at_j(guess.slope)


def random_point(symbols: Iterable[sympy.Symbol], seed: int = 0) -> dict[sympy.Symbol, sympy.Expr]:
    """A positive rational for each symbol, the same ones every time."""
    draw = random.Random(seed)
    return {s: sympy.Rational(draw.randrange(101, 999), 211) for s in sorted(symbols, key=str)}


def _equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    difference = expand(sympy.sympify(a - b))
    if difference == 0:
        return True
    symbols = sorted(difference.free_symbols, key=str)
    own = {"sigmoid": lambda z: 1 / (1 + mpmath.exp(-z)), "softplus": lambda z: mpmath.log(1 + mpmath.exp(z))}
    evaluate = sympy.lambdify(symbols, difference, modules=[own, "mpmath"])
    with mpmath.workdps(40):
        for seed in range(3):
            point = random_point(symbols, seed)
            values = [mpmath.mpf(point[s].p) / point[s].q for s in symbols]
            if abs(evaluate(*values)) > mpmath.mpf(10) ** -25:
                return False
    return True
