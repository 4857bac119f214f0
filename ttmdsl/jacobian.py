"""The Jacobian of a vector function from its component formula, as a diagonal plus a low-rank matrix.

Input: a `VectorFn` and the constants in force. Output: `Jacobian` (rule.py) in expanded scalar formulas, or
`symbolic_jacobian`, the same with silu, gelu, relu and the constants by name, which is what people read. Index
calculus: every sum is an aggregate symbol, scalar formulas are differentiated by sympy, aggregates by the chain rule.
Titles come from structure.py. Does not evaluate anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import sympy
from typing_extensions import assert_never

from ttmdsl.errors import DeriveError, Diagnostic, Span
from ttmdsl.expr import BinaryOp, CBinary, CConst, CElem, CMap, CMean, CNum, Comp, CRef, CSize, CSum, VectorFn
from ttmdsl.functions import N, X, Y, aggregate, call, expand, is_scalar_fn, symbol
from ttmdsl.low_rank import by_result, in_result, least_rank, ratio, tidy
from ttmdsl.rule import Jacobian
from ttmdsl.structure import Component, Structure, recognise, varying

SOFTMAX = "softmax"


class _Unsupported(Exception):
    def __init__(self, span: Span, message: str, hint: str) -> None:
        self.diagnostic = Diagnostic(span, message, hint)
        super().__init__(message)


def jacobian(
    fn: VectorFn, consts: Mapping[str, float] | None = None, source: str = "", filename: str = "<spec>"
) -> Jacobian:
    """Value and Jacobian with every function expanded and every constant by its value."""
    named, _ = symbolic_jacobian(fn, source, filename)
    in_force = consts or {}
    values = {_small(c.value): number(c.value) for c in _constants(fn.body) if isinstance(c, CNum)}
    values |= {
        const_symbol(c.name): number(in_force.get(c.name, c.value))
        for c in _constants(fn.body)
        if isinstance(c, CConst)
    }

    def concrete(e: sympy.Expr) -> sympy.Expr:
        return expand(e.subs(values))

    return Jacobian(
        fn=fn.name,
        aggregates=tuple(concrete(a) for a in named.aggregates),
        value=concrete(named.value),
        diagonal=concrete(named.diagonal),
        low_rank=tuple((concrete(left), concrete(right)) for left, right in named.low_rank),
        title=named.title,
    )


def softmax_jacobian() -> Jacobian:
    """The built-in softmax; its value is written without the shift by the maximum that evaluation needs."""
    value = sympy.exp(X) / aggregate(0)
    return Jacobian(SOFTMAX, (sympy.exp(X),), value, Y, ((-Y, Y),), Structure("softmax").title("x"))


@lru_cache(maxsize=256)
def symbolic_jacobian(fn: VectorFn, source: str = "", filename: str = "<spec>") -> tuple[Jacobian, Structure | None]:
    """Value and Jacobian with whole functions and named constants, and the structure where one is recognised."""
    reader = _Reader(fn)
    try:
        value = sympy.sympify(reader.read(fn.body, fn.index))
    except _Unsupported as refused:
        raise DeriveError((refused.diagnostic,), source, filename) from None
    if value.has(sympy.zoo, sympy.nan, sympy.oo):
        problem = Diagnostic(
            fn.span, f"{fn.name} is infinite or undefined for every argument", "look for a division by 0"
        )
        raise DeriveError((problem,), source, filename)
    aggregates = reader.aggregates
    slopes = _aggregate_slopes(aggregates)
    pairs = [(slope(value, aggregate(r)), chained) for r, chained in enumerate(slopes)]
    low_rank = in_result(least_rank(pairs), value)
    diagonal = by_result(slope(value, X), value)
    kept, (value, diagonal, *flat) = _prune(aggregates, [value, diagonal, *(e for pair in low_rank for e in pair)])
    low_rank = list(zip(flat[::2], flat[1::2], strict=True))
    if diagonal == 0 and not low_rank:
        problem = Diagnostic(fn.span, f"{fn.name} does not depend on its argument", f"use {fn.arg}[{fn.index}] in it")
        raise DeriveError((problem,), source, filename)
    found = recognise(kept, value, diagonal, tuple(low_rank))

    def plain(e: sympy.Expr) -> sympy.Expr:
        return e.subs({s: symbol(s.name) for s in e.free_symbols if isinstance(s, Component)})

    shown = tuple((plain(left), plain(right)) for left, right in low_rank)
    title = found.title(fn.arg) if found else ""
    return Jacobian(fn.name, tuple(map(plain, kept)), plain(value), plain(diagonal), shown, title), found


def number(value: float) -> sympy.Expr:
    """The exact rational that the decimal notation of a float means."""
    return sympy.Rational(repr(value)) if value == value and abs(value) != float("inf") else sympy.Float(value)


def const_symbol(name: str) -> sympy.Symbol:
    """The symbol of a named constant, which is none of the derivation's own."""
    return symbol(name + "_" if _is_reserved(name) else name)


def _is_reserved(name: str) -> bool:
    return name in ("x", "y", "n") or (name[0] == "s" and name[1:].isdigit())


def _small(value: float) -> sympy.Symbol:
    """A small number such as 1e-5 under its own name, lest simplification multiply by 100000."""
    return symbol(f"{value:g}".replace("e-0", "e-"))


def _constants(c: Comp) -> list[CConst | CNum]:
    match c:
        case CConst() | CNum():
            return [c]
        case CMap(x=body) | CSum(body=body) | CMean(body=body):
            return _constants(body)
        case CBinary(a=a, b=b):
            return _constants(a) + _constants(b)
        case CSize() | CElem() | CRef():
            return []
        case _:
            assert_never(c)


# ---- component formula to sympy -----------------------------------------------------------------------------


@dataclass
class _Reader:
    """Turns a component formula into a formula in x and the aggregates, which it collects."""

    fn: VectorFn
    aggregates: list[sympy.Expr] = field(default_factory=list)

    def read(self, c: Comp, index: str) -> sympy.Expr:
        match c:
            case CNum(value=value):
                return number(value) if abs(value) >= 0.01 or value == 0 else _small(value)
            case CConst(name=name):
                return const_symbol(name)
            case CSize():
                return N
            case CElem(index=own):
                self._same_index(own, index, c.span, f"{self.fn.arg}[{own}]")
                return X
            case CRef(name=name, index=own):
                if _is_reserved(name):
                    raise _Unsupported(c.span, f"the name {name} is used by the derivation itself", "rename the param")
                if not own:
                    return symbol(name)
                self._same_index(own, index, c.span, f"{name}[{own}]")
                return Component(name, real=True)
            case CMap(fn=fn, x=x):
                if not is_scalar_fn(fn):
                    raise _Unsupported(c.span, f"{fn} is no scalar function", "write it out in the formula")
                return call(fn, self.read(x, index))
            case CBinary(op=op, a=a, b=b):
                return combine(op, self.read(a, index), self.read(b, index))
            case CSum(index=own, body=body):
                return self._sum(self.read(body, own))
            case CMean(index=own, body=body):
                return self._sum(self.read(body, own)) / N
            case _:
                assert_never(c)

    def _same_index(self, used: str, current: str, span: Span, what: str) -> None:
        if used != current:
            raise _Unsupported(
                span,
                f"{what} stands inside a sum over {current}: a double sum has no diagonal plus low-rank Jacobian",
                f"let every sum's body depend on its own index alone; split a product so that {what} is outside",
            )

    def _sum(self, summand: sympy.Expr) -> sympy.Expr:
        return _sum_over(summand, self.aggregates, grow=True)


def combine(op: BinaryOp, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """A binary operation on formulas."""
    match op:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "div":
            return a / b
        case "pow":
            return a**b
        case "max":
            return sympy.Max(a, b)
        case "min":
            return sympy.Min(a, b)
        case _:
            assert_never(op)


def slope(e: sympy.Expr, by: sympy.Symbol) -> sympy.Expr:
    """The derivative; at a tie of max or min the mean of both sides, as autodiff has it."""
    result = sympy.powsimp(sympy.diff(e, by), combine="exp")
    result = result.replace(sympy.Heaviside, lambda z, *at_zero: (1 + sympy.sign(z)) / 2)
    return result.replace(sympy.DiracDelta, lambda *_: sympy.Integer(0))


def _sum_over(summand: sympy.Expr, aggregates: list[sympy.Expr], grow: bool) -> sympy.Expr:
    """sum_j summand(x_j) in terms of the aggregates so far; what is missing becomes a new one."""
    summand = sympy.sympify(summand)
    if not varying(summand):
        return summand * N
    for r, known in enumerate(aggregates):
        share = ratio(summand, known)
        if share is not None:
            return share * aggregate(r)
    if not grow:
        terms = sympy.Add.make_args(sympy.expand(summand))
        if len(terms) > 1:
            by_part: dict[sympy.Expr, sympy.Expr] = {}
            for term in terms:
                coefficient, part = term.as_independent(*varying(term), as_Add=False)
                by_part[part] = by_part.get(part, 0) + coefficient
            return sympy.Add(*(c * _sum_over(part, aggregates, grow=False) for part, c in by_part.items()))
    aggregates.append(summand)
    return aggregate(len(aggregates) - 1)


# ---- chain rule ---------------------------------------------------------------------------------------------


def _aggregate_slopes(aggregates: list[sympy.Expr]) -> list[sympy.Expr]:
    """d s_r / d x_j for every aggregate, through the aggregates that it is built from.

    The sums that the chain rule needs may be new aggregates: they are appended to the list.
    """
    slopes: list[sympy.Expr] = []
    for r in range(len(aggregates)):
        chained = slope(aggregates[r], X)
        for q in range(r):
            inner = slope(aggregates[r], aggregate(q))
            if inner != 0:
                chained += tidy(_sum_over(inner, aggregates, grow=False)) * slopes[q]
        slopes.append(chained)
    return slopes


def _prune(aggregates: list[sympy.Expr], formulas: list[sympy.Expr]) -> tuple[tuple[sympy.Expr, ...], list[sympy.Expr]]:
    """Drop the aggregates that nothing needs, and number the others anew."""
    needed: set[int] = set()
    for r in reversed(range(len(aggregates))):
        users = [*formulas, *(aggregates[u] for u in needed)]
        if any(f.has(aggregate(r)) for f in users):
            needed.add(r)
    order = sorted(needed)
    renumbered = {aggregate(old): aggregate(new) for new, old in enumerate(order)}
    renumber: Callable[[sympy.Expr], sympy.Expr] = lambda e: e.subs(renumbered, simultaneous=True)  # noqa: E731
    return tuple(renumber(aggregates[r]) for r in order), [renumber(f) for f in formulas]
