"""The PyTorch backend of a generated module: any device and dtype, batched over all units of a segment.

Input: `Lowered`. Output: the section's source text. One function forward and one backward for each form, split by
dependence on the carry: what does not depend on it is computed for all units at once, before the scan; what the next
carry does not depend on, after it.

Values have leading axes [B, H, N] outside the scan (N units: chunks, or tokens) and [B, H] inside.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass, field

from ttmdsl.ir import Axes, Node, Program, constant, depends_on
from ttmdsl.lower import Form, Lowered
from ttmdsl.lower_token import state_axes
from ttmdsl.printer import Names, Printer, strip, under
from ttmdsl.templates import render

UNARY = {
    "exp2": "torch.exp2", "log2": "torch.log2", "sqrt": "torch.sqrt", "rsqrt": "torch.rsqrt", "tanh": "torch.tanh",
    "erf": "torch.erf", "sigmoid": "torch.sigmoid", "abs": "torch.abs", "sign": "torch.sign", "recip": "torch.reciprocal",
}  # fmt: skip
LOCALS = {"x", "carry", "unit", "torch", "math", "Tensor", "d_y", "d_carry", "i", "lower", "strict", "steps", "grads"}


def aligned(text: str, axes: Axes, target: Axes) -> str:
    """Indexing that puts a value's axes among the target's."""
    if axes == target or not target:
        return text
    return f"{text}[..., {', '.join(':' if x in axes else 'None' for x in target)}]"


class TorchPrinter(Printer):
    """Prints values with leading batch axes; `scanning` says whether the unit axis N is one of them."""

    scanning = False

    def operand(self, node: Node, target: Axes) -> str:
        """A value among the target's axes; what depends on constants and sizes alone has no axes at all."""
        if not any(n.op == "leaf" for n in under([node])):
            return self.text[node]
        return aligned(self.text[node], node.axes, target)

    def expression(self, node: Node) -> str:
        axes, args = node.axes, node.args
        ops = [self.operand(a, axes) for a in args]
        match node.op:
            case "const":
                value = float(node.value or 0.0)
                return repr(value) if value >= 0 else f"({value!r})"
            case "size":
                return f"unit.size[{node.attr[0]!r}]"
            case "add":
                if args[1].op == "neg":
                    return f"({ops[0]} - {self.operand(args[1].args[0], axes)})" if args[1].args[0] in self.text else f"({ops[0]} + {ops[1]})"
                return f"({ops[0]} + {ops[1]})"
            case "neg":
                return f"(-{ops[0]})"
            case "mul":
                return f"({ops[0]} * {ops[1]})"
            case "recip":
                return f"(1.0 / {ops[0]})"
            case "pow":
                return f"{ops[0]} ** {float(node.attr[0])!r}"  # type: ignore[arg-type]
            case "max" | "min":
                bound = {"max": "min", "min": "max"}[node.op]
                if args[1].value is not None:
                    return f"{ops[0]}.clamp({bound}={args[1].value!r})"
                return f"torch.{node.op}imum({ops[0]}, {ops[1]})"
            case "step":
                return f"({ops[0]} > 0).to({ops[0]}.dtype)"
            case "select":
                if not self.scanning:
                    return f"torch.where({aligned(self.text[args[0]], (), axes)}, {ops[1]}, {ops[2]})"
                yes, no = (
                    o if constant(a) is None else f"torch.full_like({other}, {o})"
                    for o, a, other in zip(ops[1:], args[1:], ops[:0:-1], strict=True)
                )
                return f"({yes} if {self.text[args[0]]} else {no})"
            case "expand":
                return ops[0]
            case "rename":
                source, target = map(str, node.attr)
                moved = tuple(target if a == source else a for a in args[0].axes)
                return self.text[args[0]] if moved == axes else self._permuted(self.text[args[0]], moved, axes)
            case "sum":
                return f"{self.text[args[0]]}.sum({self._dims(args[0], node.reduced)})"
            case "amax":
                return f"{self.text[args[0]]}.amax({self._dims(args[0], node.reduced)})"
            case "contract":
                return self._contract(node)
            case "mask":
                fill = float(node.attr[1])  # type: ignore[arg-type]
                return f"torch.where(unit.{node.attr[0]}, {ops[0]}, {fill if fill == 0 else '-math.inf'})"
            case "cumsum":
                dim = self._dims(args[0], (str(node.attr[0]),))
                return (
                    f"{self.text[args[0]]}.flip({dim}).cumsum({dim}).flip({dim})"
                    if node.attr[1]
                    else f"{self.text[args[0]]}.cumsum({dim})"
                )
            case "tri_inv":
                return f"_unit_lower_inverse({self.text[args[0]]})"
            case "decay_dot" | "decay_mix" | "decay_mix_t":
                return f"_{node.op}({', '.join(self.text[a] for a in args)}, unit.{node.attr[0]})"
            case _:
                return f"{UNARY[node.op]}({ops[0]})"

    def _dims(self, node: Node, axes: Axes) -> str:
        dims = [node.axes.index(x) - len(node.axes) for x in axes]
        return str(dims[0]) if len(dims) == 1 else str(tuple(dims))

    def _permuted(self, text: str, axes: Axes, target: Axes) -> str:
        assert len(axes) == 2, axes
        return f"{text}.mT"

    def _contract(self, node: Node) -> str:
        a, b = node.args
        over = node.reduced
        shared = [x for x in a.axes if x in b.axes and x not in over]
        if len(over) == 1 and not shared and len(a.axes) <= 2 and len(b.axes) <= 2 and len(a.axes) + len(b.axes) > 2:
            (k,) = over
            if len(node.axes) == 2 and node.axes[0] in b.axes:
                a, b = b, a
            if len(a.axes) == 1:
                a, b = b, a
            left = self.text[a] if a.axes[-1] == k else f"{self.text[a]}.mT"
            if len(b.axes) == 1:
                return f"({left} @ {self.text[b]}[..., None])[..., 0]"
            right = self.text[b] if b.axes[0] == k else f"{self.text[b]}.mT"
            return f"({left} @ {right})"
        union = self.builder.order((*a.axes, *b.axes))
        product = f"({aligned(self.text[a], a.axes, union)} * {aligned(self.text[b], b.axes, union)})"
        return f"{product}.sum({self._dims_of(union, over)})"

    def _dims_of(self, union: Axes, over: Axes) -> str:
        dims = [union.index(x) - len(union) for x in over]
        return str(dims[0]) if len(dims) == 1 else str(tuple(dims))


@dataclass
class _Scan:
    """A program split by its dependence on the values carried from unit to unit."""

    program: Program
    carried: dict[str, Node]  # leaves fed back, by name
    results: dict[str, Node]  # what each unit hands on, by name

    def __post_init__(self) -> None:
        self.dependent = depends_on(self.program.outputs.values(), self.carried.values())
        self.inside = [n for n in self.program.nodes() if n in self.dependent and n in under(self.results.values())]

    def inputs(self, printer: Printer) -> list[Node]:
        """Values from outside that the scan's nodes use, leaves of roles that are always at hand left out."""
        needed: dict[Node, None] = {}
        for n in [*self.inside, *self.results.values()]:
            for a in (*n.args, *([n] if n in self.results.values() else [])):
                if a not in self.dependent and a.op != "size" and constant(a) is None:
                    needed[a] = None
        return list(needed)


def _varies(program: Program) -> set[Node]:
    """Nodes that have a value of their own in every unit; the others have one for all."""
    roles = {"token", "cot", "carry", "cocarry", "live", "fresh"}
    return depends_on(program.outputs.values(), [n for n in program.leaves() if n.role in roles])


@dataclass
class FormPrinter:
    """Prints the two functions of one form."""

    name: str
    form: Form
    _end: dict[str, str] = field(default_factory=dict)

    def function(self, backward: bool) -> dict[str, object]:
        """What the template needs: leaves to unpack and the lines of each phase."""
        forward, program = self.form.forward, self.form.backward if backward else self.form.forward
        names = Names(LOCALS | set(keyword.kwlist))
        printer = TorchPrinter(program.builder, names)
        body: list[str] = []
        all_leaves = {n for p in (forward, program) for n in p.leaves()} if backward else set(forward.leaves())
        for leaf in sorted(all_leaves, key=lambda n: n.id):
            match leaf.role:
                case "token" | "param":
                    printer.text[leaf] = names.get(leaf.name)
                    body.append(f"{printer.text[leaf]} = x[{leaf.name!r}]")
                case "live" | "last" | "fresh":
                    printer.text[leaf] = f"unit.{leaf.role}"
                case "cot":
                    printer.text[leaf] = "d_y"
        if not backward:
            self._scan(printer, body, program, "carry", "carry", "", False)
            rest = {k: v for k, v in program.outputs.items() if not k.startswith("carry:")}
            body += ["# for all units at once", *printer.emit(rest.values())]
            body.append(f"return {printer.text[rest['y']]}, {self._dict('carry', forward, printer)}")
            return {"name": f"_{self.name}_forward", "args": "x, carry, unit", "body": body}
        if forward.carries():
            body.append("# the states at the start of every unit, once more")
            self._scan(printer, body, forward, "carry", "carry", "", False)
        self._scan(printer, body, program, "cocarry", "d_carry", "d_", True)
        rest = {k: v for k, v in program.outputs.items() if not k.startswith("carry:")}
        body += ["# for all units at once", *printer.emit(v for v in rest.values() if constant(v) is None)]
        body.append("grads = {")
        params = {n.name for n in program.leaves() if n.role == "param"} | {n.name for n in forward.leaves() if n.role == "param"}
        for key, value in rest.items():
            name = key[2:]
            text = printer.text.get(value, "0.0")
            if constant(value) is not None:
                text = f"torch.zeros_like(x[{name!r}])"
            elif name in params:
                text = f"{text}.sum((0, 2))"
            body.append(f"    {name!r}: {text},")
        body.append("}")
        body.append(f"return grads, {self._dict('d_carry', program, printer)}")
        return {"name": f"_{self.name}_backward", "args": "x, carry, unit, d_y, d_carry", "body": body}

    def _dict(self, source: str, program: Program, printer: Printer) -> str:
        """The carries after the scan, as a dict by name."""
        prefix = "d_" if source == "d_carry" else ""
        names = [k[6:] for k in program.outputs if k.startswith("carry:")]
        return "{" + ", ".join(f"{n!r}: {self._end[prefix + n]}" for n in names) + "}"

    def _scan(
        self, printer: TorchPrinter, body: list[str], program: Program, role: str, source: str, prefix: str, reverse: bool
    ) -> None:
        """The loop over units, and before it what it needs; after it every carry is there for all units."""
        carried = {n.name: n for n in program.leaves() if n.role == role}
        results = {k[6:]: v for k, v in program.outputs.items() if k.startswith("carry:")}
        scan = _Scan(program, carried, results)
        outside = scan.inputs(printer)
        varies = _varies(program)
        lines = printer.emit(n for n in outside if n.op != "leaf")
        if lines:
            body += ["# free of the carry: for all units at once", *lines]
        saved, per_unit = dict(printer.text), {}
        inner = TorchPrinter(printer.builder, printer.names)
        inner.scanning = True
        for n in outside:
            if n.role == "fresh":
                inner.text[n] = "unit.starts[i]"
                continue
            text = saved[n]
            if text not in per_unit:
                per_unit[text] = printer.names.get(f"{text.split('.')[-1]}_at" if text.replace(".", "_").isidentifier() else "x_at")
                body.append(f"{per_unit[text]} = {text}.unbind(2)")
            inner.text[n] = f"{per_unit[text]}[{'i' if n in varies else '0'}]"
        variables: dict[str, str] = {}
        for name, leaf in carried.items():
            variables[name] = inner.text[leaf] = printer.names.get(prefix + name)
            body.append(f"{variables[name]} = {source}[{name!r}]")
        stacks = {name: printer.names.get(f"{prefix}{name}_all") for name in carried}
        body += [f"{s} = []" for s in stacks.values()]
        ends = {name: variables.get(name) or printer.names.get(prefix + name) for name in results}
        body.append(f"for i in {'reversed(range(unit.count))' if reverse else 'range(unit.count)'}:")
        body += [f"    {stacks[name]}.append({variables[name]})" for name in carried]
        step = inner.emit(v for v in results.values() if v.op != "leaf" and constant(v) is None)
        body += [f"    {line}" for line in step]
        new = {n: (inner.text[v] if constant(v) is None else f"torch.zeros_like({variables[n]})") for n, v in results.items()}
        # a carry that no unit hands on (the point, where every chunk starts a group) ends with the first unit
        new |= {n: f"torch.zeros_like({v})" for n, v in variables.items() if n not in results}
        ends |= {n: v for n, v in variables.items() if n not in results}
        moved = {n: t for n, t in new.items() if t != ends[n]}
        if moved:
            body.append(f"    {', '.join(ends[n] for n in moved)} = {', '.join(strip(t) for t in moved.values())}")
        for name, leaf in carried.items():
            order = "[::-1]" if reverse else ""
            body.append(f"{stacks[name]} = torch.stack({stacks[name]}{order}, 2)")
            printer.text[leaf] = stacks[name]
        self._end.update({prefix + n: t for n, t in ends.items() if n in results})


def emit_torch(lowered: Lowered) -> str:
    """The section: helpers, the functions of each form, the autograd function and `_torch(x, state)`."""
    spec = lowered.rule.spec
    forms = {"token": lowered.token}
    if lowered.chunk is not None:
        forms["chunk"] = lowered.chunk
    if lowered.resumed is not None:
        forms["resumed"] = lowered.resumed
    functions = [FormPrinter(n, f).function(backward) for n, f in forms.items() for backward in (False, True)]
    ops = {n.op for f in forms.values() for p in (f.forward, f.backward) for n in p.nodes()}
    per_channel = bool(ops & {"decay_dot", "decay_mix", "decay_mix_t"})
    dims = {d: _where(spec, d) for d in spec.dims}
    return render(
        "torch.py.j2",
        functions=functions,
        forms=list(forms),
        helpers=sorted(ops & {"tri_inv", "decay_dot", "decay_mix", "decay_mix_t"}),
        chunk=16 if per_channel else 64,
        batch=lowered.batch,
        params=[t.keyword for t in spec.tensors if t.kind == "param"],
        d_out=spec.passes[-1].read.shape[0],
        dims=dims,
        flipped=sorted(c.name for c in lowered.token.forward.carries() if c.axes != state_axes(spec)[c.name]),
    )


def _where(spec: object, dim: str) -> tuple[str, str, int]:
    """Where a dim's size can be read: in `x` or `state`, under which key, at which axis from the end."""
    from ttmdsl.spec import LayerSpec

    assert isinstance(spec, LayerSpec)
    for t in spec.tensors:
        if dim in t.shape:
            return "x", t.keyword, t.shape.index(dim) - len(t.shape)
    for m in spec.memories:
        if dim in m.shape:
            return "state", m.name, m.shape.index(dim) - len(m.shape)
    raise AssertionError(f"no tensor has the dim {dim}")
