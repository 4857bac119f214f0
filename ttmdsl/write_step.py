"""The kernel of one token's step where memories have a dim that no tensor has: the inner one of a deep memory.

Input: the program that the walk over tokens computes, and what the step finds of the past. Output: `KernelText`, or
None where the walk serves as well. The walk keeps states in registers, which those of a deep memory overflow; a step
has no next token to keep them for, so it walks over blocks of the inner dim instead, in rounds (rounds.py), and stores
each block as it comes to it. Of a memory and its gradient point, which are one where a group begins, a round that takes
the point loads one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ttmdsl.ir import Node, Program
from ttmdsl.kernel_text import KernelText
from ttmdsl.kernel_writer import KernelWriter, all_lines, printer_of
from ttmdsl.lower_token import inner_dim
from ttmdsl.print_tiles import load_block
from ttmdsl.rounds import rounds
from ttmdsl.schedule import FULL
from ttmdsl.spec import LayerSpec
from ttmdsl.tuning import signature
from ttmdsl.write_alone import Alone
from ttmdsl.write_rounds import emit_rounds

_LANE = "n * H + h"
_DEPTH_FIRST = 4  # of the orders (orders.py) the one that takes fewest registers where windows have many tokens


def write_step(spec: LayerSpec, program: Program, alone: Alone | None) -> KernelText | None:
    """The text of the kernel; its tensors are those of the sequence's one token."""
    inner, roots = inner_dim(spec), [*program.outputs.values()]
    points = [n for n in program.nodes if n.op == "select" and n.args[0].role == "fresh" and inner in n.axes]
    found = rounds(roots, points, inner)
    if not found:
        return None
    text = KernelText("_token_step_kernel", "y and the states after one token.", "step", inner=inner)
    text.signature = signature("token step in rounds", roots)
    printer = printer_of(program, spec, FULL)
    printer.ordering = _DEPTH_FIRST
    writer = KernelWriter(spec, text, program.nodes, program.unit, printer, alone=alone)
    leaves = program.leaves()
    printer.loads |= writer.within(leaves, inner)
    before, loads = writer.inputs(n for n in leaves if n.role != "carry" and n not in printer.loads)
    for leaf in program.carries():
        loaded = writer.load_state("start", leaf, _LANE)
        if inner in leaf.axes:
            printer.loads[leaf] = loaded
        else:
            printer.text[leaf] = printer.names.get(leaf.name)
            loads.append(f"{printer.text[leaf]} = {loaded}")
    for point in points:  # one of two states is loaded
        fresh, *both = point.args
        memory, kept = (writer.state("start", leaf) for leaf in both)
        chosen = f"tl.where({printer.text[fresh]}, {memory}, {kept})"
        order = writer.states[both[0].name]
        printer.loads[point] = f"{load_block(chosen, _LANE, point.axes, order)}.to(tl.float32)"
    then: dict[Node, list[Callable[[], list[str]]]] = {}
    for name, value in program.outputs.items():
        then.setdefault(value, []).append(_store(writer, name, value))
    text.body = [*before, *(alone.begin(text.pointer) if alone else ()), *loads]
    text.body += alone.end(text.pointer) if alone else []  # while what was asked for is on its way
    text.body += emit_rounds(printer, found, inner, {n: partial(all_lines, many) for n, many in then.items()})
    text.alive = round(printer.alive, 1)
    return text


def _store(writer: KernelWriter, name: str, value: Node) -> Callable[[], list[str]]:
    """What makes the lines that store an output: y, or a state where it is asked for."""
    if not name.startswith("carry:"):
        return lambda: writer.store_output(name, value, "")
    leaf = writer.printer.builder.leaf("carry", name.removeprefix("carry:"), value.axes)
    return lambda: writer.last_state("end", leaf, _LANE, writer.printer.sanitized(value))
