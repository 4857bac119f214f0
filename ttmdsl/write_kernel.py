"""Writes one Triton kernel: its pointers, what it loads and stores, and its arithmetic from the printer.

Input: a `Kernel` of a plan, or the sequential form for its backward pass. Output: `KernelText` (kernel_text.py).
Decides nothing about which kernels there are.

Pointers are named by what they hold: `q_ptr` an input, `S_start_ptr` a state at the sequences' starts [N, H, ...],
`S_units_ptr` at every unit's start [U, H, ...], `S_end_ptr` at the ends, and the same with d_ for cotangents.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from ttmdsl.builder import Builder
from ttmdsl.ir import DECAYED, PAST, TOKEN_AXES, Node, Program, base_dim, is_large, is_matmul
from ttmdsl.kernel_text import Ahead, Argument, KernelText
from ttmdsl.kernels import Kernel
from ttmdsl.lower_expr import matrix_axes
from ttmdsl.past import SEEN, before_name
from ttmdsl.print_triton import (
    OF_TENSORS,
    Rows,
    TritonPrinter,
    load_block,
    load_entries,
    load_saved,
    load_token,
    shape,
    store_block,
    store_entries,
    store_saved,
    store_token,
)
from ttmdsl.printer import Names
from ttmdsl.rounds import rounds
from ttmdsl.schedule import FULL, ROWS, Loads, Weight, drawn_out, weights
from ttmdsl.spec import LayerSpec, Tensor
from ttmdsl.staging import ordered
from ttmdsl.state import POSITION, state_shapes
from ttmdsl.tuning import NOTHING, Tables, signature
from ttmdsl.vector_kernels import is_vector
from ttmdsl.write_alone import Alone
from ttmdsl.write_rounds import emit_rounds, emit_together, over_blocks

LOCALS = frozenset(
    "tl triton torch n h i j u row_h alive ahead lower strict live last first length count unit_0 t_ offset place H BT"
    " LEN GROUP PER DOT PRECISION INVERSE BY_WARP DIMS_FIRST KEEP SEGMENT EVEN ORDER row head back slot"
    " inside token program step block lane here there begin fresh piece slot_0 tokens row_s share turn room SHARES"
    " ROOM".split()
)

_NAME = re.compile(r"\b[a-zA-Z_]\w*")
_LOAD = re.compile(r"(\w+) = tl\.load\(")

TOGETHER = 8  # entries that one tile may hold

PREFIX = {"carry": "", "cocarry": "d_", "cot": "d_"}  # what the names of leaves begin with


class KernelWriter:
    """Writes the text of one kernel."""

    def __init__(
        self,
        spec: LayerSpec,
        text: KernelText,
        nodes: list[Node],
        unit: str,
        printer: TritonPrinter,
        given: Container[Node] = (),
        rounded: Container[Node] = (),
        alone: Alone | None = None,
    ) -> None:
        self.spec, self.text, self.unit, self.printer, self.rounded = spec, text, unit, printer, rounded
        self.alone = alone
        text.steps = alone.steps if alone else 1
        self.shapes = {t.keyword: t.shape for t in spec.tensors}
        self.entries = spec.entries
        self.tiles: dict[Tensor, str] = {}  # of tensors whose entries a map loads together
        self.stored: dict[Tensor, dict[int, str]] = {}  # the same of their gradients, those that there are so far
        self.sources = {before_name(t): t.keyword for t in spec.tensors}
        self.shapes["y"] = spec.passes[-1].read.shape
        self.states = {k: matrix_axes(shape) for k, shape in state_shapes(spec).items() if k != POSITION}
        present = {base_dim(x) for n in nodes for x in n.axes}
        text.dims = [d for d in (*spec.dims, PAST) if d in present or self._sized(nodes, d)]
        text.dims = list(dict.fromkeys([*text.dims, *self._strides(nodes)]))
        text.uses = {str(n.attr[0]) for n in nodes if n.op in DECAYED | {"mask"} and n not in given}
        text.uses |= {n.role for n in nodes if n.role in ("live", "last")}
        text.uses |= {
            "place" for n in nodes if n.op in ("diagonal", "behind", "shift") and n.attr[1] == PAST and n not in given
        }
        text.uses |= {"wide" for n in nodes if n in printer.wide and n not in given}
        text.uses |= {"apart"} if printer.apart else set()
        text.fresh = sorted({int(n.name) for n in nodes if n.role == "fresh"})

    def _sized(self, nodes: list[Node], dim: str) -> bool:
        return any(n.op == "size" and n.attr[0] == dim for n in nodes)

    def _strides(self, nodes: list[Node]) -> list[str]:
        return [d for d in self.spec.dims if d in {base_dim(x) for shape in self.shapes.values() for x in shape}]

    def dtype(self, keyword: str) -> str:
        kinds = {t.keyword: t.kind for t in self.spec.tensors}
        return "input" if kinds.get(keyword, "input") == "input" else "gate"

    def load(self, leaf: Node) -> str:
        """The line that loads a leaf at one unit; its name becomes the leaf's text."""
        name = self.printer.text[leaf] = self.printer.names.get(self.printer.wish(leaf))
        return f"{name} = {self.loaded(leaf)}"

    def loaded(self, leaf: Node) -> str:
        """Text that loads a leaf at one unit."""
        order = self.shapes.get(leaf.name, ())
        match leaf.role:
            case "token" if self.alone and leaf.name in self.alone.found:
                return self.alone.found[leaf.name].load(leaf, self.text.pointer)
            case "token":
                name, rows = self.array(leaf.name)
                return load_token(self.tensor(name), leaf.axes, order, rows=rows)
            case "seen":
                return load_saved(self.text.pointer(SEEN, f'saved["{SEEN}"]', "float32"), leaf.axes)
            case "before":
                text = load_saved(self.before(leaf.name, f'saved["{leaf.name}"]', leaf.name), leaf.axes)
                return text if len(leaf.axes) > 1 else f"{text}.to(tl.float32)"
            case "param":
                return f"{load_block(self.tensor(leaf.name), 'h', leaf.axes, order)}.to(tl.float32)"
            case "cot":
                return load_token(self.text.pointer(f"d_{leaf.name}", "d_y", "input"), leaf.axes, order, live=True)
            case "carry" | "cocarry":
                return self.load_state("units", leaf, "u * H + h")
            case "saved":
                return load_block(self.found(leaf), "slot", leaf.axes, leaf.axes)
            case role:
                raise AssertionError(role)

    def tensor(self, name: str) -> str:
        """The pointer to a tensor of the call."""
        return self.text.pointer(name, f'x["{name}"]', self.dtype(name))

    def array(self, name: str) -> tuple[str, Rows]:
        """The tensor that holds a value of every token, and where."""
        if name not in self.entries:
            return name, OF_TENSORS
        tensor, i = self.entries[name]
        return tensor.keyword, OF_TENSORS.entry(i, tensor.entries)

    def together(self, tensor: Tensor) -> bool:
        """Whether a tensor's entries are one tile: where a lone warp takes each by itself, rows that lie further apart
        take it longer (measured: benchmarks/NOTES.md)."""
        few = tensor.entries <= TOGETHER and self.text.kind == "map"
        self.text.uses |= {"entries"} if few else set()
        return few

    def load_entry(self, leaf: Node) -> list[str]:
        """The lines that load an entry; with the first one, if they are one tile, all of them."""
        tensor, i = self.entries[leaf.name]
        if not self.together(tensor):
            return [self.load(leaf)]
        lines = []
        if tensor not in self.tiles:
            self.tiles[tensor] = self.printer.names.get(tensor.keyword)
            lines.append(f"{self.tiles[tensor]} = {load_entries(self.tensor(tensor.keyword), tensor.entries)}")
        name = self.printer.text[leaf] = self.printer.names.get(self.printer.wish(leaf))
        return [*lines, f"{name} = _tile_entry({self.tiles[tensor]}, {i})"]

    def before(self, name: str, value: str, leaf: str) -> str:
        """The pointer to an array of what tensors are before the units."""
        return self.text.pointer(name, value, self.dtype(self.sources[leaf]))

    def state(self, kind: str, leaf: Node) -> str:
        """The pointer to the array of states at the starts, the units or the ends."""
        prefix = PREFIX[leaf.role]
        dtype = "input" if self.short(kind, leaf) else "float32"
        return self.text.pointer(f"{prefix}{leaf.name}_{kind}", f'{prefix}{kind}["{leaf.name}"]', dtype)

    def short(self, kind: str, leaf: Node) -> bool:
        """Whether an array of states is in the inputs' dtype."""
        return kind == "units" and leaf in self.rounded

    def load_state(self, kind: str, leaf: Node, base: str, when: str = "") -> str:
        """Text that loads a state from the array of starts, units or ends; zero unless `when`."""
        text = load_block(self.state(kind, leaf), base, leaf.axes, self.states[leaf.name], when)
        if not self.short(kind, leaf):
            return f"{text}.to(tl.float32)"
        self.printer.loaded.add(leaf)
        return text

    def store_state(self, kind: str, leaf: Node, base: str, value: str) -> str:
        return store_block(self.state(kind, leaf), base, leaf.axes, self.states[leaf.name], value)

    def first_state(self, variable: str, kind: str, leaf: Node, base: str, when: str = "") -> list[str]:
        """Lines that load a state that a walk begins with: zeros, where there is no array of them.

        A walk over single tokens lays states out as they are loaded, and takes more registers for zeros: it has arrays.
        """
        load = f"{variable} = {self.load_state(kind, leaf, base, when)}"
        if self.unit == "token":
            return [load]
        zeros = f"{variable} = tl.zeros({shape(leaf.axes)}, tl.float32)"
        return [zeros, f"if {self.state(kind, leaf)} is not None:", f"    {load}"]

    def given_state(self, kind: str, leaf: Node, base: str, when: str) -> str:
        """The same as an expression."""
        zeros = f"tl.zeros({shape(leaf.axes)}, tl.float32)"
        return f"({self.load_state(kind, leaf, base, when)} if {self.state(kind, leaf)} is not None else {zeros})"

    def last_state(self, kind: str, leaf: Node, base: str, value: str) -> list[str]:
        """Lines that store a state that a walk ends with, where there is an array of them."""
        return [f"if {self.state(kind, leaf)} is not None:", f"    {self.store_state(kind, leaf, base, value)}"]

    def saved(self, node: Node, kernel: Kernel) -> str:
        """The pointer to where a value is saved."""
        name = saved_name(self.printer.builder, node, kernel.exact)
        dtype = "input" if is_short(node, kernel) else "float32"
        return self.text.pointer(f"{name}_saved", f'saved["{name}"]', dtype)

    def given(self, kernel: Kernel) -> list[str]:
        """Lines that load what earlier kernels have saved."""
        lines = []
        for node in kernel.given:
            if is_short(node, kernel):
                self.printer.loaded.add(node)
            if kernel.kind == "map" or kernel.inner in node.axes:
                self.printer.loads[node] = load_saved(self.saved(node, kernel), node.axes)
                continue
            name = self.printer.text[node] = self.printer.names.get(_called(self.printer.builder, node))
            lines.append(f"{name} = {load_saved(self.saved(node, kernel), node.axes)}")
        return lines

    def inputs(self, leaves: Iterable[Node]) -> tuple[list[str], list[str]]:
        """Lines for params, before the units; lines for the tensors of a unit."""
        before, each = [], []
        for leaf in leaves:
            match leaf.role:
                case "param":
                    before.append(self.load(leaf))
                case "token" if leaf.name in self.entries:
                    each += self.load_entry(leaf)
                case "token" | "before" | "seen" | "cot":
                    each.append(self.load(leaf))
                case "live" | "last":
                    self.printer.text[leaf] = leaf.role
                case "fresh":
                    self.printer.text[leaf] = f"fresh_{leaf.name}"
        return before, each

    def tokens(self, leaves: Iterable[Node]) -> tuple[list[str], list[Ahead]]:
        """The same for a walk over single tokens, each of which finds its tensors loaded."""
        leaves = list(leaves)
        found = {n: self.printer.names.get(self.printer.wish(n)) for n in leaves if n.role in ("token", "cot")}
        self.printer.text |= found
        before, _ = self.inputs(n for n in leaves if n not in found)
        return before, [
            Ahead(name, self.printer.names.get(f"{name}_next"), self.loaded(n)) for n, name in found.items()
        ]

    def found(self, node: Node) -> str:
        """The pointer to where a walk over a segment leaves a value of every token for the walk in reverse."""
        self.text.found[node.name] = node.axes
        return self.text.pointer(f"{node.name}_found", f'found["{node.name}"]', "float32")

    def handed(self, values: Iterable[tuple[Node, Node]]) -> tuple[list[str], dict[str, Node]]:
        """Lines that find what follows from the carries alone, before a walk; what each unit leaves in its place."""
        ends = dict(values)
        known = dict(self.printer.text)
        lines = self.printer.emit(ends, named=ends)
        # what they were found by is of the first unit alone
        self.printer.text = known | {n: self.printer.text[n] for n in ends}
        return lines, {self.printer.text[n]: end for n, end in ends.items()}

    def stores(self, kernel: Kernel) -> dict[Node, Callable[[], list[str]]]:
        """For every output and saved value of a kernel, what makes the lines that store it: where a backward pass may
        follow, or a later kernel of the forward one takes it."""
        actions: dict[Node, list[Callable[[], list[str]]]] = {}

        def save(node: Node) -> list[str]:
            line = store_saved(self.saved(node, kernel), node.axes, self.printer.text[node])
            return _stored(line, node, kernel)

        names = {name for name, _ in kernel.outputs}
        whole = [t for t, i in self.entries.values() if i == 0 and names.issuperset(t.each)]
        self.stored = {t: {} for t in whole if self.together(t)}
        for name, value in kernel.outputs:
            actions.setdefault(value, []).append(functools.partial(self.store_output, name, value, "u * H + h"))
        for node in kernel.saves:
            actions.setdefault(node, []).append(functools.partial(save, node))
        for name, value in kernel.carried:
            if kernel.inner in value.axes:
                actions.setdefault(value, []).append(functools.partial(self.hand_on, name, value, kernel))
        for leaf in self.waiting(kernel):
            if leaf.name in kernel.keeps:
                actions.setdefault(leaf, []).append(functools.partial(self.keep, leaf, kernel))
        return {n: functools.partial(all_lines, many) for n, many in actions.items()}

    def waiting(self, kernel: Kernel) -> list[Node]:
        """The states with the inner dim that a scan's units read or that are kept at their starts: they wait in memory
        from unit to unit."""
        if not kernel.inner:
            return []
        read = kernel.walked()
        leaves = [n for n in kernel.program.leaves() if n.role == kernel.role and kernel.inner in n.axes]
        return [n for n in leaves if n in read or n.name in kernel.keeps]

    def computed(self, kernel: Kernel) -> list[str]:
        """Lines for all that a kernel computes and stores of a unit."""
        then = self.stores(kernel)
        dim = kernel.inner or kernel.shared
        if not dim:
            return self.printer.emit(kernel.roots, then)
        kept = [n for n in self.waiting(kernel) if n.name in kernel.keeps]
        found = rounds([*kernel.roots, *kept], kernel.given, dim)
        if self.text.shared:
            self.text.handed_in = [[n.axes for n in r.sums] for r in found if r.sums]
        if not kernel.inner:
            return emit_together(self.printer, found, kernel.users, then)
        return emit_rounds(self.printer, found, dim, then, shared=bool(self.text.shared))

    def begin(self, kind: str, leaf: Node) -> list[str]:
        """Lines that put a state that a walk begins with where the first unit finds it."""
        name = self.printer.names.get(f"{leaf.name}_0")
        return [*self.first_state(name, kind, leaf, "lane"), self.store_state("held", leaf, "lane", name)]

    def finish(self, kind: str, leaf: Node) -> list[str]:
        """Lines that take a state that a walk ends with from where the last unit left it."""
        last = self.load_state("held", leaf, "(count % 2) * tl.num_programs(1) + lane")
        return self.last_state(kind, leaf, "lane", last)

    def keep(self, leaf: Node, kernel: Kernel) -> list[str]:
        return _stored(self.store_state("units", leaf, "u * H + h", self.printer.text[leaf]), leaf, kernel)

    def hand_on(self, name: str, value: Node, kernel: Kernel) -> list[str]:
        """Lines that leave a state for the next unit in memory; at the end, if no unit reads it."""
        leaf, text = kernel.program.builder.leaf(kernel.role, name, value.axes), self.printer.sanitized(value)
        if name in self.text.held:
            return [self.store_state("held", leaf, "there", text)]
        target = "start" if kernel.reverse else "end"
        return ["if step == count - 1:", *(f"    {line}" for line in self.last_state(target, leaf, "n * H + h", text))]

    def store_output(self, name: str, value: Node, base: str) -> list[str]:
        """Lines that store an output of a unit: y, or the gradient of an input, or of a param (one for each unit)."""
        text = self.printer.sanitized(value) if value.axes else self.printer.text[value]
        if name == "y":
            return [store_token(self.text.pointer("y", "y", "input"), value.axes, self.shapes["y"], text)]
        if name in self.sources:
            return [store_saved(self.before(f"d_{name}", f'd_x["{name}"]', name), value.axes, text)]
        param = any(t.keyword == name and t.kind == "param" for t in self.spec.tensors)
        array, rows = self.array(name)
        pointer = self.text.pointer(f"d_{array}", f'd_x["{array}"]', "float32" if param else self.dtype(array))
        tensor, i = self.entries.get(name, (None, 0))
        if tensor is not None and tensor in self.stored:
            self.stored[tensor][i] = text
            return [store_entries(pointer, self.stored[tensor])] if len(self.stored[tensor]) == tensor.entries else []
        if param:
            return [store_block(pointer, base, value.axes, self.shapes[name], text)]
        return [store_token(pointer, value.axes, self.shapes[array], text, rows)]

    def store_gradient(self, name: str, value: Node, base: str, more: bool) -> None:
        """Stores a tensor's gradient of every token that a walk comes to; of a param their sum at its end, in addition
        to what is there already if there is `more` of it."""
        param = next((t for t in self.spec.tensors if t.keyword == name and t.kind == "param"), None)
        if param is None:
            self.text.body += self.store_output(name, value, "")
            return
        total = self.printer.names.get(f"{name}_total")
        pointer = self.text.pointer(f"d_{name}", f'd_x["{name}"]', "float32")
        zero = f"tl.zeros({shape(value.axes)}, tl.float32)" if value.axes else "0.0"
        self.text.before.append(f"{total} = {load_block(pointer, base, value.axes, param.shape) if more else zero}")
        self.text.body.append(f"{total} += {self.printer.sanitized(value) if value.axes else self.printer.text[value]}")
        self.text.after.append(store_block(pointer, base, value.axes, param.shape, total))


def all_lines(actions: Iterable[Callable[[], list[str]]]) -> list[str]:
    """The lines of several, one after the other."""
    return [line for action in actions for line in action()]


def _stored(line: str, node: Node, kernel: Kernel) -> list[str]:
    """What stores a value for later kernels: some of it where a backward pass may follow."""
    return [line] if node in kernel.across else ["if KEEP:", f"    {line}"]


def is_short(node: Node, kernel: Kernel) -> bool:
    """Whether a saved value is in the inputs' dtype, as tiles with a token axis are; states and vectors are not."""
    return len(node.axes) > 1 and any(x in TOKEN_AXES for x in node.axes) and node not in kernel.exact


def saved_name(builder: Builder, node: Node, exact: Container[Node]) -> str:
    """The name under which a value is saved; of one in float32 for every token it says so."""
    return f"{_called(builder, node)}_{node.id}{'_exact' if node in exact else ''}"


def _called(builder: Builder, node: Node) -> str:
    """What a value that passes between kernels is called: by its label, its tensor, or what makes it."""
    return builder.labels.get(node) or node.name or node.op


def printer_of(program: Program, spec: LayerSpec, weight: Weight, wide: Container[Node] = ()) -> TritonPrinter:
    taken = {*LOCALS, *keyword.kwlist, *(f"fresh_{p.optimizer.batch}" for p in spec.passes)}
    for d in (*spec.dims, PAST):
        taken |= {f"N_{d}", f"P_{d}", f"o_{d}", f"m_{d}", f"begin_{d}", f"end_{d}"}
    return TritonPrinter(program.builder, Names(taken), program.unit, weight, wide)


def turned(kernel: Kernel) -> set[Node]:
    """Products that a kernel takes transposed, and no other way: all at once, not block by block."""
    found = set()
    for n, users in kernel.users.items():
        if is_matmul(n) and len(users) == 1 and n not in kernel.given and n not in kernel.roots:
            (user,) = users
            source, target = map(str, user.attr) if user.op == "rename" else ("", "")
            moved = tuple(target if x == source else x for x in n.axes)
            if user.op == "rename" and moved != user.axes and kernel.inner not in n.reduced:
                found.add(n)
    return found


def write_kernel(
    spec: LayerSpec,
    kernel: Kernel,
    rounded: Container[Node] = (),
    tables: Tables = NOTHING,
    tokens: int = ROWS,
    alone: Alone | None = None,
) -> KernelText:
    """The text of a kernel, its body also in the orders that the tables name for it, and for programs that share out a
    dim. `rounded`: the states at the units that are in the inputs' dtype; `tokens`: of a unit; `alone`: what one
    token's step finds by itself."""
    weight = weights(tokens)
    transposed, few = turned(kernel), tokens < ROWS
    apart = drawn_out(kernel.nodes, kernel.given, transposed, few) if kernel.kind == "map" else {}

    def write(kernel: Kernel, number: int = 0, arguments: Sequence[Argument] = ()) -> KernelText:
        text = KernelText(
            kernel.name,
            _doc(kernel),
            kernel.kind,
            arguments=[*arguments],
            blocked=kernel.blocked,
            inner=kernel.inner,
            reverse=kernel.reverse,
        )
        text.signature = _signature(kernel, text.way, rounded)
        printer = printer_of(kernel.program, spec, FULL if kernel.kind == "scan" else weight, kernel.wide)
        printer.ordering, printer.placing = number, Loads.of(number, kernel.kind == "scan")
        printer.turned, printer.few, printer.apart = transposed, few, apart
        writer = KernelWriter(spec, text, kernel.nodes, kernel.program.unit, printer, kernel.given, rounded, alone)
        if kernel.kind == "scan":
            _write_scan(kernel, writer)
        else:
            _write_map(kernel, writer, weight)
        return text

    whole = replace(kernel, shared="")
    text = write(whole)
    for number in tables.orders(text.signature):
        other = write(whole, number, text.arguments)
        assert replace(other, body=text.body, alive=text.alive) == replace(text, others={}), kernel.name
        if other.body != text.body:
            text.others[number] = other.body
    if kernel.shared:
        other = write(kernel, 0, text.arguments)
        assert (other.arguments, other.before, other.after) == (text.arguments, text.before, text.after), kernel.name
        text.shared, text.handed_in, text.together = other.shared, other.handed_in, other.body
    return text


def _write_scan(kernel: Kernel, writer: KernelWriter) -> None:
    """The text of a scan kernel: a walk over the units of one sequence and head. To load values when they are first
    used takes fewer registers, and is slower where there are enough."""
    text, printer = writer.text, writer.printer
    role, prefix = kernel.role, PREFIX[kernel.role]
    source, target = ("end", "start") if kernel.reverse else ("start", "end")
    leaves = kernel.leaves()
    results = dict(kernel.carried)
    loads: list[str] = []
    text.by_token = kernel.program.unit == "token"
    if text.by_token:
        text.before, text.ahead = writer.tokens(leaves)
        if writer.alone:
            text.before += writer.alone.begin(text.pointer)
            text.aside = writer.alone.end(text.pointer)
    else:
        text.before, loads = writer.inputs(leaves)
    loads += writer.given(kernel)
    variables: dict[str, str] = {}
    held: list[Node] = []
    for leaf in writer.waiting(kernel):
        if leaf.name in results:
            held.append(leaf)
            printer.loads[leaf] = writer.load_state("held", leaf, "here")
        else:  # it is there for the first unit alone
            printer.loads[leaf] = writer.given_state(source, leaf, "n * H + h", "step == 0")
    text.shared = kernel.shared
    if held:
        text.held, text.shared = [leaf.name for leaf in held], kernel.inner
        text.before += over_blocks(kernel.inner, (line for leaf in held for line in writer.begin(source, leaf)), True)
        text.after += over_blocks(kernel.inner, (line for leaf in held for line in writer.finish(target, leaf)), True)
    carried = {n.name: n for n in leaves if n.role == role and n not in printer.loads}
    # a carry that no unit reads is still handed from start to end
    walked = [n for n in kernel.program.leaves() if n.role == role and n not in printer.loads]
    unread = {n.name: n for n in walked if n.name in kernel.keeps}
    for name, leaf in {**carried, **unread}.items():
        variable = printer.text[leaf] = printer.names.get(prefix + name)
        # one that no unit hands on is there for the first unit alone
        when = "" if name in results else "step == 0"
        lines = writer.first_state(variable, source, leaf, "n * H + h", when)
        if name in results:
            variables[name] = variable
        (text.before if name in results else loads).extend(lines)
        if name in kernel.keeps:
            kept = loads if leaf in kernel.across else text.keep
            kept.append(writer.store_state("units", leaf, "u * H + h", variable))
    if kernel.reverse:  # states at the units' starts
        states = [leaf for leaf in leaves if leaf.role == "carry"]
        printer.loads |= {leaf: writer.loaded(leaf) for leaf in states if kernel.inner in leaf.axes}
        loads += [writer.load(leaf) for leaf in states if kernel.inner not in leaf.axes]
    found, handed = writer.handed(kernel.handed)
    text.before += found
    computed = writer.computed(kernel)
    text.body = _when_used(loads, computed) if printer.placing is Loads.LATE else [*loads, *computed]
    text.alive = round(printer.alive + sum(map(FULL, carried.values())), 1)
    ends = {k: kernel.program.builder.leaf(role, k, v.axes) for k, v in results.items()}
    for name, value in results.items():
        handed_on = name in variables or kernel.inner in value.axes
        if not handed_on:  # no unit reads it: what the last unit leaves is the end
            stores = writer.last_state(target, ends[name], "n * H + h", printer.sanitized(value))
            last = "i == length - 1" if kernel.program.unit == "token" else "step == count - 1"
            text.body += [f"if {last}:", *(f"    {line}" for line in stores)]
    new = {variable: printer.sanitized(results[k]) for k, variable in variables.items()}
    text.body += moved(printer.names, new | {k: printer.sanitized(v) for k, v in handed.items()})
    for name, variable in variables.items():
        text.after += writer.last_state(target, ends[name], "n * H + h", variable)
    if text.held:  # what one unit leaves in memory, the next one finds
        text.before.append("tl.debug_barrier()")
        text.body.append("tl.debug_barrier()")


def _when_used(loads: Sequence[str], lines: Sequence[str]) -> list[str]:
    """The lines, and before each statement among them those loads that it is the first to use; other lines among the
    loads come first."""
    known = [(line, _LOAD.match(line)) for line in loads]
    found = [line for line, load in known if not load]
    waiting = {load[1]: line for line, load in known if load}
    starts = [i for i, line in enumerate(lines) if not line.startswith((" ", "else:", "elif "))]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        statement = lines[start:end]
        used = {*_NAME.findall("\n".join(statement))}
        found += [waiting.pop(name) for name in [*waiting] if name in used]
        found += statement
    return [*found, *waiting.values()]


def moved(names: Names, new: dict[str, str]) -> list[str]:
    """Lines that give variables new values, all at once."""
    moved = [k for k in new if new[k] != k]
    staged = {k: names.get(f"{k}_next") for k in moved if len(moved) > 1}
    return [f"{staged[k]} = {new[k]}" for k in staged] + [f"{k} = {staged.get(k, new[k])}" for k in moved]


def _write_map(kernel: Kernel, writer: KernelWriter, weight: Weight) -> None:
    """The text of a map kernel: one unit of one head, all at once."""
    text, printer = writer.text, writer.printer
    leaves = kernel.leaves()
    tensors = [n for n in leaves if len(n.axes) > 1 or n.role in ("carry", "cocarry") or kernel.inner in n.axes]
    printer.loads |= {leaf: writer.loaded(leaf) for leaf in tensors}
    text.body = [line for lines in writer.inputs(leaf for leaf in leaves if leaf not in tensors) for line in lines]
    text.body += writer.given(kernel)
    printer.place = {n: i for i, n in enumerate(ordered(kernel, weight))}
    text.body += writer.computed(kernel)
    text.alive = round(printer.alive, 1)
    if all(map(is_vector, kernel.nodes)):
        text.of = " of vectors"
    elif not any(map(is_large, (*leaves, *kernel.given, *kernel.saves))):
        text.of = " of tokens"


def _signature(kernel: Kernel, way: str, rounded: Container[Node]) -> str:
    how = f"{kernel.program.unit} {way}{' in rounds' if kernel.inner else ''}"
    return signature(how, kernel.roots, kernel.given, rounded, kernel.wide)


def _doc(kernel: Kernel) -> str:
    names = [k for k, _ in kernel.outputs]
    if not names and kernel.kind == "map":
        return f"What is free of the carry: {', '.join(n.op for n in kernel.saves)}; every unit at once."
    what = names + [f"the carry {k}" for k, _ in kernel.carried]
    how = "unit after unit" if kernel.kind == "scan" else "every unit at once"
    way = ", last unit first" if kernel.reverse else ""
    gradients = any(f"d:{k}" in kernel.program.outputs for k in names)
    return f"{'Gradients of ' if gradients else ''}{', '.join(what)}: {how}{way}."
