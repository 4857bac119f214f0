"""A kernel for all units at once, as several in a row, where it would keep more tiles alive than a multiprocessor has
registers for: what crosses from one to the next goes through memory, in float32, and each loads only what it uses.

Input: a map `Kernel`. Output: the kernels in its place; itself, where it has room. Computes nothing twice but what is
cheaper than a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ttmdsl.ir import Node, constant
from ttmdsl.schedule import Weight, best_order, peak

if TYPE_CHECKING:
    from ttmdsl.plan import Kernel

MOST = 12.0  # tiles of 64 x 64 in float32 that eight warps can keep alive, beside what addresses and masks take
_SAME = frozenset({"rename", "expand", "neg"})  # cheaper than a load


def staged(kernel: Kernel, weight: Weight) -> list[Kernel]:
    """The kernels in a kernel's place, in order."""
    given = set(kernel.given)
    nodes = [n for n in kernel.nodes() if n not in given and not is_input(n) and len(n.axes) <= 2]
    order = best_order(nodes, [], operands, weight)
    if peak_of_loads(order, weight) <= MOST:
        return [kernel]
    segments = _segments(order, weight)
    place = {n: i for i, segment in enumerate(segments) for n in segment}
    crossing: dict[Node, None] = {}
    for n in order:
        for a in map(_source, operands(n)):
            if a in place and place[a] < place[n]:
                crossing[a] = None
    result: list[Kernel] = []
    known = kernel.given
    for i in range(len(segments)):
        outputs = tuple((k, v) for k, v in kernel.outputs if place.get(v, 0) == i)
        saves = dict.fromkeys([*(n for n in kernel.saves if place[n] == i), *(n for n in crossing if place[n] == i)])
        name = kernel.name.replace("_kernel", f"_{i + 1}_kernel")
        part = replace(kernel, name=name, outputs=outputs, saves=tuple(saves), exact=frozenset(crossing))
        result.append(part.giving(known))
        known += tuple(n for n in saves if n not in known)
    return [part for part in result if part.roots]


def is_input(node: Node) -> bool:
    return node.op in ("leaf", "size") or constant(node) is not None


def operands(node: Node) -> tuple[Node, ...]:
    """What a value is made of; of a tile with three axes, which no kernel holds, what that is made of."""
    return tuple(x for a in node.args for x in (a.args if len(a.axes) > 2 else (a,)))


def _source(node: Node) -> Node:
    """What a value follows from without work."""
    while node.op in _SAME:
        node = node.args[0]
    return node


def peak_of_loads(segment: Sequence[Node], weight: Weight) -> float:
    """The most registers in use at once, where what comes from outside is loaded when it is first used."""
    order: dict[Node, None] = {}
    for n in segment:
        order |= dict.fromkeys((*(a for a in operands(n) if a.op != "size" and constant(a) is None), n))
    return peak([*order], (), operands, weight)


def _segments(order: list[Node], weight: Weight) -> list[list[Node]]:
    """The order cut into pieces that have room, each at the place in its last part where least crosses."""
    last = {a: i for i, n in enumerate(order) for a in operands(n)}
    segments: list[list[Node]] = []
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and peak_of_loads(order[start : end + 1], weight) <= MOST:
            end += 1
        if end < len(order):
            places = range(start + max(1, (end - start) * 2 // 3), end + 1)
            end = min(places, key=lambda p: sum(weight(n) for n in order[start:p] if last.get(n, -1) >= p))
        segments.append(order[start:end])
        start = end
    return segments
