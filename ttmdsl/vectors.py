"""Gates of a scan's tokens, which come by way of the kernel before it.

Input: the kernels of a forward pass, and scans. Output: the same, of which a map before the first scan saves what scans
take of tensors that has one number for each token: in float32, token beside token.

Triton copies a scan's tiles to shared memory some units ahead, but nothing of two bytes, as a gate is in bfloat16: a
unit would load that when it comes to it, and with its next product wait for it, since products that take tiles from
shared memory begin with a fence that waits for all loads. That was a third of a unit's time (benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ttmdsl.ir import Node
from ttmdsl.kernels import Kernel
from ttmdsl.schedule import ROWS


def gates(scans: Iterable[Kernel]) -> tuple[Node, ...]:
    """What scans take of tensors that has one number for each token."""
    return tuple(dict.fromkeys(n for k in scans for n in k.leaves() if n.role == "token" and n.axes == ("t",)))


def leaving(forward: Sequence[Kernel], name: str, vectors: tuple[Node, ...], tokens: int) -> list[Kernel]:
    """The same, with a map before the scan that leaves the vectors: one that is there anyway; or, where units have few
    tokens, one of that name, since scans of more gain no more than it takes (measured). Else nothing."""
    first = forward[0]
    if first.program.inner:  # units that walk over blocks take long
        return []
    if first.kind == "map":
        return [replace(first, saves=(*first.saves, *vectors)), *forward[1:]]
    return [Kernel(name, "map", first.program, saves=vectors), *forward] if tokens < ROWS else []


def taking(scan: Kernel, vectors: Iterable[Node]) -> Kernel:
    """The scan, given those of the vectors that it takes."""
    leaves = scan.leaves()
    return replace(scan, given=(*scan.given, *(n for n in vectors if n in leaves)))
