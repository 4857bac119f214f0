"""A kernel, as data: which slice of a program it computes, and what it loads and stores.

Input: a program, and names of what is wanted of it. Output: `Kernel`. Decides nothing: plan.py does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from ttmdsl.ir import Node, Program, Role, reachable, users

Kind = Literal["scan", "map"]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel: a slice of a program.

    scan: one program for every sequence and head walks over the units and carries `carried` (leaf name to node at the
    unit's end); the carries at each unit's start are stored where `keeps` names them. map: one program for every unit
    and head. `outputs` are stored at every unit, `saves` likewise for the kernels after it, which are `given` them.
    What a kernel saves or keeps it stores where a backward pass may follow, but what is `across`, for a later kernel of
    the forward pass or of the backward one, always.
    `blocked` is a dim that the grid may split, or ""; `inner` one over whose blocks the kernel walks (rounds.py);
    `shared` one whose blocks several programs may share out that hand one another their sums over it.
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
    shared: str = ""
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

    @functools.cached_property
    def users(self) -> dict[Node, list[Node]]:
        """What takes each of these values there."""
        return users(self.nodes, set(self.given))

    def leaves(self) -> list[Node]:
        """Leaves that this slice needs, and is not given."""
        return [n for n in self.nodes if n.op == "leaf" and n not in self.given]

    def walked(self) -> set[Node]:
        """Leaves that a scan walks with."""
        return {n for n in self.leaves() if self.kind == "scan" and n.role == self.role}

    def states(self) -> set[Node]:
        """Leaves that hold states at a unit's ends and that this kernel loads: all but those that it walks with."""
        return {n for n in self.leaves() if n.role in ("carry", "cocarry")} - self.walked()

    def giving(self, saved: tuple[Node, ...]) -> Kernel:
        """The kernel with those saved values that it needs."""
        nodes = reachable(self.roots, set(saved))
        needed = set(nodes)
        taken = [n for n in saved if n in needed]
        found = replace(self, given=tuple(n for n in taken if n not in self.saves))
        if len(found.given) == len(taken):
            vars(found)["nodes"] = nodes  # as it would find them
        return found
