"""Kernels that walk over the blocks of a dim, in as many rounds as it takes: the inner dims of deep memories, which are
several times as wide as a head, would fill the registers many times over; and the dims of wide heads, where that helps.

Input: what a kernel computes, and a dim. Output: `Round`s. A value with the dim exists for one block at a time; a sum
over the dim is known when a round is over, and what depends on it is computed after that, values with the dim in the
next round. What an earlier round has computed of them is computed again. States with the dim cannot wait in registers
from unit to unit: kernels leave them in memory (write_kernel.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ttmdsl.ir import Node, reachable

_ADDED = frozenset({"sum", "contract", "decay_dot"})  # what is found block by block and added up
_WHOLE = frozenset({"cumsum", "tri_inv", "newton_schulz", "newton_schulz_back", "norm_scan", "norm_slopes"})


@dataclass(frozen=True)
class Round:
    """One walk over the blocks: values without the dim that are found `before` it, `sums` over the dim that it adds up,
    and its `ends`, values with the dim that are wanted of every block; for these it takes the values `within`."""

    before: tuple[Node, ...]
    sums: tuple[Node, ...]
    ends: tuple[Node, ...]
    within: frozenset[Node]


def rounds(roots: Iterable[Node], given: Iterable[Node], dim: str) -> tuple[Round, ...]:
    """The rounds of a kernel over the blocks of a dim; none, if one of its values needs the whole dim."""
    roots, known = list(dict.fromkeys(roots)), set(given)
    nodes = reachable(roots, known)
    computed = [n for n in nodes if n not in known and n.op != "leaf"]
    wide = {n for n in nodes if dim in n.axes}
    sums = {n for n in computed if n not in wide and not wide.isdisjoint(n.args)}
    whole = any(f"{dim}'" in n.axes for n in nodes) or any(n.op in _WHOLE and n in wide for n in computed)
    if not wide or whole or any(n.op not in _ADDED for n in sums):
        return ()
    level = dict.fromkeys(nodes, 0)
    for n in computed:
        level[n] = max((level[a] for a in n.args), default=0) + (n in sums)
    # what has no dim is found before the round that is the first to use it
    first: dict[Node, int] = {n: level[n] for n in roots if n not in wide}
    for n in computed:
        for a in (x.args[0] if x.op == "neg" and x not in known else x for x in n.args):
            if a not in wide and (n in wide or level[a] < level[n]):
                first[a] = min(first.get(a, level[n]), level[n])
    found: list[Round] = []
    waiting = {n for n in roots if n in wide}
    for i in range(max(level.values()), -1, -1):
        added = tuple(n for n in nodes if n in sums and level[n] == i + 1)
        # what is computed in a round anyway is stored there
        here = [*added, *(n for n in waiting if level[n] == i)]
        within = wide & set(reachable(here, {*known, *(n for n in nodes if n not in wide and n not in added)}))
        before = tuple(n for n in nodes if n not in sums and first.get(n) == i)
        found.append(Round(before, added, tuple(n for n in roots if n in waiting & within), frozenset(within)))
        waiting -= within
    return tuple(found[::-1])
