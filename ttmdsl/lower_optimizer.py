"""What an optimizer makes of a gradient, for one token: its own state, and the step that the memory takes.

Input: IR values of the gradient, the rate and the settings. Output: the step to add to the retained memory. Chunk forms
have their own way with momentum (lower_chunk.py); what stands here alone has none.
"""

from __future__ import annotations

from ttmdsl.builder import Builder
from ttmdsl.ir import Node
from ttmdsl.spec import LayerSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
TINY = 1e-7  # beside the length that a matrix is divided by


def wider(spec: LayerSpec, rows: str, columns: str) -> bool:
    """Whether a matrix has more rows than columns, as far as the spec tells: in heads of 64, a memory's inner dim being
    four times as wide."""

    def width(dim: str) -> int:
        if feature := spec.features.get(dim):
            return feature.size(width(feature.base))
        inner = all(dim not in t.shape for t in spec.tensors)
        return int(spec.consts.get(dim, 256 if inner else 64))

    return width(rows) > width(columns)


def newton_schulz(b: Builder, matrix: Node, rows: str, columns: str, steps: int) -> Node:
    """The matrix with its singular values driven towards 1: X <- c0 X + c1 X X^T X + c2 (X X^T)^2 X.

    The products run over X X^T [rows, rows]; exchange rows and columns for X^T X, which gives the same.
    """
    length = b.map("sqrt", b.sum(b.mul(matrix, matrix), {rows, columns}))
    x = b.div(matrix, b.add(length, b.const(TINY)))
    return b.make("newton_schulz", (x,), x.axes, rows, steps)
