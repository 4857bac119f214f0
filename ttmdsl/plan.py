"""Which kernels compute a form, and what each one loads and stores. Plans are data.

Input: a `Form`. Output: `Plan`, a list of kernels for the forward and one for the backward pass. A kernel is a slice of a
program: some of its outputs, and all they need. Forward is one scan. Backward is split by dependence: a scan for the
cotangents of the carries alone, then kernels that run for all chunks at once and share the gradients of the inputs
among them. The exact sequential form keeps its own backward in one kernel (see codegen/triton_token.py.j2).
Does not choose tile sizes or warps: that is the launch's business (codegen/triton.py.j2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ttmdsl.ir import Node, Program, depends_on, reachable
from ttmdsl.lower import Form

Kind = Literal["scan", "map"]


@dataclass(frozen=True)
class Kernel:
    """One kernel: a slice of a program.

    scan: one program for every sequence and head walks over the units and carries `carried` (leaf name to node at the
    unit's end); the carries at each unit's start are stored where `keeps` names them. map: one program for every unit
    and head. `outputs` are stored at every unit. `blocked` is a dim that the grid may split, or "".
    """

    name: str
    kind: Kind
    program: Program
    reverse: bool
    outputs: dict[str, Node]
    carried: dict[str, Node]
    keeps: tuple[str, ...]
    blocked: str

    @property
    def roots(self) -> list[Node]:
        return [*self.outputs.values(), *self.carried.values()]

    def leaves(self) -> list[Node]:
        """Leaves that this slice needs."""
        return [n for n in reachable(self.roots) if n.op == "leaf"]


@dataclass(frozen=True)
class Plan:
    """The kernels of one form, in the order in which they run."""

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]

    def kernels(self) -> tuple[Kernel, ...]:
        return self.forward + self.backward


def free_axis(program: Program, roots: Iterable[Node]) -> str:
    """A dim that no value under the roots is summed over and that every root has: blocks of it are independent."""
    roots = list(roots)
    nodes = reachable(roots)
    summed = {axis for n in nodes for axis in n.reduced} | {str(n.attr[0]) for n in nodes if n.op == "cumsum"}
    renamed = {str(a) for n in nodes if n.op == "rename" for a in n.attr}
    for dim in program.dims:
        if dim not in summed | renamed and roots and all(dim in r.axes for r in roots):
            return dim
    return ""


def carries(program: Program) -> dict[str, Node]:
    """The values that a program hands to the next unit, by name."""
    return {k[6:]: v for k, v in program.outputs.items() if k.startswith("carry:")}


def plan(name: str, form: Form, groups: int = 2) -> Plan:
    """The kernels of a chunk form; `groups` is how many kernels share the gradients of the inputs."""
    y = {k: v for k, v in form.forward.outputs.items() if not k.startswith("carry:")}
    kept = tuple(n.name for n in form.backward.leaves() if n.role == "carry")
    forward = _scan(f"_{name}_forward_kernel", form.forward, y, kept, False)
    gradients = {k[2:]: v for k, v in form.backward.outputs.items() if k.startswith("d:")}
    used = {n.name for n in reachable(gradients.values()) if n.role == "cocarry"}
    backward = [_scan(f"_{name}_backward_scan_kernel", form.backward, {}, tuple(sorted(used)), True)]
    for i, share in enumerate(split(form.backward, gradients, groups)):
        outputs = {k: gradients[k] for k in share}
        backward.append(Kernel(f"_{name}_backward_{i + 1}_kernel", "map", form.backward, False, outputs, {}, (), ""))
    return Plan(name, (forward,), tuple(backward))


def _scan(name: str, program: Program, outputs: dict[str, Node], keeps: tuple[str, ...], reverse: bool) -> Kernel:
    carried = carries(program)
    return Kernel(
        name, "scan", program, reverse, outputs, carried, keeps, free_axis(program, [*outputs.values(), *carried.values()])
    )


def split(program: Program, gradients: dict[str, Node], groups: int) -> list[list[str]]:
    """Shares the gradients among kernels so that each does about as much work and little of it twice."""
    heavy = {
        k: {n for n in reachable([v]) if n.op in ("contract", "tri_inv", "decay_dot", "decay_mix", "decay_mix_t")}
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
