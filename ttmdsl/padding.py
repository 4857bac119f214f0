"""What a value's padding holds: dims are padded to the tile, and 60 must be as right as 64.

Input: nodes. Output: for a value and one of its dim axes, what stands beyond the dim's end: `zero`; `finite`, any
number; or `wild`, possibly infinite or NaN. Inputs are loaded with zeros there. A sum over an axis needs one operand
that is zero beyond its end and none that is wild; the Triton emitter masks where this says it must. Functions that are
infinite at 0 (`singular`) it masks where they stand, which is cheaper than masking every product they get into.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ttmdsl.ir import Node, is_zero

Padding: TypeAlias = Literal["zero", "finite", "wild"]
_RANK: dict[Padding, int] = {"zero": 0, "finite": 1, "wild": 2}


class PaddingAnalysis:
    """Remembers what it has found; one for each kernel."""

    def __init__(self) -> None:
        self._known: dict[Node, dict[str, Padding]] = {}

    def of(self, node: Node, axis: str) -> Padding:
        """What the node's tile holds beyond the end of one of its axes."""
        stack = [] if node in self._known else [node]
        while stack:  # operands first: a program may be deeper than Python's stack
            missing = [a for a in stack[-1].args if a not in self._known]
            if missing:
                stack += missing
            else:
                top = stack.pop()
                self._known[top] = {x: self._find(top, x) for x in top.axes}
        return self._known[node][axis]

    def _find(self, node: Node, axis: str) -> Padding:
        if node.op == "leaf" or is_zero(node) or singular(node):
            return "zero"
        if node.op in ("newton_schulz", "newton_schulz_back"):  # it takes zeros there
            return "zero"
        if node.op in ("diagonal", "shift") and axis == node.attr[1]:  # no delay reaches beyond the end
            return "zero"
        if node.op == "rename" and node.attr[1] == axis:
            return self.of(node.args[0], str(node.attr[0]))
        kinds: list[Padding] = [
            self.of(a, axis) if axis in a.axes else "zero" if is_zero(a) else "finite" for a in node.args
        ]
        worst = _worst(kinds)
        if worst == "wild":
            return worst
        match node.op:
            case "mul" | "contract":
                return "zero" if "zero" in kinds else "finite"
            case "decay_mix" | "decay_mix_t":
                if _worst(kinds[2:]) != "zero":  # the exponent: a gap of any size
                    return "wild"
                return "zero" if "zero" in kinds[:2] else "finite"
            case "exp2":  # 1 at zero; of any other number it may overflow
                return "finite" if worst == "zero" else "wild"
            case "sqrt":  # NaN below zero
                return "zero" if worst == "zero" else "wild"
            case "pow":
                return "zero" if worst == "zero" and float(node.attr[0]) > 0 else "wild"
            case "mask" | "behind":
                return worst if node.attr[-1] == 0 else "wild"
            case "sigmoid":
                return "finite"
            case "softplus":  # log 2 at zero
                return "finite" if worst == "zero" else worst
            case "select":
                return _worst(kinds[1:])
            case _:
                return worst  # keeps zero: f(0, ..., 0) = 0


def singular(node: Node) -> bool:
    """Whether a function may be infinite, or no number, at 0, where padding often is."""
    if node.op == "pow":
        return float(node.attr[0]) < 0
    return node.op in ("recip", "rsqrt", "log2")


def _worst(kinds: list[Padding]) -> Padding:
    """The least that can be said of several values together; of none, nothing but that it is a number."""
    return max(kinds, key=_RANK.__getitem__) if kinds else "finite"
