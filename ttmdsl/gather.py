"""Sums over the products of one tile with several others, found at once.

What flows into a gate from each place that it scaled is a sum over channels, such as k . (A k) or k . (S^T d), times
what it was scaled by. Where sums of a kernel share a tile, and wherever they go are added up in the same shares,
sum_c k_c x_c + r sum_c k_c y_c is sum_c k_c (x_c + r y_c): one sum, and one tile alive in place of two. A gradient that
has these tiles in the same shares takes x + r y, too.

Input: a `Kernel`. Output: one that stores the same values. Knows no layer.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ttmdsl.associate import sums_tiles
from ttmdsl.builder import Builder, substitute
from ttmdsl.ir import Node, addends, depends_on, in_order
from ttmdsl.kernels import Kernel

Share: TypeAlias = tuple[float, tuple[Node, ...]]  # a number times factors, in the order of their ids
Parts: TypeAlias = Sequence[tuple[Share, Node]]  # tiles that are added up, the first of them in a share of 1

_FACTORED = frozenset({"neg", "mul", "expand"})
_LINEAR = _FACTORED | {"add"}


@dataclass(frozen=True)
class _Sum:
    """A vector: the sum over one axis of the product of two tiles, the vector's own axis renamed maybe. `shares` are
    those that it has in the expressions that it is an addend of."""

    value: Node
    product: Node
    shares: dict[Node, Share] = field(default_factory=dict)

    @property
    def names(self) -> tuple[object, ...]:
        """From what to what its axis is renamed."""
        return self.value.attr if self.value is not self.product else ()

    def beside(self, tile: Node) -> Node:
        """The other of the two tiles."""
        a, b = self.product.args
        return b if a is tile else a


def gathered(kernel: Kernel) -> Kernel:
    """The kernel with its sums gathered; itself, where none can be, or what it saves for others would be another."""
    b, there = kernel.program.builder, set(kernel.nodes)
    new = {n: n for n in kernel.given}
    tiles: list[tuple[Node, Parts]] = []
    for tile, group in _groups(_sums(kernel)):
        base = group[0][1]
        parts = [(share, s.beside(tile)) for share, s in group]
        total = _total(b, parts, there)
        value = b.contract(tile, total, base.product.reduced)
        new |= {s.value: b.zero(s.value.axes) for _, s in group}
        new[base.value] = b.rename(value, *map(str, base.names)) if base.names else value
        tiles.append((total, parts))
    if not tiles:
        return kernel
    new = _in_gradients(kernel, tiles, new.keys() - set(kernel.given)) | new
    if any(substitute(b, n, new) is not n for n in kernel.saves):
        return kernel
    outputs = tuple((name, substitute(b, n, new)) for name, n in kernel.outputs)
    return replace(kernel, outputs=outputs).giving(kernel.given)


def _sums(kernel: Kernel) -> list[_Sum]:
    """The sums of a kernel that go, each in one share, into expressions linear in them, and nowhere else."""
    users, found = kernel.users, dict[Node, _Sum]()
    for n in kernel.nodes:
        if n.op == "contract" and sums_tiles(n):
            value = users[n][0] if [u.op for u in users[n]] == ["rename"] else n
            if not {n, value} & set(kernel.given):
                found[value] = _Sum(value, n)
    tied = depends_on(kernel.roots, found)
    wrong: set[Node] = set()
    for root, terms in _expressions(kernel, tied, set(found), axes=1):
        for number, factors in terms:
            sums = [f for f in factors if f in found]
            share = number, tuple(f for f in factors if f not in found)
            if len(sums) == 1 and root not in found[sums[0]].shares and tied.isdisjoint(share[1]):
                found[sums[0]].shares[root] = share
            else:
                wrong.update(sums)
    return [s for n, s in found.items() if n not in wrong]


def _expressions(kernel: Kernel, tied: set[Node], of: set[Node], axes: int) -> Iterator[tuple[Node, list[Share]]]:
    """Values of a kernel linear in some of so many axes, as sums of products: those that are stored, or taken by what
    is not linear in these. `tied` is all that depends on any."""
    stored = set(kernel.roots)

    def linear(n: Node) -> bool:
        inside = n.op in _LINEAR and n in tied and n not in kernel.given
        return n in of or (inside and len(n.axes) == axes)

    def whole(n: Node) -> bool:
        return n in of or not (linear(n) or n.op in _FACTORED)

    for n in kernel.nodes:
        if linear(n) and (n in stored or not all(map(linear, kernel.users[n]))):
            yield n, [(c, in_order(factors)) for c, factors in addends(n, whole)]


def _groups(sums: list[_Sum]) -> list[tuple[Node, list[tuple[Share, _Sum]]]]:
    """Sums that share a tile, and how much more of each is added up than of the first; none is in two groups."""
    groups: list[tuple[Node, list[tuple[Share, _Sum]]]] = []
    left = sorted(sums, key=lambda s: (sum(len(factors) for _, factors in s.shares.values()), s.value.id))
    while left:
        base, *left = left
        ways = [(tile, [(share, s) for s in left if (share := _more(base, s, tile))]) for tile in base.product.args]
        tile, others = max(ways, key=lambda way: len(way[1]))
        if others:
            groups.append((tile, [((1.0, ()), base), *others]))
            left = [s for s in left if all(s is not other for _, other in others)]
    return groups


def _more(base: _Sum, other: _Sum, tile: Node) -> Share | None:
    """How much more is added up of another sum over the products of a tile than of this one, if everywhere the same."""
    alike = tile in other.product.args and base.product.reduced == other.product.reduced and base.names == other.names
    if not alike or base.shares.keys() != other.shares.keys():
        return None
    ratios = {_ratio(base.shares[root], other.shares[root]) for root in base.shares}
    return ratios.pop() if len(ratios) == 1 else None


def _ratio(base: Share, other: Share) -> Share | None:
    """What a share is times the base, if that is a product of its other factors."""
    factors = Counter(other[1])
    factors.subtract(base[1])
    if min(factors.values(), default=0) < 0:
        return None
    return round(other[0] / base[0], 12), in_order(factors.elements())


def _scaled(b: Builder, share: Share, *tiles: Node) -> Node:
    return b.mul(b.const(share[0]), b.product((*share[1], *tiles)))


def _total(b: Builder, parts: Parts, there: set[Node]) -> Node:
    """The tiles added up in their shares; in the order in which that is computed anyway, if it is."""
    total, *others = [_scaled(b, share, tile) for share, tile in parts]
    for x in others:
        total = next((way for way in (b.add(total, x), b.add(x, total)) if way in there), b.add(total, x))
    return total


def _in_gradients(kernel: Kernel, tiles: list[tuple[Node, Parts]], changed: set[Node]) -> dict[Node, Node]:
    """The expressions that have all of a group's tiles in its shares, by way of what these add up to."""
    b, single = kernel.program.builder, {tile for _, parts in tiles for _, tile in parts}
    tied, otherwise = depends_on(kernel.roots, single), depends_on(kernel.roots, changed)
    new: dict[Node, Node] = {}
    for root, terms in _expressions(kernel, tied, single, axes=2):
        found = terms
        for total, parts in tiles:
            found = _by_way_of(found, total, parts)
        if len(found) < len(terms) and root not in otherwise:
            value, *others = [_scaled(b, share) for share in found]
            new[root] = b.expand(functools.reduce(b.add, others, value), root.axes)
    return new


def _by_way_of(terms: list[Share], total: Node, parts: Parts) -> list[Share]:
    """The terms with one in place of those that are the parts in their shares."""
    having = [[t for t in terms if tile in t[1]] for _, tile in parts]
    if any(len(found) != 1 for found in having):
        return terms
    shares = [(c, tuple(f for f in fs if f is not tile)) for ((c, fs),), (_, tile) in zip(having, parts, strict=True)]
    if any(_ratio(shares[0], share) != more for share, (more, _) in zip(shares, parts, strict=True)):
        return terms
    gone = [found[0] for found in having]
    number, factors = shares[0]
    return [*(t for t in terms if all(t is not g for g in gone)), (number, (*factors, total))]
