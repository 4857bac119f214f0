"""The text of the kernels of the sequential form in stages: walks over a unit's tokens, and what comes between them.

Input: `Stages`. Output: `StageTexts`, kernels as text, which the templates frame. A walk begins with the states `now`,
or those kept at the unit's start; what it leaves for later kernels it stores for every token, in `found`, and the
states before each token in `scratch`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ttmdsl.ir import Axes, Node, Program
from ttmdsl.print_triton import shape, store_block
from ttmdsl.schedule import FULL
from ttmdsl.spec import LayerSpec
from ttmdsl.stages import Stages
from ttmdsl.tile_sums import handed_on
from ttmdsl.tuning import signature
from ttmdsl.write_kernel import PREFIX, Argument, KernelText, KernelWriter, moved, printer_of

STEP = Argument("step_ptr", "step", "int64")  # which unit of every sequence is walked
Source = Literal["now", "units"]


@dataclass(frozen=True)
class StageTexts:
    """The kernels in the order in which they run, once for every unit. `states`: those that are kept of every token."""

    forward: tuple[KernelText, ...]
    backward: tuple[KernelText, ...]
    kept: dict[str, str]
    states: list[str]

    def kernels(self) -> tuple[KernelText, ...]:
        """Each once: some run forward and backward."""
        return tuple({k.name: k for k in (*self.forward, *self.backward)}.values())

    def in_place(self) -> list[tuple[str, str]]:
        """What is turned, and the matrix in whose place: those that a turn finds and is given."""
        return [(f"turned__{i}", f"matrix__{i}") for i in range(sum(k.kind == "turn" for k in self.forward))]

    def forward_rooms(self) -> dict[str, Axes]:
        """What kernels of the forward pass leave of every token for later ones, and its axes."""
        return self._rooms(self.forward, {turned for turned, _ in self.in_place()})

    def backward_rooms(self) -> dict[str, Axes]:
        """The same of the backward pass."""
        return self._rooms(self.backward, {f"d_{matrix}" for _, matrix in self.in_place()})

    def _rooms(self, kernels: Iterable[KernelText], shared: Container[str]) -> dict[str, Axes]:
        return {name: axes for k in kernels for name, axes in k.found.items() if name not in shared}


def write_stages(spec: LayerSpec, s: Stages) -> StageTexts:
    """All kernels of the form."""
    turns = [_turn(spec, t.forward, f"_staged_turn_{i}_kernel") for i, t in enumerate(s.turns)]
    back = [_turn(spec, t.backward, f"_staged_backward_turn_{i}_kernel") for i, t in enumerate(s.turns)]
    walks = _Walks(spec, s.frozen)
    writes = walks.forward("_staged_writes_kernel", "What each token writes, to be orthogonalised.", s.writes, "now")
    reads = walks.forward("_staged_reads_kernel", "Steps and y, token after token.", s.reads, "now")
    again = (
        walks.forward("_staged_writes_again_kernel", "What each token wrote, once more.", s.writes, "units"),
        walks.forward("_staged_reads_again_kernel", "The states before each token, once more.", s.reads, "units"),
    )
    d_reads = walks.backward("_staged_backward_reads_kernel", "Gradients of reads and steps.", s.d_reads)
    d_writes = walks.backward("_staged_backward_writes_kernel", "Gradients of what is written.", s.d_writes)
    kept = dict.fromkeys([*s.writes.ends(), *s.reads.ends()], "float32")
    return StageTexts(
        (writes, *turns, reads),
        (again[0], *turns, again[1], d_reads, *back, d_writes),
        kept,
        [k for k in kept if k not in s.frozen],
    )


def _turn(spec: LayerSpec, program: Program, name: str) -> KernelText:
    """Newton-Schulz of one token's matrix, or its gradient."""
    text = KernelText(name, "A matrix of every token, by itself.", "turn", arguments=[STEP])
    printer = printer_of(program, spec, FULL)
    writer = KernelWriter(spec, text, program.nodes, "token", printer)
    text.signature = signature("token turn", list(program.outputs.values()))
    text.body = [writer.load(leaf) for leaf in program.leaves()]
    text.body += printer.emit(program.outputs.values())
    text.body += [_left(writer, k, v, printer.text[v]) for k, v in program.outputs.items()]
    text.alive = round(printer.alive, 1)
    return text


def _left(writer: KernelWriter, name: str, value: Node, text: str) -> str:
    """The line that leaves a value of a token for later kernels."""
    leaf = writer.printer.builder.leaf("saved", name, value.axes)
    return store_block(writer.found(leaf), "slot", value.axes, value.axes, text)


@dataclass(frozen=True)
class _Walks:
    """Writes walks over the tokens of a unit."""

    spec: LayerSpec
    frozen: Mapping[str, str]

    def forward(self, name: str, doc: str, program: Program, source: Source) -> KernelText:
        """From the states now, which it leaves as they are at the unit's end; or from those kept at its start, to leave
        those before every token."""
        text = KernelText(name, doc, "walk", arguments=[STEP])
        again = source == "units"
        outputs = {k: v for k, v in program.outputs.items() if not again or k != "y"}
        program = program.with_outputs(outputs)
        text.signature = signature(f"token walk{' again' if again else ''}", list(outputs.values()))
        printer = printer_of(program, self.spec, FULL)
        writer = KernelWriter(self.spec, text, program.nodes, "token", printer)
        text.before, text.ahead = writer.tokens(n for n in program.leaves() if n.role != "saved")
        ends = program.ends()
        states = {k: program.builder.leaf("carry", k, v.axes) for k, v in ends.items()}
        for key, leaf in states.items():
            if key in self.frozen:
                printer.loads[leaf] = writer.load_state(source, leaf, "lane" if source == "now" else "u * H + h")
                text.before += [] if again else self.point(writer, leaf)
                continue
            variable = printer.text[leaf] = printer.names.get(key)
            base = "u * H + h" if again else "lane"
            text.before.append(f"{variable} = {writer.load_state(source, leaf, base)}")
            if again:
                text.body.append(writer.store_state("scratch", leaf, "slot", variable))
            else:
                text.keep.append(writer.store_state("units", leaf, "u * H + h", variable))
        carried = {k: v for k, v in ends.items() if k not in self.frozen}
        lines, handed = writer.handed(handed_on(program.with_outputs(_carries(carried))).items())
        text.before += lines
        text.body += [writer.load(n) for n in program.leaves() if n.role == "saved"]
        left = {k: v for k, v in outputs.items() if k != "y" and not k.startswith("carry:")}
        text.body += printer.emit([*outputs.values(), *handed.values()])
        text.body += [_left(writer, k, v, printer.text[v]) for k, v in left.items()]
        if "y" in outputs:
            text.body += writer.store_output("y", outputs["y"], "")
        new = {printer.text[states[k]]: printer.sanitized(v) for k, v in carried.items()}
        text.body += moved(printer.names, new | {k: printer.sanitized(v) for k, v in handed.items()})
        if not again:
            text.after = [writer.store_state("now", states[k], "lane", printer.text[states[k]]) for k in carried]
        text.alive = round(printer.alive + sum(map(FULL, carried.values())), 1)
        return text

    def point(self, writer: KernelWriter, leaf: Node) -> list[str]:
        """Lines that put the gradient point of a unit where all its tokens find it."""
        memory = writer.printer.builder.leaf("carry", self.frozen[leaf.name], leaf.axes)
        variable = writer.printer.names.get(f"{leaf.name}_0")
        old = writer.load_state("now", leaf, "lane")
        writer.text.keep.append(writer.store_state("units", leaf, "u * H + h", variable))
        return [
            f"{variable} = tl.where(fresh, {writer.load_state('now', memory, 'lane')}, {old})",
            "tl.debug_barrier()",
            writer.store_state("now", leaf, "lane", variable),
            "tl.debug_barrier()",
        ]

    def backward(self, name: str, doc: str, program: Program) -> KernelText:
        """In reverse, with the cotangents now, of a unit whose states before each token were found again."""
        text = KernelText(name, doc, "walk", reverse=True, arguments=[STEP])
        text.signature = signature("token walk in reverse", list(program.outputs.values()))
        printer = printer_of(program, self.spec, FULL)
        writer = KernelWriter(self.spec, text, program.nodes, "token", printer)
        b = program.builder
        text.before, text.ahead = writer.tokens(n for n in program.leaves() if n.role in ("token", "cot", "param"))
        for leaf in program.carries():
            frozen = leaf.name in self.frozen
            kind, base = ("units", "u * H + h") if frozen else ("scratch", "slot")
            printer.loads[leaf] = writer.load_state(kind, leaf, base)
        printer.loads |= {n: writer.loaded(n) for n in program.leaves() if n.role == "saved"}
        ends = program.ends()
        leaves = {n.name: n for n in program.leaves() if n.role == "cocarry"}
        leaves |= {k: b.leaf("cocarry", k, v.axes) for k, v in ends.items()}
        for key, leaf in leaves.items():
            variable = printer.text[leaf] = printer.names.get(PREFIX["cocarry"] + key)
            text.before.append(f"{variable} = {writer.load_state('now', leaf, 'lane')}")
        text.body += printer.emit(program.outputs.values())
        params = {t.keyword: t.shape for t in self.spec.tensors if t.kind == "param"}
        for key, value in program.outputs.items():
            if key.startswith("carry:"):
                continue
            found = printer.sanitized(value) if value.axes else printer.text[value]
            if key[2:] in params:
                total = printer.names.get(f"{key[2:]}_total")
                zero = f"tl.zeros({shape(value.axes)}, tl.float32)" if value.axes else "0.0"
                text.before.append(f"{total} = {zero}")
                text.body.append(f"{total} += {found}")
                pointer = text.pointer(f"d_{key[2:]}", f'd_x["{key[2:]}"]', "float32")
                store = store_block(pointer, "u * H + h", value.axes, params[key[2:]], total)
                text.after += ["if j > 0:", f"    {store}"]
            elif key.startswith("d:") and key[2:] in writer.shapes:
                text.body += writer.store_output(key[2:], value, "")
            else:
                text.body.append(_left(writer, key.replace("d:", "d_"), value, found))
        names = {k: printer.text[leaf] for k, leaf in leaves.items()}
        new = {d: printer.sanitized(ends[k]) if k in ends else f"tl.zeros_like({d})" for k, d in names.items()}
        text.body += moved(printer.names, new)
        for key, leaf in leaves.items():
            text.after += self.handed_back(writer, key, leaf) if key in self.frozen else [
                writer.store_state("now", leaf, "lane", printer.text[leaf])
            ]
        text.alive = round(printer.alive + sum(map(FULL, ends.values())), 1)
        return text

    def handed_back(self, writer: KernelWriter, key: str, leaf: Node) -> list[str]:
        """Lines that hand the cotangent of a gradient point on: to the memory that it was taken from, where the unit
        began a group."""
        variable = writer.printer.text[leaf]
        memory = writer.printer.builder.leaf("cocarry", self.frozen[key], leaf.axes)
        sum_ = f"{writer.load_state('now', memory, 'lane')} + tl.where(fresh, {variable}, 0.0)"
        return [
            writer.store_state("now", memory, "lane", sum_),
            writer.store_state("now", leaf, "lane", f"tl.where(fresh, 0.0, {variable})"),
        ]


def _carries(ends: Mapping[str, Node]) -> dict[str, Node]:
    return {f"carry:{k}": v for k, v in ends.items()}
