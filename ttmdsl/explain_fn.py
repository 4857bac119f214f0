"""A vector function and its Jacobian, as equations.

Input: a checked layer's vector functions (or the built-in softmax) and a `Printer`. Output: `Line`s, and, where the
Jacobian is a plain projection, how to write it. Does not derive: jacobian.py and structure.py do.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from typing_extensions import assert_never

from ttmdsl.functions import N, X, Y, aggregate
from ttmdsl.jacobian import SOFTMAX, softmax_jacobian, symbolic_jacobian
from ttmdsl.pretty import Level, Printer, Projection
from ttmdsl.rule import Jacobian
from ttmdsl.spec import LayerSpec
from ttmdsl.structure import Structure, aggregates_in


@dataclass(frozen=True)
class Line:
    """One equation, and a remark on it."""

    left: str
    right: str
    note: str = ""
    relation: str = "="


@dataclass(frozen=True)
class FnPage:
    """One function's equations; `projection` where its Jacobian is P(x) / |x|, plain or damped."""

    lines: tuple[Line, ...]
    projection: Projection | None = None


def function_pages(spec: LayerSpec, names: tuple[str, ...], printer: Printer) -> dict[str, FnPage]:
    """The equations of every named function; projections that differ get different letters."""
    derived: dict[str, tuple[Jacobian, Structure | None]] = {}
    for name in names:
        if name in spec.fns:
            derived[name] = symbolic_jacobian(spec.fns[name], spec.source, spec.filename)
        else:
            derived[name] = softmax_jacobian(), Structure("softmax")
    dampings = {s.damping for _, s in derived.values() if s and s.kind == "projection"}
    pages = {}
    for name, (jacobian, structure) in derived.items():
        arg = spec.fns[name].arg if name != SOFTMAX or name in spec.fns else "x"
        letter = "P" if len(dampings) < 2 else printer.style.subscript("P", printer.style.name(name, 0))
        pages[name] = _Page(printer, jacobian, structure, arg, letter, spec).page()
    return pages


@dataclass(frozen=True)
class _Page:
    printer: Printer
    jacobian: Jacobian
    structure: Structure | None
    arg: str
    letter: str
    spec: LayerSpec

    def page(self) -> FnPage:
        style = self.printer.style
        symbols = self._symbols("i") | self._moments()
        value = self.printer.formula(self.jacobian.value, symbols)
        own, argument = style.name(self.jacobian.fn, 0), style.name(self.arg, 1)
        lines = [Line(style.subscript(style.call(own, argument), "i"), value)]
        for r, summand in enumerate(self.jacobian.aggregates):
            if not self._is_square(summand) and not self._moments():
                body = self.printer.formula(summand, self._symbols("j"), Level.PRODUCT)
                lines.append(Line(style.name(f"s{r}", 0), style.sum_over("j", body)))
        s = self.structure
        left = style.call(style.subscript("J", own), argument)
        if s is None:
            return FnPage((*lines, self._general()))
        title = self.jacobian.title
        match s.kind:
            case "projection":
                return self._projection(s, left, lines)
            case "layer norm":
                return FnPage((*lines, *self._layer_norm(s, left)))
            case "centering":
                body = f"{style.parens(f'I - {self._ones_ones()}')}{self._after(s)}"
                return FnPage((*lines, Line(left, self._then(s) + body, title)))
            case "softmax":
                result = style.name("y", 1)
                diagonal = style.call(style.function("diag"), result)
                right = f"{diagonal} - {result} {style.transpose(result)}"
                return FnPage(
                    (
                        *lines,
                        Line(left, right, "the covariance of a draw from y"),
                        Line(result, style.call(own, argument)),
                    )
                )
            case "diagonal":
                inside = self.printer.formula(s.slope, self._symbols(""))
                return FnPage((*lines, Line(left, style.call(style.function("diag"), inside))))
            case _:
                assert_never(s.kind)

    def _symbols(self, index: str) -> dict[sympy.Expr, str]:
        """How the symbols of a formula are written for component `index`; without an index, for the whole vector."""
        style, p = self.printer.style, self.printer

        def at(name: str) -> str:
            vector = style.name(name, 1)
            return style.subscript(vector, index) if index else vector

        found: dict[sympy.Expr, str] = {X: at(self.arg), N: "n"}
        own = style.call(style.name(self.jacobian.fn, 0), style.name(self.arg, 1))
        found[Y] = style.subscript(own, index) if index else own
        for t in self.spec.tensors:
            if t.kind == "param" and t.shape:
                found[sympy.Symbol(t.name, real=True)] = at(t.name)
        for r, summand in enumerate(self.jacobian.aggregates):
            if self._is_square(summand):
                inside = p.formula(summand.base, {X: self._argument()})
                found[aggregate(r)] = style.norm(inside, "2", "2")
                found[sympy.sqrt(aggregate(r))] = style.norm(inside, "2", "1")
        return found

    def _moments(self) -> dict[sympy.Expr, str]:
        """The centred values and the deviation, where the structure has them, under their usual letters."""
        s, style = self.structure, self.printer.style
        if s is None or s.kind not in ("layer norm", "centering"):
            return {}
        mean = next(aggregate(r) for r, summand in enumerate(self.jacobian.aggregates) if summand == s.inner) / N
        if s.kind == "centering":
            inner = self.printer.formula(s.inner, {X: self._argument()})
            return {mean: style.call(style.function("mean"), inner)}
        found = {s.inner - mean: style.subscript(style.name("c", 1), "i")}
        for root in self.jacobian.value.atoms(sympy.Pow):
            if abs(root.exp) == sympy.Rational(1, 2) and aggregates_in(root.base):
                found[sympy.sqrt(root.base)] = style.name("sigma", 0)
        return found

    def _argument(self) -> str:
        return self.printer.style.name(self.arg, 1)

    @staticmethod
    def _is_square(summand: sympy.Expr) -> bool:
        """Whether the sum is a squared length |g(x)|^2 that needs no other aggregate."""
        return bool(summand.is_Pow and summand.exp == 2 and summand.free_symbols == {X})

    def _projection(self, s: Structure, left: str, lines: list[Line]) -> FnPage:
        style, p = self.printer.style, self.printer
        inner = p.formula(s.inner, {X: self._argument()})
        damping = p.formula(s.damping, {}) if s.damping != 0 else ""
        size = sympy.Symbol("n", positive=True)
        factor = sympy.sqrt(1 / s.gain.subs(N, size))
        front = "" if factor == 1 else f"{p.formula(factor, {size: 'n'}, Level.PRODUCT)} "
        above = f"{self._then(s)}{front}{style.call(self.letter, inner)}{self._after(s)}"
        text, _ = p.quotient((above, Level.PRODUCT), p.length(inner, damping))
        held = inner if s.inner == X else style.name("z", 1)
        square = style.norm(held, "2", "2")
        below = (square, Level.ATOM) if not damping else (f"{square} + {damping}", Level.SUM)
        outer, _ = p.quotient((f"{held} {style.transpose(held)}", Level.PRODUCT), below)
        defined = Line(style.call(self.letter, held), f"I - {outer}")
        plain = s.inner == X and s.outer == 1 and s.gain == 1
        lines = [*lines, Line(left, text, self.jacobian.title), defined]
        return FnPage(tuple(lines), Projection(self.letter, damping) if plain else None)

    def _layer_norm(self, s: Structure, left: str) -> list[Line]:
        style, p = self.printer.style, self.printer
        centred, deviation = style.name("c", 1), style.name("sigma", 0)
        inner = p.formula(s.inner, {X: self._argument()})
        square = style.power(deviation, "2")
        outer, _ = p.quotient((f"{centred} {style.transpose(centred)}", Level.PRODUCT), (f"n {square}", Level.PRODUCT))
        body = f"{self._then(s)}{style.parens(f'I - {self._ones_ones()} - {outer}')}{self._after(s)}"
        text, _ = p.quotient((body, Level.PRODUCT), (deviation, Level.ATOM))
        mean = style.call(style.function("mean"), inner)
        variance, _ = p.quotient((style.norm(centred, "2", "2"), Level.ATOM), ("n", Level.ATOM))
        eps = sympy.simplify(s.damping * s.gain)
        shift = f" + {p.formula(eps, {})}" if eps != 0 else ""
        return [
            Line(left, text, self.jacobian.title),
            Line(centred, f"{inner} - {mean}"),
            Line(deviation, style.root(f"{variance}{shift}")),
        ]

    def _ones_ones(self) -> str:
        style = self.printer.style
        one = style.name("1", 1)
        return self.printer.quotient((f"{one} {style.transpose(one)}", Level.PRODUCT), ("n", Level.ATOM))[0]

    def _after(self, s: Structure) -> str:
        style = self.printer.style
        if s.slope == 1:
            return ""
        slope = self.printer.formula(s.slope, {X: self._argument()})
        return f" {style.call(style.function('diag'), slope)}"

    def _then(self, s: Structure) -> str:
        style = self.printer.style
        if s.outer == 1:
            return ""
        return f"{style.call(style.function('diag'), self.printer.formula(s.outer, self._symbols('')))} "

    def _general(self) -> Line:
        """The Jacobian by its components."""
        style, p = self.printer.style, self.printer
        at_i, at_j = self._symbols("i"), self._symbols("j")
        delta = style.subscript(style.name("delta", 0), "ij")
        terms = []
        if self.jacobian.diagonal != 0:
            terms.append(f"{delta} {p.formula(self.jacobian.diagonal, at_i, Level.PRODUCT)}")
        for left, right in self.jacobian.low_rank:
            negative = left.could_extract_minus_sign()
            body = p.formula(-left if negative else left, at_i, Level.PRODUCT)
            other = "" if right == 1 else f" {p.formula(right, at_j, Level.PRODUCT)}"
            sign = ("- " if negative else "+ ") if terms else ("-" if negative else "")
            terms.append(f"{sign}{body}{other}")
        component = style.subscript(style.name(self.jacobian.fn, 0), "i")
        variable = style.subscript(self._argument(), "j")
        above, below = (f"{style.partial}{' ' * style.built_up}{v}" for v in (component, variable))
        left_side = style.fraction(above, below)
        return Line(left_side, " ".join(terms), self.jacobian.title)
