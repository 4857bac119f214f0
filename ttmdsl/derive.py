"""Derive the closed-form gradient of every pass's bias with respect to its memories.

Input: a checked `LayerSpec`. Output: `UpdateRule`, with factored gradients, named intermediates, and the Jacobian of
every vector function that the layer applies. Reverse mode on whole vectors and matrices, by the rules of matrix
calculus; sympy is only asked about scalar functions and components (functions.py, jacobian.py). Does not classify the
recurrence, and does not know how anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import assert_never

from ttmdsl.derive_argmin import argmin_steps
from ttmdsl.errors import NOWHERE, DeriveError, Diagnostic, Span
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
    Size,
    Stop,
    Total,
    Transpose,
)
from ttmdsl.functions import is_piecewise_constant
from ttmdsl.jacobian import SOFTMAX, jacobian, softmax_jacobian
from ttmdsl.name_definitions import name_definitions
from ttmdsl.rule import Jacobian, PassRule, UpdateRule
from ttmdsl.simplify_expr import (
    ONE,
    ZERO,
    add,
    columns_jact,
    constant,
    div,
    elementwise,
    full,
    is_zero,
    jact,
    map_,
    matvec,
    mul,
    neg,
    outer,
    power,
    rows_jact,
    scale,
    sub,
    sum_to,
    transpose,
)
from ttmdsl.spec import LayerSpec, Memory, Pass
from ttmdsl.walk_expr import children, rewrite, walk


def derive(spec: LayerSpec) -> UpdateRule:
    """The layer's update rule; DeriveError, with every reason found, where there is none."""
    problems: list[Diagnostic] = []
    jacobians: dict[str, Jacobian] = {}
    for name, span in _applied(spec).items():
        if name in spec.fns:
            try:
                jacobians[name] = jacobian(spec.fns[name], spec.consts, spec.source, spec.filename)
            except DeriveError as error:
                problems.extend(error.diagnostics)
        elif name == SOFTMAX:
            jacobians[name] = softmax_jacobian()
        else:
            hint = f"declare it: fn {name}(x)[i] = ..."
            problems.append(Diagnostic(span, f"{name} is no vector function, so it has no Jacobian", hint))
    passes: list[PassRule] = []
    for p in spec.passes:
        rule = _pass_rule(spec, p, problems)
        if rule is not None:
            passes.append(rule)
    if problems:
        raise DeriveError(tuple(dict.fromkeys(problems)), spec.source, spec.filename)
    return UpdateRule(spec, jacobians, tuple(passes))


def _applied(spec: LayerSpec) -> dict[str, Span]:
    """The vector functions that the layer applies anywhere, and where first; feature maps have no components."""
    found: dict[str, Span] = {}
    roots = [e for _, e in spec.lets]
    for p in spec.passes:
        roots += [p.bias, *p.retention.values(), *p.project.values(), p.read, p.optimizer.rate]
    for root in roots:
        for node in walk(root):
            if isinstance(node, Apply | Columns | Rows) and node.fn not in (*spec.kernels, "normalized"):
                found.setdefault(node.fn, node.span)
    return found


def _pass_rule(spec: LayerSpec, p: Pass, problems: list[Diagnostic]) -> PassRule | None:
    loss = with_lets(spec, p)
    gradients = gradient(loss, p.memories)
    used = {node.name for node in walk(loss) if isinstance(node, Ref) and node.kind == "memory"}
    before = len(problems)
    for memory in p.memories:
        if memory.name not in used:
            message = f"the bias does not depend on memory {memory.name}, so there is nothing for it to learn"
            problems.append(Diagnostic(p.bias.span, message, f"use {memory.name} in the bias, or drop it"))
        elif is_zero(gradients[memory.name]):
            problems.append(_flat(loss, memory, p))
    if len(problems) > before:
        return None
    auxiliary: tuple[Memory, ...] = ()
    if p.optimizer.kind in ("implicit", "least_squares"):
        solved = argmin_steps(loss, p, gradient)
        if isinstance(solved, Diagnostic):
            problems.append(solved)
            return None
        gradients, auxiliary = solved
    gradients = {name: _running(g) for name, g in gradients.items()}
    definitions, named = name_definitions(_running(loss), gradients, spec)
    return PassRule(p.name, definitions, named, auxiliary)


def with_lets(spec: LayerSpec, p: Pass) -> Expr:
    """The bias with every definition that depends on this pass's memories written out."""
    own = {m.name for m in p.memories}
    inlined: dict[str, Expr] = {}

    def written_out(node: Expr) -> Expr | None:
        return inlined.get(node.name) if isinstance(node, Ref) and node.kind == "let" else None

    for name, value in spec.lets:
        value = rewrite(value, written_out)
        if any(isinstance(n, Ref) and n.kind == "memory" and n.name in own for n in walk(value)):
            inlined[name] = value
    return rewrite(p.bias, written_out)


def _running(e: Expr) -> Expr:
    """The expression without its stops: they matter to the derivative alone."""
    return rewrite(e, lambda node: _running(node.x) if isinstance(node, Stop) else None)


def _flat(loss: Expr, memory: Memory, p: Pass) -> Diagnostic:
    """The gradient vanished identically: name the function that ate it, if one did."""
    message = f"the bias has no derivative with respect to {memory.name}: it is zero wherever it exists"
    for node in walk(loss):
        if isinstance(node, Map) and is_piecewise_constant(node.fn):
            span = node.span if node.span != NOWHERE else p.bias.span
            return Diagnostic(span, message, f"{node.fn} is piecewise constant; try tanh, or another smooth function")
        if isinstance(node, Stop):
            return Diagnostic(node.span, message, f"stop(...) makes a constant of {memory.name}")
    return Diagnostic(p.bias.span, message, f"{memory.name} cancels out of the bias")


# ---- reverse mode -------------------------------------------------------------------------------------------


def gradient(loss: Expr, memories: tuple[Memory, ...]) -> dict[str, Expr]:
    """The derivative of a scalar expression by each memory, factored; zero where it does not depend on it."""
    own = {m.name for m in memories}
    active: set[Expr] = set()
    order = list(walk(loss))
    for node in order:
        mine = isinstance(node, Ref) and node.kind == "memory" and node.name in own
        if mine or (not isinstance(node, Stop) and any(c in active for c in children(node))):
            active.add(node)
    cotangents: dict[Expr, Expr] = {loss: ONE}
    for node in reversed(order):
        g = cotangents.get(node)
        if g is None or node not in active or is_zero(g):
            continue
        for child, contribution in _pull_back(node, g, active):
            cotangents[child] = add(cotangents.get(child, ZERO), contribution)
    found = {}
    for m in memories:
        ref = Ref(m.name, "memory", m.shape)
        g = cotangents.get(ref, ZERO)
        found[m.name] = g if is_zero(g) else full(g, m.shape)
    return found


def _pull_back(node: Expr, g: Expr, active: set[Expr]) -> Iterator[tuple[Expr, Expr]]:
    """The cotangents of a node's active arguments from its own, `g`."""
    match node:
        case Num() | Const() | Size() | Ref() | Stop() | Delay() | Component() | Features():
            return
        case Map(fn=fn, x=x):
            yield x, mul(g, _slope(fn, x, node))
        case Binary():
            yield from _pull_back_binary(node, g, active)
        case MatVec(m=m, x=x):
            g = full(g, node.shape)
            if m in active:
                yield m, outer(g, x)
            if x in active:
                yield x, matvec(transpose(m), g)
        case Transpose(m=m):
            yield m, transpose(full(g, node.shape))
        case Inner(a=a, b=b):
            if a in active:
                yield a, mul(g, b)
            if b in active:
                yield b, mul(g, a)
        case Norm(x=x):
            yield x, mul(g, _norm_slope(node))
        case Total(x=x):
            yield x, g
        case Mean(x=x):
            for dim in x.shape:
                g = div(g, Size(dim))
            yield x, g
        case Apply(fn=fn, x=x):
            yield x, jact(fn, x, full(g, node.shape))
        case Columns(fn=fn, m=m):
            yield m, columns_jact(fn, m, full(g, node.shape))
        case Rows(fn=fn, m=m):
            yield m, rows_jact(fn, m, full(g, node.shape))
        case Outer(a=a, b=b):
            g = full(g, node.shape)
            if a in active:
                yield a, matvec(g, b)
            if b in active:
                yield b, matvec(transpose(g), a)
        case JacT() | ColumnsJacT() | RowsJacT():
            raise AssertionError("a derived node cannot stand in a bias")
        case _:
            assert_never(node)


def _pull_back_binary(node: Binary, g: Expr, active: set[Expr]) -> Iterator[tuple[Expr, Expr]]:
    a, b = node.a, node.b
    if a in active:
        yield a, sum_to(g, _slope_in_first(node), node.shape, a.shape)
    if b in active:
        yield b, sum_to(g, _slope_in_second(node), node.shape, b.shape)


def _slope_in_first(node: Binary) -> Expr:
    a, b = node.a, node.b
    match node.op:
        case "add" | "sub":
            return ONE
        case "mul":
            return b
        case "div":
            return div(ONE, b)
        case "pow":
            exponent = constant(b)
            if exponent is not None:
                return mul(b, power(a, exponent - 1))
            return mul(b, elementwise("pow", a, sub(b, ONE)))
        case "max":
            return _selected(a, b)
        case "min":
            return _selected(b, a)
        case _:
            assert_never(node.op)


def _slope_in_second(node: Binary) -> Expr:
    a, b = node.a, node.b
    match node.op:
        case "add":
            return ONE
        case "sub":
            return neg(ONE)
        case "mul":
            return a
        case "div":
            return neg(div(node, b))
        case "pow":
            return mul(node, map_("log", a))
        case "max":
            return _selected(b, a)
        case "min":
            return _selected(a, b)
        case _:
            assert_never(node.op)


def _selected(a: Expr, b: Expr) -> Expr:
    """1 where a > b, 0 where a < b, one half where they tie."""
    return scale(0.5, add(ONE, map_("sign", sub(a, b))))


def _slope(fn: str, x: Expr, node: Expr) -> Expr:
    """The derivative of an elementwise function at x."""
    match fn:
        case "exp":
            return node
        case "log":
            return div(ONE, x)
        case "sqrt":
            return div(Num(0.5), node)
        case "abs":
            return map_("sign", x)
        case "softplus":
            return map_("sigmoid", x)
        case _:
            return ZERO if is_piecewise_constant(fn) else map_(fn + "'", x)


def _norm_slope(node: Norm) -> Expr:
    """d (sum |x|^p)^(power/p) / dx = power (sum |x|^p)^(power/p - 1) |x|^(p-1) sign(x)."""
    x, p, exponent = node.x, node.p, node.power
    direction = x if p == 2 else mul(map_("sign", x), power(map_("abs", x), p - 1))
    if exponent == p:
        return scale(exponent, direction)
    if exponent < p:
        return scale(exponent, div(direction, Norm(x, p, p - exponent)))
    return scale(exponent, mul(Norm(x, p, exponent - p), direction))
