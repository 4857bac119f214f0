"""Memories over an infinite-dimensional feature map, which is known by its kernel alone.

Input: the `feature` clause, and a pass once its choices are read. Output: `spec.KernelMap`, or the errors in the scope.
Such a memory exists only through what it is applied to: this says so wherever a spec asks for more. Whether the bias
leads to a recurrence over coefficients is decided when its gradient is derived (kernel_form.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ttmdsl import syntax
from ttmdsl.check_expr import Reader
from ttmdsl.check_past import whole
from ttmdsl.errors import Span
from ttmdsl.expr import Apply, Binary, Component, Const, Delay, Expr, Features, Map, MatVec, Num, Ref, Size
from ttmdsl.known import known_number
from ttmdsl.scope import Place, Scope, describe
from ttmdsl.spec import KernelMap, Memory, Pass
from ttmdsl.walk_expr import children, walk

MAX_LAST = 1_048_576
_FORM = "such as `feature phi = exp(scale * <., .>)` or `exp(<., .> / sqrt(d_k))`"
_NUMERIC = ("sqrt", "exp", "log", "abs")  # functions of numbers alone
_READ = "it exists only through its inner products, such as in `S @ phi(k)`"


# ---- the feature clause -------------------------------------------------------------------------------------


def kernel_map(clause: syntax.FeatureClause, scope: Scope) -> KernelMap | None:
    """exp(scale * <., .>), the scale being a positive number of literals, constants and sizes of dims."""
    kernel, name = clause.kernel, clause.name.text
    if not (isinstance(kernel, syntax.Call) and kernel.fn.text == "exp" and len(kernel.args) == 1):
        scope.error(kernel.span, f"the kernel of `{name}` must be the exponential of a multiple of <., .>", _FORM)
        return None
    scale = _slope(kernel.args[0], scope)
    if scale is None:
        return None
    for node in walk(scale):
        if not isinstance(node, Num | Const | Size | Binary) and not (isinstance(node, Map) and node.fn in _NUMERIC):
            hint = f"scale the keys and queries instead: `{name}(tau * k)`"
            scope.error(node.span, "the kernel's scale must be a number known before the first token", hint)
            return None
    value = known_number(scale)
    if scale.shape or (value is not None and value <= 0):
        scope.error(kernel.args[0].span, "the kernel's scale must be a positive number", _FORM)
        return None
    return KernelMap(name, scale, span=clause.span)


def _holds_slots(e: syntax.Expr) -> bool:
    return any(isinstance(n, syntax.Name) and n.text == "." for n in syntax.walk(e))


def _slope(e: syntax.Expr, scope: Scope) -> Expr | None:
    """What <., .> is multiplied by."""
    reader = Reader(scope, Place("the kernel"))
    match e:
        case syntax.Pairing(a=syntax.Name(text="."), b=syntax.Name(text="."), span=span):
            return Num(1.0, span=span)
        case syntax.Operation(op="*" | "/" as op, a=a, b=b, span=span) if _holds_slots(a) and not _holds_slots(b):
            inner, factor = _slope(a, scope), reader.read(b)
            return inner and factor and reader.binary("mul" if op == "*" else "div", inner, factor, span)
        case syntax.Operation(op="*", a=a, b=b, span=span) if _holds_slots(b) and not _holds_slots(a):
            factor, inner = reader.read(a), _slope(b, scope)
            if inner and factor and inner == Num(1.0):
                return factor
            return inner and factor and reader.binary("mul", factor, inner, span)
        case _:
            scope.error(e.span, "the kernel's exponent must be a multiple of <., .>", _FORM)
            return None


# ---- retention last(c) --------------------------------------------------------------------------------------


def take_last(
    clause: syntax.Retention | None, place: Place, scope: Scope
) -> tuple[syntax.Retention | None, int | None, Span | None]:
    """The retention without `last(c)`, which maps no memory but says how many tokens one keeps; then that number."""
    found = [v for v in clause.values if isinstance(v, syntax.Call) and v.fn.text == "last"] if clause else []
    if clause is None or not found:
        return clause, None, None
    for again in found[1:]:
        scope.error(again.span, "`last` stands twice")
    call = found[0]
    count: int | None = None
    if len(call.args) != 1:
        scope.error(call.span, f"`last` wants 1 argument, found {len(call.args)}", "such as `retention last(c)`")
    else:
        read = Reader(scope, place).read(call.args[0])
        if read is not None:
            count = whole(read, 1, MAX_LAST, "how many tokens a memory keeps", call.args[0].span, scope)
    rest = tuple(v for v in clause.values if v not in found)
    return (replace(clause, values=rest) if rest else None), count, call.span


# ---- a pass ---------------------------------------------------------------------------------------------------


def check_kernel_pass(p: Pass, last: Span | None, scope: Scope) -> None:
    """Errors of a pass with such a memory, or with what only such a memory has."""
    kernels = scope.kernels
    over = [m for m in p.memories if m.shape[1] in kernels]
    exprs: dict[str, Expr] = {"the bias": p.bias, "the readout": p.read, "the rate": p.optimizer.rate}
    exprs |= {f"the retention of `{m}`": e for m, e in p.retention.items()}
    if p.window and p.window.weight:
        exprs["the window"] = p.window.weight
    for title, e in exprs.items():
        _only_read(title, e, over, kernels, scope)
    if not over:
        if last is not None:
            hint = "`memory S[d_v, phi]` with a `feature phi` does; a matrix forgets by a decay"
            scope.error(last, "`last` needs a memory that keeps its tokens apart", hint)
        return
    memory = over[0]
    if len(p.memories) > 1:
        other = next(m for m in p.memories if m is not memory)
        hint = "a memory of several parameters wants features that have components, such as `taylor(k, 3)`"
        message = f"`{memory.name}` is over an infinite-dimensional feature map, and stands alone in its pass"
        scope.error(other.span, message, hint)
    if memory.initial != "zero":
        message = f"`{memory.name}` starts from nothing: it has no matrix to be anything else"
        scope.error(memory.span, message, "leave it out")
    if p.project:
        span = next(iter(p.project.values())).span
        message = f"`{memory.name}` has infinitely many columns, so none of them can be projected"
        scope.error(span, message, "drop `project`")
    if "L" in scope.dims:
        scope.error(scope.dims["L"], f"`L` is how many tokens `{memory.name}` holds", "give this dim another name")
    _optimizer(p, memory, scope)
    _retention(p, memory, scope)
    if p.last is not None and last is not None:
        if p.window and p.window.size > p.last:
            hint = f"at least `last({p.window.size})`"
            scope.error(last, f"the window is of {p.window.size} tokens, and the memory keeps {p.last}", hint)
        if p.optimizer.batch > 1:
            hint = "set batch = 1"
            scope.error(last, "a memory that keeps its last tokens takes its gradients token by token", hint)


def _only_read(title: str, e: Expr, over: list[Memory], kernels: Mapping[str, KernelMap], scope: Scope) -> None:
    """`S @ phi(x)` is the only place of S and of phi(x); `normalized` stands around it, in the readout."""
    names = {m.name for m in over}

    def visit(node: Expr, parent: Expr | None) -> Iterator[tuple[Span, str, str]]:
        match node:
            case Apply(fn=fn) if fn in kernels and not isinstance(parent, MatVec):
                yield node.span, f"`{fn}(...)` is a vector of infinitely many components", _READ
            case Apply(fn="normalized", x=x):
                read = isinstance(x, MatVec) and isinstance(x.x, Apply) and x.x.fn in kernels
                if title != "the readout" or not read:
                    hint = "`read normalized(S @ phi(q))`: divided by the sum of the kernel's values"
                    yield node.span, "`normalized` stands around a memory's readout over a feature map", hint
            case Ref(name=name, kind="memory") if name in names and title.startswith("the retention"):
                pass
            case Ref(name=name, kind="memory") if name in names and not _applied(parent, kernels):
                yield node.span, f"`{name}` has infinitely many columns, so it can only be read", _READ
            case Delay() | Component() | Features() if over:
                hint = "pass it to `op` as an input"
                yield node.span, "a memory over an infinite-dimensional feature map takes no prepared values", hint
            case _:
                pass
        for c in children(node):
            yield from visit(c, node)

    for span, message, hint in visit(e, None):
        scope.error(span, message, hint)


def _applied(parent: Expr | None, kernels: Mapping[str, KernelMap]) -> bool:
    return isinstance(parent, MatVec) and isinstance(parent.x, Apply) and parent.x.fn in kernels


def _optimizer(p: Pass, memory: Memory, scope: Scope) -> None:
    optimizer, name = p.optimizer, memory.name
    if optimizer.kind != "gd" or optimizer.per_token > 1:
        what = optimizer.kind if optimizer.kind != "gd" else f"gd with {optimizer.per_token} steps for each token"
        hint = "its coefficients learn by `gd(rate = eta)`"
        message = f"`{name}` is over an infinite-dimensional feature map, and {what} has no kernel form"
        scope.error(optimizer.span, message, hint)
    elif optimizer.rate.shape:
        hint = "weigh the value instead: `-<S @ phi(k), beta * v>`"
        found = describe(optimizer.rate.shape)
        scope.error(optimizer.rate.span, f"a memory over a feature map learns at one rate, and this is {found}", hint)


def _retention(p: Pass, memory: Memory, scope: Scope) -> None:
    """A scalar times the memory: its columns have no names, so nothing can run along them."""

    def scalar(e: Expr) -> bool:
        match e:
            case Ref(name=memory.name, kind="memory"):
                return True
            case Binary(op="mul", a=a, b=b):
                return (scalar(a) and not b.shape) or (scalar(b) and not a.shape)
            case Binary(op="div", a=a, b=b):
                return scalar(a) and not b.shape
            case _:
                return False

    kept = p.retention[memory.name]
    if not scalar(kept):
        hint = f"a scalar decay: `retention alpha * {memory.name}`, or `retention last(c)`"
        scope.error(kept.span, f"`{memory.name}` has infinitely many columns: it decays as a whole", hint)


def check_let(value: Expr, scope: Scope) -> None:
    """A definition holds numbers, never phi(x) itself."""
    _only_read("a `let`", value, [], scope.kernels, scope)


def check_passes(passes: tuple[Pass, ...], scope: Scope) -> None:
    """All passes of a layer are of one kind, and every feature map has its memory."""
    columns = {m.shape[1] for m in scope.memories.values()}
    for kernel in () if scope.errors else scope.kernels.values():
        if kernel.name not in columns:
            hint = f"`memory S[d_v, {kernel.name}]`, or remove it"
            scope.error(kernel.span, f"no memory is over `{kernel.name}`", hint)
    over = [any(m.shape[1] in scope.kernels for m in p.memories) for p in passes]
    if any(over) and not all(over):
        p = passes[over.index(False)]
        hint = "compose two layers: the output of the one as an input of the other"
        scope.error(p.span, f"pass `{p.name}` has a matrix for its memory, and another pass has none", hint)
