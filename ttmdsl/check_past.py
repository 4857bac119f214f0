"""What a spec may say of past tokens, of single components and of feature maps.

Input: the arguments of `delay`, `x[i]`, `power`, `taylor` and `residual`, already read. Output: a `spec.Expr`, or None,
the errors in the scope. All of them but `residual` are made before the recurrence runs, so none may hold a memory, nor
what a pass reads out. Makes nothing itself: that is unfold.py's.
"""

from __future__ import annotations

from typing import get_args

from ttmdsl import syntax
from ttmdsl.errors import Span
from ttmdsl.expr import Component, Delay, Expr, FeatureKind, Features, Ref
from ttmdsl.known import known_number
from ttmdsl.scope import Scope, describe
from ttmdsl.walk_expr import walk

MAX_WINDOW = 64  # a window of c tokens is c times the summand's formulas
MAX_ORDER = 8
MAX_SIZE = 65_536


def free_of_memories(e: Expr, span: Span, what: str, scope: Scope) -> bool:
    """Whether a value can be made for all tokens at once, before the recurrence; if not, that is noted."""
    for node in walk(e):
        if isinstance(node, Ref) and node.kind in ("memory", "pass"):
            held = "a memory" if node.kind == "memory" else "what a pass reads out"
            scope.error(span, f"{what} is made of inputs, gates, params and lets, and `{node.name}` is {held}")
            return False
    return True


def whole(e: Expr, least: int, most: int, what: str, span: Span, scope: Scope) -> int | None:
    """A whole number known at compile time."""
    value = known_number(e)
    if value is None or not value.is_integer() or not least <= value <= most:
        hint = "a literal or a `const`" if value is None else f"this is {value:g}"
        scope.error(span, f"{what} must be a whole number from {least} to {most}", hint)
        return None
    return int(value)


def delay(x: Expr, by: Expr, call: syntax.Call, scope: Scope) -> Expr | None:
    """`delay(x, j)`: x at the token j tokens ago."""
    number = whole(by, 0, MAX_WINDOW, "a delay", call.args[1].span, scope)
    if number is None or not free_of_memories(x, call.args[0].span, "a delayed value", scope):
        return None
    if len(x.shape) > 1:
        scope.error(call.args[0].span, f"`delay` wants a scalar or a vector, and this is {describe(x.shape)}")
        return None
    return Delay(x, number, x.shape, span=call.span) if number else x


def component(x: Expr, index: Expr, e: syntax.Element, scope: Scope) -> Expr | None:
    """`x[i]` outside of a component formula: one component of a vector whose length is a constant."""
    if len(x.shape) != 1:
        scope.error(e.x.span, f"a component of a vector, and this is {describe(x.shape)}")
        return None
    size = scope.consts.get(x.shape[0])
    if size is None:
        hint = f"make `{x.shape[0]}` a `const`"
        scope.error(e.x.span, f"the length [{x.shape[0]}] is not known at compile time", hint)
        return None
    number = whole(index, 0, int(size) - 1, f"an index of [{x.shape[0]}]", e.index.span, scope)
    if number is None or not free_of_memories(x, e.x.span, "a component", scope):
        return None
    return Component(x, number, span=e.span)


# ---- feature maps -------------------------------------------------------------------------------------------


def feature_kind(name: syntax.Name, scope: Scope) -> FeatureKind | None:
    """The feature map of that name."""
    for kind in get_args(FeatureKind):
        if name.text == kind:
            return kind  # type: ignore[no-any-return]
    scope.unknown(name, "feature map", get_args(FeatureKind))
    return None


def feature_order(kind: FeatureKind, e: Expr | None, span: Span, scope: Scope) -> int | None:
    """The p of a power, the last order of a Taylor map."""
    what, least = ("the power of a feature map", 1) if kind == "power" else ("the order of a Taylor map", 0)
    return None if e is None else whole(e, least, MAX_ORDER, what, span, scope)


def feature_dim(base: str, kind: FeatureKind, order: int, span: Span, scope: Scope) -> str | None:
    """The dim of a feature map's result; refused where it is known to be too large."""
    name = scope.feature_dim(base, kind, order, span)
    size = scope.consts.get(base)
    if name in scope.features and size is not None and scope.features[name].size(int(size)) > MAX_SIZE:
        found = scope.features[name].size(int(size))
        scope.error(span, f"a feature map may have {MAX_SIZE} components at most, and this one has {found}")
        return None
    return name


def features(kind: FeatureKind, x: Expr, order: Expr, call: syntax.Call, scope: Scope) -> Expr | None:
    """`power(x, p)` and `taylor(x, n)` of a vector."""
    number = feature_order(kind, order, call.args[1].span, scope)
    if len(x.shape) != 1:
        scope.error(call.args[0].span, f"`{kind}` wants a vector, and this is {describe(x.shape)}")
        return None
    if number is None or not free_of_memories(x, call.args[0].span, "a feature map's argument", scope):
        return None
    dim = feature_dim(x.shape[0], kind, number, call.span, scope)
    if dim is None:
        return None
    return x if (dim,) == x.shape else Features(x, kind, number, (dim,), span=call.span)
