"""The PyTorch backend of a generated module: any device and dtype, batched over all units of a segment.

Input: `Lowered`. Output: the section's source text. One function forward and one backward for each form, split by
dependence on the carry: what does not depend on it is computed for all units at once, before the scan; what the next
carry does not depend on, after it.

Values have leading axes [B, H, N] outside the scan (N units: chunks, or tokens) and [B H] inside.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from typing import NamedTuple

from ttmdsl.collect import collect
from ttmdsl.ir import DECAYED, TOKEN_AXES, Node, Program, Role, constant, depends_on, reachable, tied
from ttmdsl.lower import Form, Lowered
from ttmdsl.lower_expr import matrix_axes
from ttmdsl.lower_optimizer import NEWTON_SCHULZ
from ttmdsl.past import SEEN, SEEN_KEPT
from ttmdsl.print_torch import LOCALS, NORMS, ScanPrinter, TorchPrinter
from ttmdsl.printer import Names, strip, under
from ttmdsl.spec import LayerSpec
from ttmdsl.state import state_shapes
from ttmdsl.templates import render

BY_TOKEN = frozenset({"norm_scan", "norm_adjoint"})  # dear: the backward function takes it from the forward one

RELEASED = 8  # values that a function lets go of together


class _Way(NamedTuple):
    """A direction in which a scan walks, and what its values are called."""

    role: Role
    source: str
    prefix: str
    reverse: bool


FORWARD = _Way("carry", "carry", "", False)
BACKWARD = _Way("cocarry", "d_carry", "d_", True)


class _Function:
    """Prints one function of a form: the lines of its body, phase by phase."""

    def __init__(self, name: str, form: Form, program: Program, spec: LayerSpec) -> None:
        self.name, self.form, self.program = name, form, program
        self.entries = spec.entries
        self.keeps = name != "token"
        self.names = Names(LOCALS | set(keyword.kwlist))
        self.printer = TorchPrinter(program.builder.fork(), self.names)
        self.body: list[str] = []

    def forward(self) -> dict[str, object]:
        """What the template needs for y, the carries after the last unit and those at every unit's start that the
        backward function wants: of chunks; single tokens have too many, and it goes through them once more."""
        y, carries = self.program.outputs["y"], self.program.ends()
        self.unpack(self.program.nodes)
        handed = self.handed(self.form.backward.outputs.values()) if self.keeps else []
        ends = self.scan(self.program, FORWARD, carries, [y, *handed])
        self.body += ["# for all units at once", *self.printer.emit([y])]
        stacks = {self._label(n): self.printer.text[n] for n in handed}
        self.body.append(f"end = {_dict(ends)}")
        self.body.append(f"return {self.printer.text[y]}, end, {_dict(stacks)}")
        return {"name": f"_{self.name}_forward", "args": "x, carry, unit", "body": _released(self.body)}

    def backward(self) -> dict[str, object]:
        """What the template needs for the gradients of the tensors and of the carries before the first unit."""
        grads = {k[2:]: v for k, v in self.program.outputs.items() if k.startswith("d:")}
        handed = {n.name for n in self.form.forward.carries()}
        replayed = {k: v for k, v in self.form.forward.ends().items() if k in handed}
        needed = reachable(self.program.outputs.values())
        self.unpack(needed if self.keeps else reachable([*replayed.values(), *self.program.outputs.values()]))
        if self.keeps:
            for node in self.handed(self.program.outputs.values()):
                self.printer.text[node] = self.names.get(f"{self._label(node)}_all")
                self.body.append(f'{self.printer.text[node]} = states["{self._label(node)}"]')
        elif handed:
            self.body.append("# the states at the start of every unit, once more")
            self.scan(self.form.forward, FORWARD, replayed, self.program.outputs.values())
        ends = self.scan(self.program, BACKWARD, self.program.ends(), grads.values())
        params = {n.name for p in (self.form.forward, self.program) for n in p.leaves() if n.role == "param"}
        self.body += ["# for all units at once", *self.printer.emit(v for v in grads.values() if constant(v) is None)]
        self.body.append("grads = {")
        texts: dict[str, str] = {}
        for name, value in grads.items():
            if constant(value) is not None:
                texts[name] = f"torch.zeros_like({self.array(name)})"
            else:
                texts[name] = self.printer.text[value] + (".sum((0, 2))" if name in params else "")
        for t in dict.fromkeys(t for t, _ in self.entries.values()):
            if not texts.keys().isdisjoint(t.each):
                entries = ", ".join(texts.pop(name) for name in t.each)
                texts[t.keyword] = f"torch.stack(torch.broadcast_tensors({entries}), -1)"
        self.body += [f'    "{name}": {text},' for name, text in texts.items()]
        self.body += ["}", f"return grads, {_dict(ends)}"]
        given = "states" if self.keeps else "carry"
        return {
            "name": f"_{self.name}_backward",
            "args": f"x, {given}, unit, d_y, d_carry",
            "body": _released(self.body),
        }

    def array(self, name: str) -> str:
        """The tensor of that name, or the one that it is an entry of at that place."""
        if name not in self.entries:
            return f'x["{name}"]'
        tensor, i = self.entries[name]
        return f'x["{tensor.keyword}"][..., {i}]'

    def handed(self, roots: Iterable[Node]) -> list[Node]:
        """What the backward function takes from the forward one: states, and what runs token by token."""
        chained = tied(self.form.forward, "carry")
        return [n for n in reachable(roots) if n.role == "carry" or (n.op in BY_TOKEN and n in chained)]

    def unpack(self, nodes: Iterable[Node]) -> None:
        """Names for the tensors among the nodes, and the texts of what is always at hand."""
        text = self.printer.text
        for leaf in sorted((n for n in nodes if n.op == "leaf"), key=lambda n: n.id):
            match leaf.role:
                case "token" | "param" | "before":
                    text[leaf] = self.names.get(leaf.name)
                    self.body.append(f"{text[leaf]} = {self.array(leaf.name)}")
                case "seen":
                    text[leaf] = f'x["{SEEN}"]'
                case "live" | "last":
                    text[leaf] = f"unit.{leaf.role}"
                case "fresh":
                    text[leaf] = f"unit.fresh[{leaf.name}]"
                case "cot":
                    text[leaf] = "d_y"

    def scan(self, program: Program, way: _Way, results: dict[str, Node], later: Iterable[Node]) -> dict[str, str]:
        """The loop over units that hands the results on; before it what it needs; after it, for all units, what the
        values `later` need of the carries and of what the loop has found. Gives the names of the carries at the end."""
        later = list(later)
        carried = {n.name: n for n in program.leaves() if n.role == way.role}
        needed = under(later)
        found = reachable(results.values(), self.printer.text)
        dear = [n for n in found if n.op in BY_TOKEN and n in needed and n not in self.printer.text]
        roots = [*results.values(), *dear]
        made = collect(self.printer.builder, roots, _large(reachable(roots)) | depends_on(roots, carried.values()))
        results = {k: made.get(v, v) for k, v in results.items()}
        at_hand = {n for n in made if _kept(n, made[n])} | set(self.printer.text)
        outer = reachable(later, at_hand, self.printer.operands)
        kept = {n: made[n] for n in outer if n in at_hand and n not in self.printer.text}
        values = [*results.values(), *kept.values()]
        again = {a for n in outer if n not in at_hand for a in self.printer.operands(n)}
        inner = self._inputs(program, carried, values, again)
        variables: dict[str, str] = {}
        for name, leaf in carried.items():
            variables[name] = inner.text[leaf] = self.names.get(way.prefix + name)
            start = inner.held(f'{way.source}["{name}"]', leaf.axes)
            self.body.append(f"{variables[name]} = {start}")
        ends = {k: variables.get(k) or self.names.get(way.prefix + k) for k in results}
        step = inner.emit(v for v in values if v.op != "leaf" and constant(v) is None)
        texts = {leaf: inner.text[leaf] for leaf in carried.values() if leaf in outer}
        first = len(texts)  # states are kept as they are at a unit's start
        texts |= {n: inner.text[v] for n, v in kept.items()}
        stacks = {n: self.names.get(f"{text}_all" if text.isidentifier() else "x_all") for n, text in texts.items()}
        self.body += [f"{stack} = []" for stack in stacks.values()]
        appended = [f"{stack}.append({texts[n]})" for n, stack in stacks.items()]
        loop = [*appended[:first], *step, *appended[first:]]
        new = {k: inner.text[v] for k, v in results.items() if constant(v) is None}
        # what no unit hands on (the point, where every chunk starts a group) ends with the first unit
        for name in [k for k in variables if k not in new]:
            new[name] = self.names.get("nothing")
            self.body.append(f"{new[name]} = torch.zeros_like({variables[name]})")
        targets = variables | ends
        moved = {targets[k]: text for k, text in new.items() if text != targets[k]}
        if moved:
            loop.append(f"{', '.join(moved)} = {', '.join(map(strip, moved.values()))}")
        self.body += inner.before(loop)
        self.body.append(f"for i in {'reversed(range(unit.count))' if way.reverse else 'range(unit.count)'}:")
        self.body += [f"    {line}" for line in loop or ["pass"]]
        for node, stack in stacks.items():
            backwards = "[::-1]" if way.reverse else ""
            stacked = inner.bare(
                f"torch.stack({stack}{backwards}, 1).unflatten(0, unit.heads)", made.get(node, node).axes
            )
            self.body.append(f"{stack} = {stacked}")
            self.printer.text[node] = stack
        return {k: inner.bare(v, results[k].axes) for k, v in ends.items()}

    def _label(self, node: Node) -> str:
        """What a value is called between forward and backward: a state by its name, else as no state is called."""
        return node.name or f"{self.printer.builder.labels.get(node, node.op)}_{node.id}_kept"

    def _inputs(
        self, program: Program, carried: dict[str, Node], results: Iterable[Node], again: set[Node]
    ) -> ScanPrinter:
        """Prints what the scan needs and is free of the carries; gives a printer for the loop, with that at hand. What
        is needed again after it gets a name."""
        printer, roots = self.printer, list(results)
        found = reachable(roots, operands=printer.operands)
        bound = _large(found) | depends_on(roots, carried.values(), printer.operands)
        free = [a for n in found if n in bound for a in printer.operands(n)]
        outside = [n for n in dict.fromkeys([*free, *roots]) if n not in bound]
        outside = [n for n in outside if n.op != "size" and constant(n) is None]
        lines = printer.emit((n for n in outside if n.op != "leaf"), named=again)
        if lines:
            self.body += ["# free of the carry: for all units at once", *lines]
        return ScanPrinter(printer, outside, _varies(program, outside, printer))


def _released(body: list[str]) -> list[str]:
    """The lines of a function, and among them `del` of the values that no later line needs: what comes next takes their
    places in a CPU's caches."""
    statements: list[list[str]] = []
    for line in body:
        if line.startswith((" ", "}")):
            statements[-1].append(line)
        else:
            statements.append([line])
    where = {word: i for i, lines in enumerate(statements) for word in re.findall(r"\w+", "\n".join(lines))}
    made = [m[1] for lines in statements if (m := re.match(r"(\w+) = (?!x\[)", lines[0]))]
    ending: dict[int, list[str]] = {}
    for name in dict.fromkeys(made):
        ending.setdefault(where[name], []).append(name)
    result: list[str] = []
    dead: list[str] = []
    for i, lines in enumerate(statements):
        if len(dead) >= RELEASED or lines[0].startswith(("for ", "#")):
            result += [f"del {', '.join(dead[j : j + RELEASED])}" for j in range(0, len(dead), RELEASED)]
            dead = []
        result += lines
        dead += ending.get(i, [])
    return result


def _large(nodes: Iterable[Node]) -> set[Node]:
    """Those too large for all units at once."""
    return {n for n in nodes if len(n.axes) > 2}


def _kept(node: Node, made: Node) -> bool:
    """Whether a value of the loop, as it is made there, is worth keeping for what follows: smaller than a state."""
    over_tokens = not set(TOKEN_AXES).isdisjoint(node.axes)
    return len(node.axes) < (3 if over_tokens else 2) and not {node.op, made.op} & {"leaf", "expand", "rename"}


def _varies(program: Program, nodes: Iterable[Node], printer: TorchPrinter) -> set[Node]:
    """Nodes that have a value of their own in every unit; the others have one for all."""
    roles = {"token", "before", "seen", "cot", "carry", "cocarry", "live", "fresh"}
    return depends_on(nodes, [n for n in program.leaves() if n.role in roles], printer.operands)


def _dict(items: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{k}": {v}' for k, v in items.items()) + "}"


def emit_torch(lowered: Lowered) -> str:
    """The section: helpers, the functions of each form, the autograd function and `_torch(x, state)`."""
    spec = lowered.rule.spec
    forms = {"token": lowered.token}
    if lowered.chunk is not None:
        forms["chunk"] = lowered.chunk
    if lowered.resumed is not None:
        forms["resumed"] = lowered.resumed
    functions = []
    for name, form in forms.items():
        functions += [
            _Function(name, form, form.forward, spec).forward(),
            _Function(name, form, form.backward, spec).backward(),
        ]
    ops = {n.op for f in forms.values() for p in (f.forward, f.backward) for n in p.nodes}
    per_channel = bool(ops & DECAYED)
    dims, shapes = {d: _where(spec, d) for d in spec.dims}, state_shapes(spec)
    return render(
        "torch.py.j2",
        functions=functions,
        forms=list(forms),
        helpers=sorted(ops & (DECAYED | NORMS | {"log2", "shift", "tri_inv", "newton_schulz"})),
        newton_schulz=NEWTON_SCHULZ,
        per_channel=per_channel,
        chunk=lowered.whole_tokens(16 if per_channel else 64),
        batch=lowered.batch,
        batches=lowered.batches,
        params=[t.keyword for t in spec.tensors if t.kind == "param"],
        bands=lowered.prelude.bands,
        micro=lowered.prelude.micro,
        apart=lowered.apart,
        seen=SEEN,
        seen_kept=SEEN_KEPT,
        d_out=spec.passes[-1].read.shape[0],
        dims=dims,
        flipped=sorted(c.name for c in lowered.token.forward.carries() if c.axes != matrix_axes(shapes[c.name])),
    )


def _where(spec: LayerSpec, dim: str) -> tuple[str, str, int]:
    """Where a dim's size can be read: in `x` or `state`, under which key, at which axis from the end."""
    for m in spec.memories:
        if dim in m.shape:
            return "state", m.name, m.shape.index(dim) - len(m.shape)
    for t in spec.tensors:
        if dim in t.shape:
            return "x", t.keyword, t.shape.index(dim) - len(t.shape)
    raise AssertionError(f"no tensor has the dim {dim}")
