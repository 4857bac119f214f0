"""A kernel for all units at once, as several in a row, where it would keep more tiles alive than a multiprocessor has
registers for: what crosses from one to the next goes through memory, in float32, and each loads only what it uses.

Input: a map `Kernel`. Output: the kernels in its place; itself, where spilling costs less. Computes nothing twice but
what is cheaper than a load.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ttmdsl.ir import Node, constant, is_product
from ttmdsl.schedule import WORKING, Weight, best_order, peak

if TYPE_CHECKING:
    from ttmdsl.plan import Kernel

ROOM = 7.5  # tiles of 64 x 64 in float32 that four warps keep alive, beside what addresses and masks take;
MOST = 12.0  # and eight warps
LAUNCH = 4.0  # what a kernel costs, in products, or loads, of a tile
SPILL, CROWD = 6.0, 0.2  # and a tile that finds no room; more where they are many, and leave the caches
_ACROSS = frozenset({"contract", "sum", "amax", "cumsum", "tri_inv"}) | WORKING.keys()  # dearer than a load


def staged(kernel: Kernel, weight: Weight) -> list[Kernel]:
    """The kernels in a kernel's place, in order."""
    order = best_order(computed(kernel), [], operands, weight)
    if peak_of_loads(order, weight) <= ROOM:
        return [kernel]
    ways = [[kernel], *(_cut(kernel, _segments(order, weight, limit)) for limit in (MOST, ROOM))]
    return min(ways, key=lambda parts: sum(cost(part, weight) for part in parts))


def cost(kernel: Kernel, weight: Weight) -> float:
    """About how long a kernel takes, in products of two tiles; as long as loading a tile in half precision.

    What crosses takes room in memory, too, and counts more where it is stored.
    """
    order = best_order(computed(kernel), [], operands, weight)
    tiles = [n for n in dict.fromkeys(a for n in order for a in operands(n)) if len(n.axes) == 2]
    loads = sum(2.0 if n in kernel.exact else 1.0 for n in tiles if n.op == "leaf" or n in kernel.given)
    stores = sum(3.0 if n in kernel.exact else 1.0 for n in kernel.saves if len(n.axes) == 2)
    products = sum(map(is_product, order))
    over = max(0.0, peak_of_loads(order, weight) - ROOM)
    return LAUNCH + products + loads + stores + over * (SPILL + CROWD * over)


def computed(kernel: Kernel) -> list[Node]:
    """The values that a kernel computes and holds."""
    given = set(kernel.given)
    return [n for n in kernel.nodes() if n not in given and not is_input(n) and len(n.axes) <= 2]


def _cut(kernel: Kernel, segments: Sequence[Sequence[Node]]) -> list[Kernel]:
    """The kernel as several, each of which computes one segment."""
    place = {n: i for i, segment in enumerate(segments) for n in segment}
    crossing: dict[Node, None] = {}
    for n in place:
        for a in (s for x in operands(n) for s in _sources(x)):
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


def _sources(node: Node) -> list[Node]:
    """The products, sums and vectors that a value follows from by work on single elements, which is done again."""
    sources, stack, known = [], [node], set()
    while stack:
        n = stack.pop()
        if n in known or is_input(n):
            continue
        known.add(n)
        if len(n.axes) != 2 or n.op in _ACROSS:
            sources.append(n)
        else:
            stack.extend(n.args)
    return sources


def peak_of_loads(segment: Sequence[Node], weight: Weight) -> float:
    """The most registers in use at once, where what comes from outside is loaded when it is first used."""
    order: dict[Node, None] = {}
    for n in segment:
        order |= dict.fromkeys((*(a for a in operands(n) if a.op != "size" and constant(a) is None), n))
    return peak([*order], (), operands, weight)


def _segments(order: list[Node], weight: Weight, limit: float) -> list[list[Node]]:
    """The order cut into pieces that have room, each at the place in its last part where least crosses."""
    last = {a: i for i, n in enumerate(order) for a in operands(n)}
    segments: list[list[Node]] = []
    start = 0
    while start < len(order):
        places = range(start + 2, len(order) + 1)  # the peak hardly ever falls as a segment grows
        end = start + 1 + bisect(places, limit, key=lambda p: peak_of_loads(order[start:p], weight))
        if end < len(order):
            ends = range(start + max(1, (end - start) * 2 // 3), end + 1)
            end = min(ends, key=lambda p: sum(weight(n) for n in order[start:p] if last.get(n, -1) >= p))
        segments.append(order[start:end])
        start = end
    return segments
