"""Sums that a scan takes: products of tiles that share an operand as one, and what is free of its chain as one value.

x a^T d + (y b)^T d is (x a + y b)^T d: a product less. What scales the shared operand along the axis that is summed
over may as well scale the other, and so may what scales the product along the other's axis. Addends that are free of
the carries, or of their cotangents, are added up apart from the rest: what is free is found for all units at once, and
so passes to the scan as one tile, not as several.

Input: a program, and the one beside it, whose values stay as they are. Output: the same values. A product that is taken
twice is left alone, and none that is free is joined with one that is not. Knows no layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ttmdsl.builder import Builder
from ttmdsl.ir import Axes, Node, Program, Role, factors, in_order, is_large, is_matmul, tied, users

Addend: TypeAlias = tuple[bool, Node]  # whether it is negative


@dataclass(frozen=True)
class _Kind:
    """What products that can be joined have alike: the shared operand, as factors in the order of their ids, what
    scales them along its other axis, and the axis that is summed over."""

    shared: tuple[Node, ...]
    beside: tuple[Node, ...]
    over: Axes


def joined(program: Program, kept: Program) -> Program:
    """The program with its sums joined; values that the other one has, too, are left alone."""
    while (found := _once(program, kept)).outputs != program.outputs:  # what is joined may share an operand again
        program = found
    return program


def _once(program: Program, kept: Program) -> Program:
    b, taken = program.builder, users(program.nodes)
    role: Role = "cocarry" if any(n.role == "cocarry" for n in program.leaves()) else "carry"
    chained, stay = tied(program, role), {*kept.nodes, *program.outputs.values()}
    new: dict[Node, Node] = {}

    def single(n: Node) -> bool:
        return n not in stay and len(taken[n]) == 1

    def inside(n: Node) -> bool:
        """Whether this is a part of a larger sum alone."""
        return n.op in ("add", "neg") and single(n) and taken[n][0].op in ("add", "neg")

    def addends(n: Node, negative: bool = False) -> Iterator[Addend]:
        negative ^= n.op == "neg"
        for a in n.args:
            yield from addends(a, negative) if inside(a) else [(negative, a)]

    for n in program.nodes:
        new[n] = b.again(n, new)
        if n.op != "add" or not is_large(n) or inside(n):
            continue
        terms = [*addends(n)]
        sides = [[t for t in terms if (t[1] in chained) is side] for side in (True, False)]
        found = [_joined(b, side, single, new) for side in sides]
        if sum(map(len, found)) < len(terms) or (sides[0] and len(sides[1]) > 1):
            new[n] = b.expand(functools.reduce(b.add, (_total(b, side) for side in found)), n.axes)
    return program.with_outputs({k: new[v] for k, v in program.outputs.items()})


def _joined(
    b: Builder, terms: Sequence[Addend], single: Callable[[Node], bool], new: Mapping[Node, Node]
) -> list[Addend]:
    """The addends, made anew, those that share an operand as one."""
    found: list[Addend] = []
    left = [(term, dict(_ways(term[1], single))) for term in terms]
    while left:
        (first, ways), *left = left
        alike = {kind: [other for other in left if kind in other[1]] for kind in ways}
        kind = max(alike, key=lambda kind: len(alike[kind]), default=None)
        if kind is None or not alike[kind]:
            found.append((first[0], new[first[1]]))
            continue
        group = [(first, ways), *alike[kind]]
        others = [(negative, b.product(new[f] for f in parts[kind])) for (negative, _), parts in group]
        shared = b.product(new[f] for f in kind.shared)
        product = b.contract(_total(b, others), shared, kind.over)
        found.append((False, b.product([*(new[f] for f in kind.beside), product])))
        left = [other for other in left if all(other is not one for one in alike[kind])]
    return found


def _ways(node: Node, single: Callable[[Node], bool]) -> Iterator[tuple[_Kind, tuple[Node, ...]]]:
    """What an addend could share, if it is a product of tiles that nothing else takes, times vectors; and the factors
    of the other operand."""
    scales: list[Node] = []
    while node.op == "mul" and single(node):
        small, node = sorted(node.args, key=lambda a: len(a.axes))
        if len(small.axes) > 1:
            return
        scales.append(small)
    if not is_matmul(node) or not single(node):
        return
    for shared, other in (node.args, node.args[::-1]):
        parts = factors(shared) if shared.op == "mul" else [shared]
        moved = [f for f in parts if {*f.axes} <= {*node.reduced}]
        beside = [s for s in scales if {*s.axes} & {*shared.axes}]
        kind = _Kind(in_order(f for f in parts if f not in moved), in_order(beside), node.reduced)
        yield kind, (*moved, *(s for s in scales if s not in beside), other)


def _total(b: Builder, terms: Sequence[Addend]) -> Node:
    return functools.reduce(b.add, (b.neg(n) if negative else n for negative, n in terms), b.const(0.0))
