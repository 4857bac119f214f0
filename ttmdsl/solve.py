"""Gradients at the state just before each token: reads of it are unknowns, which triangular systems give.

Input: the memories of a chunk, and what a gradient step writes, affine in reads of these memories at each token.
Output: the same writes, free of unknowns; or `NotChunkable`. Knows no layer, and not how a memory is read.

With writes l_w = sum_j c_wj z_j + l'_w (z the unknown reads, c numbers for every token), each read is

    z_j = P_0 x_j + sum_w scores_jw l_w,

so that l_v = t_v + sum_w A_vw l_w, where A_vw is zero unless the token that reads comes after the one that wrote: of
one such vector I - A_vv has an inverse, and of several so has what is left of it as they are eliminated. A part of a
system may grow from token to token where the whole does not. It does not where each vector is written along what it is
read through, as errors of an l2 loss are: then A_vv is as that error's alone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from ttmdsl.builder import Builder
from ttmdsl.chunk_memory import ChunkMemory, Moment, Write, chained, total
from ttmdsl.ir import Node, addends, depends_on, factors, in_order, is_zero
from ttmdsl.lower_expr import NotChunkable

# Systems of n vectors take about n^3 / 3 products of tokens by tokens: two vectors 0.4 of the sequential form's time,
# four about as much as that (measured: benchmarks/NOTES.md).
MOST = 2

_NOT_AFFINE = "the gradient at every token is not affine in the memory"
_NOT_A_SCALAR = "the gradient at every token is not a scalar times a read of the memory"


@dataclass(frozen=True)
class Unknown:
    """What a memory gives, read through x over an axis, at each token's own gradient point; `value` stands for it."""

    memory: ChunkMemory
    x: Node
    over: str
    value: Node


@dataclass
class Probe:
    """Stands for a memory at each token's own gradient point; adds what is read of it to the `unknowns`."""

    b: Builder
    memory: ChunkMemory
    unknowns: list[Unknown]

    def read(self, x: Node, over: str) -> Node:
        if depends_on([x], [u.value for u in self.unknowns]):
            raise NotChunkable(_NOT_AFFINE)
        for u in self.unknowns:
            if u.memory is self.memory and u.x is x and u.over == over:
                return u.value
        name = f"{self.memory.name} read {len(self.unknowns)}"
        value = self.b.leaf("saved", name, ("t", self.memory.other(over)))
        self.unknowns.append(Unknown(self.memory, x, over, value))
        return value


def solve(
    b: Builder, unknowns: Sequence[Unknown], found: Mapping[str, Sequence[Write]], moment: Moment
) -> dict[str, list[Write]]:
    """The writes of each memory by its name, free of the unknowns. Raises NotChunkable where they are not affine in
    these, or too many."""
    values = [u.value for u in unknowns]
    found = _equal_as_one(found)
    parts: dict[Node, Parts] = {}  # of what is written and holds unknowns
    equations = {u.value: _equation(b, u, values, found[u.memory.name], moment, parts) for u in unknowns}
    reads: dict[Node, Node] = {}
    (z, equation), *others = equations.items()
    if len(equation.writes) > 1 and not others:
        slopes = [(scores, b.rename(parts[content].slopes[z], "t", "s")) for content, scores in equation.writes]
        target = equation.at(b, {content: part.rest for content, part in parts.items()})
        system = total(b, [b.mul(scores, slope) for scores, slope in slopes])
        (solution,) = _solution(b, [[system]], [target])
        reads[z] = b.label(solution, f"{unknowns[0].memory.name}_read")
        written = {content: part.at(b, reads) for content, part in parts.items()}
    elif len(parts) > MOST:
        raise NotChunkable(f"the gradient at every token writes more than {MOST} vectors that follow from the state")
    elif len(parts) > 1 and not all(_along_what_it_reads(b, *part, unknowns, found) for part in parts.items()):
        raise NotChunkable(
            "what the gradient at every token writes is read through other vectors than it is written along"
        )
    else:
        systems = [[_system(b, part, content, equations) for content in parts] for part in parts.values()]
        starts = {z: total(b, equation.known) for z, equation in equations.items()}
        written = dict(zip(parts, _solution(b, systems, [p.at(b, starts) for p in parts.values()]), strict=True))
        for n in written.values():
            b.label(n, "write")

    def solved(w: Write) -> Write:
        held = [n for n in (w.left, w.right) if depends_on([n], values)]
        if not held:
            return w
        if len(held) > 1 or w.frozen is not None:
            raise NotChunkable(_NOT_AFFINE)
        (n,) = held
        if n not in written:  # of a memory that nothing is read of
            part = affine(b, n, values)
            reads.update({z: equations[z].at(b, written) for z in part.slopes if z not in reads})
            written[n] = part.at(b, reads)
        return Write(written.get(w.left, w.left), written.get(w.right, w.right))

    return {name: [solved(w) for w in writes] for name, writes in found.items()}


def _equal_as_one(found: Mapping[str, Sequence[Write]]) -> dict[str, list[Write]]:
    """The same writes; of vectors that are the same product in several orders the first one stands for all."""
    known: dict[tuple[object, ...], Node] = {}

    def first(n: Node) -> Node:
        product = n.args[0] if n.op == "neg" else n
        return known.setdefault((product is n, n.axes, *in_order(factors(product))), n)

    return {name: [replace(w, left=first(w.left), right=first(w.right)) for w in found[name]] for name in found}


@dataclass(frozen=True)
class Equation:
    """An unknown read: what is `known` of it, and the `writes` that hold unknowns, each with how much of it is read."""

    unknown: Unknown
    moment: Moment
    known: list[Node]
    writes: list[tuple[Node, Node]]

    def at(self, b: Builder, contents: Mapping[Node, Node]) -> Node:
        """The read where these are written in place of what holds unknowns."""
        memory, over = self.unknown.memory, self.unknown.over
        mixed = [memory.mix(scores, contents[content], self.moment, over) for content, scores in self.writes]
        return total(b, [*self.known, *mixed])


def _equation(
    b: Builder, u: Unknown, values: Sequence[Node], writes: Sequence[Write], moment: Moment, parts: dict[Node, Parts]
) -> Equation:
    """An unknown's, of the writes of its memory; adds what is written and holds unknowns to the `parts`."""
    if u.memory.channel not in ("", u.over):
        raise NotChunkable("a decay per channel of the read makes one triangular system for every channel")
    found = Equation(u, moment, [u.memory.read_start(u.x, u.over, moment)], [])
    for w in writes:
        content, key = (w.left, w.right) if u.over == u.memory.columns else (w.right, w.left)
        if depends_on([key], values):
            raise NotChunkable(_NOT_AFFINE if depends_on([content], values) else _NOT_A_SCALAR)
        if w.frozen is not None:
            raise NotChunkable(_NOT_A_SCALAR)
        part = parts.get(content) or affine(b, content, values)
        scores = u.memory.scores(key, u.x, u.over, moment)
        if part.slopes:
            parts[content] = part
            found.writes.append((content, scores))
        else:
            found.known.append(u.memory.mix(scores, part.rest, moment, u.over))
    return found


# ---- what holds unknowns --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """A value at every token: unknowns times numbers, and the rest."""

    slopes: Mapping[Node, Node]
    rest: Node

    def at(self, b: Builder, reads: Mapping[Node, Node]) -> Node:
        """The value where the unknowns are these."""
        return total(b, [*(b.mul(slope, reads[z]) for z, slope in self.slopes.items()), self.rest])


def affine(b: Builder, value: Node, unknowns: Sequence[Node]) -> Parts:
    """Those of a value. Raises NotChunkable where it is not of that kind."""
    slopes: dict[Node, Node] = {}
    rest = b.zero(value.axes)
    tainted = depends_on([value], unknowns)
    for number, product in addends(value, lambda n: n not in tainted):
        held = [p for p in product if p in tainted]
        others = [p for p in product if p not in tainted]
        if not held:
            rest = b.add(rest, b.mul(b.const(number), b.product(others)))
            continue
        if len(held) > 1 or not _linear(held[0], unknowns, tainted):
            raise NotChunkable(_NOT_AFFINE)
        (z,) = held
        if z not in unknowns or any(set(p.axes) - {"t"} for p in others):
            raise NotChunkable(_NOT_A_SCALAR)
        term = b.expand(b.mul(b.const(number), b.product(others)), {"t"})
        slopes[z] = b.add(slopes[z], term) if z in slopes else term
    return Parts(slopes, b.expand(rest, value.axes))


def _linear(value: Node, unknowns: Container[Node], tainted: Container[Node]) -> bool:
    """Whether a value is a sum of terms, each of which holds one of the unknowns once, under no function."""
    if value in unknowns:
        return True
    held = [a for a in value.args if a in tainted]
    alone = value.op in ("mul", "contract", "sum", "neg", "expand", "rename") and len(held) == 1
    return (alone or value.op == "add") and all(_linear(a, unknowns, tainted) for a in held)


def _along_what_it_reads(
    b: Builder, content: Node, part: Parts, unknowns: Sequence[Unknown], found: Mapping[str, Sequence[Write]]
) -> bool:
    """Whether memories have this content along the vectors that it reads them through, but for numbers."""

    def direction(x: Node) -> Node:
        return b.product(f for f in factors(x.args[0] if x.op == "neg" else x) if set(f.axes) - {"t"})

    along = {
        (name, w.right if w.left is content else w.left)
        for name, writes in found.items()
        for w in writes
        if content in (w.left, w.right)
    }
    read = {(u.memory.name, direction(u.x)) for u in unknowns if u.value in part.slopes}
    return {(name, direction(x)) for name, x in along} == read


# ---- triangular systems ---------------------------------------------------------------------------------------------


def _system(b: Builder, part: Parts, content: Node, equations: Mapping[Node, Equation]) -> Node:
    """A_vw: how much of what w wrote at s is in what v writes at t, by way of all that it reads."""
    found = []
    for z, equation in equations.items():
        scores = [n for of, n in equation.writes if of is content]
        if scores and z in part.slopes:
            found.append(b.mul(part.slopes[z], total(b, scores)))
    return total(b, found) if found else b.zero({"t", "s"})


def _solution(b: Builder, systems: Sequence[Sequence[Node]], targets: Sequence[Node]) -> list[Node]:
    """The l of l_i = t_i + sum_j A_ij l_j. What moves A moves l as if A l had moved t: of how l is found, no gradient
    is asked."""
    constant = b.const(0.0)
    fixed = [[b.mask(b.implicit(x, constant), "strict") if not is_zero(x) else x for x in row] for row in systems]
    found = [b.implicit(n, constant) for n in _eliminated(b, fixed, targets)]
    moved = []
    for row, target in zip(systems, targets, strict=True):
        parts = [_applied(b, b.mask(x, "strict"), n) for x, n in zip(row, found, strict=True) if not is_zero(x)]
        moved.append(b.implicit(target, total(b, [target, *parts])))
    return _eliminated(b, fixed, moved)


def _eliminated(b: Builder, systems: Sequence[Sequence[Node]], targets: Sequence[Node]) -> list[Node]:
    """The l of l_i = t_i + sum_j A_ij l_j, one after the other: what follows l_i has A_ji (I - A_ii)^-1 of its row."""
    rows, rest = [[*row] for row in systems], [*targets]
    inverses = []
    for i in range(len(rest)):
        inverses.append(_inverse(b, rows[i][i]))
        for j in range(i + 1, len(rest)):
            if is_zero(rows[j][i]):
                continue
            step = chained(b, rows[j][i], inverses[i])
            rest[j] = b.add(rest[j], _applied(b, step, rest[i]))
            for k in range(i + 1, len(rest)):
                rows[j][k] = b.add(rows[j][k], chained(b, step, rows[i][k]))
    found: dict[int, Node] = {}
    for i in reversed(range(len(rest))):
        others = [_applied(b, rows[i][k], n) for k, n in found.items() if not is_zero(rows[i][k])]
        found[i] = _applied(b, inverses[i], total(b, [rest[i], *others]))
    return [found[i] for i in range(len(rest))]


def _inverse(b: Builder, system: Node) -> Node:
    """(I - system)^-1 over the chunk's tokens, of a strictly lower one."""
    return b.label(b.tri_inv(b.mask(system, "strict")), "inverse")


def _applied(b: Builder, matrix: Node, x: Node) -> Node:
    return b.contract(matrix, b.rename(x, "t", "s"), {"s"})
