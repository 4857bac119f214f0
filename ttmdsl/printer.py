"""Statements from IR nodes: order, names and inlining, the same for every target language.

Input: nodes and the text of those already available. Output: lines of assignments and the text of every node.
What an operation looks like is left to a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable

from ttmdsl.ir import Builder, Node, reachable

INLINE_WIDTH = 72  # longer expressions get a name of their own


class Names:
    """Unique identifiers of one function: a wish is granted as it is, or with a number."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def get(self, wish: str) -> str:
        name, n = wish, 1
        while name in self._taken:
            n += 1
            name = f"{wish}_{n}"
        self._taken.add(name)
        return name


class Printer(ABC):
    """Prints one function's values. `text` maps each value printed or given so far to an expression for it."""

    def __init__(self, builder: Builder, names: Names) -> None:
        self.builder = builder
        self.names = names
        self.text: dict[Node, str] = {}

    @abstractmethod
    def expression(self, node: Node) -> str:
        """The node's operation applied to its arguments' texts, safe to stand in any other expression."""

    def wish(self, node: Node) -> str:
        """A name for a value that has none."""
        return {"contract": "dot", "tri_inv": "inverse", "cumsum": "total"}.get(node.op, "x")

    def emit(self, roots: Iterable[Node]) -> list[str]:
        """Assignments for everything that the roots need and that has no text yet; every root gets a name."""
        wanted = list(dict.fromkeys(roots))
        todo = self._missing(wanted)
        uses = Counter(a for n in todo for a in n.args)
        lines: list[str] = []
        for node in todo:
            if node.op in ("const", "size") or (node.op == "expand" and not node.args[0].axes and node.args[0].op == "const"):
                self.text[node] = self.expression(node)
                continue
            expression = self.expression(node)
            label = self.builder.labels.get(node)
            alone = uses[node] <= 1 and label is None and node not in wanted
            if expression.isidentifier() or (alone and len(expression) <= INLINE_WIDTH):
                self.text[node] = expression
                continue
            name = self.names.get(label or self.wish(node))
            lines.append(f"{name} = {strip(expression)}")
            self.text[node] = name
        return lines

    def _missing(self, roots: list[Node]) -> list[Node]:
        """Nodes under the roots without text, not looking below those that have one."""
        known = set(self.text)
        order: dict[Node, None] = {}
        stack = [(r, False) for r in reversed(roots)]
        while stack:
            node, ready = stack.pop()
            if node in order or node in known:
                continue
            if ready:
                order[node] = None
            else:
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(node.args))
        return list(order)


def strip(expression: str) -> str:
    """The expression without a pair of parentheses around all of it."""
    if not (expression.startswith("(") and expression.endswith(")")):
        return expression
    depth = 0
    for i, c in enumerate(expression):
        depth += {"(": 1, ")": -1}.get(c, 0)
        if depth == 0 and i < len(expression) - 1:
            return expression
    return expression[1:-1]


def under(roots: Iterable[Node]) -> set[Node]:
    """The roots and all they depend on."""
    return set(reachable(roots))
