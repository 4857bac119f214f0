"""A kernel for all units at once, as several in a row, where it would keep more tiles alive than a multiprocessor has
registers for: what crosses from one to the next goes through memory, in float32 unless products alone take it, and each
loads only what it uses.

Input: a map `Kernel`. Output: the kernels in its place; itself, where spilling costs less. Computes nothing twice but
what is cheaper than a load, as products of inputs are.
"""

from __future__ import annotations

import functools
from bisect import bisect
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace

from ttmdsl.ir import DECAYED, TOKEN_AXES, Node, constant, is_product, nearest
from ttmdsl.kernels import Kernel
from ttmdsl.schedule import BLOCK, WORKING, Weight, Work, best_order, peak, weights, wider_order

ROOM = 8.5  # tiles of 64 x 64 in float32 that four warps keep alive, beside what addresses and masks take
CLOSE = 1.15 * ROOM  # a little more, which spills little
WALKING = 12.7  # the same for a walk over the blocks of a dim, beyond which kernels of all columns are faster
AGAIN = 2  # as they are where such a walk loads or multiplies more tiles a second time
# what costs as much time as moving a tile in half precision between memory and chip, as measured (benchmarks/NOTES.md):
LAUNCH = 2.0  # a kernel;
PRODUCT, DECAY = 0.5, 3.0  # a product of tiles, plain and under decays per channel;
SPILL, CROWD = 6.0, 3.0  # a tile that finds no room; more where they are many, and leave the caches;
LARGE, MOST = 0.22, 22.0  # how much of it counts in heads of 128, of which plans know nothing else; most for a kernel;
SPARED = 2.0  # least that is worth computing a value once more for: moving a tile in float32 once
SCAN = 5.0  # how much more all of it counts in a scan, whose units wait for one another;
DOUBT = 1.1  # by how much such a price may be wrong
APART = 3.2  # how much more what is read of states costs where they are loaded for it alone, in units of 64 tokens
_ACROSS = frozenset({"contract", "sum", "amax", "cumsum", "tri_inv"}) | WORKING.keys()  # dearer than a load


def staged(kernel: Kernel, weight: Weight) -> tuple[float, list[Kernel]]:
    """The kernels in a kernel's place, in order; before them what they cost together."""
    order, dim = ordered(kernel, weight), kernel.program.inner
    whole = _cost(kernel, order, weight), [kernel]
    if peak_of_loads(order, weight, dim) <= ROOM:
        return whole
    ways = [_cut(kernel, _segments(order, weight, limit, dim)) for limit in (ROOM, CLOSE)]
    price, parts = min(((_price(parts, weight), parts) for parts in ways), key=lambda way: way[0])
    if whole[0] <= price:
        return whole
    if not dim:  # what walks over blocks would compute such values in every round
        parts = _lean(kernel, parts, weight)
        price = _price(parts, weight)
    best = price, parts
    kernel = replace(kernel, searched=True)  # it may have room in another order
    whole = cost(kernel, weight), [kernel]
    return min(best, whole, key=lambda way: way[0] + spilled_at_128(way[1], weight))


def spilled_at_128(kernels: Iterable[Kernel], weight: Weight) -> float:
    """What it costs beside that maps spill of heads of 128, though they walk over the blocks of a dim."""

    def tiles(kernel: Kernel, order: Sequence[Node]) -> float:
        return min(peak_of_loads(order, weights(64, 2 * BLOCK, dim), dim) for dim in kernel.program.dims)

    maps = (k for k in kernels if k.kind == "map" and not k.program.inner)
    return sum(min(MOST, LARGE * spilled(tiles(k, ordered(k, weight)))) for k in maps)


def cost(kernel: Kernel, weight: Weight) -> float:
    """About how long a kernel takes, as many times as long as moving a tile in half precision."""
    return _cost(kernel, ordered(kernel, weight), weight)


def _cost(kernel: Kernel, order: Sequence[Node], weight: Weight) -> float:
    return _work(kernel, order) + spilled(_alive(kernel, order, weight))


def work(kernel: Kernel) -> float:
    """What a kernel costs but for what it spills."""
    return _work(kernel, computed(kernel))


def _work(kernel: Kernel, nodes: Sequence[Node]) -> float:
    tiles = [n for n in dict.fromkeys(a for n in nodes for a in operands(n)) if len(n.axes) == 2]
    walked = kernel.walked()
    moved = [n for n in tiles if (n.op == "leaf" and n not in walked) or n in kernel.given]
    moved += [n for n in kernel.saves if len(n.axes) == 2]
    traffic = sum(1.0 if n.axes[0] in TOKEN_AXES and n not in kernel.exact else 2.0 for n in moved)
    products = sum(PRODUCT * is_product(n) + DECAY * (n.op in DECAYED) for n in nodes)
    return LAUNCH + products + traffic


def spilled(tiles: float) -> float:
    """What it costs to keep so many tiles alive."""
    over = max(0.0, tiles - ROOM)
    return over * (SPILL + CROWD * over)


def alive(kernel: Kernel, weight: Weight) -> float:
    """The most tiles that a kernel keeps in registers at once."""
    return _alive(kernel, ordered(kernel, weight), weight)


def _alive(kernel: Kernel, order: Sequence[Node], weight: Weight) -> float:
    """With this order; in a scan with those that it walks with. What a scan loads for a unit is in shared memory."""
    if kernel.kind == "map":
        return peak_of_loads(order, weight, kernel.program.inner)
    held = sum(map(weight, kernel.walked())) + _totals(order, weight, kernel.program.inner)
    return peak(order, [v for _, v in kernel.carried], operands, weight) + held


def _totals(order: Iterable[Node], weight: Weight, dim: str) -> float:
    """What the sums weigh that a walk over the blocks of a dim adds up all the while."""
    return sum(weight(n) for n in order if dim and dim not in n.axes and any(dim in a.axes for a in n.args))


def ordered(kernel: Kernel, weight: Weight) -> list[Node]:
    """What a kernel computes, in the order of least peak."""
    kept = tuple(v for _, v in kernel.carried) if kernel.kind == "scan" else None
    return [*_ordered(computed(kernel), kept, kernel.searched, weight)]


@functools.lru_cache(1024)
def _ordered(nodes: tuple[Node, ...], kept: tuple[Node, ...] | None, searched: bool, weight: Weight) -> list[Node]:
    if kept is not None:
        return best_order(nodes, kept, operands, weight)
    return (wider_order if searched else best_order)(nodes, (), operands, weight, _outside(nodes))


def _outside(nodes: Iterable[Node]) -> Callable[[Node], bool]:
    """Whether a value is none of these, and has to be loaded."""
    inside = set(nodes)
    return lambda n: len(n.axes) > 0 and n not in inside and constant(n) is None


@functools.lru_cache(256)
def computed(kernel: Kernel) -> tuple[Node, ...]:
    """The values that a kernel computes and holds."""
    given = set(kernel.given)
    return tuple(n for n in kernel.nodes if n not in given and not is_input(n) and len(n.axes) <= 2)


def _cut(kernel: Kernel, segments: Sequence[Sequence[Node]]) -> list[Kernel]:
    """The kernel as several, each of which computes one segment, and once more the products of inputs that it uses."""
    place = {n: i for i, segment in enumerate(segments) for n in segment}
    outside = {*kernel.given, *(n for n in place if len(n.axes) < 2)}
    cheap = {n for n in place if is_product(n) and all(outside.issuperset(_sources(a, ())) for a in operands(n))}
    passed = functools.cache(lambda n: _crossing(n, cheap))
    crossing: dict[Node, None] = {}
    for n in place:
        for a in (s for x in operands(n) for s in passed(x)):
            if a in place and place[a] < place[n]:
                crossing[a] = None
    return _passing(kernel, place, crossing)


def _passing(kernel: Kernel, place: dict[Node, int], crossing: Collection[Node]) -> list[Kernel]:
    """The kernel as several, which pass these values on: each value is computed by the part that is its `place`."""
    passed = set(crossing) - set(kernel.saves)  # what is saved for others passes as it is saved
    # what products alone take of it, they would round anyway
    exact = kernel.exact | passed.intersection(a for n in place if not is_product(n) for a in operands(n))
    result: list[Kernel] = []
    known = kernel.given
    for i in range(1 + max(place.values())):
        outputs = tuple((k, v) for k, v in kernel.outputs if place.get(v, 0) == i)
        saves = dict.fromkeys([*(n for n in kernel.saves if place[n] == i), *(n for n in crossing if place[n] == i)])
        name = kernel.name.replace("_kernel", f"_{i + 1}_kernel")
        part = replace(kernel, name=name, outputs=outputs, saves=tuple(saves), exact=exact)
        result.append(part.giving(known))
        known += tuple(n for n in saves if n not in known)
    return [part for part in result if part.roots]


def _lean(kernel: Kernel, parts: list[Kernel], weight: Weight) -> list[Kernel]:
    """The parts of a kernel, which pass on nothing that is found more cheaply of what else they are given."""
    place = {n: i for i, part in reversed([*enumerate(parts)]) for n in computed(part)}
    crossing = [n for part in parts for n in part.saves if n not in kernel.saves]
    for n in [n for n in crossing if len(n.axes) == 2 and n.op not in _ACROSS]:
        fewer = [a for a in crossing if a is not n]
        if _follows(n, {*kernel.given, *fewer}):
            found = _passing(kernel, place, fewer)
            old, new = _apart(parts, found)
            lighter = sum(map(work, new)) <= sum(map(work, old)) - SPARED  # quick to tell
            if lighter and _price(new, weight) <= _price(old, weight) - SPARED:
                crossing, parts = fewer, found
    return parts


def _follows(node: Node, given: Container[Node]) -> bool:
    """Whether a value follows from inputs and from what is given by work on single elements."""
    return not nearest(node, lambda n: n.op in _ACROSS, lambda n: n in given or is_input(n))


def _apart(some: Iterable[Kernel], others: Iterable[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Those kernels of each that the other does not have."""
    one, two = ({(*k.roots, None, *k.given): k for k in kernels} for kernels in (some, others))
    return [k for key, k in one.items() if key not in two], [k for key, k in two.items() if key not in one]


def _price(kernels: Iterable[Kernel], weight: Weight) -> float:
    return sum(cost(k, weight) for k in kernels)


@functools.lru_cache(1 << 14)
def is_input(node: Node) -> bool:
    return node.op in ("leaf", "size") or constant(node) is not None


@functools.lru_cache(1 << 14)
def operands(node: Node) -> tuple[Node, ...]:
    """What a value is made of; of a tile with three axes, which no kernel holds, what that is made of."""
    return tuple(x for a in node.args for x in (a.args if len(a.axes) > 2 else (a,)))


def _crossing(node: Node, cheap: Container[Node]) -> list[Node]:
    """What a later kernel is given for a value: the value, or the one tile, if any, that it follows from."""
    sources = _sources(node, cheap)
    return [node] if sum(len(n.axes) == 2 for n in sources) > 1 else sources


def _sources(node: Node, cheap: Container[Node]) -> list[Node]:
    """The products, sums and vectors that a value follows from by work on single elements, which is done again, as what
    is `cheap` is."""
    return nearest(node, lambda n: (len(n.axes) != 2 or n.op in _ACROSS) and n not in cheap, is_input)


def peak_of_loads(segment: Sequence[Node], weight: Weight, dim: str = "") -> float:
    """The most registers in use at once, where what comes from outside is loaded when it is first used; in a walk over
    the blocks of a dim."""
    return _peak_of_loads(tuple(segment), weight, dim)


@functools.lru_cache(1024)  # ways to plan share kernels, and parts of them
def _peak_of_loads(segment: tuple[Node, ...], weight: Weight, dim: str) -> float:
    return peak(segment, (), operands, weight, _outside(segment)) + _totals(segment, weight, dim)


def _fitting(nodes: list[Node], weight: Weight, limit: float, dim: str) -> int:
    """How many of the nodes have room, from the first one on."""
    work = Work(nodes, (), operands, weight, _outside(nodes))

    def tiles(first: int) -> float:
        totals = _totals(nodes[:first], weight, dim)
        return work.peak(range(first), limit - totals) + totals

    return 1 + bisect(range(2, len(nodes) + 1), limit, key=tiles)  # the peak hardly ever falls as a segment grows


def _segments(order: list[Node], weight: Weight, limit: float, dim: str) -> list[list[Node]]:
    """The order cut into pieces that have room, each at the place in its last part where least crosses."""
    last = {a: i for i, n in enumerate(order) for a in operands(n)}
    segments: list[list[Node]] = []
    start = 0
    while start < len(order):
        end = start + _fitting(order[start:], weight, limit, dim)
        if end < len(order):
            ends = range(start + max(1, (end - start) * 2 // 3), end + 1)
            placed = enumerate(order[start:end], start)
            later = [(i, last[n], weight(n)) for i, n in placed if last.get(n, -1) >= ends[0]]
            end = min(ends, key=lambda p: sum(w for first, until, w in later if first < p <= until))
        segments.append(order[start:end])
        start = end
    merged = segments[:1]
    for segment in segments[1:]:  # what is next to a value that has no room anyway
        apart = max(peak_of_loads(part, weight, dim) for part in (merged[-1], segment))
        if peak_of_loads([*merged[-1], *segment], weight, dim) <= max(limit, apart):
            merged[-1] = [*merged[-1], *segment]
        else:
            merged.append(segment)
    return merged
