"""What a long stretch of tokens does to a state, where that is linear: so that stretches can be walked side by side.

Input: the forward program of a form. Output: for each memory a `Transfer`, with the homogeneous program that carries a
state through a unit with nothing written into it; or nothing, where some memory's end is not linear in its start, or
depends on another's. Knows nothing of kernels.

    end(S) = end(0) + L(S):  L(S) = C * S, or S A, or A S
"""

from __future__ import annotations

from dataclasses import dataclass

from ttmdsl.builder import Builder, substitute
from ttmdsl.ir import DECAYED, MASKS, Node, Program, base_dim, depends_on, is_zero, reachable

# on what depends on the state: operations that are linear in it
_LINEAR = frozenset({"add", "neg", "sum", "expand", "rename", "cumsum", "shift", "leaf"})
_BILINEAR = frozenset({"mul", "contract"})


@dataclass(frozen=True)
class Transfer:
    """How the state of one memory is carried through a unit: `end` is homogeneous in the memory's leaf.

    Nothing mixes along the axis `free`. Where the `other` one mixes, the factor A is what becomes of the identity, for
    which `free` is made as long as it; else (`elementwise`) the factor C is what becomes of a state of ones.
    """

    memory: str
    end: Node
    free: str
    other: str
    elementwise: bool


def transfers(program: Program) -> list[Transfer]:
    """One for each carry; none at all if one of them has none."""
    leaves = {n.name: n for n in program.carries()}
    ends = program.ends()
    if set(ends) != set(leaves):
        return []
    found = []
    for name, leaf in leaves.items():
        end = ends[name]
        if {n for n in leaves.values() if n is not leaf} & set(reachable([end])):
            return []
        made = next((t for free in leaf.axes if (t := _along(program.builder, leaf, end, free))), None)
        if made is None:
            return []
        found.append(made)
    return found


def _along(b: Builder, leaf: Node, end: Node, free: str) -> Transfer | None:
    """The transfer, if without the tensors that have this axis nothing is written, and nothing mixes along it."""
    (other,) = (x for x in leaf.axes if x != free)
    written = [n for n in reachable([end]) if n.role in ("token", "param", "before") and free in n.axes]
    from_state, from_written = depends_on([end], [leaf]), depends_on([end], written)
    if any(n.op != "add" and from_written & set(n.args) - from_state for n in from_state):
        return None  # what is written also says what is kept
    bare = substitute(b, end, {n: b.zero(n.axes) for n in written})
    if not is_zero(substitute(b, bare, {leaf: b.zero(leaf.axes)})):
        return None
    tainted = depends_on([bare], [leaf])
    mixed: set[str] = set()
    for n in tainted:
        held = [a for a in n.args if a in tainted]
        linear = n.op in _LINEAR or (n.op in _BILINEAR and len(held) == 1)
        linear |= n.op in DECAYED and len(held) == 1 and not set(n.args[2:]) & tainted
        linear |= n.op == "select" and n.args[0] not in tainted
        linear |= n.op in MASKS and n.attr[-1] == 0
        if not linear:
            return None
        mixed |= {x for x in n.reduced if any(x in a.axes for a in held)}
        mixed |= {str(x) for x in n.attr} if n.op == "rename" else set()
    if free in mixed:
        return None
    if other in mixed and any(n.op == "size" and n.attr[0] == base_dim(free) for n in reachable([bare])):
        return None  # the identity that is carried through would be taken for a state of that size
    return Transfer(leaf.name, bare, free, other, other not in mixed)
