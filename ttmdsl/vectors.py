"""Gates of a scan's tokens, and what follows from gates alone, which come by way of the kernel before it.

Input: the kernels of a forward pass, and scans. Output: the same, of which a map before the first scan saves what scans
take of tensors that has one number for each token: in float32, token beside token.

Triton copies a scan's tiles to shared memory some units ahead, but nothing of two bytes, as a gate is in bfloat16: a
unit would load that when it comes to it, and with its next product wait for it, since products that take tiles from
shared memory begin with a fence that waits for all loads. That was a third of a unit's time (benchmarks/NOTES.md).
Where programs walk over the blocks of a deep memory, a unit's sums over tokens, and weights of which it takes one row,
hold up its one head, and each program that shares its blocks would find them again: a sixth of a unit's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ttmdsl.ir import Node, has_dim, is_product, original
from ttmdsl.kernels import Kernel
from ttmdsl.scans import walks_at
from ttmdsl.schedule import ROWS
from ttmdsl.vector_kernels import GIVEN, is_vector


def gates(scans: Iterable[Kernel]) -> tuple[Node, ...]:
    """What scans take of tensors that has one number for each token."""
    return tuple(dict.fromkeys(n for k in scans for n in k.leaves() if n.role == "token" and n.axes == ("t",)))


def followed(scans: Iterable[Kernel]) -> tuple[Node, ...]:
    """What scans take that follows from gates alone and is a number, or one for each token, if some of it takes a
    product of weights of tokens: sums alone cost a kernel what they spare (measured)."""
    found: dict[Node, None] = {}
    weighed = False
    for k in scans:
        free, known = set[Node](), set[Node]()  # what follows from gates alone, with and without constants
        for n in k.nodes:
            leaf = n.op == "leaf" and n.role in GIVEN
            if not has_dim(n) and n not in k.given and (leaf or (n.op != "leaf" and free.issuperset(n.args))):
                free.add(n)
                if leaf or not known.isdisjoint(n.args):
                    known.add(n)
                    weighed |= is_product(n)
        taken = (original(a) for n in k.nodes if n not in free and n not in k.given for a in n.args if a in known)
        found |= dict.fromkeys(a for a in taken if is_vector(a) and a.op != "leaf")
    return tuple(found) if weighed else ()


def leaving(forward: Sequence[Kernel], name: str, vectors: tuple[Node, ...], tokens: int) -> list[Kernel]:
    """The same, with a map before the scan that leaves the vectors: one that is there anyway; or one of that name, if
    scans walk over blocks, or units have few tokens, since others gain no more than it takes (measured). Else
    nothing."""
    first = forward[0]
    own = Kernel(name, "map", first.program, saves=vectors, exact=first.exact)
    if first.program.inner:  # by itself: what is there may be of vectors alone, by one warp
        start = walks_at(k.kind for k in forward).start
        before = forward[:start]
        return [*before, own.giving(tuple(n for k in before for n in k.saves)), *forward[start:]]
    if first.kind == "map":
        return [replace(first, saves=(*first.saves, *vectors)), *forward[1:]]
    return [own, *forward] if tokens < ROWS else []


def taking(k: Kernel, vectors: tuple[Node, ...]) -> Kernel:
    """A scan, given those of the vectors that it takes; or a map, if it would save some, which then need not."""
    if k.kind == "map" and not {*vectors}.intersection(k.saves):
        return k
    given = tuple(dict.fromkeys((*k.given, *vectors)))
    return replace(k, saves=tuple(n for n in k.saves if n not in vectors)).giving(given)
