"""Gradients at the state just before each token: reads of it are unknowns, which triangular systems give.

Input: the memories of a chunk, and what a gradient step writes, affine in reads of these memories at each token.
Output: the same writes, free of unknowns; or `NotChunkable`. Knows no layer, and not how a memory is read.

With writes l = sum_j c_j z_j + l' (z the unknown reads, c_j numbers for every token), each read is

    z_i = P_0 x_i + sum_w scores_iw l_w = t_i + sum_j A_ij z_j,

where A_ij is zero unless the token that reads comes after the one that wrote: I - A_ii has an inverse, and so has what
is left of it as the other reads are eliminated.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ttmdsl.builder import Builder
from ttmdsl.chunk_memory import ChunkMemory, Moment, Write, total
from ttmdsl.ir import Node, addends, depends_on, is_zero
from ttmdsl.lower_expr import NotChunkable

# Systems of so many reads are solved at once: one of n takes about n^3 / 3 products of tokens by tokens.
MOST_READS = 4

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
    """The writes of each memory by its name, free of the unknowns."""
    if len(unknowns) > MOST_READS:
        raise NotChunkable(f"the gradient at every token reads the memory through more than {MOST_READS} vectors")
    values = [u.value for u in unknowns]
    parts: dict[tuple[Write, str], Parts] = {}
    known: list[list[Node]] = []
    open_: list[list[tuple[Node, Parts]]] = []  # of each unknown the writes that hold some, with their scores
    for u in unknowns:
        if u.memory.channel not in ("", u.over):
            raise NotChunkable("a decay per channel of the read makes one triangular system for every channel")
        known.append([u.memory.read_start(u.x, u.over, moment)])
        open_.append([])
        for w in found[u.memory.name]:
            content, key = (w.left, w.right) if u.over == u.memory.columns else (w.right, w.left)
            if w.frozen is not None or depends_on([key], values):
                raise NotChunkable(_NOT_AFFINE)
            if (w, u.over) not in parts:
                parts[w, u.over] = affine(b, content, values)
            part, scores = parts[w, u.over], u.memory.scores(key, u.x, u.over, moment)
            if part.slopes:
                open_[-1].append((scores, part))
            else:
                known[-1].append(u.memory.mix(scores, part.rest, moment, u.over))
    holding = [w for writes in found.values() for w in writes if depends_on([w.left, w.right], values)]
    if len(unknowns) == len(holding) == len(open_[0]) == 1:
        # for the one write that reads, l = c (P_0 x + sum of the others) + l' + c scores l, solved for l itself
        ((scores, part),) = open_[0]
        (slope,) = part.slopes.values()
        target = b.add(b.mul(slope, total(b, known[0])), part.rest)
        content = b.label(_applied(b, _inverse(b, b.mul(slope, scores)), target), "write")
        return {name: [_with(w, values, content) for w in writes] for name, writes in found.items()}
    for u, others, targets in zip(unknowns, open_, known, strict=True):
        targets += [u.memory.mix(scores, part.rest, moment, u.over) for scores, part in others]
    systems = [[_system(b, others, value) for value in values] for others in open_]
    reads = dict(zip(values, _eliminated(b, systems, [total(b, targets) for targets in known]), strict=True))
    for u in unknowns:
        b.label(reads[u.value], f"{u.memory.name}_read")

    def solved(w: Write) -> Write:
        held = [n for n in (w.left, w.right) if depends_on([n], values)]
        if not held:
            return w
        if len(held) > 1 or w.frozen is not None:
            raise NotChunkable(_NOT_AFFINE)
        part = affine(b, held[0], values)
        return _with(w, values, total(b, [*(b.mul(c, reads[z]) for z, c in part.slopes.items()), part.rest]))

    return {name: [solved(w) for w in writes] for name, writes in found.items()}


def _with(w: Write, values: Sequence[Node], content: Node) -> Write:
    """The write with that in place of what holds unknowns."""
    left, right = (bool(depends_on([n], values)) for n in (w.left, w.right))
    return Write(content if left else w.left, content if right else w.right) if left or right else w


# ---- what holds unknowns --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """A value at every token: unknowns times numbers, and the rest."""

    slopes: Mapping[Node, Node]
    rest: Node


def affine(b: Builder, value: Node, unknowns: Sequence[Node]) -> Parts:
    """Those of a value. Raises NotChunkable where it is not of that kind."""
    slopes: dict[Node, Node] = {}
    rest = b.zero(value.axes)
    tainted = depends_on([value], unknowns)
    for number, factors in addends(value, lambda n: n not in tainted):
        held = [p for p in factors if p in tainted]
        others = [p for p in factors if p not in tainted]
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


# ---- triangular systems ---------------------------------------------------------------------------------------------


def _system(b: Builder, writes: Sequence[tuple[Node, Parts]], unknown: Node) -> Node:
    """A_ij: how much of an unknown at s a read at t is, by way of these writes."""
    slopes = ((scores, part.slopes.get(unknown)) for scores, part in writes)
    terms = [b.mul(scores, b.rename(slope, "t", "s")) for scores, slope in slopes if slope is not None]
    return total(b, terms) if terms else b.zero({"t", "s"})


def _eliminated(b: Builder, systems: Sequence[Sequence[Node]], targets: Sequence[Node]) -> list[Node]:
    """The z of z_i = t_i + sum_j A_ij z_j, one after the other: what follows z_i has A_ji (I - A_ii)^-1 of its row."""
    rows, rest = [[*row] for row in systems], [*targets]
    inverses = []
    for i in range(len(rest)):
        inverses.append(_inverse(b, rows[i][i]))
        for j in range(i + 1, len(rest)):
            if is_zero(rows[j][i]):
                continue
            step = _chained(b, rows[j][i], inverses[i])
            rest[j] = b.add(rest[j], _applied(b, step, rest[i]))
            for k in range(i + 1, len(rest)):
                rows[j][k] = b.add(rows[j][k], _chained(b, step, rows[i][k]))
    reads: dict[int, Node] = {}
    for i in reversed(range(len(rest))):
        others = [_applied(b, rows[i][k], z) for k, z in reads.items() if not is_zero(rows[i][k])]
        reads[i] = _applied(b, inverses[i], total(b, [rest[i], *others]))
    return [reads[i] for i in range(len(rest))]


def _inverse(b: Builder, system: Node) -> Node:
    """(I - system)^-1 over the chunk's tokens, of a strictly lower one."""
    return b.label(b.tri_inv(b.mask(system, "strict")), "inverse")


def _applied(b: Builder, matrix: Node, x: Node) -> Node:
    return b.contract(matrix, b.rename(x, "t", "s"), {"s"})


def _chained(b: Builder, first: Node, second: Node) -> Node:
    """The product of two matrices of tokens by tokens."""
    return b.contract(b.rename(first, "s", "u"), b.rename(second, "t", "u"), {"u"})
