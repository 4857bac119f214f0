"""Which carries of a program need not be walked with at once, and what then passes from one walk to the next.

Input: a program, which of its carries are walked with together, and what is wanted of it. Output: `Walk`s in the order
in which they run: the carries of each, what it computes beside them, and the values that it hands to later ones: the
smallest that separate it from these, as a minimum cut finds them. Decides nothing about what pays (plan.py does).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ttmdsl.ir import DEAR, Node, Program, Role, depends_on, is_large, is_matmul, reachable
from ttmdsl.network import NEVER, UNIT, Network
from ttmdsl.rounding import enlarged, rounds_operands
from ttmdsl.schedule import Weight

# what it counts, beside a tile that is passed on in half precision, that something dear is computed in a walk, and not
# for all units at once before the next; what passing on a state counts, more than any sum of these
_AHEAD, _STATE = 8 * UNIT, 1 << 40


@dataclass(frozen=True)
class Walk:
    """One walk over the units: with `carried`, computing `wanted` beside them; it takes `given` from earlier walks,
    `across` is what later ones take of it. Of the values that pass so `exact` are those whose rounding is enlarged.
    """

    carried: tuple[str, ...]
    wanted: tuple[Node, ...]
    given: tuple[Node, ...]
    across: tuple[Node, ...]
    exact: frozenset[Node]


def chains(program: Program, role: Role) -> list[tuple[str, ...]]:
    """The carries that depend on one another from unit to unit, together, each after those that it depends on."""
    ends = program.ends()
    needs = {k: {k} | {n.name for n in reachable([v]) if n.role == role and n.name in ends} for k, v in ends.items()}
    for _ in ends:
        needs = {k: set().union(*(needs[x] for x in found)) for k, found in needs.items()}
    groups = list(dict.fromkeys(tuple(x for x in ends if needs[x] == needs[k]) for k in ends))
    result: list[tuple[str, ...]] = []
    while len(result) < len(groups):
        done = {x for group in result for x in group}
        result.append(next(g for g in groups if g not in result and needs[g[0]] <= done | {*g}))
    return result


def walks(
    program: Program, role: Role, groups: Sequence[tuple[str, ...]], wanted: Iterable[Node], weight: Weight
) -> list[Walk]:
    """One walk for each group; fewer, where nothing smaller than a state could pass between two. `wanted` is computed
    by the last walk on whose carries it depends; what depends on none by the last of all."""
    wanted = list(wanted)
    ends = program.ends()
    nodes = reachable([*ends.values(), *wanted])
    place = {name: i for i, group in enumerate(groups) for name in group}
    latest: dict[Node, int] = {}
    for n in nodes:
        own = place.get(n.name, -1) if n.role == role else -1
        latest[n] = max((own, *(latest[a] for a in n.args)))
    last = len(groups) - 1
    asked = [[n for n in wanted if (latest[n] if latest[n] >= 0 else last) == i] for i in range(len(groups))]
    across: list[dict[Node, None]] = [{} for _ in groups]
    given: list[dict[Node, bool]] = [{} for _ in groups]
    exact: set[Node] = set()
    for i in reversed(range(len(groups))):
        roots = [*(ends[k] for k in groups[i]), *asked[i], *across[i]]
        given[i] = smallest_crossing(roots, {n for n in nodes if 0 <= latest[n] < i}, weight)
        exact |= {n for n, full in given[i].items() if full}
        for n in given[i]:
            if n.op == "leaf":  # a state: these are walked with together
                j = latest[n]
                together = tuple(name for group in groups[j : i + 1] for name in group)
                return walks(program, role, [*groups[:j], together, *groups[i + 1 :]], wanted, weight)
            across[latest[n]][n] = None
    return [
        Walk(group, tuple(asked[i]), tuple(given[i]), tuple(across[i]), frozenset(exact & {*given[i], *across[i]}))
        for i, group in enumerate(groups)
    ]


def smallest_crossing(roots: Sequence[Node], foreign: Collection[Node], weight: Weight) -> dict[Node, bool]:
    """The values that cost least to pass on, of those `foreign`, which follow from carries of earlier walks alone, so
    that the roots can be computed without these carries; of several such sets that next to the roots. Each with whether
    it passes in float32: where its rounding is enlarged, or products of weights of tokens take it. Where nothing else
    can pass, a carry is among them.

    It is the minimum cut of a network: anything may flow from a value to what is made of it, but through a value only
    what it costs to pass it on.
    """
    inside = reachable(roots)
    carries = [n for n in inside if n.op == "leaf" and n in foreign]
    tainted = depends_on(roots, carries)
    dear = depends_on(roots, (n for n in tainted if n.op in DEAR))
    exact = enlarged(inside)
    network = Network()
    for n in inside:
        if n not in tainted:
            continue
        for x in (x for x in n.args if x in tainted):
            if n.op == "rename":  # what takes it takes the other
                network.join((x, _FULL), (n, _FULL))
                network.join((x, _SHORT), (n, _SHORT))
            else:
                short = rounds_operands(n) or not (x in exact or is_matmul(n))
                network.join((x, _SHORT if short else _FULL), (n, _MADE))
        if n.op != "rename":
            price = max(1, int(weight(n) * UNIT)) + _AHEAD * (n in dear)
            moved = n in foreign and not is_large(n) and n.op not in ("leaf", "expand")
            network.join((n, _MADE), (n, _FULL), 2 * price if moved else _STATE if n.op == "leaf" else NEVER)
            network.join((n, _FULL), (n, _SHORT), price if moved and len(n.axes) == 2 else NEVER)
    for n in carries:
        network.join(network.SOURCE, (n, _MADE))
    for n in tainted & set(roots):
        network.join((n, _FULL), network.SINK)
    near = network.cut()
    values = [n for n in inside if n in tainted and n.op != "rename"]
    full = {n: True for n in values if (n, _FULL) in near and (n, _MADE) not in near}
    return full | {n: False for n in values if (n, _SHORT) in near and (n, _FULL) not in near}


# how far a value has come: as it is made, as it passes in float32 and in half precision
_MADE, _FULL, _SHORT = range(3)
