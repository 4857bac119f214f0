"""Vectors over tokens by themselves: what waits for many sums over a unit's tokens, and takes no tile.

Input: a form's programs. Output: the kernel that finds such vectors ahead of all others; and those at the end of the
gradients' way, with the sums of tiles that they follow from. Beside tiles a kernel has four warps and more: a sum over
tokens crosses these, each waits for the one before it, and a vector along a tile's columns takes sixteen registers of
every thread. A kernel of vectors alone has one warp, and so many of them side by side that none waits for another.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from ttmdsl.ir import TOKEN_AXES, Node, Program, has_dim, original, reachable, users
from ttmdsl.kernels import Kernel

LEAST = 8  # sums, or shifts, from token to token that are worth a kernel (those of other layers: four at most)
GIVEN = frozenset({"token", "before", "param", "live", "seen", "last", "fresh"})


def crosses_tokens(node: Node) -> bool:
    """Whether a value is a sum over a unit's tokens, or over those so far, or stood at others, and takes no room: a
    number, or one for each token."""
    summed = node.op in ("cumsum", "shift") or any(axis in TOKEN_AXES for axis in node.reduced)
    return summed and is_vector(node)


def is_vector(node: Node) -> bool:
    """Whether a value is a number, or has one for each token."""
    return len(node.axes) <= 1 and not has_dim(node)


def found_ahead(name: str, program: Program, outputs: Iterable[Node]) -> Kernel | None:
    """The kernel that finds what vectors alone lead to and tiles take, if it is worth one."""
    nodes = reachable(outputs)
    free = _free(nodes)
    crossing = {n for n in free if crosses_tokens(n)}
    if len(crossing) < LEAST:
        return None
    late = set[Node]()
    for n in nodes:
        if n in free and (n in crossing or not late.isdisjoint(n.args)):
            late.add(n)
    taken = dict.fromkeys(original(a) for n in nodes if n not in free for a in n.args if a in late)
    return Kernel(f"{name}_kernel", "map", program, saves=tuple(taken))


@dataclass(frozen=True)
class Tail:
    """Of gradients by name those that vectors lead to, and the `others`; and the sums of tiles, by numbers, that the
    former follow from."""

    gradients: Mapping[str, Node]
    others: Mapping[str, Node]
    sums: Mapping[str, Node]


def found_last(gradients: Mapping[str, Node], given: tuple[Node, ...]) -> Tail:
    """What comes after all tiles: nothing, if it is not worth a kernel."""
    nodes = reachable(gradients.values(), set(given))
    free, taking = _free(nodes, given), users(nodes, set(given))
    last = set[Node]()
    for n in reversed(nodes):
        if is_vector(n) and n not in free and n.op != "leaf" and last.issuperset(taking[n]):
            last.add(n)
    sums = [n for n in nodes if n in last and not all(a in free or a in last for a in n.args)]
    if sum(crosses_tokens(n) for n in last.difference(sums)) < LEAST:
        return Tail({}, gradients, {})
    vectors = {name: n for name, n in gradients.items() if n in last and n not in sums}
    others = {name: n for name, n in gradients.items() if name not in vectors}
    return Tail(vectors, others, {str(i): n for i, n in enumerate(sums)})


def _free(nodes: Iterable[Node], given: Container[Node] = ()) -> set[Node]:
    """The vectors that follow from vectors alone."""
    found = set[Node]()
    for n in nodes:
        known = n in given or (n.role in GIVEN if n.op == "leaf" else found.issuperset(n.args))
        if is_vector(n) and known:
            found.add(n)
    return found
