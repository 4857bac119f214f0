"""What is computed apart from a scan: ahead of it, for all units at once, and by it for the kernels that follow.

Input: what a scan is to compute, what of it depends on its chain of units, and what is there already. Output: the
kernel that comes first, or the values that the scan saves. Does not choose whether a scan is one or several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import replace

from ttmdsl.ir import (
    DEAR,
    ELEMENTWISE,
    Node,
    Program,
    has_dim,
    is_large,
    is_matmul,
    is_product,
    is_token_tile,
    nearest,
    reachable,
    users,
)
from ttmdsl.kernels import Kernel
from ttmdsl.vector_kernels import crosses_tokens

STEPS = 4  # values of single elements that a tile takes
MOST_CUTS = 2  # values per token that a scan saves: each costs as much memory traffic as an input


def prologue(
    name: str,
    program: Program,
    roots: Iterable[Node],
    chained: set[Node],
    given: tuple[Node, ...],
    loads: bool = False,
) -> Kernel | None:
    """A kernel for what a scan needs that is free of its chain, wherever that takes a product or something dear; for a
    scan that `loads` rather than computes, also wherever it takes `STEPS`."""
    nodes = reachable(roots, set(given))
    chain = [n for n in nodes if n in chained and n not in given]
    border = {a: _sources(a, given) for n in chain for a in n.args if a not in chained and a.axes}
    sources = {n: found for n, found in border.items() if len(n.axes) == 2}
    uses = Counter(s for found in sources.values() for s in found)
    single = {n: found[0] for n, found in sources.items() if len(found) == 1}
    # as large as a state: moving it takes longer than computing it
    large = {n: source for n, source in single.items() if is_large(source) and _of_inputs(source, given)}
    # what is scaled is saved where products alone take it, which round it anyway
    taken = [(a, n) for n in (*chain, *large.values()) for a in n.args if a not in chained]
    exact = {a for a, n in taken if not is_matmul(n)}
    saves = dict.fromkeys(a for a, _ in taken if scaled(a, given) and (a not in exact or len(a.axes) == 1))
    for n, found in sources.items():
        if n in large or n in saves:
            continue
        if loads and n.op in ELEMENTWISE and has_dim(n) and _steps(n, given) >= STEPS:
            saves[n] = None
            continue
        # the products that a value needs are saved; or itself, if it alone needs them: several, or one for weights
        alone = n.op != "rename" and all(uses[s] == 1 for s in found)
        weights = len(found) == 1 and not has_dim(n)
        saves.update(dict.fromkeys([n] if alone and (len(found) > 1 or weights) else found))
    # a vector takes no room: it is saved where products are needed for it alone
    saves.update((n, None) for n, found in border.items() if len(n.axes) == 1 and not saves.keys() >= set(found))
    if saves and not program.inner:  # a sum over tokens, such as decays so far, takes barriers in each unit of a chain
        held = {*given, *saves, *chained}
        saves.update((s, None) for n in chain for a in n.args for s in nearest(a, crosses_tokens, held.__contains__))
    return Kernel(f"{name}_kernel", "map", program, saves=tuple(saves)).giving(given) if saves else None


def shared_products(free: Kernel, later: Iterable[Node], given: tuple[Node, ...]) -> tuple[Node, ...]:
    """The products of tokens that a kernel finds on its way, does not save, and later ones take, too."""
    have = {*given, *free.saves}
    found = {n for n in free.nodes if is_product(n) and not is_large(n) and n not in have}
    return tuple(n for n in reachable(later, have) if n in found)


def needs_dear(roots: Iterable[Node], chained: set[Node], given: tuple[Node, ...]) -> bool:
    """Whether something that the roots need is dear and free of the chain."""
    return any(n.op in DEAR and n not in chained and n not in given for n in reachable(roots, set(given)))


def weighs(free: Kernel) -> bool:
    """Whether several products go to weights of tokens, and to nothing as large as an input: what each block of a
    scan's grid would compute again, in the chain of its units."""
    return sum(map(is_product, free.nodes)) > 1 and not any(map(has_dim, free.saves))


def weights_alone(free: Kernel) -> Kernel | None:
    """Of what is free of the carry, tiles of weights of tokens alone, if they take several products."""
    tiles = {n for n in free.nodes if len(n.axes) == 2 and not has_dim(n)}
    saves = tuple(n for n in free.nodes if n in tiles and not tiles.issuperset(free.users[n]))
    found = replace(free, saves=saves)
    return found if weighs(found) else None


def scaled(node: Node, given: Container[Node] = ()) -> bool:
    """Whether a value follows by work on single elements, and by way of no product, from decays per channel: summed up
    over the tokens so far; or is a vector, and they are summed up over all tokens of a unit."""

    def running(n: Node) -> bool:
        return n.op == "cumsum" and has_dim(n)

    dear = nearest(node, lambda n: running(n) or n.op in DEAR or is_product(n), given.__contains__)
    if len(node.axes) == 2:
        return bool(dear) and all(map(running, dear))
    of_channels = len(node.axes) == 1 and has_dim(node)
    return of_channels and not dear and bool(nearest(node, is_token_tile, given.__contains__))


def _of_inputs(node: Node, given: tuple[Node, ...]) -> bool:
    """Whether a value is a product of what follows from inputs alone."""
    return is_product(node) and not any(_sources(a, given) for a in node.args)


def _sources(node: Node, given: tuple[Node, ...]) -> list[Node]:
    """The products of tiles, and other dear values, that a value follows from without another product."""
    return nearest(node, lambda n: n.op in DEAR or is_product(n), given.__contains__)


def _steps(node: Node, given: tuple[Node, ...]) -> int:
    """How many tiles of tokens a value takes of work on single elements, itself included, from products and what is
    given on."""
    ends = {*given, *_sources(node, given)}
    return sum(is_token_tile(n) and n.op in ELEMENTWISE for n in reachable([node], ends) if n not in ends)


def _spared(roots: Iterable[Node], given: Iterable[Node]) -> dict[Node, int]:
    """How many products of tiles the roots need no more once they are given a value: its own, and those that they need
    by way of it alone (its dominator tree)."""
    roots, known = set(roots), set(given)
    order = reachable(roots, known)
    taking = users(order, known)
    above: dict[Node, Node | None] = {}
    depth: dict[Node | None, int] = {None: 0}
    for n in reversed(order):
        common: Node | None = None if n in roots else taking[n][0]
        for other in () if n in roots else taking[n][1:]:
            x: Node | None = other
            while common is not x:
                if common is None or x is None:
                    common = x = None
                elif depth[common] >= depth[x]:
                    common = above[common]
                else:
                    x = above[x]
        above[n], depth[n] = common, depth[common] + 1
    spared: Counter[Node | None] = Counter()
    for n in order:
        spared[n] += n not in known and is_product(n)
        spared[above[n]] += spared[n]
    return {n: spared[n] for n in order}


def worth_saving(
    program: Program,
    roots: Iterable[Node],
    later: Iterable[Node],
    given: tuple[Node, ...],
    chained: set[Node],
    least: int,
) -> tuple[Node, ...]:
    """Values that a scan saves, one per token, that would cost later kernels `least` products or more."""
    later = list(later)
    found: tuple[Node, ...] = ()
    while len(found) < MOST_CUTS:
        have = (*given, *found)
        spared = _spared(later, have)
        candidates = [
            n
            for n in reachable(roots, set(have))
            if n in spared and n in chained and n not in have and n.op not in ("leaf", "rename", "expand")
            if len(n.axes) == 2 and n.axes[0] == "t" and has_dim(n)
        ]
        best = max(candidates, key=spared.__getitem__, default=None)
        if best is None or spared[best] < least:
            break
        found += (best,)
    return found
