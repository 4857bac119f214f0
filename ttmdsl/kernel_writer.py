"""What one Triton kernel loads and stores: its pointers, and the lines around its arithmetic.

Input: what a kernel takes and leaves (`Kernel`), and the printer of its arithmetic. Output: lines of code, and a
`KernelText` with the pointers that they name. Puts no kernel together: write_kernel.py and its kin do.

Pointers are named by what they hold: `q_ptr` an input, `S_start_ptr` a state at the sequences' starts [N, H, ...],
`S_units_ptr` at every unit's start [U, H, ...], `S_end_ptr` at the ends, and the same with d_ for cotangents.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Container, Iterable

from ttmdsl.builder import Builder
from ttmdsl.ir import DECAYED, PAST, TOKEN_AXES, Node, Program, base_dim
from ttmdsl.kernel_text import Ahead, KernelText
from ttmdsl.kernels import Kernel
from ttmdsl.lower_expr import matrix_axes
from ttmdsl.past import SEEN, before_name
from ttmdsl.prelude import Parts
from ttmdsl.print_tiles import (
    OF_TENSORS,
    OF_WHOLE_TOKENS,
    Rows,
    load_block,
    load_entries,
    load_saved,
    load_token,
    of_parts,
    shape,
    store_block,
    store_entries,
    store_saved,
    store_token,
)
from ttmdsl.print_triton import TritonPrinter
from ttmdsl.printer import Names
from ttmdsl.rounds import rounds
from ttmdsl.schedule import Weight
from ttmdsl.spec import LayerSpec, Tensor
from ttmdsl.state import POSITION, state_shapes
from ttmdsl.write_alone import Alone
from ttmdsl.write_rounds import emit_rounds, emit_together

LOCALS = frozenset(
    "tl triton torch n h i j u row_h alive ahead lower strict live last first length count unit_0 t_ offset place H BT"
    " LEN GROUP PER DOT PRECISION INVERSE BY_WARP DIMS_FIRST IN_SHARED KEEP SEGMENT EVEN ORDER row head back slot"
    " inside token program step block lane here there begin fresh piece slot_0 tokens row_s share turn room SHARES"
    " ROOM".split()
)

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
        parts: Parts | None = None,
    ) -> None:
        self.parts = parts
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
                pointer = self.text.pointer(f"d_{leaf.name}", "d_y", "input")
                return load_token(pointer, leaf.axes, order, live=True, rows=self.rows(leaf.name))
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
            return name, self.rows(name)
        tensor, i = self.entries[name]
        return tensor.keyword, OF_TENSORS.entry(i, tensor.entries)

    def rows(self, name: str) -> Rows:
        """Where a tensor's values are, or those of y: of parts of tokens some are the tokens'."""
        parts = self.parts
        if parts is None or name not in ("y", *parts.read, *parts.own):
            return OF_TENSORS
        self.text.parts = parts.number
        return of_parts(parts.number) if name in parts.own else OF_WHOLE_TOKENS

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
        dtype = "passed" if self.short(kind, leaf) else "float32"
        return self.text.pointer(f"{prefix}{leaf.name}_{kind}", f'{prefix}{kind}["{leaf.name}"]', dtype)

    def short(self, kind: str, leaf: Node) -> bool:
        """Whether an array of states is in the dtype that products take."""
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
        dtype = "passed" if is_short(node, kernel) else "float32"
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

    def within(self, leaves: Iterable[Node], dim: str) -> dict[Node, str]:
        """How the tensors that have a dim are loaded, a block of it at a time, by a walk over its blocks."""
        given = ("param", "token", "before", "seen", "cot")
        return {leaf: self.loaded(leaf) for leaf in leaves if dim in leaf.axes and leaf.role in given}

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
        in_shared = kernel.kind == "map" and not self.printer.few
        lines = emit_rounds(self.printer, found, dim, then, bool(self.text.shared), in_shared)
        self.text.uses |= {"in_shared"} if self.printer.in_shared else set()
        return lines

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
            pointer = self.text.pointer("y", "y", "input")
            return [store_token(pointer, value.axes, self.shapes["y"], text, self.rows("y"))]
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
