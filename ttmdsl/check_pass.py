"""The choices of one pass: memory, bias, retention, optimizer, projection and readout.

Input: a `syntax.Block` and the scope, its memories declared. Output: `spec.Pass`, or None with the errors noted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar, get_args

from ttmdsl import syntax
from ttmdsl.check_expr import Reader
from ttmdsl.check_kernel import check_kernel_pass, take_last
from ttmdsl.check_window import no_pass_per_step, step_dim, window
from ttmdsl.errors import Span
from ttmdsl.expr import Expr, Num, Ref
from ttmdsl.known import known_number
from ttmdsl.scope import Place, Scope, describe, suggestion
from ttmdsl.simplify_expr import walk
from ttmdsl.spec import Memory, Optimizer, OptimizerKind, Pass

MAX_BATCH = 65_536
MAX_STEPS = 16

_SETTINGS: dict[str, tuple[str, ...]] = {
    "gd": ("rate", "steps", "at", "batch"),
    "momentum": ("decay", "rate", "at", "batch"),
    "muon": ("momentum", "rate", "steps", "at", "batch"),
    "implicit": ("rate",),
    "least_squares": ("ridge",),
}
_NEEDED = {"momentum": "decay", "muon": "momentum", "least_squares": "ridge"}
_EXAMPLES = {
    "momentum": "momentum(decay = theta, rate = eta)",
    "muon": "muon(momentum = theta, rate = eta)",
    "least_squares": "least_squares(ridge = lam)",
}

C = TypeVar("C", bound=syntax.Choice)
Point: TypeAlias = Literal["previous", "retained"]


def check_pass(block: syntax.Block, scope: Scope) -> Pass | None:
    """The checked pass; None if a part of it failed."""
    name = block.name.text
    items = [m for c in block.clauses if isinstance(c, syntax.Memories) for m in c.items]
    memories = tuple(scope.memories[m.name.text] for m in items if m.name.text in scope.memories)
    title = f"pass `{name}`" if name in scope.declared else "the layer"
    if not items:
        scope.error(block.name.span, f"{title} has no `memory`", "such as `memory S[d_v, d_k]`")
    names, earlier = frozenset(m.name.text for m in items), frozenset(scope.passes)

    bias_clause = _one(syntax.Bias, block, scope)
    read_clause = _one(syntax.Read, block, scope)
    optimizer_clause = _one(syntax.OptimizerClause, block, scope)
    for clause, example in ((bias_clause, "bias 1/2 * |S @ k - v|^2"), (read_clause, "read S @ q")):
        if clause is None:
            scope.error(block.name.span, f"{title} has no `{example.split()[0]}`", f"such as `{example}`")

    one = step_dim(optimizer_clause, scope)
    learning = Place("the bias", names, earlier, name, learns=True, step_dim=one)
    bias = bias_clause and _bias(bias_clause, learning, memories, scope)
    windowed = None if bias_clause is None else bias_clause.window
    tokens = windowed and window(windowed, bias or None, earlier, name, one, scope)
    keeping = Place("the retention", names, earlier, name)
    retention_clause, last, last_span = take_last(_one(syntax.Retention, block, scope), keeping, scope)
    retention = _maps(retention_clause, keeping, scope)
    optimizing = Place("the optimizer", frozenset(), earlier, name, step_dim=one)
    optimizer = _optimizer(optimizer_clause, optimizing, memories, scope)
    project_clause = _one(syntax.Project, block, scope)
    project = _maps(project_clause, Place("the projection", names, earlier, name), scope)
    read = read_clause and Reader(scope, Place("the readout", names, earlier, name)).read(read_clause.value)
    if read and len(read.shape) != 1:
        scope.error(read.span, f"the readout must be a vector, and this is {describe(read.shape)}")
        return None
    if not (bias and read and optimizer and retention is not None and project is not None):
        return None
    kept = {m.name: retention.get(m.name, Ref(m.name, "memory", m.shape, span=m.span)) for m in memories}
    if optimizer.kind == "least_squares":
        for other in (_one(syntax.Retention, block, scope), project_clause):
            if other is not None:
                hint = "the state is what minimises the sum over all tokens, and nothing else"
                scope.error(other.span, "this has no place beside least_squares", hint)
    if windowed and tokens is None:
        return None
    if tokens and optimizer.kind in ("implicit", "least_squares"):
        hint = "with gd, momentum or muon"
        scope.error(tokens.span, f"a window is a sum of gradients, and {optimizer.kind} takes none", hint)
    if optimizer.per_token > 1:
        no_pass_per_step((bias, optimizer.rate, *kept.values()), optimizer, scope)
    if project_clause and project_clause.when and scope.consts.get(project_clause.when.text) == 0:
        project = {}
    checked = Pass(name, memories, bias, kept, optimizer, project, read, tokens or None, last, span=block.span)
    check_kernel_pass(checked, last_span, scope)
    return checked


def _one(kind: type[C], block: syntax.Block, scope: Scope) -> C | None:
    found = [c for c in block.clauses if isinstance(c, kind)]
    for again in found[1:]:
        scope.error(again.span, "this clause stands twice", f"first on line {found[0].span.line}")
    return found[0] if found else None


def _used(e: Expr) -> set[str]:
    return {n.name for n in walk(e) if isinstance(n, Ref) and n.kind == "memory"}


def _bias(clause: syntax.Bias, place: Place, memories: tuple[Memory, ...], scope: Scope) -> Expr | None:
    bias = Reader(scope, place).read(clause.value)
    if bias is None:
        return None
    if bias.shape:
        hint = "|x|^2, <a, b> or sum(x) make a number of a vector"
        scope.error(clause.value.span, f"the bias must be a scalar, and this is {describe(bias.shape)}", hint)
        return None
    used = _used(bias)
    for memory in memories:
        if memory.name not in used:
            scope.error(memory.span, f"the bias does not use `{memory.name}`, so it would never learn")
    return bias


def _maps(clause: syntax.Retention | syntax.Project | None, place: Place, scope: Scope) -> dict[str, Expr] | None:
    """For each memory the expression of itself that a retention or a projection gives."""
    maps: dict[str, Expr] = {}
    if clause is None:
        return maps
    fine = True
    if isinstance(clause, syntax.Project) and clause.when and clause.when.text not in scope.consts:
        scope.unknown(clause.when, "constant", scope.consts)
        fine = False
    for value in clause.values:
        groups = [n for n in syntax.walk(value) if isinstance(n, syntax.Group)]
        if len(groups) > 1:
            scope.error(groups[1].span, f"{place.title} may list its memories once", "`alpha * (W1, W2)`")
            fine = False
            continue
        for chosen in range(len(groups[0].items)) if groups else (None,):
            e = Reader(scope, place, chosen).read(value)
            memory = None if e is None else _memory_of(e, value.span, place, scope)
            if e is None or memory is None:
                fine = False
            elif memory in maps:
                scope.error(value.span, f"{place.title} of `{memory}` stands twice")
            else:
                maps[memory] = e
    return maps if fine else None


def _memory_of(e: Expr, span: Span, place: Place, scope: Scope) -> str | None:
    """The one memory that the expression maps, of whose shape it has to be."""
    used = sorted(_used(e))
    if len(used) != 1:
        found = f"it uses {' and '.join(f'`{n}`' for n in used)}" if used else "it uses none"
        scope.error(span, f"{place.title} maps one memory, and {found}", "such as `alpha * S`")
        return None
    shape = scope.memories[used[0]].shape
    if e.shape != shape:
        scope.error(span, f"{place.title} of `{used[0]}` is {describe(e.shape)}, and `{used[0]}` is {describe(shape)}")
        return None
    return used[0]


# ---- optimizer ----------------------------------------------------------------------------------------------


def _optimizer(
    clause: syntax.OptimizerClause | None, place: Place, memories: tuple[Memory, ...], scope: Scope
) -> Optimizer | None:
    if clause is None:
        return Optimizer("gd", Num(1.0))
    kind = clause.kind.text
    if kind not in _SETTINGS:
        scope.unknown(clause.kind, "optimizer", _SETTINGS)
        return None
    settings = _settings(clause, scope)
    rate = _factor(settings["rate"], place, memories, scope) if "rate" in settings else Num(1.0, span=clause.kind.span)
    push = settings.get("momentum" if kind == "muon" else "decay")
    decay = None if push is None else _factor(push, place, memories, scope)
    batch = _whole("batch", settings["batch"], MAX_BATCH, place, scope) if "batch" in settings else 1
    newton = _whole("number of steps", settings["steps"], MAX_STEPS, place, scope) if "steps" in settings else 5
    ridge = _ridge(settings["ridge"], place, scope) if "ridge" in settings else None
    at = _point(settings["at"], scope) if "at" in settings else "previous"
    if kind in _NEEDED and _NEEDED[kind] not in settings:
        scope.error(clause.span, f"{kind} needs its `{_NEEDED[kind]}`", _EXAMPLES[kind])
        return None
    if at == "retained" and batch is not None and batch > 1:
        hint = "with a batch the gradient is taken at the state that the last batch left"
        scope.error(settings["at"].span, f"`at` has no meaning with batch = {batch}", hint)
        return None
    if rate is None or batch is None or at is None or newton is None:
        return None
    if (push is not None and decay is None) or ("ridge" in settings and ridge is None):
        return None
    point: Point = "retained" if at == "retained" or kind == "implicit" else "previous"
    for known in get_args(OptimizerKind):
        if kind == known:
            found = Optimizer(known, rate, decay, point, batch, ridge=ridge, span=clause.span)
            if kind == "muon":
                return replace(found, newton_schulz=newton)
            stepping = kind == "gd" and "steps" in settings
            return replace(found, per_token=newton, step_dim=place.step_dim) if stepping else found
    raise AssertionError(kind)


def _settings(clause: syntax.OptimizerClause, scope: Scope) -> dict[str, syntax.Expr]:
    settings: dict[str, syntax.Expr] = {}
    for s in clause.settings:
        known = _SETTINGS[clause.kind.text]
        if s.name.text not in known:
            message = f"`{clause.kind.text}` has no setting `{s.name.text}`"
            scope.error(s.name.span, message, suggestion(s.name.text, known))
        elif s.name.text in settings:
            scope.error(s.name.span, f"`{s.name.text}` is set twice")
        else:
            settings[s.name.text] = s.value
    return settings


def _factor(e: syntax.Expr, place: Place, memories: tuple[Memory, ...], scope: Scope) -> Expr | None:
    """A rate or a decay: a scalar, or one that runs along dims of every memory."""
    factor = Reader(scope, place).read(e)
    for memory in memories if factor is not None and factor.shape else ():
        assert factor is not None
        rows, columns = memory.shape
        if factor.shape != memory.shape and (len(factor.shape) != 1 or factor.shape[0] not in memory.shape):
            shapes = f"{describe(factor.shape)}, and `{memory.name}` is {describe(memory.shape)}"
            scope.error(e.span, f"this does not run along the memory: it is {shapes}")
            return None
        if factor.shape != memory.shape and rows == columns:
            hint = f"it could run along the rows or the columns of `{memory.name}`: give the two dims two names"
            scope.error(e.span, f"{describe(factor.shape)} along {describe(memory.shape)} is ambiguous", hint)
            return None
    return factor


def _whole(what: str, e: syntax.Expr, most: int, place: Place, scope: Scope) -> int | None:
    read = Reader(scope, place).read(e)
    value = None if read is None else known_number(read)
    if read is not None and (value is None or not value.is_integer() or not 1 <= value <= most):
        hint = "a literal or a `const`" if value is None else f"this is {value:g}"
        scope.error(e.span, f"the {what} must be a whole number from 1 to {most}", hint)
        return None
    return None if value is None else int(value)


def _ridge(e: syntax.Expr, place: Place, scope: Scope) -> Expr | None:
    """The weight of |P|^2, which belongs to the state before the first token: no token can tell it."""
    read = Reader(scope, place).read(e)
    if read is None:
        return None
    if read.shape:
        scope.error(e.span, f"the ridge must be a scalar, and this is {describe(read.shape)}")
        return None
    for node in walk(read):
        if isinstance(node, Ref) and node.kind != "param":
            hint = "declare it so: `param lam: positive`"
            message = f"the ridge must be of params and constants alone, and `{node.name}` is neither"
            scope.error(node.span, message, hint)
            return None
    return read


def _point(e: syntax.Expr, scope: Scope) -> str | None:
    if isinstance(e, syntax.Name) and e.text in ("retained", "previous"):
        return e.text
    scope.error(e.span, "the gradient is taken `at = previous` or `at = retained`")
    return None
