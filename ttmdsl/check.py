"""The syntax tree to a checked layer: every name resolved, every shape known, or all errors at once.

Input: `syntax.Layer` from `parse`, and values for constants. Output: `LayerSpec`, or `CheckError` with all diagnostics.
Expressions are check_expr.py's, component formulas check_fn.py's, the choices of a pass check_pass.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import get_args

from ttmdsl import syntax
from ttmdsl.check_expr import Reader
from ttmdsl.check_fn import vector_fn
from ttmdsl.check_kernel import check_let, check_passes, kernel_map
from ttmdsl.check_pass import check_pass
from ttmdsl.check_past import feature_dim, feature_kind, feature_order
from ttmdsl.errors import NOWHERE, CheckError, Diagnostic, LoadError
from ttmdsl.expr import Expr, Shape
from ttmdsl.names import layer_refusal, refusal
from ttmdsl.parse import MAX_NUMBER
from ttmdsl.scope import MAX_ERRORS, Abandon, Place, Scope, suggestion
from ttmdsl.spec import Initial, LayerSpec, Memory, Pass, Range, Tensor

MAX_DIM = 65_536
MAX_NAMES = 256
OUTPUT = "y"  # the pass of a layer without `pass` blocks


def check(
    tree: syntax.Layer, source_text: str, filename: str = "<spec>", consts: Mapping[str, float] | None = None
) -> LayerSpec:
    """The meaning of a syntax tree, with `consts` in place of the declared values."""
    scope = Scope()
    scope.consts = _constants(tree, consts or {})
    spec: LayerSpec | None = None
    try:
        spec = _layer(tree, scope, source_text, filename)
    except Abandon:
        if len(scope.errors) >= MAX_ERRORS:
            scope.errors.append(Diagnostic(NOWHERE, f"stopped after {MAX_ERRORS} errors"))
    if spec is None or scope.errors:
        found = sorted(scope.errors, key=lambda d: (d.span == NOWHERE, d.span.line, d.span.column))
        raise CheckError(tuple(found), source_text, filename)
    return spec


def _constants(tree: syntax.Layer, given: Mapping[str, float]) -> dict[str, float]:
    """Every declared constant with the value in force."""
    values = {c.name.text: c.value.value for k in tree.clauses if isinstance(k, syntax.Constants) for c in k.items}
    for name, value in given.items():
        if name not in values:
            known = f"its constants are {', '.join(sorted(values))}" if values else "it has none"
            hint = f": {suggestion(str(name), values)}" if len(values) > 1 else ""
            raise LoadError(f"{tree.name.text} has no constant `{name}`; {known}{hint}")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise LoadError(f"the constant `{name}` must be a number, not of type {type(value).__name__}")
        if not abs(value) <= MAX_NUMBER:  # nan ends here too
            raise LoadError(f"the constant `{name}` must be finite and at most {MAX_NUMBER:.0e}")
        values[name] = float(value)
    return values


def _layer(tree: syntax.Layer, scope: Scope, source: str, filename: str) -> LayerSpec:
    if why := layer_refusal(tree.name.text):
        scope.error(tree.name.span, f"no layer may be named `{tree.name.text}`: {why}")
    blocks = _blocks(tree, scope)
    _declare_all(tree, blocks, scope)
    tensors = _tensors(tree, scope)
    for clause in tree.clauses:
        if isinstance(clause, syntax.FeatureClause):
            kernel = kernel_map(clause, scope)
            if kernel is None:
                scope.failed.add(clause.name.text)
            else:
                scope.kernels.setdefault(kernel.name, kernel)
    for block in blocks:
        for clause in block.clauses:
            if isinstance(clause, syntax.Memories):
                for item in clause.items:
                    _memory(item, block.name.text, scope)
    scope.step_dims = _step_dims(blocks, scope)
    _functions(tree, scope)
    lets = _lets(tree, scope)
    passes: list[Pass] = []
    for block in blocks:
        checked = check_pass(block, scope)
        if checked is None:
            scope.failed.add(block.name.text)
        else:
            scope.passes[checked.name] = checked.read.shape
            passes.append(checked)
    check_passes(tuple(passes), scope)
    for p in passes[1:]:
        mine, first = ((o.per_token, o.step_dim) for o in (p.optimizer, passes[0].optimizer))
        if mine != first:
            counts = f"`{p.name}` takes {mine[0]}, and `{passes[0].name}` {first[0]}"
            span = p.optimizer.span if p.optimizer.span != NOWHERE else p.span
            hint = "write the same `steps` into each pass's optimizer"
            scope.error(span, f"the passes take different numbers of gradient steps for a token: {counts}", hint)
    used = {d for t in tensors for d in t.shape} | {d for m in scope.memories.values() for d in m.shape}
    used |= {f.base for f in scope.features.values()}
    # After other errors the shapes that would use a dim may be missing.
    for name in () if scope.errors else scope.dims.keys() - used:
        scope.error(scope.dims[name], f"no tensor and no memory has the dim `{name}`", "remove it")
    return LayerSpec(
        name=tree.name.text,
        source=source,
        dims=tuple(scope.dims),
        tensors=tensors,
        consts=scope.consts,
        fns=scope.vector_fns,
        lets=lets,
        passes=tuple(passes),
        filename=filename,
        features=scope.features,
        kernels=scope.kernels,
    )


def _blocks(tree: syntax.Layer, scope: Scope) -> tuple[syntax.Block, ...]:
    """The passes; a layer's own choices are a pass named y."""
    blocks = tuple(c for c in tree.clauses if isinstance(c, syntax.Block))
    choices = tuple(c for c in tree.clauses if isinstance(c, get_args(syntax.Choice)))
    if blocks:
        for choice in choices:
            hint = "with `pass` blocks, every memory and its choices stand inside of one"
            scope.error(choice.span, "this belongs into a `pass` block", hint)
        return blocks
    return (syntax.Block(syntax.Name(OUTPUT, tree.name.span), choices, tree.name.span),)


# ---- names --------------------------------------------------------------------------------------------------


def _declare_all(tree: syntax.Layer, blocks: tuple[syntax.Block, ...], scope: Scope) -> None:
    """Every name of the layer, once: they share one namespace, the keywords of `op` among them."""
    for clause in tree.clauses:
        match clause:
            case syntax.Dims(names=names):
                for name in names:
                    _declare(name, scope)
                    scope.dims.setdefault(name.text, name.span)
            case syntax.Tensors(items=items) | syntax.Constants(items=items):
                for item in items:
                    _declare(item.name, scope)
            case syntax.Function(name=name):
                _declare(name, scope)
            case syntax.FeatureClause(name=name):
                _declare(name, scope)
                scope.kernel_names.add(name.text)
            case syntax.Let(name=name):
                _declare(name, scope)
            case _:
                pass
    explicit = any(isinstance(c, syntax.Block) for c in tree.clauses)
    if not explicit and OUTPUT in scope.declared:
        scope.error(scope.declared[OUTPUT], f"`{OUTPUT}` is the layer's output", "give this another name")
    for block in blocks:
        if explicit:
            _declare(block.name, scope)
        for choice in block.clauses:
            for memory in choice.items if isinstance(choice, syntax.Memories) else ():
                _declare(memory.name, scope)
                scope.owners.setdefault(memory.name.text, block.name.text)


def _declare(name: syntax.Name, scope: Scope) -> None:
    if why := refusal(name.text):
        scope.error(name.span, f"nothing may be named `{name.text}`: {why}")
    if name.text in scope.declared:
        line = scope.declared[name.text].line
        scope.error(name.span, f"`{name.text}` is declared twice", f"first on line {line}")
    scope.declared.setdefault(name.text, name.span)
    if len(scope.declared) > MAX_NAMES:
        scope.errors.append(Diagnostic(name.span, f"more than {MAX_NAMES} names in one layer"))
        raise Abandon


# ---- declarations -------------------------------------------------------------------------------------------


def _shape(names: tuple[syntax.Name, ...], scope: Scope) -> Shape | None:
    fine = True
    for name in names:
        if name.text in scope.consts:
            value = scope.consts[name.text]
            if not (value.is_integer() and 1 <= value <= MAX_DIM):
                hint = f"`{name.text}` is {value:g}"
                scope.error(name.span, f"a dim must be a whole number from 1 to {MAX_DIM}", hint)
                fine = False
        elif name.text in scope.kernel_names and name.text not in scope.failed:
            hint = "it may be a memory's columns, as in `memory S[d_v, phi]`, and nothing else has them"
            scope.error(name.span, f"`{name.text}` is a feature map of infinitely many components", hint)
            fine = False
        elif name.text in scope.failed and name.text not in scope.dims:
            fine = False
        elif name.text not in scope.dims:
            scope.unknown(name, "dim", {*scope.dims, *scope.consts})
            fine = False
    return tuple(n.text for n in names) if fine else None


def _tensors(tree: syntax.Layer, scope: Scope) -> tuple[Tensor, ...]:
    """Inputs, gates and params; one that failed keeps its name, so that its users stay silent about it."""
    tensors = []
    for clause in (c for c in tree.clauses if isinstance(c, syntax.Tensors)):
        for item in clause.items:
            name, shape, within = item.name.text, _shape(item.shape, scope), _range(item, scope)
            if len(item.shape) > 2:
                scope.error(item.span, f"`{name}` has {len(item.shape)} dims, and a tensor may have two at most")
            if shape is None or len(item.shape) > 2:
                scope.failed.add(name)
            else:
                tensor = Tensor(name, clause.kind, shape, within, span=item.span)
                tensors.append(scope.tensors.setdefault(name, tensor))
                if tensor.keyword != name and tensor.keyword in scope.declared:
                    hint = f"`{name}` is a decay, which is passed as its logarithm `{tensor.keyword}`"
                    scope.error(scope.declared[tensor.keyword], f"`{tensor.keyword}` is taken", hint)
    return tuple(tensors)


def _range(item: syntax.TensorItem, scope: Scope) -> Range:
    name = "real" if item.range is None else item.range.text
    for known in get_args(Range):
        if name == known:
            return known  # type: ignore[no-any-return]
    if item.range is not None:
        scope.unknown(item.range, "range", get_args(Range))
    return "real"


def _step_dims(blocks: tuple[syntax.Block, ...], scope: Scope) -> set[str]:
    """The constants that count gradient steps, known before any expression is read."""
    optimizers = [c for b in blocks for c in b.clauses if isinstance(c, syntax.OptimizerClause) and c.kind.text == "gd"]
    steps = [s.value for o in optimizers for s in o.settings if s.name.text == "steps"]
    return {e.text for e in steps if isinstance(e, syntax.Name) and e.text in scope.consts}


def _extents(items: tuple[syntax.Extent, ...], scope: Scope) -> Shape | None:
    """A memory's shape: declared dims, and those that feature maps make of them."""
    if len(items) == 2 and items[1].base.text in scope.kernels and items[1].kind is None:
        rows = _extents(items[:1], scope)
        return None if rows is None else (*rows, items[1].base.text)
    base = _shape(tuple(i.base for i in items), scope)
    shape: list[str | None] = []
    for item, dim in zip(items, base or (), strict=False):
        if item.kind is None or item.order is None:
            shape.append(dim)
            continue
        kind = feature_kind(item.kind, scope)
        order = kind and feature_order(kind, Reader(scope, Place("a dim")).read(item.order), item.order.span, scope)
        shape.append(feature_dim(dim, kind, order, item.span, scope) if kind and order is not None else None)
    dims = tuple(d for d in shape if d is not None)
    return None if base is None or len(dims) < len(items) else dims


def _memory(item: syntax.MemoryItem, owner: str, scope: Scope) -> None:
    shape = _extents(item.shape, scope)
    if len(item.shape) != 2:
        scope.error(item.span, f"the memory `{item.name.text}` must be a matrix", f"`{item.name.text}[rows, columns]`")
    if shape is None or len(item.shape) != 2:
        scope.failed.add(item.name.text)
    else:
        memory = Memory(item.name.text, shape, _initial(item.initial, scope), span=item.span)
        scope.memories.setdefault(memory.name, memory)


def _initial(written: syntax.Name | syntax.Number | None, scope: Scope) -> Initial:
    match written:
        case None | syntax.Number(value=0):
            return "zero"
        case syntax.Name(text="orthonormal"):
            return "orthonormal"
        case syntax.Name(text="uniform"):
            return "uniform"
        case _:
            hint = "`0`, `orthonormal` or `uniform`; any other start is passed to `op` as `initial_state`"
            scope.error(written.span, "a memory cannot start from this", hint)
            return "zero"


def _functions(tree: syntax.Layer, scope: Scope) -> None:
    functions = [c for c in tree.clauses if isinstance(c, syntax.Function)]
    for fn in functions:
        scope.functions.setdefault(fn.name.text, fn)
        local = [*fn.args, *((fn.index,) if fn.index else ())]
        for at, name in enumerate(local):
            if why := refusal(name.text):
                scope.error(name.span, f"nothing may be named `{name.text}`: {why}")
            if name.text in {n.text for n in local[:at]}:
                scope.error(name.span, f"`{name.text}` is an argument twice")
        mentioned = {n.text for n in syntax.walk(fn.body) if isinstance(n, syntax.Name)}
        for arg in fn.args:
            if arg.text not in mentioned:
                scope.error(arg.span, f"`{fn.name.text}` never uses its argument `{arg.text}`")
    _find_cycles(scope)
    for fn in functions:
        if fn.index is not None:
            checked = None if fn.name.text in scope.failed else vector_fn(fn, scope)
            if checked is None:
                scope.failed.add(fn.name.text)
            else:
                scope.vector_fns.setdefault(fn.name.text, checked)


def unused(tree: syntax.Layer) -> list[Diagnostic]:
    """What a layer declares and nothing takes, in the source's order. That is no error: the layer means what it means,
    and callers give such a tensor in vain."""
    kinds: dict[syntax.Name, str] = {}
    for clause in tree.clauses:
        match clause:
            case syntax.Tensors(kind=kind, items=items):
                kinds |= {item.name: kind for item in items}
            case syntax.Constants(items=constants):
                kinds |= {item.name: "constant" for item in constants}
            case syntax.Let() | syntax.Function():
                kinds[clause.name] = type(clause).__name__.lower()
    taken = {n.text for n in syntax.walk(tree) if isinstance(n, syntax.Name) and n not in kinds}
    return [
        Diagnostic(name.span, f"nothing uses the {kind} `{name.text}`", "use it in a clause, or remove it")
        for name, kind in kinds.items()
        if name.text not in taken
    ]


def _find_cycles(scope: Scope) -> None:
    calls = {
        name: {n.text for n in syntax.walk(fn.body) if isinstance(n, syntax.Name)} & scope.functions.keys()
        for name, fn in scope.functions.items()
    }
    for name, fn in scope.functions.items():
        reached: set[str] = set()
        ahead = set(calls[name])
        while ahead:
            reached |= ahead
            ahead = {callee for caller in ahead for callee in calls[caller]} - reached
        if name in reached:
            scope.failed.add(name)
            scope.error(fn.name.span, f"`{name}` calls itself", "functions are unfolded, so they may not recur")


def _lets(tree: syntax.Layer, scope: Scope) -> tuple[tuple[str, Expr], ...]:
    lets: list[tuple[str, Expr]] = []
    for clause in tree.clauses:
        if isinstance(clause, syntax.Let):
            name, value = clause.name.text, Reader(scope, Place("a `let`")).read(clause.value)
            if value is not None:
                check_let(value, scope)
            if value is not None and len(value.shape) > 1:
                scope.error(clause.value.span, "a `let` holds a scalar or a vector, and this is a matrix")
            elif value is not None:
                scope.lets.setdefault(name, value.shape)
                lets.append((name, value))
                continue
            scope.failed.add(name)
    return tuple(lets)
