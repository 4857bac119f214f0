"""The scans of a form, as kernels: one, or several where one has no room for all that it walks with.

Input: a scan `Kernel` of all carries. Output: the kernels in its place, in the order in which they run. What a later
one takes of an earlier one passes through memory (chains.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ttmdsl.ahead import needs_dear, prologue
from ttmdsl.chains import Walk, chains, walks
from ttmdsl.ir import Node, Program, depends_on, reachable
from ttmdsl.kernels import Kernel
from ttmdsl.schedule import FULL, WIDE, Weight
from ttmdsl.staging import ROOM, alive, cost, spilled, staged, work


def free_axis(program: Program, roots: Iterable[Node], given: Iterable[Node] = ()) -> str:
    """A dim that no value under the roots is summed over and that every root has: blocks of it are independent."""
    roots, known = list(roots), set(given)
    nodes = [n for n in reachable(roots, known) if n not in known]
    summed = {axis for n in nodes for axis in n.reduced} | {str(n.attr[0]) for n in nodes if n.op == "cumsum"}
    renamed = {str(a) for n in nodes if n.op == "rename" for a in n.attr}
    for dim in program.dims:
        if dim not in summed | renamed and roots and all(dim in r.axes for r in roots):
            return dim
    return ""


def walks_at(kinds: Iterable[str]) -> slice:
    """Where, among kernels of these kinds, those from the first scan to the last are."""
    scans = [i for i, kind in enumerate(kinds) if kind == "scan"]
    return slice(scans[0], scans[-1] + 1)


def walking(kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    """Those from the first scan to the last."""
    return kernels[walks_at(k.kind for k in kernels)]


def scans_of(whole: Kernel, saved: tuple[Node, ...], weight: Weight) -> list[Kernel]:
    """The scan; or, where it has no room and several cost less, one for each of some groups of its carries. Where eight
    warps have no room for it in heads of 128, it is several if grids can split a dim of each, but none of all."""
    whole = placed(whole, saved)
    groups = chains(whole.program, whole.role)
    tiles = functools.cache(lambda scan: alive(scan, FULL))
    crowded = len(groups) > 1 and not whole.blocked and alive(whole, WIDE) > 2 * ROOM
    if len(groups) == 1 or (tiles(whole) <= ROOM and not crowded):
        return [whole]

    def several(groups: Sequence[tuple[str, ...]]) -> list[Kernel]:
        if len(groups) == 1:
            return [whole]
        found = walks(whole.program, whole.role, groups, [*(v for _, v in whole.outputs), *whole.saves], FULL)
        return _walked(whole, saved, found, weight) if len(found) > 1 else [whole]

    least = several(groups)
    if crowded and all(k.blocked for k in least if k.kind == "scan"):
        return least
    if tiles(whole) <= ROOM:
        return [whole]
    beside = {name: (k.name, tiles(k) - _held(k)) for k in least for name, _ in k.carried}

    def price(kernels: Iterable[Kernel]) -> float:
        """A scan of several walks spills in each of them, beside the states of all."""
        spills = 0.0
        for k in (k for k in kernels if k.kind == "scan"):
            each = dict(beside[name] for name, _ in k.carried).values()
            spills += max(spilled(tiles(k)), sum(spilled(beside_it + _held(k)) for beside_it in each))
        return spills + sum(work(k) if k.kind == "scan" else cost(k, weight) for k in kernels)

    ways = [least]
    while len(groups := [tuple(name for name, _ in k.carried) for k in ways[-1] if k.kind == "scan"]) > 1:
        joined = ([*groups[:i], groups[i] + groups[i + 1], *groups[i + 2 :]] for i in range(len(groups) - 1))
        ways.append(min(map(several, joined), key=price))
    return min(ways, key=price)


def _held(scan: Kernel) -> float:
    """The tiles that a scan holds from unit to unit."""
    return sum(map(FULL, scan.walked()))


def _walked(whole: Kernel, saved: tuple[Node, ...], found: Sequence[Walk], weight: Weight) -> list[Kernel]:
    """A kernel for each walk, in place of the scan that is all of them; before it others for what is dear and follows
    from earlier walks alone."""
    exact = frozenset(n for walk in found for n in walk.exact)
    handed = {name for name, _ in whole.carried}
    kernels: list[Kernel] = []
    for i, walk in enumerate(found):
        scan = replace(
            whole,
            name=whole.name.replace("_kernel", f"_{i + 1}_kernel"),
            outputs=tuple((k, v) for k, v in whole.outputs if v in walk.wanted),
            carried=tuple((k, v) for k, v in whole.carried if k in walk.carried),
            # what no unit hands on is there for the first unit alone, which any of them may keep
            keeps=tuple(k for k in whole.keeps if k in walk.carried or (k not in handed and i == 0)),
            saves=tuple(dict.fromkeys((*(n for n in whole.saves if n in walk.wanted), *walk.across))),
            across=frozenset(walk.across),
            exact=exact,
        )
        given = (*saved, *walk.given)
        chained = depends_on(scan.roots, scan.giving(given).walked())
        if needs_dear(scan.roots, chained, given):
            free = prologue(f"{scan.name.removesuffix('_kernel')}_free", whole.program, scan.roots, chained, given)
            if free:
                kernels += staged(replace(free, exact=exact), weight)[1]
                given += free.saves
        kernels.append(placed(scan, given))
    return kernels


def passed_on(kernels: Sequence[Kernel]) -> tuple[Node, ...]:
    """What was saved for one of several scans, and serves all kernels after them, too."""
    taken = {n for k in kernels if k.kind == "scan" for n in k.given}
    return tuple(n for k in kernels for n in k.saves if n in taken)


def placed(scan: Kernel, saved: tuple[Node, ...]) -> Kernel:
    """A scan with the dim that its grid may split, and what it needs of the values saved before it."""
    return replace(scan, blocked=free_axis(scan.program, scan.roots, saved)).giving(saved)
