"""A kernel for all units at once, as several in a row, where it would keep more tiles alive than a multiprocessor has
registers for: what crosses from one to the next goes through memory, in float32 where rounding would be enlarged, and
each loads only what it uses.

Input: a map `Kernel`. Output: the kernels in its place; itself, where spilling costs less. Computes nothing twice but
what is cheaper than a load, as products of inputs are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import replace

from ttmdsl.ir import DECAYED, TOKEN_AXES, Node, constant, is_product, nearest, operands
from ttmdsl.kernels import Kernel
from ttmdsl.network import NEVER, UNIT, Network
from ttmdsl.rounding import taken_exactly
from ttmdsl.schedule import (
    BLOCK,
    WORKING,
    Weight,
    Work,
    best_order,
    least_peak,
    peak,
    tiles_first,
    weights,
    wider_order,
)
from ttmdsl.vector_kernels import is_vector

ROOM = 8.5  # tiles of 64 x 64 in float32 that four warps keep alive, beside what addresses and masks take
CLOSE = 1.15 * ROOM  # a little more, which spills little
WALKING = 12.7  # the same for a walk over the blocks of a dim, beyond which kernels of all columns are faster
AGAIN = 2  # as they are where such a walk loads or multiplies more tiles a second time
SEVERAL = 3  # products of a scan's unit that programs share out though they have room: it takes longer than to wait
WAITING = 2.0  # as much as programs wait for one another they would for so many more tiles of each other's sums
# what costs as much time as moving a tile in half precision between memory and chip, as measured (benchmarks/NOTES.md):
LAUNCH = 2.0  # a kernel;
PRODUCT, DECAY = 0.5, 3.0  # a product of tiles, plain and under decays per channel;
SPILL, CROWD = 6.0, 3.0  # a tile that finds no room; more where they are many, and leave the caches;
LARGE, MOST = 0.22, 22.0  # how much of it counts in heads of 128, of which plans know nothing else; most for a kernel;
SPARED = 1.0  # least that is worth computing a value once more for: moving a tile once
SCAN = 5.0  # how much more all of it counts in a scan, whose units wait for one another;
DOUBT = 1.1  # by how much such a price may be wrong
APART = 3.2  # how much more what is read of states costs where they are loaded for it alone, in units of 64 tokens
SEARCHED = 0.8  # what an order that is looked for longer may leave of the tiles that are alive
BESIDE = 0.25  # tiles without room in what passes on more to the next kernel than it would else
_ACROSS = frozenset({"contract", "sum", "amax", "cumsum", "shift", "tri_inv"}) | WORKING.keys()  # dearer than a load


def staged(kernel: Kernel, weight: Weight, gates_last: bool = False) -> tuple[float, list[Kernel]]:
    """The kernels in a kernel's place, in order; before them what they cost together. `gates_last`: whether they are
    also looked for with what tiles follow from before what vectors alone do."""
    order, dim = ordered(kernel, weight), kernel.program.inner
    whole = _cost(kernel, order, weight), [kernel]
    if peak_of_loads(order, weight, dim) <= ROOM:
        return whole
    ways = [_cut(kernel, segments) for segments in _segments(order, weight, dim)]
    price, parts = min(((_price(parts, weight), parts) for parts in ways), key=lambda way: way[0])
    if whole[0] <= price:
        return whole
    if not dim:  # what walks over blocks would compute such values in every round
        parts = _lean(kernel, parts, weight)
        price = _price(parts, weight)
    if work(kernel) + spilled(SEARCHED * alive(kernel, weight)) < price:
        searched = replace(kernel, searched=True)  # it may have room in another order
        whole = cost(searched, weight), [searched]
    found = [(price, parts), whole]
    if not dim and gates_last:
        found += _gates_last(kernel, weight, min(price, whole[0]))
    price, parts = least = min(found, key=lambda way: way[0])
    near = [way for way in found if way[0] < price + MOST * len(parts)]
    return min(near, key=lambda way: way[0] + spilled_at_128(way[1], weight)) if len(near) > 1 else least


def spilled_at_128(kernels: Iterable[Kernel], weight: Weight) -> float:
    """What it costs beside that maps spill of heads of 128, though they walk over the blocks of a dim."""

    def tiles(kernel: Kernel, order: Sequence[Node]) -> float:
        return min(peak_of_loads(order, weights(64, 2 * BLOCK, dim), dim) for dim in kernel.program.dims)

    maps = (k for k in kernels if k.kind == "map" and not k.program.inner)
    return sum(min(MOST, LARGE * spilled(tiles(k, ordered(k, weight)))) for k in maps)


def cost(kernel: Kernel, weight: Weight) -> float:
    """About how long a kernel takes, as many times as long as moving a tile in half precision."""
    if kernel.kind == "map" and not kernel.program.inner and not kernel.searched:
        return work(kernel) + spilled(_least_peak(computed(kernel), weight))
    return _cost(kernel, ordered(kernel, weight), weight)


@functools.lru_cache(1024)  # ways to plan share kernels, and parts of them
def _least_peak(nodes: tuple[Node, ...], weight: Weight) -> float:
    return least_peak(nodes, operands, weight, _outside(nodes), ROOM)


def _cost(kernel: Kernel, order: Sequence[Node], weight: Weight) -> float:
    return _work(kernel, order) + spilled(_alive(kernel, order, weight))


@functools.lru_cache(1024)
def work(kernel: Kernel) -> float:
    """What a kernel costs but for what it spills."""
    return _work(kernel, computed(kernel))


def _work(kernel: Kernel, nodes: Sequence[Node]) -> float:
    tiles = [n for n in dict.fromkeys(a for n in nodes for a in operands(n)) if len(n.axes) == 2]
    walked = kernel.walked()
    moved = [n for n in tiles if (n.op == "leaf" and n not in walked) or n in kernel.given]
    moved += [n for n in kernel.saves if len(n.axes) == 2]
    traffic = sum(_moved(n, kernel) for n in moved)
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
    if not dim:
        return 0.0
    return sum(weight(n) for n in order if dim not in n.axes and any(dim in a.axes for a in n.args))


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
    passed = _passed(kernel)
    crossing = dict.fromkeys(a for n in place for a in passed[n] if place[a] < place[n])
    return _passing(kernel, place, crossing)


@functools.lru_cache(16)
def _passed(kernel: Kernel) -> dict[Node, tuple[Node, ...]]:
    """For each value that a kernel computes those that a later part is given in place of its operands."""
    nodes = computed(kernel)
    outside = {*kernel.given, *(n for n in nodes if len(n.axes) < 2)}
    cheap = {n for n in nodes if is_product(n) and all(outside.issuperset(_sources(a, ())) for a in operands(n))}
    inside = set(nodes)
    crossing = functools.cache(lambda n: [a for a in _crossing(n, cheap) if a in inside])
    return {n: tuple(a for x in operands(n) for a in crossing(x)) for n in nodes}


def _passing(
    kernel: Kernel, place: dict[Node, int], crossing: Collection[Node], same: Iterable[Kernel] = ()
) -> list[Kernel]:
    """The kernel as several, which pass these values on: each value is computed by the part that is its `place`. Those
    that save what they did are the `same`, as what these are given is passed on."""
    as_before = {(part.name, part.saves): part for part in same}
    passed = set(crossing) - set(kernel.saves)  # what is saved for others passes as it is saved
    exact = kernel.exact | (passed & _taken_exactly(kernel))
    result: list[Kernel] = []
    known = kernel.given
    for i in range(1 + max(place.values())):
        outputs = tuple((k, v) for k, v in kernel.outputs if place.get(v, 0) == i)
        saves = dict.fromkeys([*(n for n in kernel.saves if place[n] == i), *(n for n in crossing if place[n] == i)])
        name = kernel.name.replace("_kernel", f"_{i + 1}_kernel")
        part = as_before.get((name, tuple(saves)))
        if part is None:
            part = replace(kernel, name=name, outputs=outputs, saves=tuple(saves), exact=exact).giving(known)
        result.append(part)
        known += tuple(n for n in saves if n not in known)
    return [part for part in result if part.roots]


@functools.lru_cache(16)
def _taken_exactly(kernel: Kernel) -> set[Node]:
    """What passes between its parts in float32."""
    # of sums of tiles that it leaves, gradients of gates follow (vector_kernels.py)
    left = filter(is_vector, kernel.saves)
    return taken_exactly([n for n in kernel.nodes if n not in kernel.given], kernel.program, left)


def _gates_last(kernel: Kernel, weight: Weight, most: float) -> list[tuple[float, list[Kernel]]]:
    """The kernel cut so that gradients of gates, which are found of sums over tiles, come after those of vectors, if it
    costs clearly less than `most`; before it what it costs, as far as that is known."""
    orders = tiles_first(computed(kernel), operands, weight, _outside(computed(kernel)))
    different = dict.fromkeys(map(tuple, orders))
    found = itertools.chain.from_iterable(_segments(order, weight, "") for order in different)
    ways = [_cut(kernel, segments) for segments in {tuple(map(frozenset, s)): s for s in found}.values()]
    least, best = most, list[Kernel]()
    for parts in sorted(ways, key=lambda parts: sum(map(work, parts))):
        price = _price(parts, weight, least)
        if price < least:
            least, best = price, parts
    if not best:
        return []
    best = _spared(kernel, _handed_on(kernel, _lean(kernel, best, weight), weight))
    doubted = DOUBT * _price(best, weight)
    return [(doubted, best)] if doubted <= most else []


def _handed_on(kernel: Kernel, parts: list[Kernel], weight: Weight) -> list[Kernel]:
    """The parts of a kernel, each of which is given what it would find once more of tiles that it loads for that alone,
    where that costs less and the part before it has room for it."""
    for i in range(1, len(parts)):
        spared = _found_again(kernel, parts, i)
        if not spared:
            continue
        place, crossing = _as_cut(kernel, parts)
        new = _passing(kernel, place | dict.fromkeys(spared, i - 1), [*crossing, *spared])
        cheaper = len(new) == len(parts) and _price(new, weight) < _price(parts, weight)
        if cheaper and alive(new[i - 1], weight) <= ROOM + BESIDE:
            parts = new
    return parts


def _spared(kernel: Kernel, parts: list[Kernel]) -> list[Kernel]:
    """The parts of a kernel, which pass on no vector that follows from inputs by work on single elements."""
    place, crossing = _as_cut(kernel, parts)
    known = {*kernel.given, *crossing}
    easy = {n for n in crossing if len(n.axes) < 2 and _follows(n, known - {n})}
    taken = {n for part in _passing(kernel, place, [n for n in crossing if n not in easy]) for n in part.given}
    return _passing(kernel, place, [n for n in crossing if n in taken])


def _found_again(kernel: Kernel, parts: Sequence[Kernel], i: int) -> list[Node]:
    """The values that cost least to pass to a part of a kernel, so that it need not load what they follow from: of
    those that inputs alone, and vectors that it is given, lead to by way of one product.

    A minimum cut: on the sink's side is what the part loads, or computes, itself.
    """
    part, before = parts[i], {n for p in parts[:i] for n in p.nodes if is_product(n)}
    passed = {n for p in parts[:i] for n in p.saves} - set(kernel.given)
    known = {*kernel.given, *(n for n in passed if len(n.axes) < 2)}
    nodes = [n for n in part.nodes if not is_input(n) and n not in part.given]
    alone: dict[Node, bool] = {}  # and whether by way of a product
    for n in nodes:
        if n not in part.roots and all(a in alone or a in known or is_input(a) for a in n.args):
            late = any(alone.get(a, False) for a in n.args)
            if not (late and is_product(n)):
                alone[n] = late or is_product(n)
    taken = dict.fromkeys(a for n in nodes for a in n.args if len(a.axes) == 2 and a not in passed)
    loads = [a for a in taken if is_input(a) or a in known]
    exact = _taken_exactly(kernel)
    network = Network()
    for tile in loads:
        if constant(tile) is None:
            network.join(network.SOURCE, (tile, True), int(UNIT * _moved(tile, kernel)))
    for n in nodes:
        for a in n.args:
            if a in alone or a in loads:
                network.join((a, True), (n, False) if n in alone else network.SINK)
        if n in alone:
            way = 2 * _moved(n, kernel) if len(n.axes) == 2 else len(n.axes) / 64
            halves = n not in exact
            kept = n.op in ("rename", "expand") or len(n.axes) > 2
            network.join((n, False), (n, True), NEVER if kept else int(UNIT * (way if halves else 2 * way)))
            if n in before:
                network.join(network.SOURCE, (n, False), int(UNIT * PRODUCT))
    near = network.cut()
    return [n for n in alone if (n, True) in near and (n, False) not in near]


def _moved(tile: Node, kernel: Kernel) -> float:
    """What a tile's way between memory and chip costs."""
    return 1.0 if tile.axes[0] in TOKEN_AXES and tile not in kernel.exact else 2.0


def _as_cut(kernel: Kernel, parts: Sequence[Kernel]) -> tuple[dict[Node, int], list[Node]]:
    """Which part of a kernel is the first to compute each value, and what they pass on."""
    place = {n: i for i, part in reversed([*enumerate(parts)]) for n in computed(part)}
    return place, [n for part in parts for n in part.saves if n not in kernel.saves]


def _lean(kernel: Kernel, parts: list[Kernel], weight: Weight) -> list[Kernel]:
    """The parts of a kernel, which pass on nothing that is found more cheaply of what else they are given."""
    place, crossing = _as_cut(kernel, parts)
    for n in [n for n in crossing if len(n.axes) == 2 and n.op not in _ACROSS]:
        fewer = [a for a in crossing if a is not n]
        if _follows(n, {*kernel.given, *fewer}):
            found = _passing(kernel, place, fewer, same=[part for part in parts if n not in part.given])
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


def _price(kernels: Sequence[Kernel], weight: Weight, most: float = math.inf) -> float:
    """What kernels cost together; of more than `most` only that it is more."""
    price = sum(map(work, kernels))
    for k in kernels:
        if price > most:
            break
        price += cost(k, weight) - work(k)
    return price


@functools.lru_cache(1 << 14)
def is_input(node: Node) -> bool:
    return node.op in ("leaf", "size") or constant(node) is not None


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


def _segments(order: Sequence[Node], weight: Weight, dim: str) -> Iterator[list[Sequence[Node]]]:
    """The order cut into pieces that have room, each at the place in its last part where least crosses; and once more
    into such as spill a little."""
    last = {a: i for i, n in enumerate(order) for a in operands(n)}
    values = Work(order, (), operands, weight, _outside(order))
    totals = [_totals([n], weight, dim) for n in order]
    for limit in (ROOM, CLOSE):
        room: dict[int, int] = {}  # how many values have, from each place where a piece starts
        start = 0
        while start < len(order):
            end = start + room.setdefault(start, values.fitting(start, limit, totals))
            if end < len(order):
                least = start + max(1, (end - start) * 2 // 3)
                crossing = dict.fromkeys(range(least, end + 1), 0.0)
                for i, n in enumerate(order[start:end], start):
                    for place in range(max(i + 1, least), min(last.get(n, -1), end) + 1):
                        crossing[place] += weight(n)
                end = min(crossing, key=crossing.__getitem__)
            start = end
        yield _merged(order, room, weight, limit, dim)


def _merged(
    order: Sequence[Node], room: dict[int, int], weight: Weight, limit: float, dim: str
) -> list[Sequence[Node]]:
    """Pieces that start where `room` says, those as one that have room together."""
    ends = [*room, len(order)]
    merged = [order[: ends[1]]]
    first = 0
    for start, end in itertools.pairwise(ends[1:]):
        both = order[first:end]
        fits = len(both) <= room[first]
        if not fits and 1 in (room[first], room[start]):  # what is next to a value that has no room anyway
            apart = max(peak_of_loads(part, weight, dim) for part in (merged[-1], order[start:end]))
            fits = peak_of_loads(both, weight, dim) <= max(limit, apart)
        if fits:
            merged[-1] = both
        else:
            merged.append(order[start:end])
            first = start
    return merged
