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
- Scans that no grid splits, and that find no room in heads of 128 or take long there, may be shared out among programs
  that have a block each of a dim of all their states.
- Maps walk likewise over the blocks of a head's dim, where heads of 128 find room so: whether a launch takes such
  blocks, or the whole dim as one, is said by what was measured.
- The exact sequential form keeps its own backward in one kernel (see codegen/triton_kernels.py.j2).

Does not choose tile sizes or warps: that is the launch's business (codegen/triton_launch.py.j2).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ttmdsl.affine import affine
from ttmdsl.ahead import needs_dear, prologue, weighs, weights_alone, worth_saving
from ttmdsl.associate import associated, shortened
from ttmdsl.gather import gathered
from ttmdsl.ir import Node, Program, is_matmul, is_product, operands, original, reachable, tied
from ttmdsl.join import joined
from ttmdsl.kernels import Kernel
from ttmdsl.lower import Form
from ttmdsl.rounding import adding_up, bent, enlarged, perpendicular, steep, unbounded
from ttmdsl.rounds import Round, rounds
from ttmdsl.scans import passed_on, placed, scans_of, walking, walks_at
from ttmdsl.schedule import BLOCK, FULL, ROWS, WIDE, Weight, weights
from ttmdsl.staging import AGAIN, APART, DOUBT, ROOM, SEVERAL, WAITING, WALKING, alive, cost, staged
from ttmdsl.transfer import Transfer, transfers
from ttmdsl.vector_kernels import found_ahead
from ttmdsl.vectors import followed, gates, leaving, taking
from ttmdsl.ways import Choice, Way, cheapest, free_ways


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

    def in_halves(self, rounded: Container[Node]) -> dict[str, frozenset[Node]]:
        """By kernels' names, products that take what rounding leaves of a state, too, where it passes in float32: of
        those states that a kernel loads (what it walks with has all digits in long calls, too) and that may be
        `rounded`, with an input or a cotangent, which need no more digits, and on the way to what enlarges rounding, as
        gradients of decays. Of a piece amid a group any state passes so."""
        products = [n for n in enlarged(reachable(v for k in self.kernels() for _, v in k.outputs)) if is_matmul(n)]
        every = _amid_groups(self.forward[0].program)

        def of(k: Kernel) -> frozenset[Node]:
            states = {n for n in k.states() if every or n in rounded}
            return frozenset(n for n in products if _of_state(n, states))

        return {k.name: of(k) for k in self.kernels()}


def _amid_groups(forward: Program) -> bool:
    """Whether a forward program is of pieces that start amid a group of tokens, and so may be one token."""
    return any(n.role == "fresh" for n in forward.leaves())


def _of_state(product: Node, states: Container[Node]) -> bool:
    """Whether it is of one of these states and an input or a cotangent."""
    one, other = map(original, product.args[:2])
    given = "token", "cot"
    return (one in states and other.role in given) or (other in states and one.role in given)


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
    everything = (*form.forward.outputs.values(), *form.backward.outputs.values())
    vectors = found_ahead(f"_{name}_forward_vectors", form.forward, everything)
    known = vectors.saves if vectors else ()
    before = prologue(f"_{name}_forward_free", form.forward, ends, chained, known)
    if before and not (needs_dear(ends, chained, known) or weighs(before)):
        before = weights_alone(before)
    saved = (*known, *(before.saves if before else ()))
    passed = passed_on(scans_of(scan, saved, weight))
    walked = {*reachable(scan.roots)}

    def ways() -> Iterator[Way]:
        # where kernels walk over blocks, what few steps take costs more than they spare (measured)
        chain = form.backward if form.backward.inner else affine(form.backward)
        for i, (program, doubt) in enumerate(_programs(shortened(chain, "cocarry"))):
            later = [*program.outputs.values(), *read_later]
            saving = (worth_saving(form.forward, ends, later, (*saved, *passed), chained, least) for least in (1, 2))
            for cuts in dict.fromkeys(saving):
                scans = scans_of(replace(scan, saves=tuple(n for n in cuts if n in walked)), saved, weight)
                have = (*saved, *passed_on(scans), *cuts)
                for j, free in enumerate(free_ways(name, program, have, chain is not form.backward)):
                    yield Way(program, doubt, tuple(scans), cuts, have, free, (i, j))

    way, backward, choice = cheapest(name, [*ways()], weight, careful, choice)
    cuts, scans = way.cuts, [*way.scans]
    exact = way.free.exact if way.free else frozenset[Node]()
    if _amid_groups(form.forward):
        exact |= bent(reachable(everything)).intersection((*cuts, *(n for k in scans for n in k.saves)))
    if way.free and unbounded(form.forward):  # the chain adds to it, and rounds both once more
        exact |= frozenset(way.free.saves)
    parts = _parts(name, form.forward, saved)
    first = [*([vectors] if vectors else []), *(staged(before, weight)[1] if before else [])]
    if apart:
        read = replace(read, saves=tuple(n for n in cuts if n not in walked))
        read = read.giving((*saved, *(n for k in scans for n in k.saves)))
        scans += staged(read, weight)[1] if dim else [read]
        exact |= frozenset(read.saves)
    found = Plan(name, (*first, *scans), tuple(_gathered(backward, weight)), choice, parts)
    exact = exact.union(_mixed(found), *(k.exact for k in found.kernels() if k.kind == "scan"))
    found = _exactly(found, exact)
    found = _widely(_careful(found) if careful else found)
    found = _always(_with_gates_ahead(found, tokens))
    if dim:
        found = _in_rounds(found, dim)
    elif tokens >= ROWS:
        found = _shared_out(found)
    return _in_blocks(found, tokens)


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


def _states(roots: Iterable[Node]) -> tuple[str, ...]:
    """The memories whose states at a unit's start the roots need."""
    return tuple(n.name for n in reachable(roots) if n.role == "carry")


def _programs(backward: Program) -> list[tuple[Program, float]]:
    """The backward program, and the same with sums by other ways, where these are shorter; beside each how much more
    its maps may cost than they seem to."""
    other = associated(backward)
    return [(backward, 1.0)] if other is backward else [(backward, 1.0), (other, DOUBT)]


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


def _parts(name: str, program: Program, saved: tuple[Node, ...]) -> Parts | None:
    """The kernels for sequences in parts, if every carry is linear in itself and a program holds states whole."""
    found = transfers(program)
    if not found or program.inner:  # whose blocks programs share out
        return None
    kernels = []
    for i, t in enumerate(found):
        bare = program.with_outputs({f"carry:{t.memory}": t.end})
        kernel = Kernel(f"_{name}_transfer_{i + 1}_kernel", "scan", bare, carried=((t.memory, t.end),))
        kernels.append((t, placed(kernel, saved)))
    carry = Kernel(f"_{name}_carry_kernel", "scan", program, carried=tuple(program.ends().items()))
    return Parts(placed(carry, saved), tuple(kernels))


def _mixed(p: Plan) -> frozenset[Node]:
    """What some kernels pass on in float32, and others in the inputs' dtype to such as round it no further: products
    would anyway. As both find the same, what one loses the other does not, and sums of both keep the difference."""
    exactly = {n for k in p.kernels() for n in k.exact.intersection(k.saves)}
    takes = ((k, n) for k in p.kernels() for n in k.nodes if n not in k.given and not is_product(n))
    return frozenset(a for k, n in takes for a in operands(n) if a in exactly and a in k.given and a not in k.exact)


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


def _widely(p: Plan) -> Plan:
    """The same with wide products where their rounding adds up along a chain."""
    wide = adding_up(p.forward[0].program, p.backward[-1].program)

    def widely(k: Kernel) -> Kernel:
        return replace(k, wide=k.wide | wide.intersection(k.nodes))

    return replace(p, forward=tuple(map(widely, p.forward)), backward=tuple(map(widely, p.backward))) if wide else p


def _with_gates_ahead(p: Plan, tokens: int) -> Plan:
    """The same with the gates that scans take, or what follows from them, left by a kernel before (vectors.py)."""
    scans = [k for k in p.kernels() if k.kind == "scan"]
    vectors = followed(scans) if p.forward[0].program.inner else gates(scans)
    forward = leaving(p.forward, f"_{p.name}_forward_free_kernel", vectors, tokens)

    def fed(k: Kernel) -> Kernel:
        return taking(k, vectors)

    if not vectors or not forward:
        return p
    parts = p.parts and Parts(fed(p.parts.carry), tuple((t, fed(k)) for t, k in p.parts.transfers))
    start = walks_at(k.kind for k in forward).start
    forward[start:] = map(fed, forward[start:])
    p = replace(p, forward=tuple(forward), backward=tuple(map(fed, p.backward)), parts=parts)
    return _exactly(p, frozenset(vectors)) if p.forward[0].program.inner else p  # maps may pass them on, too


def _in_rounds(p: Plan, dim: str) -> Plan:
    """The same by kernels that walk over the blocks of a dim, where they can and their grid does not split it."""

    def walking_over(k: Kernel) -> Kernel:
        if k.blocked == dim or not rounds(k.roots, k.given, dim):
            return k
        return replace(k, inner=dim, blocked="")  # programs share out the dim's blocks

    return replace(p, forward=tuple(map(walking_over, p.forward)), backward=tuple(map(walking_over, p.backward)))


def _shared_out(p: Plan) -> Plan:
    """The same by scans whose programs may share out the blocks of a dim that all states have, where grids split none
    and a unit in heads of 128 takes much longer than a wait for one another: of the dim by which they wait least."""

    def handed(found: Iterable[Round]) -> float:
        return sum(WAITING * bool(r.sums) + sum(map(FULL, r.sums)) for r in found)

    def sharing(k: Kernel) -> Kernel:
        if k.kind != "scan" or k.blocked or k.inner or k.handed:
            return k
        products = sum(is_product(n) for n in k.nodes if n not in k.given)
        if alive(k, WIDE) <= 2 * ROOM and products < SEVERAL:
            return k
        dims = [d for d in k.program.dims if all(d in end.axes for _, end in k.carried)]
        ways = {d: handed(found) for d in dims if (found := rounds(k.roots, k.given, d))}
        return replace(k, shared=min(ways, key=ways.__getitem__, default=""))

    return replace(p, forward=tuple(map(sharing, p.forward)), backward=tuple(map(sharing, p.backward)))


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


def _exactly(p: Plan, exact: frozenset[Node]) -> Plan:
    """The same with these values in float32 wherever they pass between kernels."""

    def exactly(k: Kernel) -> Kernel:
        return replace(k, exact=k.exact | exact)

    return replace(p, forward=tuple(map(exactly, p.forward)), backward=tuple(map(exactly, p.backward)))
