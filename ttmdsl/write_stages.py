"""The text of the kernels of the sequential form in stages: walks over a unit's tokens, and what is found for all of
them at once.

Input: `Stages`. Output: `StageTexts`, kernels as text, which the templates frame. The first kernel of a unit begins
with the states `now`, or those kept at the unit's start. What a kernel leaves for later ones it stores for every token,
in `found`; the states before each token are in `scratch`.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from ttmdsl.ir import Axes, Node, Program
from ttmdsl.kernel_text import Kept, KernelText
from ttmdsl.kernel_writer import KernelWriter
from ttmdsl.print_tiles import Rows, load_token, store_token, width
from ttmdsl.rounds import rounds
from ttmdsl.spec import LayerSpec
from ttmdsl.stages import Stages
from ttmdsl.write_rounds import emit_rounds
from ttmdsl.write_walks import BASE, Source, WalkWriter

SLOTS = Rows("lane * SEGMENT", "t_")  # where a unit's tokens are in arrays of what was found


@dataclass(frozen=True)
class StageTexts:
    """The kernels in the order in which they run, once for every unit. `kept`: the states at the units' starts, as in
    `FormTexts`, and `saved` and `across`, of which there is nothing; `states`: those that are found again before each
    token."""

    forward: tuple[KernelText, ...]
    backward: tuple[KernelText, ...]
    kept: dict[str, str]
    states: list[str]
    name: str = "staged"
    saved: Mapping[str, Axes] = field(default_factory=dict)
    across: tuple[str, ...] = ()

    def kernels(self) -> tuple[KernelText, ...]:
        return self.forward + self.backward

    def kept_steps(self) -> list[Kept]:
        """What the steps of Newton-Schulz start from."""
        return list(dict.fromkeys(k.kept for k in self.backward if k.kept))

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
    write = _Writer(spec, s.frozen, bool(s.vectors))
    vectors = [write.vectors("_staged_vectors_kernel", s.vectors.forward, "now")] if s.vectors else []
    writes = write.walk("_staged_writes_kernel", "What each token writes, to be turned.", s.writes.forward, "now")
    turns = [write.turn(f"_staged_turn_{i}_kernel", t.forward, False) for i, t in enumerate(s.turns)]
    reads = write.walk("_staged_reads_kernel", "Steps and y, token after token.", s.reads.forward, "now")
    again = [write.vectors("_staged_vectors_again_kernel", s.vectors.forward, "units")] if s.vectors else []
    again += [
        write.walk("_staged_writes_again_kernel", "What each token wrote, once more.", s.writes.forward, "units"),
        *(write.turn(f"_staged_turn_{i}_again_kernel", t.forward, True) for i, t in enumerate(s.turns)),
        write.walk("_staged_reads_again_kernel", "The states before each token.", s.reads.forward, "units"),
    ]
    backward = [
        write.back("_staged_backward_reads_kernel", "Gradients of y and of the steps.", s.reads.backward),
        *(write.turn(f"_staged_backward_turn_{i}_kernel", t.backward, True) for i, t in enumerate(s.turns)),
        write.back("_staged_backward_writes_kernel", "Gradients of what is written.", s.writes.backward),
    ]
    backward += [write.vectors_back("_staged_backward_vectors_kernel", s.vectors.backward)] if s.vectors else []
    kept = dict.fromkeys([*s.frozen, *s.writes.forward.ends(), *s.reads.forward.ends()], "float32")
    states = [k for k in kept if k not in s.frozen]
    return StageTexts((*vectors, writes, *turns, reads), (*again, *backward), kept, states)


class _Writer(WalkWriter):
    """Writes kernels of one unit: beside the walks, those of one token and of all at once."""

    def turn(self, name: str, program: Program, kept: bool) -> KernelText:
        """Newton-Schulz of every token's matrix, each by itself; or the gradient, of what was `kept` of its steps."""
        way = f"turn{' kept' if kept else ''}"
        text, writer = self.begun(name, "A matrix of every token, by itself.", "turn", program, way)
        ((key, node),) = program.outputs.items()
        rows, steps = node.attr
        text.kept = Kept(f"kept__{key.rpartition('__')[2]}", node.axes, steps) if kept else None
        given = node.args[-1]
        text.body = [writer.load(given)]
        flipped = node.axes[1] != rows  # products run over x^T x
        tile = f"tl.trans({writer.printer.text[given]})" if flipped else writer.printer.text[given]
        call, arguments = f"_tile_{node.op}", [tile, str(steps), "INVERSE"]
        if text.kept:
            pointer = text.pointer(text.kept.name, f'found["{text.kept.name}"]', "half")
            size = " * ".join([str(steps), *map(width, node.axes)])
            call = call.replace("_schulz", "_schulz_kept")
            arguments.insert(1, f"{pointer} + slot * ({size})")
        found = f"{call}({', '.join(arguments)})"
        writer.printer.text[node] = f"tl.trans({found})" if flipped else found
        text.body += self.left(writer, program)
        text.alive = 1.0
        return text

    def vectors(self, name: str, program: Program, source: Source) -> KernelText:
        """Vectors of all tokens that follow from the gradient point."""
        again = " again" if source == "units" else ""
        text, writer = self.begun(name, "Vectors of all tokens at once.", "unit", program, f"vectors{again}")
        for leaf in program.carries():
            text.before += [] if again else self.point(writer, leaf)
            writer.printer.loads[leaf] = writer.load_state(source, leaf, BASE[source])
        return self._at_once(text, writer, program)

    def vectors_back(self, name: str, program: Program) -> KernelText:
        """Their gradients."""
        text, writer = self.begun(name, "Gradients of the vectors.", "unit", program, "vectors in reverse")
        writer.printer.dot = "DOT, INVERSE"  # nothing enlarges their rounding
        for leaf in program.leaves():
            if leaf.role == "saved":
                pointer = self.found(writer, leaf.name, leaf.axes)
                loaded = load_token(pointer, leaf.axes, leaf.axes[1:], live=True, rows=SLOTS)
                writer.printer.loads[leaf] = loaded
            elif leaf.role in ("carry", "cocarry"):
                kind: Source = "units" if leaf.role == "carry" else "now"
                writer.printer.loads[leaf] = writer.load_state(kind, leaf, BASE[kind])
        return self._at_once(text, writer, program)

    def _at_once(self, text: KernelText, writer: KernelWriter, program: Program) -> KernelText:
        """The body of a kernel of a whole unit: it walks over the blocks of an inner dim."""
        printer = writer.printer
        tensors = [n for n in program.leaves() if n.role == "token" and len(n.axes) > 1]
        printer.loads |= {n: writer.loaded(n) for n in tensors}
        before, each = writer.inputs(n for n in program.leaves() if n not in tensors)
        text.body = [*before, *each]
        stored: dict[Node, list[str]] = {}
        for key, value in program.outputs.items():
            if value.role != "carry":  # a point stays as it is
                stored.setdefault(value, []).append(key)
        then = {value: functools.partial(self._stored, writer, keys, value) for value, keys in stored.items()}
        if text.inner:
            text.body += emit_rounds(printer, rounds(then, (), text.inner), text.inner, then)
        else:
            text.body += printer.emit(then, then)
        text.alive = round(printer.alive, 1)
        return text

    def _stored(self, writer: KernelWriter, keys: Iterable[str], value: Node) -> list[str]:
        """Lines that store a value that a kernel of a whole unit finds, under each of its names."""
        lines: list[str] = []
        for key in keys:
            keyword, text = key.removeprefix("d:"), writer.printer.sanitized(value)
            if key.startswith("carry:"):
                lines += self.handed_back(writer, key.removeprefix("carry:"), text)
            elif key.startswith("d:") and keyword in writer.shapes:
                lines += writer.store_output(keyword, value, BASE["units"])
            else:
                pointer = self.found(writer, key.replace("d:", "d_"), value.axes)
                lines.append(store_token(pointer, value.axes, value.axes[1:], text, SLOTS))
        return lines
