"""The generated module: the surface of `op`, `step` and `Layer` framed around the backends' sections.

Input: a `LayerSpec`, the lines of its derived update, and the source text of its sections: "reference" defines
`_reference(x, state)`, "torch" `_torch(x, state)`, "triton" `_triton(x, state, cu_seqlens, resumed, final)`, and, which
may be empty, "prelude" `_prelude(x, state, bounds, dtype, fresh, wanted, backend)` and "past", the kernel by which a
step finds that. Output: one file that needs torch and triton alone.
Does not print arithmetic, and decides nothing about schedules.

A spec is untrusted text. Its names get here as identifiers, its numbers as numbers; its source gets into a string by
`repr`, and into comments line by line with everything unprintable escaped.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
import symtable
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass

from ttmdsl.errors import CheckError, Diagnostic
from ttmdsl.expr import Apply, Expr, MatVec, Ref, Shape
from ttmdsl.names import refusal, snake_case
from ttmdsl.past import SEEN_KEPT, past_axes
from ttmdsl.prelude import FIRST
from ttmdsl.print_reference import feature_size
from ttmdsl.spec import LayerSpec, Memory, Tensor
from ttmdsl.state import ENDINGS, inverse_name, state_shapes
from ttmdsl.templates import literal, render
from ttmdsl.version import TORCH, TRITON, VERSION
from ttmdsl.walk_expr import walk

_WIDTH = 120
# What a spec's names cannot be beside those that `names` refuses: an axis, an entry of the state, and what the
# templates use where a name of the spec is in reach.
_TAKEN = frozenset(["N", "position", "tokens", "F", "State", "conv_size", "norm_eps"])
_SQUASH = {"decay": "logsigmoid", "unit": "sigmoid", "positive": "softplus", "real": ""}
_AVERAGES = ("normalized", "softmax")  # functions of a read whose result is an average over what is held
_NOTES = {
    "decay": "logarithm of a decay in (0, 1], so at most 0",
    "unit": "meant to lie in (0, 1)",
    "positive": "positive",
    "real": "",
}


def emit_module(
    spec: LayerSpec,
    update: Iterable[str],
    sections: Mapping[str, str],
    state: Mapping[str, Shape] | None = None,
    bands: bool = False,
    micro: int = 0,
    walked: str = "",
) -> str:
    """The module's source text. `update` are the lines of the derived update, shown in its header.

    `state` is the layout of a state that grows, one of keys and coefficients in place of matrices. `bands`: the prelude
    has other tensors for chunks than for single tokens. `micro`: how many micro-tokens a token is in chunks, if more
    than one. `walked`: the dim of features over whose blocks kernels walk.
    """
    _verify_names(spec)
    matrices = () if state else spec.memories
    tensors = [_tensor(spec, t) for kind in ("input", "gate", "param") for t in spec.tensors if t.kind == kind]
    alias = snake_case(spec.name)
    context: dict[str, object] = {
        "banner": _banner,
        "literal": literal,
        "table": _table,
        "layout": _layout,
        "header": _header(spec, update),
        "layer": spec.name,
        "source": [literal(line) for line in spec.source.splitlines(keepends=True)] or ['""'],
        "tensors": tensors,
        "inputs": {t.keyword: t.shape for t in tensors if t.kind == "input"},
        "gates": {t.keyword: t.shape for t in tensors if t.kind == "gate"},
        "params": {t.keyword: t.shape for t in tensors if t.kind == "param"},
        "ranges": {t.keyword: t.range for t in tensors},
        "memory": {m.name: m.shape for m in matrices},
        "state": state or state_shapes(spec) | past_axes(spec),
        "grows": state is not None,
        "ridges": {inverse_name(m.name): p.name for p in spec.passes if p.optimizer.ridge for m in p.memories},
        "features": {name: (f.base, f.kind, f.order) for name, f in spec.features.items()},
        "held": [name for name in spec.features if name != walked],
        "feature_size": lambda name, base: feature_size(spec.features[name], base),
        "prelude": sections.get("prelude", "").strip("\n"),
        "past": sections.get("past", "").strip("\n"),
        "micro_kernels": sections.get("micro", "").strip("\n"),
        "bands": bands,
        "micro": micro,
        "micro_mark": FIRST,
        "seen_kept": SEEN_KEPT,
        "steps": max(p.optimizer.per_token for p in spec.passes),
        "initial": {m.name: m.initial for m in matrices},
        "consts": spec.consts,
        "output": spec.passes[-1].read.shape,
        "output_size": _product([_size(spec, axis) for axis in spec.passes[-1].read.shape]),
        "sections": {name: text.strip("\n") for name, text in sections.items()},
        "dims": [_Dim(dim, _default(spec, dim)) for dim in spec.dims if dim not in spec.consts],
        "learned": _learned(spec),
        "width": max(len(name) for name in [t.keyword for t in tensors] + [m.name for m in spec.memories]),
        "arguments": lambda lead: [_argument(t, lead) for t in tensors],
    }

    def module(alias: str) -> str:
        exports = [*_EXPORTS, *sorted({"op", "step", alias})]
        return render("module.py.j2", **context, alias=alias, exports=exports).rstrip("\n") + "\n"

    text = module(alias)
    while _clashes(text, alias):
        alias += "_"
        text = module(alias)
    return text


_EXPORTS = (
    "CONSTS",
    "FEATURES",
    "GATES",
    "INITIAL",
    "INPUTS",
    "MEMORY",
    "PARAMS",
    "RANGES",
    "SPEC",
    "STATE",
    "Layer",
)


# ---- what the templates see of a spec -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dim:
    """A keyword of Layer."""

    name: str
    default: str


@dataclass(frozen=True, slots=True)
class _Learned:
    """A memory whose initial value Layer learns."""

    name: str
    start: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A keyword of op, and where Layer has it from.

    role: of an input key (convolved, unit length), score (convolved), unit (unit length) or plain; of a gate selector
    (convolved) or gate; param.
    """

    keyword: str
    kind: str
    shape: Shape
    range: str
    role: str
    role_title: str
    sizes: list[str]
    start: float
    activation: str

    @property
    def size(self) -> str:
        return _product(self.sizes)

    @property
    def convolved(self) -> bool:
        return self.role in ("key", "score", "selector")

    @property
    def of_unit_length(self) -> bool:
        return self.role in ("key", "unit")


def _tensor(spec: LayerSpec, t: Tensor) -> _Tensor:
    """The papers' blocks: q and k through a short convolution to unit length; gates start where learning is stable."""
    role = _role(spec, t)
    rate = [p.optimizer for p in spec.passes if t.name in _names(spec, p.optimizer.rate)]
    momentum = any(t.name in _names(spec, p.optimizer.decay) for p in spec.passes)
    weighed = [p.window.size for p in spec.passes if p.window and t.name in _names(spec, p.window.weight)]
    bounded = t.range == "real" and t.kind == "gate" and (rate or weighed)
    squash = "sigmoid" if bounded else _SQUASH[t.range]
    title = {
        "key": "projection, short convolution with SiLU, unit length",
        "score": "projection, short convolution with SiLU",
        "unit": "projection, unit length",
        "plain": "projection",
        "selector": f"projection, short convolution{', ' + squash if squash else ''}",
        "gate": f"projection{', ' + squash if squash else ''}",
        "param": f"one value for each head{', ' + squash if squash else ''}",
    }[role]
    thresholds = any(t.name in _names(spec, e) for p in spec.passes for e in p.project.values())
    if t.range == "decay":
        start = 1.0 if momentum else 4.0  # a decay of 0.73 or 0.98
    elif thresholds and t.range == "positive":  # a token takes away a hundredth of what it may write
        start = math.log(math.expm1(0.01))
    elif rate:  # one step of about 1, or 1/2, spread over the tokens that share a gradient point and over the momentum,
        # which muon makes as long as a step
        step = min(1 / (o.batch * (4 if o.kind == "momentum" else 1)) for o in rate)
        start = math.log(math.expm1(step)) if t.range == "positive" else math.log(step)
    elif weighed and bounded:  # the tokens of a window share a weight of about 1
        start = -math.log(max(weighed) - 1) if max(weighed) > 1 else 4.0
    else:
        start = {"positive": math.log(math.expm1(1)), "real": 0.0 if t.kind == "gate" else 1.0}.get(t.range, 0.0)
    sizes = [_size(spec, axis) for axis in t.shape]
    activation = "silu" if role in ("key", "score") else "" if t.kind == "input" else squash
    return _Tensor(t.keyword, t.kind, t.shape, t.range, role, title, sizes, round(start, 2) + 0.0, activation)


def _role(spec: LayerSpec, t: Tensor) -> str:
    """What a tensor is to the memory.

    A key, or a value, that the memory is multiplied by has length 1, for the gradient's slope is its square. Where the
    read is an average there is no need: it stays bounded for keys of any length, and sharpens with it.
    """
    asked = {name for p in spec.passes for e in (p.bias, p.read) for name in _asked(spec, e)}
    averaged = any(isinstance(n, Apply) and n.fn in _AVERAGES for p in spec.passes for n in walk(p.read))
    queries = {other.shape for other in spec.tensors if other.name in ("q", "k")}
    if t.kind == "param":
        return "param"
    if t.kind == "gate":
        return "selector" if t.name in asked and t.shape in queries else "gate"
    if t.name in ("q", "k") or (t.name in asked and t.shape in queries):
        return "score" if averaged else "key"
    return "unit" if t.name in asked and not averaged else "plain"


def _asked(spec: LayerSpec, e: Expr) -> set[str]:
    """Tensors that matrices are multiplied by, through lets."""
    return set().union(*(_names(spec, n.x) for n in walk(e) if isinstance(n, MatVec)))


def _learned(spec: LayerSpec) -> list[_Learned]:
    """Memories that cannot start from zeros, or that learn nothing there: orthonormal ones, products of several."""

    def start(m: Memory) -> str:
        rows, columns = (_size(spec, axis) for axis in m.shape)
        if m.initial == "orthonormal":
            return f"_orthonormal(num_heads, {rows}, {columns})"
        return f"torch.randn(num_heads, {rows}, {columns}) / math.sqrt({columns})"

    deep = {m.name for p in spec.passes if len(p.memories) > 1 for m in p.memories if m.initial == "zero"}
    return [_Learned(m.name, start(m)) for m in spec.memories if m.initial == "orthonormal" or m.name in deep]


def _default(spec: LayerSpec, dim: str) -> str:
    """Layer's size for a dim: the head's, or four times that where memories alone have it, as an MLP's inner size."""
    head = "hidden_size // num_heads"
    return head if any(dim in t.shape for t in spec.tensors) else f"4 * ({head})"


def _size(spec: LayerSpec, axis: str) -> str:
    if axis in spec.features:
        return feature_size(spec.features[axis], _size(spec, spec.features[axis].base))
    return str(int(spec.consts[axis])) if axis in spec.consts else axis


def _product(sizes: Iterable[str]) -> str:
    return " * ".join(sizes) or "1"


def _names(spec: LayerSpec, node: object) -> set[str]:
    """Tensors that an expression reads, through lets."""
    if isinstance(node, Ref):
        return _names(spec, dict(spec.lets)[node.name]) if node.kind == "let" else {node.name}
    if is_dataclass(node):
        return set().union(*(_names(spec, getattr(node, f.name)) for f in fields(node)), set())
    return set()


# ---- text ---------------------------------------------------------------------------------------------------


def _header(spec: LayerSpec, update: Iterable[str]) -> list[str]:
    """The first comment. Nothing of the spec's text may be in the first two lines, where Python reads an encoding."""
    values = ", ".join(f"{name} = {literal(value)}" for name, value in spec.consts.items())
    return [
        f"{spec.name}, generated by ttmdsl {VERSION}.",
        f"Needs torch >= {TORCH} and triton >= {TRITON}, nothing else: read it, vendor it, edit it.",
        "",
        "The layer as it was declared:",
        "",
        *(comment("    " + line) for line in spec.source.strip("\n").split("\n")),
        "",
        *([f"Constants: {values}.", ""] if spec.consts else []),
        "The update that was derived from it:",
        "",
        *(comment("    " + line) for text in update for line in text.split("\n")),
    ]


def comment(line: str) -> str:
    """A line fit for a comment: what could end the line, or not be seen, is escaped."""
    line = line.replace("\t", "    ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line).rstrip()


def _banner(title: str) -> str:
    return f"# ---- {title} ".ljust(110, "-")


def _table(name: str, value: Mapping[str, object]) -> str:
    """An annotated dict, on one line where it fits."""
    others = {"CONSTS": "float", "RANGES": "str", "INITIAL": "str", "FEATURES": "tuple[str, str, int]"}
    kind = others.get(name, "tuple[str, ...]")
    text = f"{name}: dict[str, {kind}] = "
    if len(text + literal(dict(value))) <= _WIDTH:
        return text + literal(dict(value))
    return text + "{\n" + "".join(f"    {literal(k)}: {literal(v)},\n" for k, v in value.items()) + "}"


def _layout(lead: str, shape: Shape) -> str:
    return f"[{', '.join([lead, *shape])}]"


def _argument(t: _Tensor, lead: str) -> str:
    note = _NOTES[t.range]
    layout = _layout("H" if t.kind == "param" else lead, t.shape)
    return f"{t.keyword:<18}  {layout}{', ' + note if note else ''}"


# ---- names --------------------------------------------------------------------------------------------------


def _verify_names(spec: LayerSpec) -> None:
    """Refuse names that would hide what the generated file uses; most of them `check` has refused before."""
    first = spec.passes[0].span
    named = [(t.span, name) for t in spec.tensors for name in {t.name, t.keyword}]
    named += [(first, name) for name in (*spec.dims, *spec.consts)]
    named += [(m.span, m.name) for m in spec.memories]
    found = [
        Diagnostic(span, f"the name {name!r} is taken by the generated module", "choose another name")
        for span, name in named
        if refusal(name) or name in _TAKEN or name.startswith("_") or not (name.isascii() and name.isidentifier())
    ]
    found += [
        Diagnostic(m.span, f"the memory name {m.name!r} ends like an entry of the state", "choose another name")
        for m in spec.memories
        if m.name.endswith(ENDINGS)
    ]
    if not any(t.kind == "input" for t in spec.tensors):
        found.append(Diagnostic(first, "a layer needs at least one input", "declare one: input q[d]"))
    if found:
        raise CheckError(tuple(found), spec.source, spec.filename)


def _clashes(text: str, alias: str) -> bool:
    """Whether `op` under the layer's own name would replace something that the module defines or uses."""
    if keyword.iskeyword(alias) or hasattr(builtins, alias):
        return True
    text = text.removesuffix(f"{alias} = op\n")
    # what no name can stand behind; a table of a large module's names takes a third of a second
    if all(re.match(r"[\w\"'.]", text[m.start() - 1]) for m in re.finditer(rf"{alias}(?!\w)", text)):
        return False
    module = symtable.symtable(text, "module", "exec")
    tables = [module]
    for table in tables:  # the list grows
        tables += table.get_children()
    return alias in {s.get_name() for t in tables for s in t.get_symbols() if t is module or s.is_global()}
