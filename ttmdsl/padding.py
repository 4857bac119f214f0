"""What a value's padding holds: dims are padded to the tile, and 60 must be as right as 64.

Input: nodes. Output: for a value and one of its dim axes, what stands beyond the dim's end: `zero`; `finite`, any
number; or `wild`, possibly infinite or NaN. Inputs are loaded with zeros there. A sum over an axis needs one operand that
is zero beyond its end and none that is wild; the Triton emitter masks where this says it must.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ttmdsl.ir import Node, is_zero

Padding: TypeAlias = Literal["zero", "finite", "wild"]
_RANK: dict[Padding, int] = {"zero": 0, "finite": 1, "wild": 2}

# f(0) = 0, and finite for finite arguments
KEEPS_ZERO = frozenset("neg abs sign sqrt tanh erf step rename mask expand sum amax select".split())
# infinite at 0, where padding often is
SINGULAR = frozenset("recip rsqrt log2".split())


class PaddingAnalysis:
    """Remembers what it has found; one for each kernel."""

    def __init__(self) -> None:
        self._known: dict[tuple[Node, str], Padding] = {}

    def of(self, node: Node, axis: str) -> Padding:
        """What the node's tile holds beyond the end of one of its axes."""
        key = (node, axis)
        if key not in self._known:
            self._known[key] = self._find(node, axis)
        return self._known[key]

    def _find(self, node: Node, axis: str) -> Padding:
        if node.op == "leaf" or is_zero(node):
            return "zero"
        if node.op == "rename" and node.attr[1] == axis:
            return self.of(node.args[0], str(node.attr[0]))
        kinds: list[Padding] = [
            self.of(a, axis) if axis in a.axes else "zero" if is_zero(a) else "finite" for a in node.args
        ]
        worst = max(kinds, key=_RANK.__getitem__, default="finite")
        if worst == "wild":
            return "wild"
        match node.op:
            case "mul" | "contract" | "decay_mix" | "decay_mix_t":
                factors = kinds[:2]
                return "zero" if "zero" in factors else "finite"
            case "pow":
                return worst if float(node.attr[0]) > 0 else "wild"  # type: ignore[arg-type]
            case op if op in SINGULAR:
                return "wild"
            case "exp2" | "sigmoid" | "cumsum" | "tri_inv" | "decay_dot":
                return "finite"
            case "select":
                return max(kinds[1:], key=_RANK.__getitem__)
            case _:
                return worst  # keeps zero: f(0, ..., 0) = 0
