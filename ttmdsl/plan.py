"""Which kernels compute a form, and what each one loads and stores. Plans are data.

Input: a `Form`. Output: `Plan`, a list of kernels for the forward and one for the backward pass. A kernel is a slice
of a program: some of its outputs, and all they need, down to what an earlier kernel has saved.

- Forward is one scan. What is free of the carry and dear (a triangular inverse, products under decays per channel,
  tokens scaled by these), or weights of tokens that take several products, is computed for all chunks at once before
  it, and saved for the backward pass; so are gates, which scans would wait for (vectors.py).
- Backward is split by dependence: a scan for the cotangents of the carries alone, in few steps where that spares many
  (affine.py), then kernels that run for all chunks at once and share the gradients of the inputs among them.
- Products that are added up and share an operand are one; so is what a scan's sum takes that is free (join.py).
- Sums over three tiles go by a product that the inputs' gradients take anyway, where that costs less, or that a scan
  takes before their own (associate.py); those of one kernel that share a tile are one, where they go the same ways
  (gather.py).
- Where a scan has no room for all that it walks with, and carries do not depend on one another, it is several, one
  after the other, if these cost less, or if grids can split these alone: what a later one takes of an earlier one
  passes through memory (chains.py).
- Where the carries are linear, and too few sequences would fill a GPU, each is walked in parts, side by side: first for
  the states at the parts' starts (`Parts`), then as above.
- Kernels walk over the blocks of a dim that memories alone have (rounds.py). Their states pass through memory from unit
  to unit, so what is read of them may be computed for all units at once, after the scan, where that costs less; so it
  is where a carry's products have twice the digits, and leave a scan no room.
- Maps walk likewise over the blocks of a head's dim, where heads of 128 find room so: whether a launch takes such
  blocks, or the whole dim as one, is said by what was measured.
- The exact sequential form keeps its own backward in one kernel (see codegen/triton_kernels.py.j2).

Does not choose tile sizes or warps: that is the launch's business (codegen/triton_launch.py.j2).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ttmdsl.affine import affine
from ttmdsl.ahead import needs_dear, prologue, scaled, shared_products, weighs, weights_alone, worth_saving
from ttmdsl.associate import associated, shortened
from ttmdsl.chains import Walk, chains, walks
from ttmdsl.gather import gathered
from ttmdsl.ir import (
    DEAR,
    Node,
    Program,
    depends_on,
    is_matmul,
    is_product,
    is_token_tile,
    original,
    reachable,
    tied,
)
from ttmdsl.join import joined
from ttmdsl.kernels import Kernel
from ttmdsl.lower import Form
from ttmdsl.padding import singular
from ttmdsl.rounds import rounds
from ttmdsl.schedule import BLOCK, FULL, ROWS, WIDE, Weight, weights
from ttmdsl.staging import (
    AGAIN,
    APART,
    DOUBT,
    ROOM,
    SCAN,
    WALKING,
    alive,
    cost,
    spilled,
    spilled_at_128,
    staged,
    steep,
    taken_exactly,
    work,
)
from ttmdsl.transfer import Transfer, transfers
from ttmdsl.vectors import gates, leaving, taking

Division = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Choice:
    """What was found by looking for what is cheapest: the number of the `Way` to the gradients, and which of these
    share kernels."""

    way: int
    division: Division


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
    """The kernels of one form, in the order in which they run, and how they were chosen."""

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    choice: Choice
    parts: Parts | None = None

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


@dataclass(frozen=True)
class Way:
    """One way to the gradients: by this backward program, whose maps may cost `doubt` times what they seem to; with a
    forward pass by these scans, which saves the `cuts` for it, of all that it will `have` of that pass; and with the
    kernel before its own scan, if any. Those of one `kind` differ in what the forward pass saves."""

    program: Program
    doubt: float
    scans: tuple[Kernel, ...]
    cuts: tuple[Node, ...]
    have: tuple[Node, ...]
    free: Kernel | None
    kind: tuple[int, int]


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


def plan(name: str, form: Form, tokens: int = 64, choice: Choice | None = None) -> Plan:
    """The kernels of a chunk form in units of so many tokens; by the `choice` of a form that is almost the same, since
    looking for one takes long."""
    form = Form(joined(form.forward, form.backward), joined(form.backward, form.forward))
    form = Form(shortened(form.forward, "carry"), form.backward)
    weight = weights(tokens)
    y = {k: v for k, v in form.forward.outputs.items() if not k.startswith("carry:")}
    handed, kept = form.forward.ends(), _states(form.backward.outputs.values())
    scan = Kernel(f"_{name}_forward_scan_kernel", "scan", form.forward, keeps=kept, carried=tuple(handed.items()))
    whole = replace(scan, outputs=tuple(y.items()))
    read = Kernel(f"_{name}_forward_read_kernel", "map", form.forward, outputs=whole.outputs)
    dim, careful = form.forward.inner, steep(form.forward)
    apart = _reads_later(whole, scan, read, careful, tokens)
    needed = tuple(dict.fromkeys((*kept, *_states(y.values()))))
    scan = replace(scan, keeps=needed) if apart else whole
    ends, read_later = [*handed.values()], [*y.values()]
    if not (apart and dim):  # what reads in rounds saves nothing for the backward pass
        ends, read_later = [*read_later, *ends], []

    chained = tied(form.forward, "carry")
    before = prologue(f"_{name}_forward_free", form.forward, ends, chained, ())
    if before and not (needs_dear(ends, chained, ()) or weighs(before)):
        before = weights_alone(before)
    saved = before.saves if before else ()
    passed = _passed(_scans(scan, saved, weight))
    walked = {*reachable(scan.roots)}

    def ways() -> Iterator[Way]:
        # where kernels walk over blocks, what few steps take costs more than they spare (measured)
        chain = form.backward if form.backward.inner else affine(form.backward)
        for i, (program, doubt) in enumerate(_programs(shortened(chain, "cocarry"))):
            later = [*program.outputs.values(), *read_later]
            saving = (worth_saving(form.forward, ends, later, (*saved, *passed), chained, least) for least in (1, 2))
            for cuts in dict.fromkeys(saving):
                scans = _scans(replace(scan, saves=tuple(n for n in cuts if n in walked)), saved, weight)
                have = (*saved, *_passed(scans), *cuts)
                for j, free in enumerate(_before(name, program, have, chain is not form.backward)):
                    yield Way(program, doubt, tuple(scans), cuts, have, free, (i, j))

    way, backward, choice = _cheapest(name, [*ways()], weight, careful, choice)
    cuts, scans = way.cuts, [*way.scans]
    exact = way.free.exact if way.free else frozenset[Node]()
    parts = _parts(name, form.forward, saved)
    first = staged(before, weight)[1] if before else []
    if apart:
        read = replace(read, saves=tuple(n for n in cuts if n not in walked))
        read = read.giving((*saved, *(n for k in scans for n in k.saves)))
        scans += staged(read, weight)[1] if dim else [read]
        exact |= frozenset(read.saves)
    found = Plan(name, (*first, *scans), tuple(_gathered(backward, weight)), choice, parts)
    found = _exactly(found, exact.union(n for k in found.kernels() if k.kind == "scan" for n in k.exact))
    found = _careful(found) if careful else found
    found = _always(_with_gates_ahead(found, tokens))
    return _in_blocks(_in_rounds(found, dim) if dim else found, tokens)


def _cheapest(
    name: str, ways: Sequence[Way], weight: Weight, careful: bool, choice: Choice | None
) -> tuple[Way, list[Kernel], Choice]:
    """The cheapest of the ways to the gradients, or the chosen one, and the kernels of its backward pass."""
    numbers: Iterable[int] = range(len(ways))
    if choice and choice.way in numbers:
        numbers = [choice.way]
    divisions: dict[tuple[int, int], Division] = {}  # which take long to find: of the first way of each kind
    least, best = math.inf, None
    for number in numbers:
        way = ways[number]
        division = choice.division if choice else divisions.get(way.kind, ())
        found = _backward(name, way, weight, division, least - len(way.cuts))
        if not found:
            continue
        price, kernels, divisions[way.kind] = found
        # what is saved is written once, too
        price += len(way.cuts) + (_twice(kernels, way.have) if careful else 0)
        if price < least:
            least, best = price, (way, kernels, Choice(number, divisions[way.kind]))
    assert best  # the first has no price to beat
    return best


def _gathered(backward: Sequence[Kernel], weight: Weight) -> list[Kernel]:
    """The same with sums that share a tile found at once, where that keeps no more tiles alive, to half a tile."""

    def with_fewer_sums(k: Kernel) -> Kernel:
        found = gathered(k) if k.kind == "map" else k
        return found if found is not k and alive(found, weight) < alive(k, weight) + 0.5 else k

    found = [with_fewer_sums(k) for k in backward]
    program, gradients = backward[0].program, {f"d:{name}": n for k in found for name, n in k.outputs}
    program = program.with_outputs(program.outputs | gradients)
    return [replace(k, program=program) for k in found]


def _reads_later(whole: Kernel, scan: Kernel, read: Kernel, careful: bool, tokens: int) -> bool:
    """Whether y is read of states by a kernel of its own, for all units at once, and not by the `whole` scan."""
    weight = weights(tokens)
    if read.program.inner:
        return cost(whole, FULL) - cost(scan, FULL) > APART * 64 / tokens * staged(read, weight)[0]
    # products of twice the digits leave a scan no room for others (measured)
    return careful and tokens >= ROWS and len(staged(read, weight)[1]) == 1


def _programs(backward: Program) -> list[tuple[Program, float]]:
    """The backward program, and the same with sums by other ways, where these are shorter; beside each how much more
    its maps may cost than they seem to."""
    other = associated(backward)
    return [(backward, 1.0)] if other is backward else [(backward, 1.0), (other, DOUBT)]


def _states(roots: Iterable[Node]) -> tuple[str, ...]:
    """The memories whose states at a unit's start the roots need."""
    return tuple(n.name for n in reachable(roots) if n.role == "carry")


def _always(p: Plan) -> Plan:
    """The same which stores, whether or not a backward pass may follow, what later kernels of the forward one take; and
    of the backward one all that its maps save."""
    later = {n for k in (p.parts.kernels() if p.parts else ()) for n in k.given}
    forward: list[Kernel] = []
    for k in reversed(p.forward):
        states = [n for n in k.leaves() if n.role == "carry"]
        forward.insert(0, replace(k, across=k.across | later.intersection((*k.saves, *states))))
        later.update(k.given, states)
    backward = [replace(k, across=frozenset(k.saves)) if k.kind == "map" else k for k in p.backward]
    return replace(p, forward=tuple(forward), backward=tuple(backward))


def _before(name: str, program: Program, saved: tuple[Node, ...], few: bool) -> list[Kernel | None]:
    """The kernel before the backward scan, if it wants one. Where the scan has `few` steps, or goes in rounds, it loads
    rather than computes: then also the same kernel that saves products which maps take, too."""
    handed = program.ends().values()
    found = functools.partial(prologue, f"_{name}_backward_free", program, handed, tied(program, "cocarry"), saved)
    free = found()
    given = (*saved, *(free.saves if free else ()))
    in_rounds = program.inner and free_axis(program, handed, given) != program.inner
    if not (few or in_rounds):
        return [free]
    free = found(loads=True)
    gradients = [v for k, v in program.outputs.items() if k.startswith("d:")]
    products = shared_products(free, gradients, saved) if free else ()
    if free is None or not products:
        return [free]
    have = {*saved, *products}
    exact = taken_exactly([n for n in reachable(gradients, have) if n not in have], program)
    return [free, replace(free, saves=(*free.saves, *products), exact=frozenset(exact.intersection(products)))]


def _backward(
    name: str, way: Way, weight: Weight, division: Division, most: float
) -> tuple[float, list[Kernel], Division] | None:
    """The kernels of a way's backward pass; before them what all cost. None where these cost `most` and more."""
    program, free, saved = way.program, way.free, way.have
    handed = program.ends()
    gradients = {k[2:]: v for k, v in program.outputs.items() if k.startswith("d:")}
    d_ends, chained = list(handed.values()), tied(program, "cocarry")
    price, kernels = staged(free, weight) if free else (0.0, [])
    saved += free.saves if free else ()
    cuts = worth_saving(program, d_ends, gradients.values(), saved, chained, 1)
    used = {n.name for n in reachable(gradients.values(), {*saved, *cuts}) if n.role == "cocarry"}
    scan = Kernel(f"_{name}_backward_scan_kernel", "scan", program, True, (), tuple(handed.items()))
    scans = _scans(replace(scan, keeps=tuple(sorted(used)), saves=cuts), saved, weight)
    kernels += scans
    chain = sum(SCAN * cost(k, FULL) for k in scans if k.kind == "scan")
    if way.doubt * price + chain >= most:
        return None
    # gradients of decays take what is scaled exactly
    have = tuple(n for n in (*saved, *_passed(scans), *cuts) if not scaled(n))
    division, shared = shares(program, gradients, have, weight, [division] if division else None)
    for i, (paid, share) in enumerate(shared):
        price += paid
        kernels += [replace(k, name=f"_{name}_backward_{i + 1}{k.name}") for k in share]
    return way.doubt * price + chain + spilled_at_128(kernels, weight), kernels, division


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
    carry = Kernel(f"_{name}_carry_kernel", "scan", program, carried=tuple(program.ends().items()))
    return Parts(_placed(carry, saved), tuple(kernels))


def perpendicular(program: Program) -> bool:
    """Whether what is read of a carry is divided by its length, or the like. Lengths change nothing then: the state is
    at right angles to its cotangent, and of the sum of their elements' products little but rounding is left."""
    chained = tied(program, "carry")
    return any(singular(n) and n in chained and not _of_softmax(n) for n in program.nodes)


def _of_softmax(node: Node) -> bool:
    """Whether this is one over a sum of exponentials, which knows no lengths."""
    return node.op == "recip" and node.args[0].op == "sum" and node.args[0].args[0].op == "exp2"


def walks_at(kinds: Iterable[str]) -> slice:
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


def _with_gates_ahead(p: Plan, tokens: int) -> Plan:
    """The same with the gates that scans take left by a kernel before them (vectors.py)."""
    vectors = gates(k for k in p.kernels() if k.kind == "scan")
    forward = leaving(p.forward, f"_{p.name}_forward_free_kernel", vectors, tokens)

    def fed(k: Kernel) -> Kernel:
        return taking(k, vectors) if k.kind == "scan" else k

    if not vectors or not forward:
        return p
    parts = p.parts and Parts(fed(p.parts.carry), tuple((t, fed(k)) for t, k in p.parts.transfers))
    return replace(p, forward=tuple(map(fed, forward)), backward=tuple(map(fed, p.backward)), parts=parts)


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

    def freed(k: Kernel) -> float:
        return 2 / 3 if len(rounds(k.roots, k.given, k.inner)) == 1 else 1 / 2

    def walking_over(k: Kernel) -> Kernel:
        if k.kind == "scan" or k.inner or tiles(k) <= ROOM:
            return k
        most = tiles(k) if k.searched else min(WALKING, tiles(k))
        ways = [replace(k, inner=dim) for dim in k.program.dims if rounds(k.roots, k.given, dim)]
        ways = [way for way in ways if again(way) <= AGAIN]
        best = min(ways, key=tiles, default=k)
        if tiles(best) <= most:
            return best
        best = min(ways, key=searched, default=k)  # in another order, which frees half; a third, if in one round
        return best if searched(best) <= min(most, tiles(k) * freed(best)) else k

    return replace(p, forward=tuple(map(walking_over, p.forward)), backward=tuple(map(walking_over, p.backward)))


def again(walking: Kernel) -> int:
    """How many tiles a walk loads or multiplies in one round and again in a later one."""
    found = rounds(walking.roots, walking.given, walking.inner)
    times = Counter(n for r in found for n in {*r.sums, *r.within})
    return sum(times[n] - 1 for n in times if n.op == "leaf" or n in walking.given or is_product(n))


def _twice(kernels: Iterable[Kernel], exact: tuple[Node, ...]) -> int:
    """What it costs more to load these values in float32; by scans no more than by others, as it is copied ahead."""
    tiles = {n for n in exact if is_token_tile(n)}
    return sum(len(tiles.intersection(k.given)) for k in kernels)


def _exactly(p: Plan, exact: frozenset[Node]) -> Plan:
    """The same with these values in float32 wherever they pass between kernels."""

    def exactly(k: Kernel) -> Kernel:
        return replace(k, exact=k.exact | exact)

    return replace(p, forward=tuple(map(exactly, p.forward)), backward=tuple(map(exactly, p.backward)))


def _scans(whole: Kernel, saved: tuple[Node, ...], weight: Weight) -> list[Kernel]:
    """The scan; or, where it has no room and several cost less, one for each of some groups of its carries. Where eight
    warps have no room for it in heads of 128, it is several if grids can split a dim of each, but none of all."""
    whole = _placed(whole, saved)
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
        if needs_dear(scan.roots, chained, given):
            free = prologue(f"{scan.name.removesuffix('_kernel')}_free", whole.program, scan.roots, chained, given)
            if free:
                kernels += staged(replace(free, exact=exact), weight)[1]
                given += free.saves
        kernels.append(_placed(scan, given))
    return kernels


def _passed(kernels: Sequence[Kernel]) -> tuple[Node, ...]:
    """What was saved for one of several scans, and serves all kernels after them, too."""
    taken = {n for k in kernels if k.kind == "scan" for n in k.given}
    return tuple(n for k in kernels for n in k.saves if n in taken)


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
        return staged(kernel.giving(saved), weight, gates_last=len(share) > len(gates) and {*gates} <= {*share})

    least, best = math.inf, divisions[0]
    for division in divisions:
        total = 0.0
        # walks in rounds take longer than they seem to where they are divided (measured)
        doubt = DOUBT if program.inner and len(division) > 1 else 1.0
        for share in division:
            total += doubt * kernels(*share)[0]
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
