"""The order in which a kernel computes its values: tiles live in registers, so few should be alive at once.

Input: nodes in any order that respects dependence, and what they weigh. Output: the best of a few such orders by peak.
Does not choose what is computed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ttmdsl.ir import DECAYED, TOKEN_AXES, Node

Operands = Callable[[Node], tuple[Node, ...]]
Weight = Callable[[Node], float]

# tiles that an operation needs beside its operands and its result, as ahead-of-time compilation shows them
WORKING = {**dict.fromkeys(DECAYED, 3.5), "tri_inv": 2.0, "cumsum": 4.0}


BLOCK = 64  # columns that kernels take of a dim at once where they walk over it, or their grid splits it


def weights(tokens: int, width: int = BLOCK, walked: str = "") -> Weight:
    """What values weigh where a unit has that many tokens: registers, in tiles of 64 x 64.

    Dims count as `width`, one that is `walked` over as a block. Tiles of few tokens are held by several warps at once;
    what is loaded has half the precision of what is computed.
    """
    of_dim = width / BLOCK
    sides = {**dict.fromkeys(TOKEN_AXES, math.sqrt(tokens / 64)), walked: 1.0}

    @functools.cache
    def weight(node: Node) -> float:
        if len(node.axes) < 2:
            return len(node.axes) / 64
        tile = math.prod(sides.get(x, of_dim) for x in node.axes[:2])
        return tile / 2 if node.role in ("token", "cot") else tile

    return weight


FULL = weights(64)  # in a loop, tiles of few tokens lie as the states do that they meet: on all warps


def peak(
    order: Sequence[Node],
    kept: Iterable[Node],
    operands: Operands,
    weight: Weight,
    loaded: Callable[[Node], bool] = lambda n: False,
) -> float:
    """The most registers in use at once: what is kept stays to the end, what nothing uses is stored and gone, what is
    `loaded` comes with its first use."""
    staying, held = set(kept), set(order)
    used = [operands(n) for n in order]
    left = Counter(itertools.chain.from_iterable(used))
    live = most = 0.0
    for n, arguments in zip(order, used, strict=True):
        for a in arguments:
            if a not in held and loaded(a):
                held.add(a)
                live += weight(a)
        live += weight(n)
        most = max(most, live + weight(n) * WORKING.get(n.op, 0.0))
        for a in arguments:
            left[a] -= 1
            if left[a] == 0 and a in held and a not in staying:
                live -= weight(a)
        if left[n] == 0 and n not in staying:
            live -= weight(n)
    return most


def with_loads(order: Iterable[Node], operands: Operands, loaded: Callable[[Node], bool]) -> list[Node]:
    """The order, and before each value what it is the first to use of that which is loaded."""
    result: dict[Node, None] = {}
    for n in order:
        result |= dict.fromkeys((*filter(loaded, operands(n)), n))
    return list(result)


def best_order(
    nodes: list[Node],
    kept: list[Node],
    operands: Operands,
    weight: Weight,
    loaded: Callable[[Node], bool] = lambda n: False,
) -> list[Node]:
    """The nodes in the order of least peak: depth first, in both directions, or greedy; `kept` live to the end, what is
    `loaded` from its first use."""
    operands = {n: operands(n) for n in nodes}.__getitem__
    used = {a for n in nodes for a in operands(n)}
    ends = [n for n in nodes if n not in used]
    orders = [nodes, _greedy(nodes, kept, operands, weight)]
    orders += [_depth_first(nodes, r, operands, flip) for r in (ends, ends[::-1]) for flip in (False, True)]
    whole = (order for order in orders if len(order) == len(nodes))
    return min(whole, key=lambda order: peak(order, kept, operands, weight, loaded))


def _depth_first(nodes: list[Node], roots: list[Node], operands: Operands, flip: bool) -> list[Node]:
    inside = set(nodes)
    order: dict[Node, None] = {}
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in order or node not in inside:
            continue
        if ready:
            order[node] = None
        else:
            stack.append((node, True))
            arguments = operands(node)
            stack.extend((a, False) for a in (arguments if flip else arguments[::-1]))
    return list(order)


def _greedy(nodes: list[Node], roots: list[Node], operands: Operands, weight: Weight) -> list[Node]:
    """Always the ready value that frees most, or adds least."""
    inside, kept = set(nodes), set(roots)
    left = Counter(a for n in nodes for a in operands(n))
    waiting = {n: {a for a in operands(n) if a in inside} for n in nodes}
    users: dict[Node, list[Node]] = {}
    for n in nodes:
        for a in set(operands(n)):
            users.setdefault(a, []).append(n)
    place = {n: i for i, n in enumerate(nodes)}
    ready = [n for n in nodes if not waiting[n]]
    order: list[Node] = []
    freeable = {n: [(a, c, weight(a)) for a, c in Counter(operands(n)).items() if a in inside - kept] for n in nodes}

    def cost(n: Node) -> tuple[float, int]:
        return weight(n) - sum(w for a, c, w in freeable[n] if left[a] == c), place[n]

    while ready:
        node = min(ready, key=cost)
        ready.remove(node)
        order.append(node)
        left.subtract(operands(node))
        for user in users.get(node, ()):
            waiting[user].discard(node)
            if not waiting[user]:
                ready.append(user)
    return order
