"""What a layer carries from token to token: the entries of its state, their names and shapes.

Input: a `LayerSpec`. Output: names and shapes, the same for the generated module's surface and for every backend. Says
nothing of where an entry starts (codegen/state.py.j2 does), and computes nothing.
"""

from __future__ import annotations

from ttmdsl.expr import MatVec, Ref, Shape, Transpose
from ttmdsl.spec import LayerSpec, Memory, Pass
from ttmdsl.walk_expr import walk

POSITION = "position"  # how many tokens each sequence has seen, modulo the groups that share a gradient point
ENDINGS = ("_momentum", "_point", "_inverse", "_past")  # no memory's own name ends so


def momentum_name(memory: str) -> str:
    """State key of the momentum of a memory."""
    return f"{memory}_momentum"


def point_name(memory: str) -> str:
    """State key of the state at the current group's gradient point."""
    return f"{memory}_point"


def inverse_name(memory: str) -> str:
    """State key of the inverse of what a least-squares memory has summed up, (sum x x^T + ridge I)^-1."""
    return f"{memory}_inverse"


def reads_transposed(p: Pass, memory: Memory) -> bool:
    """Whether the bias reads the memory as S^T @ x."""
    return any(
        isinstance(n, MatVec) and isinstance(n.m, Transpose) and isinstance(n.m.m, Ref) and n.m.m.name == memory.name
        for n in walk(p.bias)
    )


def input_dim(p: Pass, memory: Memory) -> str:
    """The dim of the vectors that the bias reads the memory through."""
    rows, columns = memory.shape
    return rows if reads_transposed(p, memory) else columns


def state_shapes(spec: LayerSpec) -> dict[str, Shape]:
    """Every entry of the state and its axes after [N, H]; `position` has neither H nor more."""
    state: dict[str, Shape] = {}
    for p in spec.passes:
        state |= {m.name: m.shape for m in p.memories}
        if p.optimizer.kind in ("momentum", "muon"):
            state |= {momentum_name(m.name): m.shape for m in p.memories}
        if p.optimizer.kind == "least_squares":
            state |= {inverse_name(m.name): (input_dim(p, m),) * 2 for m in p.memories}
        if p.optimizer.batch > 1:
            state |= {point_name(m.name): m.shape for m in p.memories}
    if any(p.optimizer.batch > 1 for p in spec.passes):
        state[POSITION] = ()
    return state
