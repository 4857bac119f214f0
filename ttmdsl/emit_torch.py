"""The PyTorch backend of a generated module: any device and dtype, batched over all units of a segment.

Input: `Lowered`. Output: the section's source text. One function forward and one backward for each form, split by
dependence on the carry: what does not depend on it is computed for all units at once, before the scan; what the next
carry does not depend on, after it.

Values have leading axes [B, H, N] outside the scan (N units: chunks, or tokens) and [B, H] inside.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from ttmdsl.collect import collect, is_matrix_product
from ttmdsl.ir import TOKEN_AXES, Axes, Node, Program, Role, constant, depends_on, reachable
from ttmdsl.lower import Form, Lowered
from ttmdsl.lower_expr import matrix_axes
from ttmdsl.lower_optimizer import NEWTON_SCHULZ
from ttmdsl.printer import Names, Printer, strip, under
from ttmdsl.spec import LayerSpec
from ttmdsl.state import state_shapes
from ttmdsl.templates import render

DECAYED = frozenset({"decay_dot", "decay_mix", "decay_mix_t"})
BY_TOKEN = frozenset(
    {"norm_scan", "norm_adjoint"}
)  # dear: kept from a scan for what follows, and for the backward pass
NORMS = frozenset({"norm_scan", "norm_slopes", "norm_adjoint"})
UNARY = frozenset({"exp2", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "abs", "sign"})
CONSTANTS = {math.log2(math.e): "LOG2E", math.log(2.0): "LN2"}
LOCALS = {
    "x",
    "carry",
    "states",
    "end",
    "unit",
    "torch",
    "math",
    "Tensor",
    "d_y",
    "d_carry",
    "i",
    "grads",
    *CONSTANTS.values(),
}


def aligned(text: str, axes: Axes, target: Axes) -> str:
    """Indexing that puts a value's axes among the target's."""
    if axes == target or not target:
        return text
    return f"{text}[..., {', '.join(':' if x in axes else 'None' for x in target)}]"


def _dims(axes: Axes, over: Axes) -> str:
    """Some of the axes as dims counted from the end, as torch's reductions take them."""
    dims = [axes.index(x) - len(axes) for x in over]
    return str(dims[0]) if len(dims) == 1 else str(tuple(dims))


def _diagonal(node: Node) -> int:
    """The last one that a mask leaves."""
    return 0 if node.attr[0] == "lower" else -1


class TorchPrinter(Printer):
    """Prints values with leading batch axes; the unit axis N is one of them, except while `scanning`."""

    scanning = False
    constants = CONSTANTS

    def operands(self, node: Node) -> tuple[Node, ...]:
        """Also what products under the same decays per channel share, and what slopes of norms are made of: values of
        this printer alone, for all units at once where they are free of the carry."""
        if node.op in DECAYED:
            logarithms = node.args[2:]
            decays = self.builder.make("decays", logarithms, logarithms[0].axes, _diagonal(node))
            x, y = node.args[:2]
            return (x if node.op == "decay_dot" else self.builder.mask(x, node.attr[0])), y, decays
        if node.op == "norm_slopes":
            return (self.builder.make("norm_slopes_of", node.args, node.args[-1].axes),)
        if node.op == "add":
            for x, y in (node.args, node.args[::-1]):
                product = y.args[0] if y.op == "neg" else y
                tiles = (x, *product.args)
                if product.op == "mul" and product not in self.text and y not in self.text:
                    if all(constant(n) is None and self.is_tile(n) for n in tiles):
                        return tiles
        return super().operands(node)

    def wish(self, node: Node) -> str:
        return {"decays": "decays", "norm_slopes_of": "slopes"}.get(node.op) or super().wish(node)

    def operand(self, node: Node, target: Axes) -> str:
        return aligned(self.text[node], node.axes, target) if self.is_tile(node) else self.text[node]

    def tile(self, node: Node) -> str:
        """A value over tokens as a tensor, constants too."""
        number = constant(node)
        if number is None:
            return self.text[node]
        like = "unit.lower" if set(node.axes) <= set(TOKEN_AXES) else "unit.lower[:, :1]"
        return f"torch.full_like({like}, {number!r}, dtype=unit.one.dtype)"

    def expression(self, node: Node) -> str:
        axes, args = node.axes, node.args
        ops = [self.operand(a, axes) for a in self.operands(node)]
        match node.op:
            case "size":
                return f'unit.size["{node.attr[0]}"]'
            case "add" if len(ops) == 3:
                minus = "" if any(x.op == "mul" and x.args == self.operands(node)[1:] for x in args) else ", value=-1"
                return f"torch.addcmul({', '.join(map(strip, ops))}{minus})"
            case "const" | "neg" | "recip" | "mul" | "add":
                return self.arithmetic(node)
            case "pow":
                return f"({ops[0]} ** {float(node.attr[0])!r})"
            case "log2":
                return f"_log2({strip(ops[0])})"
            case "max" | "min":
                bound = {"max": "min", "min": "max"}[node.op]
                for text, limit in ((ops[0], constant(args[1])), (ops[1], constant(args[0]))):
                    if limit is not None:
                        return f"{text}.clamp({bound}={limit!r})"
                return f"torch.{node.op}imum({strip(ops[0])}, {strip(ops[1])})"
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
                return self.text[args[0]] if moved == axes else f"{self.text[args[0]]}.mT"
            case "sum":
                return f"{self.text[args[0]]}.sum({_dims(args[0].axes, node.reduced)})"
            case "amax":
                return f"{self.text[args[0]]}.amax({_dims(args[0].axes, node.reduced)})"
            case "contract":
                return self._contract(node)
            case "mask":
                fill = float(node.attr[1])
                if fill == 0 and axes == ("t", "s") == args[0].axes and constant(args[0]) is None:
                    return f"{self.text[args[0]]}.tril({_diagonal(node)})"
                # two numbers would give a tile of torch's default dtype
                kept = strip(ops[0]) if constant(args[0]) is None else f"{strip(ops[0])} * unit.one"
                return f"torch.where(unit.{node.attr[0]}, {kept}, {fill if fill == 0 else '-math.inf'})"
            case "cumsum":
                text, dim = self.text[args[0]], _dims(args[0].axes, (str(node.attr[0]),))
                return f"{text}.flip({dim}).cumsum({dim}).flip({dim})" if node.attr[1] else f"{text}.cumsum({dim})"
            case "tri_inv":
                return f"_unit_lower_inverse({self.text[args[0]]})"
            case "newton_schulz" | "newton_schulz_back":
                turn = ".mT" if axes[0] != node.attr[0] else ""
                texts = [f"{self.operand(a, axes)}{turn}" for a in args]
                return f"_{node.op}({', '.join(texts)}, {node.attr[1]}){turn}"
            case "decay_dot" | "decay_mix" | "decay_mix_t":
                x, y, decays = self.operands(node)
                return f"{self.text[decays]}.{node.op[6:]}({self.tile(x)}, {self.tile(y)})"
            case "decays":
                return f"_decays({', '.join(map(self.tile, args))}, {node.attr[0]})"
            case "norm_slopes":
                return f"{self.text[self.operands(node)[0]]}()"
            case "norm_slopes_of":
                return f"_norm_slopes({', '.join(map(self.tile, args))})"
            case "norm_scan" | "norm_adjoint":
                return f"_{node.op}({', '.join(map(self.tile, args))})"
            case _:
                assert node.op in UNARY, node.op
                return f"torch.{node.op}({strip(ops[0])})"

    def _contract(self, node: Node) -> str:
        a, b = node.args
        over = node.reduced
        if is_matrix_product(node):
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
        return f"({self.operand(a, union)} * {self.operand(b, union)}).sum({_dims(union, over)})"


class _ScanPrinter(TorchPrinter):
    """Prints the loop over units; what was found for all at once is at hand by unit, its axes where they are wanted."""

    scanning = True

    def __init__(self, outer: TorchPrinter, given: Iterable[Node], varies: set[Node]) -> None:
        super().__init__(outer.builder, outer.names)
        self.outer, self.varies = outer, varies
        self.lists: dict[str, str] = {}  # text of a value: the name of its list of values, one for each unit
        for node in given:
            if node.role == "fresh":
                self.text[node] = f"unit.starts[{node.name}][i]"
            elif not self.is_tile(node):
                self.text[node] = outer.text[node]
            else:
                self.text[node] = self._of_unit(node, outer.text[node])

    def operand(self, node: Node, target: Axes) -> str:
        if node in self.outer.text and self.is_tile(node) and node.role != "fresh":
            return self._of_unit(node, aligned(self.outer.text[node], node.axes, target))
        return super().operand(node, target)

    def before(self, loop: Iterable[str]) -> list[str]:
        """The lines that make what a loop takes by unit."""
        used = {word for line in loop for word in re.findall(r"\w+", line)}
        return [f"{name} = {text}.unbind(2)" for text, name in self.lists.items() if name in used]

    def _of_unit(self, node: Node, text: str) -> str:
        if text not in self.lists:
            wish = text.partition("[")[0].removeprefix("unit.")
            self.lists[text] = self.names.get(f"{wish}_at" if wish.isidentifier() else "x_at")
        return f"{self.lists[text]}[{'i' if node in self.varies else '0'}]"


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

    def __init__(self, name: str, form: Form, program: Program) -> None:
        self.name, self.form, self.program = name, form, program
        self.keeps = name != "token"
        self.names = Names(LOCALS | set(keyword.kwlist))
        self.printer = TorchPrinter(program.builder.fork(), self.names)
        self.body: list[str] = []

    def forward(self) -> dict[str, object]:
        """What the template needs for y, the carries after the last unit and those at every unit's start that the
        backward function wants: of chunks; single tokens have too many, and it goes through them once more."""
        y, carries = self.program.outputs["y"], _carries(self.program)
        self.unpack(self.program.nodes())
        handed = self.handed(self.form.backward.outputs.values()) if self.keeps else []
        ends = self.scan(self.program, FORWARD, carries, [y, *handed])
        self.body += ["# for all units at once", *self.printer.emit([y])]
        stacks = {self._label(n): self.printer.text[n] for n in handed}
        self.body.append(f"end = {_dict(ends)}")
        self.body.append(f"return {self.printer.text[y]}, end, {_dict(stacks)}")
        return {"name": f"_{self.name}_forward", "args": "x, carry, unit", "body": self.body}

    def backward(self) -> dict[str, object]:
        """What the template needs for the gradients of the tensors and of the carries before the first unit."""
        grads = {k[2:]: v for k, v in self.program.outputs.items() if k.startswith("d:")}
        handed = {n.name for n in self.form.forward.carries()}
        replayed = {k: v for k, v in _carries(self.form.forward).items() if k in handed}
        needed = reachable(self.program.outputs.values())
        self.unpack(needed if self.keeps else reachable([*replayed.values(), *self.program.outputs.values()]))
        if self.keeps:
            for node in self.handed(self.program.outputs.values()):
                self.printer.text[node] = self.names.get(f"{self._label(node)}_all")
                self.body.append(f'{self.printer.text[node]} = states["{self._label(node)}"]')
        elif handed:
            self.body.append("# the states at the start of every unit, once more")
            self.scan(self.form.forward, FORWARD, replayed, self.program.outputs.values())
        ends = self.scan(self.program, BACKWARD, _carries(self.program), grads.values())
        params = {n.name for p in (self.form.forward, self.program) for n in p.leaves() if n.role == "param"}
        self.body += ["# for all units at once", *self.printer.emit(v for v in grads.values() if constant(v) is None)]
        self.body.append("grads = {")
        for name, value in grads.items():
            if constant(value) is not None:
                text = f'torch.zeros_like(x["{name}"])'
            else:
                text = self.printer.text[value] + (".sum((0, 2))" if name in params else "")
            self.body.append(f'    "{name}": {text},')
        self.body += ["}", f"return grads, {_dict(ends)}"]
        given = "states" if self.keeps else "carry"
        return {"name": f"_{self.name}_backward", "args": f"x, {given}, unit, d_y, d_carry", "body": self.body}

    def handed(self, roots: Iterable[Node]) -> list[Node]:
        """What the backward function takes from the forward one: states, and what runs token by token."""
        chained = depends_on(self.form.forward.outputs.values(), self.form.forward.carries())
        return [n for n in reachable(roots) if n.role == "carry" or (n.op in BY_TOKEN and n in chained)]

    def unpack(self, nodes: Iterable[Node]) -> None:
        """Names for the tensors among the nodes, and the texts of what is always at hand."""
        text = self.printer.text
        for leaf in sorted((n for n in nodes if n.op == "leaf"), key=lambda n: n.id):
            match leaf.role:
                case "token" | "param":
                    text[leaf] = self.names.get(leaf.name)
                    self.body.append(f'{text[leaf]} = x["{leaf.name}"]')
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
        outer = reachable(later, at_hand)
        kept = {n: made[n] for n in outer if n in at_hand and n not in self.printer.text}
        values = [*results.values(), *kept.values()]
        again = {a for n in outer if n not in at_hand for a in n.args}
        inner = self._inputs(program, carried, values, again)
        variables: dict[str, str] = {}
        for name, leaf in carried.items():
            variables[name] = inner.text[leaf] = self.names.get(way.prefix + name)
            self.body.append(f'{variables[name]} = {way.source}["{name}"]')
        ends = {k: variables.get(k) or self.names.get(way.prefix + k) for k in results}
        step = inner.emit(v for v in values if v.op != "leaf" and constant(v) is None)
        texts = {leaf: inner.text[leaf] for leaf in carried.values() if leaf in needed}
        first = len(texts)  # states are kept as they are at a unit's start
        texts |= {n: inner.text[v] for n, v in kept.items()}
        stacks = {n: self.names.get(f"{text}_all" if text.isidentifier() else "x_all") for n, text in texts.items()}
        self.body += [f"{stack} = []" for stack in stacks.values()]
        appended = [f"{stack}.append({texts[n]})" for n, stack in stacks.items()]
        loop = [*appended[:first], *step, *appended[first:]]
        new = {k: inner.text[v] for k, v in results.items() if constant(v) is None}
        # what no unit hands on (the point, where every chunk starts a group) ends with the first unit
        new |= {k: f"torch.zeros_like({v})" for k, v in variables.items() if k not in new}
        targets = variables | ends
        moved = {targets[k]: text for k, text in new.items() if text != targets[k]}
        if moved:
            loop.append(f"{', '.join(moved)} = {', '.join(map(strip, moved.values()))}")
        self.body += inner.before(loop)
        self.body.append(f"for i in {'reversed(range(unit.count))' if way.reverse else 'range(unit.count)'}:")
        self.body += [f"    {line}" for line in loop or ["pass"]]
        for node, stack in stacks.items():
            self.body.append(f"{stack} = torch.stack({stack}{'[::-1]' if way.reverse else ''}, 2)")
            self.printer.text[node] = stack
        return ends

    def _label(self, node: Node) -> str:
        """What a value is called between forward and backward: a state by its name, else as no state is called."""
        return node.name or f"{self.printer.builder.labels.get(node, node.op)}_{node.id}_kept"

    def _inputs(
        self, program: Program, carried: dict[str, Node], results: Iterable[Node], again: set[Node]
    ) -> _ScanPrinter:
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
        return _ScanPrinter(printer, outside, _varies(program, outside, printer))


def _large(nodes: Iterable[Node]) -> set[Node]:
    """Those too large for all units at once."""
    return {n for n in nodes if len(n.axes) > 2}


def _kept(node: Node, made: Node) -> bool:
    """Whether a value of the loop is kept for what follows: where that is more than a name, and smaller than a state."""
    named = {"leaf", "expand", "rename"}
    return not {node.op, made.op} & named and (len(node.axes) < 2 or len({*node.axes} - {*TOKEN_AXES}) < len(node.axes) < 3)


def _varies(program: Program, nodes: Iterable[Node], printer: TorchPrinter) -> set[Node]:
    """Nodes that have a value of their own in every unit; the others have one for all."""
    roles = {"token", "cot", "carry", "cocarry", "live", "fresh"}
    return depends_on(nodes, [n for n in program.leaves() if n.role in roles], printer.operands)


def _carries(program: Program) -> dict[str, Node]:
    return {k[6:]: v for k, v in program.outputs.items() if k.startswith("carry:")}


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
        functions += [_Function(name, form, form.forward).forward(), _Function(name, form, form.backward).backward()]
    ops = {n.op for f in forms.values() for p in (f.forward, f.backward) for n in p.nodes()}
    per_channel = bool(ops & DECAYED)
    dims, shapes = {d: _where(spec, d) for d in spec.dims}, state_shapes(spec)
    return render(
        "torch.py.j2",
        functions=functions,
        forms=list(forms),
        helpers=sorted(ops & (DECAYED | NORMS | {"log2", "tri_inv", "newton_schulz"})),
        newton_schulz=NEWTON_SCHULZ,
        per_channel=per_channel,
        chunk=16 if per_channel else 64,
        batch=lowered.batch,
        batches=lowered.batches,
        params=[t.keyword for t in spec.tensors if t.kind == "param"],
        d_out=spec.passes[-1].read.shape[0],
        dims=dims,
        flipped=sorted(c.name for c in lowered.token.forward.carries() if c.axes != matrix_axes(shapes[c.name])),
    )


def _where(spec: LayerSpec, dim: str) -> tuple[str, str, int]:
    """Where a dim's size can be read: in `x` or `state`, under which key, at which axis from the end."""
    for t in spec.tensors:
        if dim in t.shape:
            return "x", t.keyword, t.shape.index(dim) - len(t.shape)
    for m in spec.memories:
        if dim in m.shape:
            return "state", m.name, m.shape.index(dim) - len(m.shape)
    raise AssertionError(f"no tensor has the dim {dim}")
