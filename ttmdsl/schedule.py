"""The order in which a kernel computes its values: tiles live in registers, so few should be alive at once.

Input: nodes in any order that respects dependence, and what they weigh. Output: the best of a few such orders by peak;
or one of them by its number, since what a compiler makes of an order only measuring tells. Does not choose what is
computed.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

from ttmdsl.ir import DECAYED, ELEMENTWISE, PAST, TOKEN_AXES, UNIT_AXES, Node, has_dim, is_matmul, reachable
from ttmdsl.orders import ELSEWHERE, ORDERS, Loads

Operands = Callable[[Node], tuple[Node, ...]]
Weight = Callable[[Node], float]

# tiles that an operation needs beside its operands and its result, as ahead-of-time compilation shows them
WORKING = {**dict.fromkeys(DECAYED, 3.5), "tri_inv": 2.0, "cumsum": 4.0}

EARLY, RISE = 2, 0.5  # products before which a tile may be loaded; tiles by which that may raise the peak (measured)

ROWS = 64  # of a product that four warps compute
WAY = 20  # tiles found one of the other that are worth a trip through shared memory (measured)
BLOCK = 64  # columns that kernels take of a dim at once where they walk over it, or their grid splits it


@functools.lru_cache(16)
def weights(tokens: int, width: int = BLOCK, walked: str = "") -> Weight:
    """What values weigh where a unit has that many tokens: registers, in tiles of 64 x 64.

    Dims count as `width`, one that is `walked` over as a block. Tiles of few tokens are held by several warps at once;
    what is loaded has half the precision of what is computed.
    """
    of_dim = width / BLOCK
    sides = {**dict.fromkeys(UNIT_AXES, math.sqrt(tokens / 64)), PAST: 0.25, walked: 1.0}

    @functools.lru_cache(1 << 14)
    def weight(node: Node) -> float:
        if len(node.axes) < 2:
            return len(node.axes) / 64
        tile = math.prod(sides.get(x, of_dim) for x in node.axes[:2])
        return tile / 2 if node.role in ("token", "before", "cot") else tile

    return weight


FULL = weights(64)  # in a loop, tiles of few tokens lie as the states do that they meet: on all warps
WIDE = weights(64, 2 * BLOCK)  # the same of heads of 128


def peak(
    order: Sequence[Node],
    kept: Iterable[Node],
    operands: Operands,
    weight: Weight,
    loaded: Callable[[Node], bool] = lambda n: False,
) -> float:
    """The most registers in use at once: what is kept stays to the end, what nothing uses is stored and gone, what is
    `loaded` comes with its first use."""
    return Work(order, kept, operands, weight, loaded).peak(range(len(order)))


def with_loads(order: Iterable[Node], operands: Operands, loaded: Callable[[Node], bool], early: int = 0) -> list[Node]:
    """The order, and before each value what it is the first to use of that which is loaded; tiles `early` products of
    tiles before."""
    result: list[Node] = []
    known: set[Node] = set()
    for n in order:
        for a in (*filter(loaded, operands(n)), n):
            if a in known:
                continue
            known.add(a)
            place, left = len(result), early if early and loaded(a) and len(a.axes) > 1 else -1
            while place and (left := left - is_matmul(result[place - 1])) >= 0:
                place -= 1
            result.insert(place, a)
    return result


def with_early_loads(
    order: Sequence[Node],
    kept: Iterable[Node],
    operands: Operands,
    weight: Weight,
    loaded: Callable[[Node], bool],
    loads: Loads,
) -> list[Node]:
    """The order with its loads, as early as `loads` says."""
    late = with_loads(order, operands, loaded)
    if loads in (Loads.AHEAD, Loads.LATE):
        return late
    early = with_loads(order, operands, loaded, EARLY)
    if loads is Loads.EARLY:
        return early
    rise = peak(early, kept, operands, weight) - peak(late, kept, operands, weight)
    return early if (rise <= RISE) == (loads is Loads.FITTING) else late


def best_order(
    nodes: Sequence[Node],
    kept: Iterable[Node],
    operands: Operands,
    weight: Weight,
    loaded: Callable[[Node], bool] = lambda n: False,
) -> list[Node]:
    """The nodes in the order of least peak: depth first, in both directions, or greedy; `kept` live to the end, what is
    `loaded` from its first use."""
    work = Work(nodes, kept, operands, weight, loaded)
    return [nodes[i] for i in work.best(map(work.order, range(1, ORDERS)))]


def least_peak(
    nodes: Sequence[Node], operands: Operands, weight: Weight, loaded: Callable[[Node], bool], enough: float
) -> float:
    """The peak of the best order, but of `enough` registers and fewer only that they are no more."""
    work, least = Work(nodes, (), operands, weight, loaded), math.inf
    for number in (1, *range(3, ORDERS), 2):  # greedy takes longest
        least = min(least, work.peak(work.order(number), least))
        if least <= enough:
            break
    return least


def order_by(
    number: int,
    nodes: Sequence[Node],
    kept: Iterable[Node],
    operands: Operands,
    weight: Weight,
    loaded: Callable[[Node], bool],
) -> list[Node]:
    """The nodes in the order of that number, wherever it has the loads; 0 is the one of least peak."""
    number %= ELSEWHERE
    if not number:
        return best_order(nodes, kept, operands, weight, loaded)
    return [nodes[i] for i in Work(nodes, kept, operands, weight, loaded).order(number)]


def wide_last(order: Sequence[Node], operands: Operands) -> list[Node]:
    """The order with a product of tokens by a dim as the last of those that have tokens as rows, not one of tokens by
    tokens, if one needs none of these.

    Of products with fewer rows than `ROWS` the last decides how Triton lays out all that are connected with it: a
    square one along rows, of which every warp then computes all.
    """
    products = [n for n in order if is_matmul(n) and n.axes[0] in TOKEN_AXES]
    square = {n for n in products if not has_dim(n)}
    if products and products[-1] in square:
        for wide in reversed([n for n in products if n not in square]):
            later = {wide}
            for n in order:
                if not later.isdisjoint(operands(n)):
                    later.add(n)
            if later.isdisjoint(square):
                return [n for n in order if n not in later] + [n for n in order if n in later]
    return [*order]


def drawn_out(nodes: Iterable[Node], outside: Container[Node], turned: Container[Node], few: bool) -> dict[Node, Node]:
    """By product the operand that every warp takes all of, where it follows from `WAY` tiles and more by work on single
    elements, among these values: Triton lays out so, on every warp, all that leads to it, as far as the loads.

    Of products with fewer rows than `ROWS`, in units of `few` tokens, these are the rows; of others, before Hopper,
    what they are multiplied by. `turned`: products that are found transposed.
    """

    def tiles(node: Node) -> tuple[Node, ...]:
        single = node.op in ELEMENTWISE or node.op in ("rename", "expand")
        return tuple(a for a in node.args if len(a.axes) > 1) if single else ()

    def way(operand: Node) -> int:
        return sum(n.op in ELEMENTWISE and n not in outside for n in reachable([operand], outside, tiles))

    taken = {}
    for n in (n for n in nodes if n not in outside and is_matmul(n)):
        rows = n.axes[n in turned]
        by_rows = few and rows in UNIT_AXES
        taken[n] = next(a for a in n.args if (rows in a.axes) == by_rows)
    return {n: a for n, a in taken.items() if way(a) >= WAY}


def wider_order(
    nodes: Sequence[Node], kept: Iterable[Node], operands: Operands, weight: Weight, loaded: Callable[[Node], bool]
) -> list[Node]:
    """The same of more orders, which take longer: depth first, each end once the first and once the last; and always
    what raises the peak least."""
    nodes = best_order(nodes, kept, operands, weight, loaded)
    work = Work(nodes, kept, operands, weight, loaded)
    turned = [[end, *(i for i in work.ends if i != end)] for end in work.ends]
    turned += [[*rest, first] for first, *rest in turned]
    orders = [work.depth_first(roots, flip) for roots in turned for flip in (False, True)]
    return [nodes[i] for i in work.best([work.order(1), work.frugal(), *orders])]


def tiles_first(
    nodes: Sequence[Node], operands: Operands, weight: Weight, loaded: Callable[[Node], bool]
) -> list[list[Node]]:
    """The nodes depth first, in both directions: what tiles at the end follow from before what vectors alone do, and
    each vector or number as soon as what it is made of has been computed, or that and loaded for something else."""
    work = Work(nodes, (), operands, weight, loaded)
    small = [len(n.axes) < 2 for n in nodes]
    roots = sorted(work.ends, key=small.__getitem__)
    orders = [work.depth_first(roots, flip) for flip in (False, True)]
    return [[nodes[i] for i in work.early(small, order, loads)] for loads in (False, True) for order in orders]


class Work:
    """Values by number, in the order given; behind them what they load. What lies in no register is left out."""

    def __init__(
        self,
        nodes: Sequence[Node],
        kept: Iterable[Node],
        operands: Operands,
        weight: Weight,
        loaded: Callable[[Node], bool],
    ) -> None:
        number = {n: i for i, n in enumerate(nodes)}
        given = list(map(operands, nodes))
        for a in itertools.chain.from_iterable(given):
            if a not in number and loaded(a):
                number[a] = len(number)
        self.computed = len(nodes)
        self.used = [[number[a] for a in arguments if a in number] for arguments in given]
        self.users: list[list[int]] = [[] for _ in number]
        for user, mine in enumerate(self.used):
            for i in mine:
                self.users[i].append(user)
        self.weights = list(map(weight, number))
        self.working = [weight(n) * WORKING.get(n.op, 0.0) for n in nodes]
        self.kept = {number[n] for n in kept if n in number}

    @functools.cached_property
    def backward(self) -> list[list[int]]:
        """What each uses, its last operand first."""
        return [mine[::-1] for mine in self.used]

    @functools.cached_property
    def distinct(self) -> list[list[int]]:
        """What each uses, once."""
        return [[*dict.fromkeys(mine)] for mine in self.used]

    @functools.cached_property
    def ends(self) -> list[int]:
        """What nothing uses."""
        return [i for i in range(self.computed) if not self.users[i]]

    def peak(self, order: Sequence[int], limit: float = math.inf) -> float:
        """The most registers in use at once where these are computed in this order; of more than `limit` only that it
        is more."""
        used, weights, working, computed = self.used, self.weights, self.working, self.computed
        left = [*self.times]
        loaded: set[int] = set()
        live = most = 0.0
        for i in order:
            mine = used[i]
            for a in mine:
                if a >= computed and a not in loaded:
                    loaded.add(a)
                    live += weights[a]
            live += weights[i]
            if live + working[i] > most:
                most = live + working[i]
                if most > limit:
                    break
            for a in mine:
                left[a] -= 1
                if not left[a]:
                    live -= weights[a]
            if not left[i]:
                live -= weights[i]
        return most

    def fitting(self, first: int, limit: float, beside: Sequence[float]) -> int:
        """How many values from the first on, in the order given, find room in so many registers, at least one: each is
        kept until the last of these that takes it. `beside`: what each weighs all the while."""
        weights, working, distinct = self.weights, self.working, self.distinct
        taken: dict[int, int] = {}  # at which place last
        live: list[float] = []  # at each place
        most = more = 0.0
        for place, i in enumerate(range(first, self.computed)):
            live.append(weights[i] + working[i])
            since = place
            for a in distinct[i]:
                start = taken[a] + 1 if a in taken else place
                if start < since:
                    since = start
                weight = weights[a]
                for between in range(start, place + 1):
                    live[between] += weight
                taken[a] = place
            taken[i] = place
            most, more = max(most, max(live[since:])), more + beside[i]
            if place and most + more > limit:
                return place
        return self.computed - first

    @functools.cached_property
    def times(self) -> list[int]:
        """How often each is taken, what is kept once more."""
        return [len(users) + (i in self.kept) for i, users in enumerate(self.users)]

    def best(self, orders: Iterable[list[int]]) -> list[int]:
        """The first order of least peak."""
        best, least = list[int](), math.inf
        for order in {tuple(order): order for order in orders}.values():
            found = self.peak(order, least)
            if found < least:
                best, least = order, found
        return best

    def order(self, number: int) -> list[int]:
        """The order given; greedy; depth first, from the first end on or the last, an operation's first operand first
        or its last; always what raises the peak least."""
        match number:
            case 1:
                return list(range(self.computed))
            case 2:
                return self.greedy()
            case 3 | 4:
                return self.depth_first(self.ends, flip=number == 4)
            case 5 | 6:
                return self.depth_first(self.ends[::-1], flip=number == 6)
            case _:
                return self.frugal()

    def depth_first(self, roots: Sequence[int], flip: bool) -> list[int]:
        order: dict[int, None] = {}
        stack, computed, operands = [*reversed(roots)], self.computed, self.used if flip else self.backward
        while stack:
            i = stack.pop()
            if i < 0:  # its operands are done
                order[~i] = None
            elif i < computed and i not in order:
                stack.append(~i)
                stack += operands[i]
        return list(order)

    def early(self, early: Sequence[bool], order: Iterable[int], loads: bool) -> list[int]:
        """The order, but some values as soon as what they are made of has been computed; with `loads` also loaded."""
        left = [sum(loads or a < self.computed for a in mine) for mine in self.distinct]
        found: dict[int, None] = {}
        there: set[int] = set()
        for i in order:
            ready = [] if i in found else [i]
            while ready:
                i = ready.pop()
                found[i] = None
                new = {a for a in self.used[i] if loads and a >= self.computed and a not in there}
                there |= new
                for user in dict.fromkeys(u for a in (i, *sorted(new)) for u in set(self.users[a])):
                    left[user] -= sum(a in self.used[user] for a in (i, *new))
                    if early[user] and not left[user] and user not in found:
                        ready.append(user)
        return [*found]

    def greedy(self) -> list[int]:
        """Always the ready value that frees most, or adds least."""
        left = list(map(len, self.users))
        waiting = [sum(a < self.computed for a in mine) for mine in self.distinct]
        freeable = [
            [(a, mine.count(a), self.weights[a]) for a in once if a < self.computed and a not in self.kept]
            for mine, once in zip(self.used, self.distinct, strict=True)
        ]

        def cost(i: int) -> float:
            return self.weights[i] - sum([w for a, times, w in freeable[i] if left[a] == times])

        ready = [(cost(i), i) for i in range(self.computed) if not waiting[i]]
        heapq.heapify(ready)
        order: dict[int, None] = {}
        while ready:
            _, i = heapq.heappop(ready)
            if i in order:
                continue
            order[i] = None
            for a in self.used[i]:
                left[a] -= 1
            near = {*self.users[i]}
            for user in near:
                waiting[user] -= 1
            near.update(*[self.users[a] for a in self.distinct[i]])
            for user in near.difference(order):
                if not waiting[user]:
                    heapq.heappush(ready, (cost(user), user))
        return list(order)

    def frugal(self) -> list[int]:
        """Always the ready value with which the peak so far is least; of several the one that leaves least."""
        left = list(map(len, self.users))
        waiting = [{a for a in mine if a < self.computed} for mine in self.used]
        used = [Counter(mine) for mine in self.used]
        loaded: set[int] = set()
        ready = [i for i in range(self.computed) if not waiting[i]]
        order: list[int] = []
        live = most = 0.0

        def after(i: int) -> tuple[float, float, int]:
            """The peak, and what lives on."""
            new = (a for a in used[i] if a >= self.computed and a not in loaded)
            held = live + self.weights[i] + sum(self.weights[a] for a in new)
            gone = sum(self.weights[a] for a, times in used[i].items() if left[a] == times and a not in self.kept)
            gone += 0.0 if self.users[i] or i in self.kept else self.weights[i]
            return max(most, held + self.working[i]), held - gone, i

        while ready:
            most, live, i = min(map(after, ready))
            ready.remove(i)
            order.append(i)
            for a, times in used[i].items():
                left[a] -= times
                if a >= self.computed:
                    loaded.add(a)
            for user in dict.fromkeys(self.users[i]):
                waiting[user].discard(i)
                if not waiting[user]:
                    ready.append(user)
        return order
