"""Which kernels compute a form, and what each one loads and stores. Plans are data.

Input: a `Form`. Output: `Plan`, a list of kernels for the forward and one for the backward pass. A kernel is a slice
of a program: some of its outputs, and all they need, down to what an earlier kernel has saved.

- Forward is one scan. What is free of the carry and dear (a triangular inverse, products under decays per channel,
  tokens scaled by these), or weights of tokens that take several products, is computed for all chunks at once before
  it, and saved for the backward pass.
- Backward is split by dependence: a scan for the cotangents of the carries alone, then kernels that run for all chunks
  at once and share the gradients of the inputs among them.
- Sums over three tiles go by a product that the inputs' gradients take anyway, where that costs less (associate.py).
- Where a scan has no room for all that it walks with, and carries do not depend on one another, it is several, one
  after the other, if these cost less, or if grids can split these alone: what a later one takes of an earlier one
  passes through memory (chains.py).
- Where the carries are linear, and too few sequences would fill a GPU, each is walked in parts, side by side: first for
  the states at the parts' starts (`Parts`), then as above.
- Kernels walk over the blocks of a dim that memories alone have (rounds.py). Their states pass through memory from unit
  to unit, so what is read of them may be computed for all units at once, after the scan, where that costs less.
- Maps walk likewise over the blocks of a head's dim, where heads of 128 find room so: whether a launch takes such
  blocks, or the whole dim as one, is said by what was measured.
- The exact sequential form keeps its own backward in one kernel (see codegen/triton_kernels.py.j2).

Does not choose tile sizes or warps: that is the launch's business (codegen/triton.py.j2).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ttmdsl.associate import associated
from ttmdsl.chains import Walk, chains, walks
from ttmdsl.ir import (
    DEAR,
    TOKEN_AXES,
    Node,
    Program,
    Role,
    depends_on,
    is_matmul,
    is_product,
    nearest,
    original,
    reachable,
)
from ttmdsl.lower import Form
from ttmdsl.padding import singular
from ttmdsl.rounds import rounds
from ttmdsl.schedule import BLOCK, FULL, Weight, weights
from ttmdsl.staging import AGAIN, APART, DOUBT, ROOM, SCAN, WALKING, alive, cost, spilled, spilled_at_128, staged, work
from ttmdsl.transfer import Transfer, transfers

Kind = Literal["scan", "map"]
Division = Sequence[Sequence[str]]
MOST_CUTS = 2  # values per token that a scan saves: each costs as much memory traffic as an input


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel: a slice of a program.

    scan: one program for every sequence and head walks over the units and carries `carried` (leaf name to node at the
    unit's end); the carries at each unit's start are stored where `keeps` names them. map: one program for every unit
    and head. `outputs` are stored at every unit, `saves` likewise for the kernels after it, which are `given` them.
    What a scan saves or keeps it stores where a backward pass may follow, but what is `across`, for a later kernel of
    the forward pass, always.
    `blocked` is a dim that the grid may split, or ""; `inner` one over whose blocks the kernel walks (rounds.py).
    `exact` values pass between kernels in float32; others that have a value for every token in the inputs' dtype.
    `wide` products have twice its digits. `handed` values follow from the carries alone: found before a walk, and by
    each unit for the next. `searched`: the order of its values is looked for longer than others.
    """

    name: str
    kind: Kind
    program: Program
    reverse: bool = False
    outputs: tuple[tuple[str, Node], ...] = ()
    carried: tuple[tuple[str, Node], ...] = ()
    keeps: tuple[str, ...] = ()
    saves: tuple[Node, ...] = ()
    across: frozenset[Node] = frozenset()
    given: tuple[Node, ...] = ()
    blocked: str = ""
    inner: str = ""
    exact: frozenset[Node] = frozenset()
    wide: frozenset[Node] = frozenset()
    handed: tuple[tuple[Node, Node], ...] = ()
    searched: bool = False

    @property
    def roots(self) -> list[Node]:
        values = [*self.outputs, *(("", n) for n in self.saves), *self.carried]
        return [*(v for _, v in values), *(end for _, end in self.handed)]

    @property
    def role(self) -> Role:
        """What a scan walks with."""
        return "cocarry" if self.reverse else "carry"

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """What this kernel computes or loads, operands first; saved values are loaded."""
        return reachable(self.roots, set(self.given))

    def leaves(self) -> list[Node]:
        """Leaves that this slice needs."""
        return [n for n in self.nodes if n.op == "leaf"]

    def walked(self) -> set[Node]:
        """Leaves that a scan walks with."""
        return {n for n in self.leaves() if self.kind == "scan" and n.role == self.role}

    def states(self) -> set[Node]:
        """Leaves that hold states at a unit's ends and that this kernel loads: all but those that it walks with."""
        return {n for n in self.leaves() if n.role in ("carry", "cocarry")} - self.walked()

    def giving(self, saved: tuple[Node, ...]) -> Kernel:
        """The kernel with those saved values that it needs."""
        needed = set(reachable(self.roots, set(saved)))
        return replace(self, given=tuple(n for n in saved if n in needed and n not in self.saves))


@dataclass(frozen=True)
class Parts:
    """Kernels by which parts of a sequence find the states that they start from, side by side: `carry` walks with the
    tokens' writes alone, a kernel for each memory carries a factor through a part (transfer.py)."""

    carry: Kernel
    transfers: tuple[tuple[Transfer, Kernel], ...]

    def kernels(self) -> tuple[Kernel, ...]:
        return (self.carry, *(kernel for _, kernel in self.transfers))


@dataclass(frozen=True)
class Plan:
    """The kernels of one form, in the order in which they run; `division` says which gradients share kernels."""

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    parts: Parts | None = None
    division: Division = ()

    def kernels(self) -> tuple[Kernel, ...]:
        return self.forward + self.backward + (self.parts.kernels() if self.parts else ())

    def rounded(self) -> frozenset[Node]:
        """States at the units' ends that may be in the inputs' dtype wherever they are loaded: matrix products alone
        take them, which round them anyway, or gradients of decays, sums of a state's elements times its cotangent's,
        unless little but rounding would be left of these."""
        loaded: set[Node] = set()
        exact: set[Node] = set()
        fragile = perpendicular(self.forward[0].program)
        for k in self.kernels():
            states = k.states()
            rounding = {n for n in k.nodes if is_matmul(n) and n not in k.wide}
            if not fragile:
                rounding |= {n for n in k.nodes if n.op == "contract" and states.issuperset(map(original, n.args))}
            others = [n for n in k.nodes if n not in k.given and n not in rounding and n.op != "rename"]
            loaded |= states
            exact |= states & {original(a) for a in (*k.roots, *(a for n in others for a in n.args))}
        return frozenset(loaded - exact)


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


def carries(program: Program) -> dict[str, Node]:
    """The values that a program hands to the next unit, by name."""
    return {k[6:]: v for k, v in program.outputs.items() if k.startswith("carry:")}


def plan(name: str, form: Form, tokens: int = 64, division: Division = ()) -> Plan:
    """The kernels of a chunk form in units of so many tokens. `division`: which gradients share kernels, where a form
    with the same ones has said so."""
    weight = weights(tokens)
    y = {k: v for k, v in form.forward.outputs.items() if not k.startswith("carry:")}
    handed, kept = carries(form.forward), _states(form.backward.outputs.values())
    scan = Kernel(f"_{name}_forward_scan_kernel", "scan", form.forward, keeps=kept, carried=tuple(handed.items()))
    whole = replace(scan, outputs=tuple(y.items()))
    read = Kernel(f"_{name}_forward_read_kernel", "map", form.forward, outputs=whole.outputs)
    dim = form.forward.inner
    apart = bool(dim) and cost(whole, FULL) - cost(scan, FULL) > APART * 64 / tokens * staged(read, weight)[0]
    needed = tuple(dict.fromkeys((*kept, *_states(y.values()))))
    scan = replace(scan, keeps=needed) if apart else whole
    ends = [*handed.values()] if apart else [*y.values(), *handed.values()]
    read_later = [*y.values()] if apart else []

    chained = tied(form.forward, "carry")
    before = _prologue(f"_{name}_forward_free", form.forward, ends, chained, ())
    if before and not (_dear(ends, chained, ()) or _weighs(before)):
        before = None
    saved = before.saves if before else ()
    passed = _passed(_scans(scan, saved, weight))
    ways: list[tuple[float, tuple[Node, ...], list[Kernel], list[Kernel], Division]] = []
    for program, doubt in _backward_programs(form):
        shared, later = division, [*program.outputs.values(), *read_later]
        saving = (_cuts(form.forward, ends, later, (*saved, *passed), chained, least) for least in (1, 2))
        for cuts in dict.fromkeys(saving):
            scans = _scans(replace(scan, saves=cuts), saved, weight)
            have = (*saved, *_passed(scans), *cuts)
            # the second way keeps the first's division, which takes long to find
            price, kernels, shared = _backward(name, program, have, weight, shared)
            price = doubt * price + sum(SCAN * cost(k, FULL) for k in kernels if k.kind == "scan")
            price += spilled_at_128(kernels, weight) + len(cuts)  # what is saved is written once, too
            ways.append((price, cuts, scans, kernels, shared))
    _, _, scans, backward, division = min(ways, key=lambda way: way[0])
    parts = _parts(name, form.forward, saved)
    first = staged(before, weight)[1] if before else []
    if apart:
        scans = _always(scans, y.values())
        scans += staged(read.giving((*saved, *(n for k in scans for n in k.saves))), weight)[1]
    found = Plan(name, (*first, *scans), tuple(backward), parts, division)
    found = _exactly(found, frozenset(n for k in found.kernels() if k.kind == "scan" for n in k.exact))
    found = _careful(found) if steep(form.forward) else found
    return _in_blocks(_in_rounds(found, dim) if dim else found, tokens)


def _backward_programs(form: Form) -> list[tuple[Program, float]]:
    """The backward program, and the same with sums by other ways, where these are shorter; beside each how much more
    its maps may cost than they seem to."""
    other = associated(form.backward)
    return [(form.backward, 1.0)] if other is form.backward else [(form.backward, 1.0), (other, DOUBT)]


def _states(roots: Iterable[Node]) -> tuple[str, ...]:
    """The memories whose states at a unit's start the roots need."""
    return tuple(n.name for n in reachable(roots) if n.role == "carry")


def _always(scans: Iterable[Kernel], read: Iterable[Node]) -> list[Kernel]:
    """The same, that leave always what a later kernel of the forward pass takes."""
    needed = set(reachable(read, {n for k in scans for n in k.saves}))
    return [replace(k, across=k.across | (needed & {*k.saves, *k.leaves()})) for k in scans]


def _backward(
    name: str,
    program: Program,
    saved: tuple[Node, ...],
    weight: Weight,
    division: Division,
) -> tuple[float, list[Kernel], Division]:
    """The kernels of the backward pass, given what the forward one saves; before them what all but the scan cost."""
    handed = carries(program)
    gradients = {k[2:]: v for k, v in program.outputs.items() if k.startswith("d:")}
    d_ends, chained = list(handed.values()), tied(program, "cocarry")
    free = _prologue(f"_{name}_backward_free", program, d_ends, chained, saved)
    price, kernels = staged(free, weight) if free else (0.0, [])
    saved += free.saves if free else ()
    cuts = _cuts(program, d_ends, gradients.values(), saved, chained, 1)
    used = {n.name for n in reachable(gradients.values(), {*saved, *cuts}) if n.role == "cocarry"}
    scan = Kernel(f"_{name}_backward_scan_kernel", "scan", program, True, (), tuple(handed.items()))
    scans = _scans(replace(scan, keeps=tuple(sorted(used)), saves=cuts), saved, weight)
    kernels += scans
    have = tuple(n for n in (*saved, *_passed(scans), *cuts) if not scaled(n))  # gradients of decays take these exactly
    division, shared = shares(program, gradients, have, weight, [division] if division else None)
    for i, (paid, share) in enumerate(shared):
        price += paid
        kernels += [replace(k, name=f"_{name}_backward_{i + 1}{k.name}") for k in share]
    return price, kernels, division


def _parts(name: str, program: Program, saved: tuple[Node, ...]) -> Parts | None:
    """The kernels for sequences in parts, if every carry is linear in itself."""
    found = transfers(program)
    if not found:
        return None
    kernels = []
    for i, t in enumerate(found):
        bare = program.with_outputs({f"carry:{t.memory}": t.end})
        kernel = Kernel(f"_{name}_transfer_{i + 1}_kernel", "scan", bare, carried=((t.memory, t.end),))
        kernels.append((t, _placed(kernel, saved)))
    carry = Kernel(f"_{name}_carry_kernel", "scan", program, carried=tuple(carries(program).items()))
    return Parts(_placed(carry, saved), tuple(kernels))


def tied(program: Program, role: str) -> set[Node]:
    """Nodes that depend on what is handed from unit to unit: the carries, or in a backward program their cotangents."""
    return depends_on(program.outputs.values(), [n for n in program.leaves() if n.role == role])


def steep(program: Program) -> bool:
    """Whether a state meets a function that is infinite at 0, as it does where it is divided by its own length.

    The shorter the state, the more such a function enlarges what rounding has added to it, unit after unit.
    """
    chained = tied(program, "carry")
    nodes = reachable(carries(program).values())
    return any(singular(n) and n in chained and not any(x in TOKEN_AXES for x in n.axes) for n in nodes)


def perpendicular(program: Program) -> bool:
    """Whether what is read of a carry is divided by its length, or the like. Lengths change nothing then: the state is
    at right angles to its cotangent, and of the sum of their elements' products little but rounding is left."""
    chained = tied(program, "carry")
    return any(singular(n) and n in chained and not _of_softmax(n) for n in program.nodes)


def _of_softmax(node: Node) -> bool:
    """Whether this is one over a sum of exponentials, which knows no lengths."""
    return node.op == "recip" and node.args[0].op == "sum" and node.args[0].args[0].op == "exp2"


def walks_at(kinds: Iterable[Kind]) -> slice:
    """Where, among kernels of these kinds, those from the first scan to the last are."""
    scans = [i for i, kind in enumerate(kinds) if kind == "scan"]
    return slice(scans[0], scans[-1] + 1)


def walking(kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    """Those from the first scan to the last."""
    return kernels[walks_at(k.kind for k in kernels)]


def _careful(p: Plan) -> Plan:
    """The same for carries that enlarge rounding: products on which a carry depends are wide, and what its scans save
    or are given is exact. Cotangents enlarge nothing: they pass through the slopes where the carry was."""
    walks = walking(p.forward)
    names = {k.name for k in walks}
    saves = {n for k in walks for n in k.saves}
    given = {n for k in walks for n in k.given} - saves
    wide = frozenset(filter(is_product, reachable((v for k in walks for _, v in k.carried), given)))
    p = _exactly(p, frozenset(saves | given))
    return replace(p, forward=tuple(replace(k, wide=wide) if k.name in names else k for k in p.forward))


def _in_rounds(p: Plan, dim: str) -> Plan:
    """The same by kernels that walk over the blocks of a dim, where they can and their grid does not split it."""

    def walking_over(k: Kernel) -> Kernel:
        return replace(k, inner=dim) if k.blocked != dim and rounds(k.roots, k.given, dim) else k

    return replace(p, forward=tuple(map(walking_over, p.forward)), backward=tuple(map(walking_over, p.backward)))


def _in_blocks(p: Plan, tokens: int) -> Plan:
    """The same by map kernels that walk over the blocks of a dim, where heads twice as wide as a block find room so and
    none else, and few tiles are loaded or multiplied again. Of a narrower head one block is all: there is one walk."""

    wide = functools.cache(lambda dim: weights(tokens, 2 * BLOCK, dim))

    @functools.cache
    def tiles(k: Kernel) -> float:
        return alive(k, wide(k.inner))

    def searched(k: Kernel) -> float:
        return tiles(replace(k, searched=True))

    def walking_over(k: Kernel) -> Kernel:
        if k.kind == "scan" or k.inner or tiles(k) <= ROOM:
            return k
        most = tiles(k) if k.searched else min(WALKING, tiles(k))
        ways = [replace(k, inner=dim) for dim in k.program.dims if rounds(k.roots, k.given, dim)]
        ways = [way for way in ways if again(way) <= AGAIN]
        best = min(ways, key=tiles, default=k)
        if tiles(best) <= most:
            return best
        best = min(ways, key=searched, default=k)  # in another order, which frees half
        return best if searched(best) <= min(most, tiles(k) / 2) else k

    return replace(p, forward=tuple(map(walking_over, p.forward)), backward=tuple(map(walking_over, p.backward)))


def again(walking: Kernel) -> int:
    """How many tiles a walk loads or multiplies in one round and again in a later one."""
    found = rounds(walking.roots, walking.given, walking.inner)
    times = Counter(n for r in found for n in {*r.sums, *r.within})
    return sum(times[n] - 1 for n in times if n.op == "leaf" or n in walking.given or is_product(n))


def _exactly(p: Plan, exact: frozenset[Node]) -> Plan:
    """The same with these values in float32 wherever they pass between kernels."""

    def exactly(k: Kernel) -> Kernel:
        return replace(k, exact=k.exact | exact)

    return replace(p, forward=tuple(map(exactly, p.forward)), backward=tuple(map(exactly, p.backward)))


def _spared(roots: Iterable[Node], given: Iterable[Node]) -> dict[Node, int]:
    """How many products of tiles the roots need no more once they are given a value: its own, and those that they need
    by way of it alone (its dominator tree)."""
    roots, known = set(roots), set(given)
    order = reachable(roots, known)
    users: dict[Node, list[Node]] = {}
    for n in order:
        for a in () if n in known else n.args:
            users.setdefault(a, []).append(n)
    above: dict[Node, Node | None] = {}
    depth: dict[Node | None, int] = {None: 0}
    for n in reversed(order):
        common: Node | None = None if n in roots else users[n][0]
        for other in () if n in roots else users[n][1:]:
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


def _cuts(
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
            if len(n.axes) == 2 and n.axes[0] == "t" and n.axes[1] not in TOKEN_AXES
        ]
        best = max(candidates, key=spared.__getitem__, default=None)
        if best is None or spared[best] < least:
            break
        found += (best,)
    return found


def _dear(roots: Iterable[Node], chained: set[Node], given: tuple[Node, ...]) -> bool:
    """Whether something that the roots need is dear and free of the chain."""
    return any(n.op in DEAR and n not in chained and n not in given for n in reachable(roots, set(given)))


def _weighs(free: Kernel) -> bool:
    """Whether several products go to weights of tokens, and to nothing as large as an input: what each block of a
    scan's grid would compute again, in the chain of its units."""
    return sum(map(is_product, free.nodes)) > 1 and all(set(n.axes) <= set(TOKEN_AXES) for n in free.saves)


def _prologue(
    name: str, program: Program, roots: Iterable[Node], chained: set[Node], given: tuple[Node, ...]
) -> Kernel | None:
    """A kernel for what a scan needs that is free of its chain, wherever that takes a product or something dear."""
    nodes = reachable(roots, set(given))
    chain = [n for n in nodes if n in chained and n not in given]
    border = {a: _sources(a, given) for n in chain for a in n.args if a not in chained and a.axes}
    sources = {n: found for n, found in border.items() if len(n.axes) == 2}
    uses = Counter(s for found in sources.values() for s in found)
    # as large as a state: moving it takes longer than computing it
    large = {n: found[0] for n, found in sources.items() if len(found) == 1 and _outgrows(found[0], given)}
    taken = [(a, n) for n in (*chain, *large.values()) for a in n.args if a not in chained]
    exact = {a for a, n in taken if not is_matmul(n)}
    saves = dict.fromkeys(a for a, _ in taken if scaled(a, given) and (a not in exact or len(a.axes) == 1))
    for n, found in sources.items():
        if n in large or n in saves:
            continue
        # the products that a value needs are saved, unless it alone needs several of them
        alone = len(found) > 1 and n.op != "rename" and all(uses[s] == 1 for s in found)
        saves.update(dict.fromkeys([n] if alone else found))
    # a vector takes no room: it is saved where products are needed for it alone
    saves.update((n, None) for n, found in border.items() if len(n.axes) == 1 and not saves.keys() >= set(found))
    return Kernel(f"{name}_kernel", "map", program, saves=tuple(saves)).giving(given) if saves else None


def scaled(node: Node, given: Container[Node] = ()) -> bool:
    """Whether a value follows by work on single elements, and by way of no product, from decays per channel: summed up
    over the tokens so far; or is a vector, and they are summed up over all tokens of a unit."""

    def running(n: Node) -> bool:
        return n.op == "cumsum" and not set(n.axes) <= set(TOKEN_AXES)

    def of_tokens(n: Node) -> bool:
        return len(n.axes) == 2 and n.axes[0] in TOKEN_AXES

    dear = nearest(node, lambda n: running(n) or n.op in DEAR or is_product(n), given.__contains__)
    if len(node.axes) == 2:
        return bool(dear) and all(map(running, dear))
    of_channels = len(node.axes) == 1 and node.axes[0] not in TOKEN_AXES
    return of_channels and not dear and any(map(of_tokens, nearest(node, of_tokens, given.__contains__)))


def _outgrows(node: Node, given: tuple[Node, ...]) -> bool:
    """Whether a value is a product of inputs that is as large as a state."""
    return not any(x in TOKEN_AXES for x in node.axes) and _of_inputs(node, given)


def _of_inputs(node: Node, given: tuple[Node, ...]) -> bool:
    """Whether a value is a product of what follows from inputs alone."""
    return is_product(node) and not any(_sources(a, given) for a in node.args)


def _sources(node: Node, given: tuple[Node, ...]) -> list[Node]:
    """The products of tiles, and other dear values, that a value follows from without another product."""
    return nearest(node, lambda n: n.op in DEAR or is_product(n), given.__contains__)


def _scans(whole: Kernel, saved: tuple[Node, ...], weight: Weight) -> list[Kernel]:
    """The scan; or, where it has no room and several cost less, one for each of some groups of its carries. Where eight
    warps have no room for it in heads of 128, it is several if grids can split a dim of each, but none of all."""
    whole = _placed(whole, saved)
    groups = chains(whole.program, whole.role)
    tiles = functools.cache(lambda scan: alive(scan, FULL))
    if len(groups) == 1:
        return [whole]

    def several(groups: Sequence[tuple[str, ...]]) -> list[Kernel]:
        if len(groups) == 1:
            return [whole]
        found = walks(whole.program, whole.role, groups, [*(v for _, v in whole.outputs), *whole.saves], FULL)
        return _walked(whole, saved, found, weight) if len(found) > 1 else [whole]

    least = several(groups)
    splitting = not whole.blocked and all(k.blocked for k in least if k.kind == "scan")
    if splitting and alive(whole, weights(64, 2 * BLOCK)) > 2 * ROOM:
        return least
    if tiles(whole) <= ROOM:
        return [whole]
    beside = {name: (k.name, tiles(k) - held(k)) for k in least for name, _ in k.carried}

    def price(kernels: Iterable[Kernel]) -> float:
        """A scan of several walks spills in each of them, beside the states of all."""
        spills = 0.0
        for k in (k for k in kernels if k.kind == "scan"):
            each = dict(beside[name] for name, _ in k.carried).values()
            spills += max(spilled(tiles(k)), sum(spilled(beside_it + held(k)) for beside_it in each))
        return spills + sum(work(k) if k.kind == "scan" else cost(k, weight) for k in kernels)

    ways = [least]
    while len(groups := [tuple(name for name, _ in k.carried) for k in ways[-1] if k.kind == "scan"]) > 1:
        joined = ([*groups[:i], groups[i] + groups[i + 1], *groups[i + 2 :]] for i in range(len(groups) - 1))
        ways.append(min(map(several, joined), key=price))
    return min(ways, key=price)


def held(scan: Kernel) -> float:
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
        if _dear(scan.roots, chained, given):
            free = _prologue(f"{scan.name.removesuffix('_kernel')}_free", whole.program, scan.roots, chained, given)
            if free:
                kernels += staged(replace(free, exact=exact), weight)[1]
                given += free.saves
        kernels.append(_placed(scan, given))
    return kernels


def _passed(kernels: Sequence[Kernel]) -> tuple[Node, ...]:
    """What was saved for one of several scans, and serves all kernels after them, too: in float32, or free of its
    carries."""
    taken = {n for k in kernels if k.kind == "scan" for n in k.given}
    return tuple(n for k in kernels for n in k.saves if n in taken and (k.kind == "map" or n in k.across & k.exact))


def _placed(scan: Kernel, saved: tuple[Node, ...]) -> Kernel:
    """A scan with the dim that its grid may split, and what it needs of the values saved before it."""
    return replace(scan, blocked=free_axis(scan.program, scan.roots, saved)).giving(saved)


def shares(
    program: Program,
    gradients: dict[str, Node],
    saved: tuple[Node, ...],
    weight: Weight,
    divisions: Sequence[Division] | None = None,
) -> tuple[Division, list[tuple[float, list[Kernel]]]]:
    """The cheapest of a few divisions of the inputs' gradients, and for each share what it costs and its kernels."""
    gates = [k for k, v in gradients.items() if len(v.axes) < 2]
    vectors = {k: v for k, v in gradients.items() if k not in gates}
    if divisions is None:
        divisions = [split(program, gradients, n) for n in (1, 2)]
        if gates and vectors:
            divisions += [[gates, *split(program, vectors, n)] for n in (1, 2)]

    @functools.cache
    def kernels(*share: str) -> tuple[float, list[Kernel]]:
        kernel = Kernel("_kernel", "map", program, outputs=tuple((k, gradients[k]) for k in share))
        return staged(kernel.giving(saved), weight)

    least, best = math.inf, divisions[0]
    for division in divisions:
        total = 0.0
        for share in division:
            total += kernels(*share)[0]
            if total >= least:
                break
        else:
            least, best = total, division
    return best, [kernels(*share) for share in best]


def split(program: Program, gradients: dict[str, Node], groups: int) -> list[list[str]]:
    """Shares the gradients among kernels so that each does about as much work and little of it twice."""
    heavy = {
        k: {n for n in reachable([v]) if n.op == "contract" or n.op in DEAR}
        & depends_on([v], [n for n in program.leaves() if n.role in ("cot", "cocarry")])
        for k, v in gradients.items()
    }
    order = sorted(gradients, key=lambda k: (-len(heavy[k]), k))
    shares: list[list[str]] = [[] for _ in range(min(groups, len(order)))]
    work: list[set[Node]] = [set() for _ in shares]
    limit = len(set().union(*heavy.values())) / max(len(shares), 1)
    for k in order:
        costs = [len(w | heavy[k]) for w in work]
        added = [len(heavy[k] - w) for w in work]
        best = min(range(len(shares)), key=lambda i: (added[i] + max(0.0, costs[i] - 1.3 * limit), costs[i]))
        shares[best].append(k)
        work[best] |= heavy[k]
    return [s for s in shares if s]
