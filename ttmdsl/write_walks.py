"""The text of the sequential form's kernels that walk over some of a sequence's tokens: forward, or in reverse with
what was found of each of them.

Input: programs for one token. Output: kernels as text, which the templates frame. States and cotangents are handed from
one walk to the next in arrays `now`; what a walk leaves for later kernels it stores for every token: states before each
token in `scratch`, other values in `found`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ttmdsl.ir import Axes, Node, Program
from ttmdsl.kernel_text import Argument, KernelText, TokenKind
from ttmdsl.kernel_writer import PREFIX, KernelWriter, printer_of
from ttmdsl.print_tiles import store_block
from ttmdsl.replay import Replay
from ttmdsl.rounds import rounds
from ttmdsl.schedule import FULL, weights
from ttmdsl.spec import LayerSpec
from ttmdsl.tile_sums import handed_on
from ttmdsl.tuning import signature
from ttmdsl.write_kernel import moved
from ttmdsl.write_rounds import over_blocks

STEP = Argument("step_ptr", "step", "int64")  # which unit of every sequence it is, or which piece
Source = Literal["now", "units"]
BASE: dict[Source, str] = {"now": "lane", "units": "u * H + h"}


@dataclass(frozen=True)
class WalkWriter:
    """Writes kernels. `frozen`: gradient points that hold for all tokens of a walk, and the memory that each is taken
    from. `apart`: whether other kernels are the first to take one, and the last to hand its cotangent on; else the
    walks do."""

    spec: LayerSpec
    frozen: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False

    def walk(self, name: str, doc: str, program: Program, source: Source, kind: TokenKind = "walk") -> KernelText:
        """From the states now, which it leaves as they are at the unit's end; or from those kept at its start, to leave
        those before every token."""
        again = source == "units"
        points = [] if self.apart or again else [n for n in program.outputs.values() if n.name in self.frozen]
        fixed = {f"carry:{k}" for k in self.frozen} | ({"y"} if again else set())
        program = program.with_outputs({k: v for k, v in program.outputs.items() if k not in fixed})
        text, writer = self.begun(name, doc, kind, program, f"{kind}{' again' if again else ''}")
        printer, outputs = writer.printer, program.outputs
        text.before, text.ahead = writer.tokens(n for n in program.leaves() if n.role != "saved")
        for leaf in points:
            text.before += self.point(writer, leaf)
        for leaf in (n for n in program.carries() if n.name in self.frozen):
            printer.loads[leaf] = writer.load_state(source, leaf, BASE[source])
        ends = program.ends()
        states = {k: program.builder.leaf("carry", k, v.axes) for k, v in ends.items()}
        for key, leaf in states.items():
            variable = printer.text[leaf] = printer.names.get(key)
            text.before.append(f"{variable} = {writer.load_state(source, leaf, BASE[source])}")
            if again:
                text.body.append(writer.store_state("scratch", leaf, "slot", variable))
            else:
                text.keep.append(writer.store_state("units", leaf, BASE["units"], variable))
        lines, handed = writer.handed(handed_on(program).items())
        text.before += lines
        text.body += [writer.load(n) for n in program.leaves() if n.role == "saved"]
        text.body += printer.emit([*outputs.values(), *handed.values()])
        text.body += self.left(writer, program)
        if "y" in outputs:
            text.body += writer.store_output("y", outputs["y"], "")
        new = {printer.text[states[k]]: printer.sanitized(v) for k, v in ends.items()}
        text.body += moved(printer.names, new | {k: printer.sanitized(v) for k, v in handed.items()})
        if not again:
            text.after = [writer.store_state("now", leaf, "lane", printer.text[leaf]) for leaf in states.values()]
        text.alive = round(printer.alive + sum(map(FULL, ends.values())), 1)
        return text

    def back(self, name: str, doc: str, program: Program, kind: TokenKind = "walk") -> KernelText:
        """In reverse, with the cotangents now, over tokens before each of which the states were found again."""
        text, writer = self.begun(name, doc, kind, program, f"{kind} in reverse")
        text.reverse = True
        printer, leaves = writer.printer, program.leaves()
        text.before, text.ahead = writer.tokens(n for n in leaves if n.role not in ("carry", "cocarry", "saved"))
        found = {n: writer.load_state("scratch", n, "slot") for n in program.carries() if n.name not in self.frozen}
        found |= {n: writer.loaded(n) for n in leaves if n.role == "saved"}
        if kind == "piece":  # before all else: a token waits for nothing more
            for leaf, load in found.items():
                printer.text[leaf] = printer.names.get(printer.wish(leaf))
                text.body.append(f"{printer.text[leaf]} = {load}")
        else:
            printer.loads |= found
        for leaf in (n for n in program.carries() if n.name in self.frozen):
            printer.loads[leaf] = writer.load_state("units", leaf, BASE["units"])
        ends = program.ends()
        cotangents = {n.name: n for n in leaves if n.role == "cocarry"}
        cotangents |= {k: program.builder.leaf("cocarry", k, v.axes) for k, v in ends.items()}
        for key, leaf in cotangents.items():
            variable = printer.text[leaf] = printer.names.get(PREFIX["cocarry"] + key)
            text.before.append(f"{variable} = {writer.load_state('now', leaf, 'lane')}")
        text.body += printer.emit(program.outputs.values())
        text.body += self.left(writer, program)
        for key, value in program.outputs.items():
            if key.startswith("d:") and key[2:] in writer.shapes:
                more = kind == "piece"  # one after the other; of units each has room for its own
                writer.store_gradient(key[2:], value, BASE["now" if more else "units"], more)
        names = {k: printer.text[leaf] for k, leaf in cotangents.items()}
        new = {d: printer.sanitized(ends[k]) if k in ends else f"tl.zeros_like({d})" for k, d in names.items()}
        text.body += moved(printer.names, new)
        text.held = [*cotangents]
        handed = {} if self.apart else {point: memory for point, memory in self.frozen.items() if point in names}
        for point, memory in handed.items():
            text.after += self.handed_back(writer, point, names[point], names.get(memory))
        for key, leaf in cotangents.items():
            if key not in handed and key not in handed.values():
                text.after.append(writer.store_state("now", leaf, "lane", names[key]))
        text.alive = round(printer.alive + sum(map(FULL, ends.values())), 1)
        return text

    def begun(
        self, name: str, doc: str, kind: TokenKind, program: Program, way: str
    ) -> tuple[KernelText, KernelWriter]:
        inner = program.inner if rounds(program.outputs.values(), (), program.inner) else ""
        text = KernelText(name, doc, kind, arguments=[STEP], inner=inner)
        text.signature = signature(f"token {way}", list(program.outputs.values()))
        weight = FULL if program.unit == "token" else weights(16)
        return text, KernelWriter(self.spec, text, program.nodes, program.unit, printer_of(program, self.spec, weight))

    def left(self, writer: KernelWriter, program: Program) -> list[str]:
        """Lines that leave for later kernels what is neither y, nor a carry, nor a tensor's gradient."""
        lines = []
        for key, value in program.outputs.items():
            if key == "y" or key.startswith("carry:") or (key.startswith("d:") and key[2:] in writer.shapes):
                continue
            pointer = self.found(writer, key.replace("d:", "d_"), value.axes)
            text = writer.printer.sanitized(value) if value.axes else writer.printer.text[value]
            lines.append(store_block(pointer, "slot", value.axes, value.axes, text))
        return lines

    def found(self, writer: KernelWriter, name: str, axes: Axes) -> str:
        """The pointer to a value of every token, whether a kernel has one of them or all of a unit's at once."""
        of_token = tuple(x for x in axes if x != "t")
        return writer.found(writer.printer.builder.leaf("saved", name, of_token))

    def point(self, writer: KernelWriter, leaf: Node) -> list[str]:
        """Lines that leave the gradient point of a unit where all kernels find it: the memory, where a group begins."""
        name = writer.printer.names.get(leaf.name)
        memory = writer.printer.builder.leaf("carry", self.frozen[leaf.name], leaf.axes)
        now = [writer.load_state("now", n, "lane") for n in (memory, leaf)]
        lines = [
            f"{name} = tl.where(fresh, {now[0]}, {now[1]})",
            "if KEEP:",
            f"    {writer.store_state('units', leaf, BASE['units'], name)}",
            "tl.debug_barrier()",
            writer.store_state("now", leaf, "lane", name),
        ]
        inner = writer.text.inner
        return [*(over_blocks(inner, lines) if inner in leaf.axes else lines), "tl.debug_barrier()"]

    def handed_back(self, writer: KernelWriter, key: str, value: str, of_memory: str | None = None) -> list[str]:
        """Lines that hand the cotangent of a gradient point on: to the memory that it was taken from, where the unit
        began a group. `of_memory`: the memory's own, where the kernel has it at hand."""
        b, states = writer.printer.builder, writer.states
        leaf, memory = (b.leaf("cocarry", k, states[key]) for k in (key, self.frozen[key]))
        own = of_memory or writer.load_state("now", memory, "lane")
        return [
            writer.store_state("now", memory, "lane", f"{own} + tl.where(fresh, {value}, 0.0)"),
            writer.store_state("now", leaf, "lane", f"tl.where(fresh, 0.0, {value})"),
        ]


def write_token_backward(spec: LayerSpec, walks: Replay) -> tuple[KernelText, KernelText]:
    """The backward kernels of the sequential form: the states before each token of a piece of the sequence, all of its
    segments side by side, since those at their starts are kept; then its tokens in reverse."""
    read = {n.name for n in (*walks.again.carries(), *walks.backward.carries())}
    outputs = walks.again.outputs.items()
    again = walks.again.with_outputs({k: v for k, v in outputs if k.partition(":")[2] in {"", *read}})
    write = WalkWriter(spec)
    doc = "Gradients of everything, a piece of the sequence at a time, the last one first."
    return (
        write.walk("_token_again_kernel", "The states before each token of a segment.", again, "units", "segment"),
        write.back("_token_backward_kernel", doc, walks.backward, "piece"),
    )
