"""The text of a kernel's rounds over the blocks of a dim: what is without the dim before each, sums added up in it.

Input: `Round`s, a printer and what follows a value at once. Output: lines of code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ttmdsl.ir import Node, reachable
from ttmdsl.print_triton import TritonPrinter, shape
from ttmdsl.rounds import Round

Then = Mapping[Node, Callable[[], list[str]]]


def emit_rounds(printer: TritonPrinter, found: Sequence[Round], dim: str, then: Then) -> list[str]:
    """Lines that compute everything in the rounds; `then` gives lines that follow a value at once, as its store."""
    lines: list[str] = []
    most = 0.0
    for i, r in enumerate(found):
        lines += printer.emit(r.before, {n: then[n] for n in r.before if n in then})
        most = max(most, printer.alive)
        if not r.sums and not r.ends:
            continue
        totals = {n: printer.names.get(f"{printer.builder.labels.get(n) or printer.wish(n)}_total") for n in r.sums}
        for n, name in totals.items():
            lines.append(f"{name} = {f'tl.zeros({shape(n.axes)}, tl.float32)' if n.axes else '0.0'}")
        beside = sum(map(printer.weight, {*totals, *_outside(printer, found[i:], dim)}))
        known, printer.alive = dict(printer.text), 0.0
        adding = {n: _adding(printer, n, name) for n, name in totals.items()}
        ends = {n: then[n] for n in r.ends if n in then}
        lines += over_blocks(dim, printer.emit([*r.sums, *r.ends], ends | adding))
        most = max(most, printer.alive + beside)
        printer.text = known | totals
        lines += [line for n in r.sums if n in then for line in then[n]()]
    printer.alive = most
    return lines


def _adding(printer: TritonPrinter, node: Node, total: str) -> Callable[[], list[str]]:
    return lambda: [f"{total} += {printer.text[node]}"]


def _outside(printer: TritonPrinter, left: Sequence[Round], dim: str) -> set[Node]:
    """Values without the dim that are known, and that the rounds which are left take."""
    todo = reachable([n for r in left for n in (*r.before, *r.sums, *r.ends)], printer.text)
    return {n for n in todo if n in printer.text and dim not in n.axes}


def over_blocks(dim: str, lines: Iterable[str]) -> list[str]:
    """The lines for every block of a dim."""
    even = f"N_{dim} % P_{dim} == 0"
    head = [f"o_{dim} = block + tl.arange(0, P_{dim})", f"m_{dim} = (o_{dim} < N_{dim}) | ({even})"]
    return [f"for block in range(0, N_{dim}, P_{dim}):", *(f"    {line}" for line in [*head, *lines])]
