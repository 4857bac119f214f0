"""The text of a kernel's rounds over the blocks of a dim: what is without the dim before each, sums added up in it.

Input: `Round`s, a printer and what follows a value at once. Output: lines of code. The blocks of one head may be shared
out among several programs, each of which walks over some: after each round they hand their sums to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ttmdsl.ir import Node, depends_on, is_product, reachable
from ttmdsl.print_tiles import numbered, shape, width
from ttmdsl.print_triton import TritonPrinter
from ttmdsl.rounds import Round

Then = Mapping[Node, Callable[[], list[str]]]


def emit_rounds(
    printer: TritonPrinter,
    found: Sequence[Round],
    dim: str,
    then: Then,
    shared: bool = False,
    in_shared: bool = False,
) -> list[str]:
    """Lines that compute everything in the rounds; `then` gives lines that follow a value at once, as its store.
    `shared`: blocks may be shared out. `in_shared`: what products take from before a walk may wait in shared memory."""
    lines: list[str] = []
    most = 0.0
    adding_up = [r for r in found if r.sums]
    for i, r in enumerate(found):
        lines += printer.emit(r.before, {n: then[n] for n in r.before if n in then})
        most = max(most, printer.alive)
        if not r.sums and not r.ends:
            continue
        totals = _totals(printer, r)
        for n, name in totals.items():
            lines.append(f"{name} = {f'tl.zeros({shape(n.axes)}, tl.float32)' if n.axes else '0.0'}")
        beside = sum(map(printer.weight, {*totals, *_outside(printer, found[i:], dim)}))
        if in_shared:
            lines += printer.put_in_shared(reachable([*r.sums, *r.ends], printer.text))
        known, printer.alive = dict(printer.text), 0.0
        adding = {n: _adding(printer, n, name) for n, name in totals.items()}
        ends = {n: then[n] for n in r.ends if n in then}
        lines += over_blocks(dim, printer.emit([*r.sums, *r.ends], ends | adding), shared)
        most = max(most, printer.alive + beside)
        printer.text = known | totals
        if shared and r.sums:
            handing, waiting = _handing(totals, adding_up.index(r), len(adding_up))
            lines += ["if SHARES > 1:", *(f"    {line}" for line in [*handing, *waiting])]
        lines += [line for n in r.sums if n in then for line in then[n]()]
    printer.alive = most
    return lines


def emit_together(
    printer: TritonPrinter, found: Sequence[Round], takers: Mapping[Node, Sequence[Node]], then: Then
) -> list[str]:
    """The same by programs that have one block each: nothing is computed twice. Once a program has handed in its sums
    of a round, it takes those products that need none of them, and then waits for the others'. `takers`: all that is
    computed or loaded, and what takes it."""
    lines: list[str] = []
    adding_up = [r for r in found if r.sums]

    def emit(roots: Iterable[Node], then: Then = then) -> list[str]:
        roots = list(dict.fromkeys(roots))
        here = set(reachable(roots, printer.text))
        later = [n for n in here if not here.issuperset(takers.get(n, ()))]
        return printer.emit(roots, {n: then[n] for n in roots if n in then}, named=later)

    for r in found:
        lines += emit(r.before)
        if not r.sums:
            lines += emit(r.ends)
            continue
        lines += emit(r.sums, {})
        totals = _totals(printer, r)
        lines += [f"{name} = {printer.text[n]}" for n, name in totals.items()]
        handing, waiting = _handing(totals, adding_up.index(r), len(adding_up))
        unknown = depends_on(takers, totals)
        apart = [n for n in takers if is_product(n) and n not in unknown and n not in printer.text]
        lines += [*handing, *emit([*r.ends, *apart]), *waiting]
        printer.text |= totals
        lines += [line for n in r.sums if n in then for line in then[n]()]
    return lines


def _totals(printer: TritonPrinter, r: Round) -> dict[Node, str]:
    """The names of what a round's sums add up to."""
    return {n: printer.names.get(f"{printer.builder.labels.get(n) or printer.wish(n)}_total") for n in r.sums}


def _adding(printer: TritonPrinter, node: Node, total: str) -> Callable[[], list[str]]:
    return lambda: [f"{total} += {printer.text[node]}"]


def _outside(printer: TritonPrinter, left: Sequence[Round], dim: str) -> set[Node]:
    """Values without the dim that are known, and that the rounds which are left take."""
    todo = reachable([n for r in left for n in (*r.before, *r.sums, *r.ends)], printer.text)
    return {n for n in todo if n in printer.text and dim not in n.axes}


def _handing(totals: Mapping[Node, str], turn: int, turns: int) -> tuple[list[str], list[str]]:
    """Lines by which a program hands in what it has found, at one of a unit's turns; and lines that wait for all that
    share the head's blocks, and add up what they have found. There is room for two turns: who hands in at the next one
    has loaded all of this one, so at the one after it everybody has."""
    handing = [f"turn = {turns} * step + {turn}", "room = sums_ptr + (2 * lane + turn % 2) * SHARES * ROOM"]
    begin, places = "", {}
    for n, name in totals.items():
        places[name] = f"({begin}{numbered(n.axes)})"
        begin += f"{' * '.join(map(width, n.axes)) or '1'} + "
        handing.append(f"tl.store(room + share * ROOM + {places[name]}, {name})")
    waiting = ["_wait(arrived_ptr + lane, (turn + 1) * SHARES)"]
    waiting += [f"{name} = _added_up(room + {place}, SHARES, ROOM)" for name, place in places.items()]
    return [*handing, "_arrive(arrived_ptr + lane)"], waiting


def over_blocks(dim: str, lines: Iterable[str], shared: bool = False) -> list[str]:
    """The lines for every block of a dim, or of those that a program has of them."""
    even = f"N_{dim} % {f'(SHARES * P_{dim})' if shared else f'P_{dim}'} == 0"
    head = [f"o_{dim} = block + tl.arange(0, P_{dim})", f"m_{dim} = (o_{dim} < N_{dim}) | ({even})"]
    ends = f"begin_{dim}, end_{dim}" if shared else f"0, N_{dim}"
    return [f"for block in range({ends}, P_{dim}):", *(f"    {line}" for line in [*head, *lines])]
