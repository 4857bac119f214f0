"""The sections of a layer over feature maps: the reference, the torch and the Triton backend, and the state's layout.

Input: `LoweredKernel`. Output: source text, as emit_module.py frames it. The per-token arithmetic comes from the IR's
printer; what the backends do with it is in codegen/kernel_*.j2. Derives nothing, and knows no layer.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from functools import partial

from ttmdsl import emit_reference as reference
from ttmdsl import expr as ex
from ttmdsl import spec as s
from ttmdsl.ir import Node, Program, constant
from ttmdsl.kernel_form import READ, KernelForm, LoweredKernel
from ttmdsl.names import snake_case
from ttmdsl.print_torch import LOCALS, TorchPrinter
from ttmdsl.printer import Names
from ttmdsl.templates import literal, render
from ttmdsl.tuning import EVERYWHERE, NOTHING, Tables, tuned_table

_LOCALS = LOCALS | {
    *("state", "lengths", "core", "read", "solve", "like", "T", "device", "wide", "scale", "query", "key", "value"),
    *("rate", "weight", "log_decay", "slope", "spare", "live", "past", "L", "keys", "out", "F", "length"),
}


class _Printer(TorchPrinter):
    """Prints per-token values with leading axes [N, T, H]; sizes are read off the tensors."""

    def __init__(self, program: Program, sizes: dict[str, str]) -> None:
        super().__init__(program.builder, Names(_LOCALS | set(keyword.kwlist)))
        self.sizes = sizes

    def expression(self, node: Node) -> str:
        return self.sizes[str(node.attr[0])] if node.op == "size" else super().expression(node)


@dataclass(frozen=True)
class _Text:
    """One pass as the templates see it: facts, and texts of values with the lines that they need."""

    name: str
    memory: str
    scale: str
    key_dim: str
    value_dim: str
    key_size: str
    value_size: str
    terms: list[str]
    values: dict[str, str]
    readout: list[str]
    y: str
    additive: bool
    normalized: bool
    decays: bool
    window: int
    last: int
    batch: int
    retained: bool

    @property
    def weighs(self) -> bool:
        """Whether a write of this layer may count other than once."""
        return self.additive and (self.window > 1 or bool(self.weight) or self.rate != "1.0")

    def __getattr__(self, name: str) -> str:
        """Text of a per-token value: query, key, value, slope, rate, weight or log_decay; empty if it has none."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self.values.get(name, "1.0" if name == "rate" else "")


def kernel_state(lowered: LoweredKernel) -> dict[str, ex.Shape]:
    """Every entry of the state and its axes after [N, H]; L is the number of tokens held, and it grows."""
    state: dict[str, ex.Shape] = {}
    for f in lowered.forms:
        name, key, value = f.memory.name, f.key_dim, f.value_dim
        state[f"{name}_keys"] = ("L", key)
        state[f"{name}_values"] = ("L", value)
        if f.additive:
            state[f"{name}_weights"] = ("L",)
            continue
        if f.batch > 1:
            state[f"{name}_point"] = ("L", value)
        if f.window > 1:
            state[f"{name}_targets"] = (str(f.window - 1), value)
            state[f"{name}_slopes"] = (str(f.window - 1),)
    state["tokens"] = ()
    if lowered.batch > 1:
        state["position"] = ()
    return state


def kernel_sections(lowered: LoweredKernel, tables: Tables = NOTHING) -> dict[str, str]:
    """The source text of each backend, with what the tables hold for its kernels."""
    spec = lowered.rule.spec
    sizes = _sizes(spec)
    needs = {
        "decays": any(f.decays for f in lowered.forms),
        "averages": any(f.normalized for f in lowered.forms),
        "weighs": any(f.additive for f in lowered.forms),
        "evicts": any(f.last for f in lowered.forms),
        "solves": any(not f.additive for f in lowered.forms),
    }
    # the kernels' text follows from these words alone; how long one takes also from whether rows have several writes
    words = [name for name, needed in needs.items() if needed] + ["groups"] * (lowered.batch > 1)
    words += ["several"] * any(f.additive and f.window > 1 for f in lowered.forms)
    kernels = ["read", "queries", "rows", *(["solve", "adjoint"] if needs["solves"] else [])]
    signatures = {f"_{name}_kernel": f"pairs {name}: {' '.join(words)}" for name in kernels}
    common: dict[str, object] = {
        "forms": [_text(spec, f, sizes) for f in lowered.forms],
        "leader": next(t.keyword for t in spec.tensors if t.kind != "param"),
        "batch": lowered.batch,
    }
    programs = [p for f in lowered.forms for p in (f.terms, f.readout)]
    logarithms = any(n.op == "log2" for p in programs for n in p.nodes)
    return {
        "reference": _reference(lowered, sizes),
        "torch": render("kernel_torch.py.j2", **common, logarithms=logarithms),
        "triton": render(
            "kernel_triton.py.j2",
            layer=snake_case(spec.name),
            **common,
            **needs,
            signatures=signatures,
            tuned=tables.kernels(signatures),
            tuned_table=tuned_table,
            everywhere=EVERYWHERE,
            kinds=partial(_kinds, additive=lowered.forms[-1].additive),
        ),
    }


def _kinds(names: list[str], additive: bool) -> str:
    """What a kernel's arguments hold, by their names, as Python source."""
    inputs = {"q", "k", "d_q", "d_k"} | ({"u", "d_y", "y", "d_u"} if additive else set())
    own = {"aq": "float64", "a": "float64", "turns": "int32"}
    kinds = {f"{n}_ptr": "input" if n in inputs else own.get(n, "float32") for n in names}
    counts = dict.fromkeys(("Q", "R", "base", "H", "room", "share"), "count")
    return literal(kinds | {"offset_ptr": "int64", "scale": "number"} | counts)


# ---- per-token values ---------------------------------------------------------------------------------------------


def _sizes(spec: s.LayerSpec) -> dict[str, str]:
    """Python text for every dim's size: a constant, or where in the tensors it can be read."""
    sizes: dict[str, str] = {}
    for t in spec.tensors:
        for i, dim in enumerate(t.shape):
            sizes.setdefault(dim, f'x["{t.keyword}"].shape[{i - len(t.shape)}]')
    for m in spec.memories:
        if m.shape[0] not in sizes:
            sizes[m.shape[0]] = f'state["{m.name}_values"].shape[-1]'
    return sizes | {name: str(int(spec.consts[name])) for name in spec.consts if name in sizes}


def _text(spec: s.LayerSpec, f: KernelForm, sizes: dict[str, str]) -> _Text:
    printer = _Printer(f.terms, sizes)
    outputs = f.terms.outputs
    terms = _load(printer, f.terms, bare={n for n in outputs.values() if n.op == "leaf"})
    terms += printer.emit(n for n in outputs.values() if n.op != "leaf" and constant(n) is None)
    values = {name: _value(printer, node) for name, node in outputs.items()}
    around = _Printer(f.readout, sizes)
    y = f.readout.outputs["y"]
    readout = _load(around, f.readout, bare={y})
    readout += around.emit([y]) if y.op != "leaf" and constant(y) is None else []
    return _Text(
        name=f.name,
        memory=f.memory.name,
        scale=_number(f.scale, sizes),
        key_dim=f.key_dim,
        value_dim=f.value_dim,
        key_size=sizes[f.key_dim],
        value_size=sizes[f.value_dim],
        terms=terms,
        values=values,
        readout=readout,
        y=_value(around, y),
        additive=f.additive,
        normalized=f.normalized,
        decays=f.decays,
        window=f.window,
        last=f.last or 0,
        batch=1 if f.additive else f.batch,
        retained=f.retained,
    )


def _load(printer: _Printer, program: Program, bare: set[Node]) -> list[str]:
    """Names for the leaves: those that arithmetic is done with at least in float32, the others as they are."""
    lines = []
    inner = {a for n in program.nodes for a in n.args}
    for leaf in program.leaves():
        source = "out" if leaf.name == READ else f'x["{leaf.name}"]'
        if leaf in bare and leaf not in inner:
            printer.text[leaf] = source
        else:
            printer.text[leaf] = printer.names.get(leaf.name.replace("__", "_") + "_wide")
            lines.append(f"{printer.text[leaf]} = {source}.to(wide)")
    return lines


def _value(printer: _Printer, node: Node) -> str:
    number = constant(node)
    return printer.text[node] if number is None else repr(number)


def _number(e: ex.Expr, sizes: dict[str, str]) -> str:
    """A number of literals, constants and sizes as Python text."""
    match e:
        case ex.Num(value=value) | ex.Const(value=value):
            return repr(float(value))
        case ex.Size(dim=dim):
            return sizes[dim]
        case ex.Map(fn=fn, x=x):
            return f"{'abs' if fn == 'abs' else f'math.{fn}'}({_number(x, sizes)})"
        case ex.Binary(op=op, a=a, b=b):
            sign = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}.get(op)
            left, right = _number(a, sizes), _number(b, sizes)
            return f"({left} {sign} {right})" if sign else f"{op}({left}, {right})"
        case _:
            raise AssertionError(f"the checker has seen that the scale is a number, not {e!r}")


# ---- the reference ------------------------------------------------------------------------------------------------


def _reference(lowered: LoweredKernel, sizes: dict[str, str]) -> str:
    """The declared loss token by token, on an explicit list of keys and coefficients."""
    spec = lowered.rule.spec
    functions = [reference.vector_function(spec, fn) for fn in spec.fns.values()]
    functions += [reference.clause_function(spec, f"_ref_let_{name}", e, name) for name, e in spec.lets]
    passes = []
    for p, f in zip(spec.passes, lowered.forms, strict=True):
        clauses: dict[str, ex.Expr] = {"bias": p.bias, "rate": p.optimizer.rate, "read": p.read}
        clauses["retention"] = p.retention[f.memory.name]
        if p.window and p.window.weight is not None:
            clauses["weight"] = p.window.weight
        functions += [
            reference.clause_function(spec, f"_ref_{role}_{p.name}", clause, role) for role, clause in clauses.items()
        ]
        passes.append(
            {
                "name": p.name,
                "memory": f.memory.name,
                "scale": _number(f.scale, sizes),
                "size": sizes[f.value_dim],
                "additive": f.additive,
                "window": f.window,
                "weighted": "weight" in clauses,
                "last": f.last or 0,
                "batch": 1 if f.additive else f.batch,
                "retained": f.retained,
            }
        )
    alone = set(sizes) - {dim for t in spec.tensors for dim in t.shape}  # dims that only memories have
    leader = next(t for t in spec.tensors if t.kind != "param")
    texts = [text for function in functions for text in (function.value, *(d[1] for d in function.definitions))]
    return render(
        "kernel_reference.py.j2",
        functions=functions,
        power=any("_ref_power(" in text for text in texts),
        first=leader.name,
        leader=leader.keyword,
        token=[(name, text) for name, text in reference.token_entries(spec) if not name.startswith("|")]
        + [(f"|{dim}|", text) for dim, text in sizes.items() if dim in alone],
        passes=passes,
        batch=lowered.batch,
        out=[sizes[dim] for dim in spec.passes[-1].read.shape],
    )
