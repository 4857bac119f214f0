"""Optimizers that minimise: the closed form of their step, where the bias is quadratic in one prediction.

Input: the loss of a pass as one expression, and the pass. Output: what the step subtracts, as `PassRule` has it, or
diagnostics. The bias may read the memory through one vector alone, S @ x or S^T @ x; as a function of that
prediction z it must be quadratic component by component. Its slope is then a z + b, and sympy solves for the slope at
the solution. Takes gradients by derive.py's reverse mode, which is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from ttmdsl.errors import NOWHERE, Diagnostic, Span
from ttmdsl.expr import Binary, Expr, MatVec, Num, Ref, Shape, Stop, Transpose
from ttmdsl.jacobian import combine
from ttmdsl.simplify_expr import (
    ONE,
    add,
    constant,
    div,
    inner,
    matvec,
    mul,
    outer,
    power,
    transpose,
)
from ttmdsl.spec import Memory, Pass
from ttmdsl.state import inverse_name
from ttmdsl.walk_expr import rewrite, walk

Gradient: TypeAlias = Callable[[Expr, tuple[Memory, ...]], dict[str, Expr]]
Steps: TypeAlias = tuple[dict[str, Expr], tuple[Memory, ...]]

_SLOPE, _GIVES = sympy.Symbol("u"), sympy.Symbol("c")


@dataclass(frozen=True)
class Quadratic:
    """A bias whose slope in the prediction z = S @ x (S^T @ x where `transposed`) is `residual` = curvature * z + rest.

    Where the prediction itself gives way by c times its slope, the slope is residual / below(c).
    """

    x: Expr
    transposed: bool
    residual: Expr
    curvature: Expr
    below: Callable[[Expr], Expr]

    def matrix(self, left: Expr, right: Expr) -> Expr:
        """left right^T of the prediction's memory, left along the prediction and right along x."""
        return outer(right, left) if self.transposed else outer(left, right)


class NotQuadratic(Exception):
    """Holds the diagnostic."""

    def __init__(self, span: Span, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.diagnostic = Diagnostic(span, message, hint)


def argmin_steps(loss: Expr, p: Pass, gradient: Gradient) -> Steps | Diagnostic:
    """What the solved step subtracts from each memory, and what it carries along; or why there is no such step."""
    if len(p.memories) > 1:
        names = " and ".join(m.name for m in p.memories)
        return Diagnostic(p.optimizer.span, f"{p.optimizer.kind} solves for one memory, and the pass has {names}")
    (memory,) = p.memories
    try:
        found = quadratic(loss, memory, p, gradient)
        if p.optimizer.kind == "implicit":
            return {memory.name: implicit_step(found, memory, p.optimizer.rate)}, ()
        return least_squares_steps(found, memory, p)
    except NotQuadratic as problem:
        return problem.diagnostic


def quadratic(loss: Expr, memory: Memory, p: Pass, gradient: Gradient) -> Quadratic:
    """The loss as a quadratic function of its one prediction."""
    reads = [n for n in walk(loss) if isinstance(n, MatVec) and _is_memory(n.m, memory.name) and not _uses(n.x, memory)]
    others = f"{p.optimizer.kind} wants a bias that reads {memory.name} through one vector, as in `{memory.name} @ x`"
    if len(set(reads)) != 1:
        spans = [n.span for n in reads[1:] if n.span != NOWHERE]
        raise NotQuadratic(spans[0] if spans else p.bias.span, others, f"this one has {len(set(reads))} such reads")
    read = reads[0]
    z = Memory("the prediction", read.shape)
    at = Ref(z.name, "memory", z.shape)
    replaced = rewrite(loss, lambda n: at if n == read else None)
    if _uses(replaced, memory):
        raise NotQuadratic(p.bias.span, others, f"here {memory.name} stands elsewhere, too")
    stop = next((n for n in walk(loss) if isinstance(n, Stop)), None)
    if stop is not None:
        raise NotQuadratic(stop.span, f"{p.optimizer.kind} has no gradient point at which stop(...) could be taken")
    slope = gradient(replaced, (z,))[z.name]
    table = _Table(at)
    formula = table.formula(slope)
    curvature = None if formula is None else sympy.diff(formula, table.z)
    if formula is None or curvature is None or curvature.has(table.z):
        message = f"{p.optimizer.kind} needs a bias that is quadratic in each component of its prediction"
        raise NotQuadratic(p.bias.span, message, "such as 1/2 * |S @ k - v|^2; gd and momentum take any bias")
    (solution,) = sympy.solve(sympy.Eq(_SLOPE, formula.subs(table.z, table.z - _GIVES * _SLOPE)), _SLOPE)
    factor = sympy.cancel(formula / solution)
    return Quadratic(
        read.x,
        isinstance(read.m, Transpose),
        rewrite(slope, lambda n: read if n == at else None),
        table.expression(curvature),
        lambda gives: table.expression(factor, gives),
    )


def implicit_step(q: Quadratic, memory: Memory, rate: Expr) -> Expr:
    """The bias's gradient at argmin 1/2 |P - S|^2 + rate * bias(P), from its slope at S."""
    square = mul(q.x, q.x) if len(rate.shape) else inner(q.x, q.x)
    weight: Expr  # how much a unit of slope moves the prediction
    if rate.shape == memory.shape:
        weight = matvec(transpose(rate) if q.transposed else rate, square)
    elif rate.shape == q.x.shape:
        weight = inner(mul(rate, q.x), q.x)
    else:
        weight = mul(rate, inner(q.x, q.x))
    return q.matrix(div(q.residual, q.below(weight)), q.x)


def least_squares_steps(q: Quadratic, memory: Memory, p: Pass) -> Steps:
    """Sherman-Morrison on the inverse C of the sum of curvature x x^T: steps of the memory and of C."""
    if q.curvature.shape:
        message = "least_squares needs one curvature for all components of the prediction"
        raise NotQuadratic(p.bias.span, message, "weigh the tokens by scalars, the components alike")
    (dim,) = q.x.shape
    shape: Shape = (dim, dim)
    inverse = Memory(inverse_name(memory.name), shape)
    c = Ref(inverse.name, "memory", shape)
    # C is symmetric but for rounding; with C x in both places float32 diverges within a few thousand tokens
    gain, left = matvec(transpose(c), q.x), matvec(c, q.x)
    below = q.below(inner(q.x, left))
    steps = {
        memory.name: q.matrix(q.residual, div(gain, below)),
        inverse.name: outer(mul(q.curvature, left), div(gain, below)),
    }
    return steps, (inverse,)


def _is_memory(m: Expr, name: str) -> bool:
    m = m.m if isinstance(m, Transpose) else m
    return isinstance(m, Ref) and m.kind == "memory" and m.name == name


def _uses(e: Expr, memory: Memory) -> bool:
    return any(isinstance(n, Ref) and n.kind == "memory" and n.name == memory.name for n in walk(e))


class _Table:
    """Spec expressions as sympy formulas of one component, and back: what is free of z is a symbol."""

    def __init__(self, z: Ref) -> None:
        self.at, self.z = z, sympy.Symbol("z")
        self._symbols: dict[Expr, sympy.Symbol] = {}

    def formula(self, e: Expr) -> sympy.Expr | None:
        """The formula of a component of `e`; None where components of z meet, or a function bends them."""
        if e == self.at:
            return self.z
        if isinstance(e, Num):
            return sympy.nsimplify(e.value, rational=True)
        if self.at not in walk(e):
            number = constant(e)
            return self._symbol(e) if number is None else sympy.nsimplify(number, rational=True)
        if not isinstance(e, Binary):
            return None
        a, b = self.formula(e.a), self.formula(e.b)
        if a is None or b is None:
            return None
        return combine(e.op, a, b) if e.op in ("add", "sub", "mul", "div") else None

    def _symbol(self, e: Expr) -> sympy.Symbol:
        return self._symbols.setdefault(e, sympy.Symbol(f"n{len(self._symbols)}"))

    def expression(self, f: sympy.Expr, gives: Expr = ONE) -> Expr:
        """The formula as a spec expression; it is free of z, and holds `gives` as c."""
        if f == _GIVES:
            return gives
        for e, symbol in self._symbols.items():
            if f == symbol:
                return e
        if f.is_Number:
            return Num(float(f))
        if f.is_Pow:
            exponent = int(f.exp)
            base = power(self.expression(f.base, gives), float(abs(exponent)))
            return base if exponent > 0 else div(ONE, base)
        parts = [self.expression(a, gives) for a in f.args]
        result = parts[0]
        for part in parts[1:]:
            result = add(result, part) if f.is_Add else mul(result, part)
        return result
