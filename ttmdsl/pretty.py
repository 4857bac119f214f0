"""Spec expressions and scalar formulas as the field writes them, in Unicode text or in LaTeX.

Input: `Expr`, or a sympy formula in the symbols of functions.py. Output: a string. One traversal for both languages; a
`Style` says how each piece looks. Keeps products, outer products and Jacobians as they stand; simplifies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction

import sympy
from typing_extensions import assert_never

from ttmdsl.expr import (
    Apply,
    Binary,
    Columns,
    ColumnsJacT,
    Component,
    Const,
    Delay,
    Expr,
    Features,
    Inner,
    JacT,
    Map,
    MatVec,
    Mean,
    Norm,
    Num,
    Outer,
    Ref,
    Rows,
    RowsJacT,
    Shape,
    Size,
    Stop,
    Total,
    Transpose,
)
from ttmdsl.functions import X, Y, whole_name
from ttmdsl.notation import Style
from ttmdsl.simplify_expr import ONE, split


class Level(IntEnum):
    """How tightly a piece of output holds together: what may stand in a product, in a power."""

    SUM = 0
    QUOTIENT = 1  # also the elementwise product
    PRODUCT = 2
    ATOM = 3


Piece = tuple[str, Level]


@dataclass(frozen=True)
class Projection:
    """A vector function whose Jacobian at x is P(x) / sqrt(|x|^2 + damping): how P and the damping are written."""

    name: str
    damping: str = ""


@dataclass(frozen=True)
class Printer:
    """Prints in one style; `names` says how a memory or another name is to be shown here (a state at its time)."""

    style: Style
    names: Mapping[str, str] = field(default_factory=dict)
    projections: Mapping[str, Projection] = field(default_factory=dict)

    def expr(self, e: Expr, least: Level = Level.SUM) -> str:
        """The expression, in parentheses if it holds together less than `least`."""
        return self.wrap(self._piece(e), least)

    def wrap(self, piece: Piece, least: Level) -> str:
        return piece[0] if piece[1] >= least else self.style.parens(piece[0])

    def name(self, name: str, shape: Shape = ()) -> str:
        return self.names.get(name) or self.style.name(name, len(shape))

    def number(self, value: float) -> str:
        """A float as a short fraction where it is one."""
        fraction = Fraction(value).limit_denominator(64)
        if fraction.denominator == 1 or abs(float(fraction) - value) > 1e-12:
            return f"{value:g}"
        text = self.style.fraction(str(abs(fraction.numerator)), str(fraction.denominator))
        return text if fraction > 0 else f"-{text}"

    # ---- expressions ----------------------------------------------------------------------------------------

    def _piece(self, e: Expr) -> Piece:
        coefficient, rest = split(e)
        if coefficient != 1.0 and rest != ONE:
            return self._scaled(coefficient, rest)
        style = self.style
        match e:
            case Num(value=value, shape=shape):
                text = style.ones(self.number(value), shape)
                return text, Level.SUM if value < 0 else Level.ATOM
            case Const(name=name) | Ref(name=name):
                return self.name(name, e.shape), Level.ATOM
            case Size(dim=dim):
                return style.name(dim, 0), Level.ATOM
            case Map(fn=fn, x=x):
                return self._map(fn, x)
            case Binary():
                return self._binary(e)
            case MatVec(m=m, x=x):
                return f"{self.expr(m, Level.PRODUCT)} {self._factor(x)}", Level.PRODUCT
            case Transpose(m=m):
                return style.transpose(self.expr(m, Level.ATOM)), Level.ATOM
            case Inner(a=a, b=b):
                return style.inner(self.expr(a), self.expr(b)), Level.ATOM
            case Norm(x=x, p=p, power=power):
                return style.norm(self.expr(x), f"{p:g}", f"{power:g}"), Level.ATOM
            case Total(x=x):
                return style.call(style.function("sum"), self.expr(x)), Level.ATOM
            case Mean(x=x):
                return style.call(style.function("mean"), self.expr(x)), Level.ATOM
            case Delay(x=x, by=by):
                return style.at_time(self.expr(x, Level.ATOM), f"t-{by}"), Level.ATOM
            case Component(x=x, index=index):
                return style.subscript(self.expr(x, Level.ATOM), str(index)), Level.ATOM
            case Features(x=x, kind="power", order=order):
                return style.tensor_power(self.expr(x, Level.ATOM), str(order)), Level.ATOM
            case Features(x=x, order=order):
                return style.call(style.subscript(style.function("taylor"), str(order)), self.expr(x)), Level.ATOM
            case Stop(x=x):
                return style.call(style.function("stop"), self.expr(x)), Level.ATOM
            case Apply(fn=fn, x=m) | Columns(fn=fn, m=m):
                return style.call(style.name(fn, 0), self.expr(m)), Level.ATOM
            case Rows(fn=fn, m=m):
                turned = style.transpose(self.expr(m, Level.ATOM))
                return style.transpose(style.call(style.name(fn, 0), turned)), Level.ATOM
            case Outer(a=a, b=b):
                return f"{self.expr(a, Level.PRODUCT)} {style.transpose(self.expr(b, Level.ATOM))}", Level.PRODUCT
            case JacT(fn=fn, at=x, cot=cot) if fn in self.projections:
                above = f"{style.call(self.projections[fn].name, self.expr(x))} {self._factor(cot)}"
                return self.quotient((above, Level.PRODUCT), self.length(self.expr(x), self.projections[fn].damping))
            case JacT(fn=fn, at=m, cot=cot) | ColumnsJacT(fn=fn, m=m, cot=cot) | RowsJacT(fn=fn, m=m, cot=cot):
                jacobian = style.call(style.subscript("J", style.name(fn, 0)), self.expr(m))
                held = self.expr(cot, Level.ATOM if len(cot.shape) == 2 else Level.PRODUCT)
                return f"{style.transpose(jacobian)} {held}", Level.PRODUCT
            case _:
                assert_never(e)

    def length(self, x: str, damping: str) -> Piece:
        """|x|, or sqrt(|x|^2 + damping)."""
        if not damping:
            return self.style.norm(x, "2", "1"), Level.ATOM
        return self.style.root(f"{self.style.norm(x, '2', '2')} + {damping}"), Level.ATOM

    def _scaled(self, coefficient: float, rest: Expr) -> Piece:
        if abs(coefficient) == 1.0:
            body = self.expr(rest, Level.QUOTIENT)
        else:
            body = f"{self.number(abs(coefficient))} {self.expr(rest, Level.QUOTIENT)}"
        return (f"-{body}", Level.SUM) if coefficient < 0 else (body, min(Level.PRODUCT, self._piece(rest)[1]))

    def _factor(self, e: Expr) -> str:
        return self.expr(e, Level.PRODUCT)

    def _map(self, fn: str, x: Expr) -> Piece:
        if fn == "sqrt":
            return self.style.root(self.expr(x)), Level.ATOM
        return self.style.call(self.style.function(fn), self.expr(x)), Level.ATOM

    def _binary(self, e: Binary) -> Piece:
        a, b = e.a, e.b
        match e.op:
            case "add" | "sub":
                return self._sum(e), Level.SUM
            case "mul":
                return self._product(a, b)
            case "div":
                if isinstance(a, Num) and isinstance(b, Num) and b.value:
                    return self.number(a.value / b.value), Level.ATOM
                return self.quotient(self._piece(a), self._piece(b))
            case "pow":
                return self.style.power(self.expr(a, Level.ATOM), self.expr(b)), Level.ATOM
            case "max" | "min":
                return self.style.call(self.style.function(e.op), f"{self.expr(a)}, {self.expr(b)}"), Level.ATOM
            case _:
                assert_never(e.op)

    def _sum(self, e: Binary) -> str:
        first = self.expr(e.a)
        coefficient, rest = split(e.b)
        minus = (coefficient < 0) != (e.op == "sub")
        if coefficient < 0:
            positive = self._piece(rest) if coefficient == -1 else self._scaled(-coefficient, rest)
            second = self.wrap(positive, Level.QUOTIENT)
        else:
            second = self.expr(e.b, Level.QUOTIENT if minus else Level.SUM)
        return f"{first} - {second}" if minus else f"{first} + {second}"

    def _product(self, a: Expr, b: Expr) -> Piece:
        if len(a.shape) != len(b.shape) and 2 in (len(a.shape), len(b.shape)):
            matrix, other = (a, b) if len(a.shape) == 2 else (b, a)
            if other.shape:
                diagonal = self.style.call(self.style.function("diag"), self.expr(other))
                right = other.shape == matrix.shape[1:]
                held = self._factor(matrix)
                return (f"{held} {diagonal}" if right else f"{diagonal} {held}"), Level.PRODUCT
        if a.shape and b.shape:
            left = self.expr(a, Level.QUOTIENT if isinstance(a, Binary) and a.op == "mul" else Level.ATOM)
            return f"{left} {self.style.elementwise} {self.expr(b, Level.ATOM)}", Level.QUOTIENT
        first, second = (b, a) if a.shape and not b.shape else (a, b)
        text, level = self._piece(second)  # a (b / c) needs no parentheses for a scalar a
        if level == Level.SUM:
            text, level = self.style.parens(text), Level.ATOM
        return f"{self._factor(first)} {text}", min(level, Level.PRODUCT)

    def quotient(self, a: Piece, b: Piece) -> Piece:
        """a / b, as a built-up fraction where the style has one."""
        if self.style.built_up:
            return self.style.fraction(a[0], b[0]), Level.PRODUCT
        return f"{self.wrap(a, Level.PRODUCT)} / {self.wrap(b, Level.ATOM)}", Level.QUOTIENT

    # ---- scalar formulas ------------------------------------------------------------------------------------

    def formula(self, e: sympy.Expr, symbols: Mapping[sympy.Expr, str], least: Level = Level.SUM) -> str:
        """A sympy formula; `symbols` shows its symbols, and may show larger parts."""
        return self.wrap(self.formula_piece(e, symbols), least)

    def formula_piece(self, e: sympy.Expr, symbols: Mapping[sympy.Expr, str]) -> Piece:
        style = self.style
        if e in symbols:
            return symbols[e], Level.ATOM
        if e.is_Symbol:
            return style.name(e.name, 0), Level.ATOM
        if e.is_Rational and not e.is_Integer:
            text = style.fraction(str(abs(e.p)), str(e.q))
            return (text, Level.QUOTIENT) if e.p > 0 else (f"-{text}", Level.SUM)
        if e.is_Number:
            return str(e), Level.SUM if e.is_negative else Level.ATOM
        if e.is_Add:
            return self._formula_sum(e, symbols), Level.SUM
        if e.is_Mul or (e.is_Pow and e.exp.is_negative):
            return self._formula_product(e, symbols)
        if e.is_Pow:
            if e.exp == sympy.Rational(1, 2):
                return style.root(self.formula(e.base, symbols)), Level.ATOM
            return style.power(self.formula(e.base, symbols, Level.ATOM), self.formula(e.exp, symbols)), Level.ATOM
        name = whole_name(e) or {"Abs": "abs", "Max": "max", "Min": "min"}.get(e.func.__name__, e.func.__name__)
        return style.call(style.function(name), ", ".join(self.formula(a, symbols) for a in e.args)), Level.ATOM

    def _formula_sum(self, e: sympy.Expr, symbols: Mapping[sympy.Expr, str]) -> str:
        terms = sorted(e.as_ordered_terms(), key=lambda t: (t.could_extract_minus_sign(), not t.has(X, Y, *symbols)))
        text = ""
        for term in terms:
            negative = term.could_extract_minus_sign()
            body = self.formula(-term if negative else term, symbols, Level.QUOTIENT)
            if not text:
                text = f"-{body}" if negative else body
            else:
                text += f" - {body}" if negative else f" + {body}"
        return text

    def _formula_product(self, e: sympy.Expr, symbols: Mapping[sympy.Expr, str]) -> Piece:
        if e.could_extract_minus_sign():
            return f"-{self.formula(-e, symbols, Level.QUOTIENT)}", Level.SUM
        above, below = sympy.fraction(e)
        if below != 1:
            return self.quotient(self.formula_piece(above, symbols), self.formula_piece(below, symbols))
        factors = [self.formula(f, symbols, Level.PRODUCT) for f in sympy.Mul.make_args(above)]
        return " ".join(factors), Level.PRODUCT
