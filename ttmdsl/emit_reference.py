"""The reference section of a generated module: the declared loss through autodiff, token by token.

Input: a `LayerSpec`. Output: source text that defines `_reference(x, state)` and its helpers, all named `_ref_*`.
Does not derive anything: the gradient is `torch.func.grad` of the loss as it stands in the spec. It shares no code with
the derived backends, which are tested against it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ttmdsl import expr as ex
from ttmdsl import spec as s
from ttmdsl.errors import NOWHERE, Span
from ttmdsl.past import history, past_name, roots
from ttmdsl.print_reference import Axes, Printer, delayed, feature_size, fn_params, to_shape
from ttmdsl.state import reads_transposed
from ttmdsl.templates import render
from ttmdsl.walk_expr import walk


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    arguments: tuple[str, ...]
    comment: str
    definitions: tuple[tuple[str, str], ...]
    value: str


def _line(spec: s.LayerSpec, span: Span, default: str) -> str:
    """The source line at a span, fit for a comment."""
    lines = spec.source.splitlines()
    text = lines[span.line - 1].partition("#")[0] if 1 <= span.line <= len(lines) else default
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def vector_function(spec: s.LayerSpec, fn: ex.VectorFn) -> _Function:
    printer = Printer(spec, "")
    printer.like = printer.local(fn.arg)
    params = tuple(printer.local(name) for name in fn_params(fn))
    value = printer.tensor(printer.comp(fn.body, (fn.index,)))
    full = value.axes == (0,) and re.search(rf"\b{printer.like}\b", value.text)
    text = value.text if full else f"{value.text} + torch.zeros_like({printer.like})"
    comment = _line(spec, fn.span, f"{fn.name}({fn.arg})[{fn.index}]")
    return _Function(f"_ref_fn_{fn.name}", (printer.like, *params), comment, tuple(printer.definitions), text)


def clause_function(
    spec: s.LayerSpec, name: str, exprs: ex.Expr | Mapping[str, tuple[ex.Expr, Axes]], comment: str
) -> _Function:
    """A function of (memory, x): one value, or a dict with one for each memory, shaped like that memory."""
    printer = Printer(spec, f'x["{spec.tensors[0].name}"]', ("memory", "x"))
    if isinstance(exprs, Mapping):
        values = {key: to_shape(printer.expr(e), shape).text for key, (e, shape) in exprs.items()}
        value = "{" + ", ".join(f'"{key}": {text}' for key, text in values.items()) + "}"
    else:
        value = printer.tensor(printer.expr(exprs)).text
    spans = [e.span for e, _ in exprs.values()] if isinstance(exprs, Mapping) else [exprs.span]
    span = min(spans, key=lambda span: (span == NOWHERE, span.line))
    return _Function(name, ("memory", "x"), _line(spec, span, comment), tuple(printer.definitions), value)


def _pass_functions(spec: s.LayerSpec, p: s.Pass) -> Iterable[_Function]:
    def each(expr: ex.Expr) -> dict[str, tuple[ex.Expr, Axes]]:
        return {m.name: (expr, m.shape) for m in p.memories}

    def mapped(exprs: dict[str, ex.Expr]) -> dict[str, tuple[ex.Expr, Axes]]:
        return {m.name: (exprs.get(m.name, ex.Ref(m.name, "memory", m.shape)), m.shape) for m in p.memories}

    def clause(role: str, exprs: ex.Expr | Mapping[str, tuple[ex.Expr, Axes]]) -> _Function:
        return clause_function(spec, f"_ref_{role}_{p.name}", exprs, role)

    yield clause("bias", p.bias)
    if p.window and p.window.weight is not None:
        yield clause("weight", p.window.weight)
    yield clause("retention", mapped(p.retention))
    if p.optimizer.ridge is None:
        yield clause("rate", each(p.optimizer.rate))
    else:
        yield clause("ridge", p.optimizer.ridge)
    if p.optimizer.decay is not None:
        yield clause("decay", each(p.optimizer.decay))
    if p.project:
        yield clause("project", mapped(p.project))
    yield clause("read", p.read)


def token_entries(spec: s.LayerSpec) -> list[tuple[str, str]]:
    """The dict of one token's tensors by the spec's names, and the sizes of dims that only memories have."""
    token = []
    for tensor in spec.tensors:
        text = f'x["{tensor.keyword}"]' + ("" if tensor.kind == "param" else "[:, t]")
        token.append((tensor.name, f"{text}.exp()" if tensor.range == "decay" else text))
    seen = {dim for tensor in spec.tensors for dim in tensor.shape} | set(spec.features) | set(spec.consts)
    sizes = {f"|{dim}|": _memory_size(spec, dim) for m in spec.memories for dim in m.shape if dim not in seen}
    return token + list(sizes.items())


def _memory_size(spec: s.LayerSpec, dim: str) -> str:
    memory = next(m for m in spec.memories if dim in m.shape)
    return f'state["{memory.name}"].shape[{memory.shape.index(dim) - 2}]'


def _out_size(spec: s.LayerSpec, dim: str) -> str:
    for tensor in spec.tensors:
        if dim in tensor.shape:
            return f'x["{tensor.keyword}"].shape[{tensor.shape.index(dim) - len(tensor.shape)}]'
    if dim in spec.features:
        return feature_size(spec.features[dim], _out_size(spec, spec.features[dim].base))
    return _memory_size(spec, dim)


def _past(spec: s.LayerSpec) -> list[tuple[s.Tensor, int]]:
    return [(spec.tensor(name), depth) for name, depth in history(spec).items()]


def _nodes(spec: s.LayerSpec) -> Iterable[ex.Expr]:
    """Every expression in the layer."""
    for root in roots(spec):
        yield from walk(root)


def _stepped(spec: s.LayerSpec, p: s.Pass) -> list[str]:
    """Tensors with an entry for each gradient step of a token."""
    dim = p.optimizer.step_dim
    return [t.name for t in spec.tensors if dim and t.kind != "param" and t.shape[:1] == (dim,)]


def emit_reference(spec: s.LayerSpec) -> str:
    """The section's source text; its surroundings import torch and call `_reference(x, state)`."""
    functions = [vector_function(spec, fn) for fn in spec.fns.values()]
    functions += [clause_function(spec, f"_ref_let_{name}", expr, name) for name, expr in spec.lets]
    functions += [clause_function(spec, f"_ref_past_{i}", expr, "") for i, expr in enumerate(delayed(spec))]
    functions += [f for p in spec.passes for f in _pass_functions(spec, p)]
    passes: list[dict[str, Any]] = [
        {
            "name": p.name,
            "memories": "(" + " ".join(f'"{m.name}",' for m in p.memories) + ")",
            "batch": p.optimizer.batch,
            "retained": p.optimizer.at == "retained",
            "kind": p.optimizer.kind,
            "newton_schulz": p.optimizer.newton_schulz,
            "first": p.memories[0].name,
            "turn": ".mT" if reads_transposed(p, p.memories[0]) else "",
            "projects": bool(p.project),
            "window": p.window.size if p.window else 0,
            "weighted": p.window is not None and p.window.weight is not None,
            "steps": p.optimizer.per_token if p.optimizer.step_dim or p.optimizer.per_token > 1 else 0,
            "stepped": _stepped(spec, p),
        }
        for p in spec.passes
    ]
    return render(
        "reference.py.j2",
        functions=functions,
        past=[(t.name, t.keyword, past_name(t), depth, t.range == "decay") for t, depth in _past(spec)],
        windows=any(p.window for p in spec.passes),
        delays=any(isinstance(n, ex.Delay) for n in _nodes(spec)),
        features={n.kind for n in _nodes(spec) if isinstance(n, ex.Features)},
        power=any("_ref_power(" in text for f in functions for text in (f.value, *(d[1] for d in f.definitions))),
        stops=any(isinstance(node, ex.Stop) for p in spec.passes for node in walk(p.bias)),
        leader=next(t.keyword for t in spec.tensors if t.kind != "param"),
        token=token_entries(spec),
        passes=passes,
        kinds={p.optimizer.kind for p in spec.passes},
        period=math.lcm(*(p.optimizer.batch for p in spec.passes)),
        out=[_out_size(spec, dim) for dim in spec.passes[-1].read.shape],
    )
