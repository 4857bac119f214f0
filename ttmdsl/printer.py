"""Statements from IR nodes: order, names, inlining and arithmetic, the same for every target language.

Input: nodes and the text of those already available. Output: lines of assignments and the text of every node.
What an operation looks like beyond plain arithmetic is left to a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping

from ttmdsl.builder import Builder
from ttmdsl.ir import Axes, Node, constant, reachable

INLINE_WIDTH = 46  # longer expressions get a name of their own; two of them fit on a line
ARGUMENT_WIDTH = 24  # as one of three arguments

# operations whose parentheses may go where they stand beside another: to the left of * and of +, to the right of +
LEFT_OF_PRODUCT = frozenset({"const", "neg", "mul", "recip", "contract"})
LEFT_OF_SUM = LEFT_OF_PRODUCT | {"add"}
RIGHT_OF_SUM = frozenset({"mul", "recip", "contract"})


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

    constants: Mapping[float, str] = {}  # numbers that the target has names for

    def __init__(self, builder: Builder, names: Names) -> None:
        self.builder = builder
        self.names = names
        self.text: dict[Node, str] = {}
        self.joined: dict[Node, Node] = {}  # sums, each with the product that is a part of it
        self._tiles: dict[Node, bool] = {}

    @abstractmethod
    def expression(self, node: Node) -> str:
        """The node's operation applied to its arguments' texts, safe to stand in any other expression."""

    @abstractmethod
    def operand(self, node: Node, target: Axes) -> str:
        """A value's text among the target's axes."""

    def wish(self, node: Node) -> str:
        """A name for a value that has none."""
        return {"contract": "dot", "tri_inv": "inverse", "cumsum": "total"}.get(node.op, "x")

    def is_tile(self, node: Node) -> bool:
        """Whether the value depends on any tensor; else it is a number, whatever its axes."""
        known, stack = self._tiles, [node]
        while stack:
            missing = [a for a in stack[-1].args if a not in known]
            if missing:
                stack += missing
            else:
                top = stack.pop()
                known[top] = top.op == "leaf" or any(known[a] for a in top.args)
        return known[node]

    def operands(self, node: Node) -> tuple[Node, ...]:
        """The values that a node's text is made of: its arguments; of a difference, what is negated, if it is not known
        by its negative alone."""
        if node.op == "add":
            a, b = node.args
            for x, y in ((a, b), (b, a)):
                if y.op == "neg" and (self.known(y.args[0]) or not self.known(y)):
                    return x, y.args[0]
        return node.args

    def known(self, node: Node) -> bool:
        """Whether a value need not be computed."""
        return node in self.text

    def negates(self, node: Node) -> bool:
        """Whether a sum is the difference of its operands."""
        return self.operands(node) != node.args

    # -- arithmetic ------------------------------------------------------------------------------------------

    def arithmetic(self, node: Node) -> str:
        """The text of a const, neg, add, mul or recip."""
        axes = node.axes
        match node.op, self.operands(node):
            case "const", _:
                value = float(node.value or 0.0)
                text = self.constants.get(abs(value)) or repr(abs(value))
                return f"(-{text})" if value < 0 else text
            case "neg", (a,):
                return f"(-{self.operand(a, axes)})"
            case "recip", (a,):
                return f"(1.0 / {self.operand(a, axes)})"
            case "mul", (a, b):
                return f"({self._beside(a, axes, LEFT_OF_PRODUCT)} * {self.operand(b, axes)})"
            case "add", (a, b):
                sign = "-" if self.negates(node) else "+"
                return f"({self._beside(a, axes, LEFT_OF_SUM)} {sign} {self._beside(b, axes, RIGHT_OF_SUM)})"
            case _:
                raise AssertionError(node.op)

    def _beside(self, node: Node, axes: Axes, bare: Container[str]) -> str:
        text = self.operand(node, axes)
        while node.op in ("expand", "rename"):
            node = node.args[0]
        return strip(text) if node.op in bare else text

    # -- statements ------------------------------------------------------------------------------------------

    def emit(
        self,
        roots: Iterable[Node],
        then: Mapping[Node, Callable[[], list[str]]] | None = None,
        named: Iterable[Node] = (),
    ) -> list[str]:
        """Assignments for everything that the roots need and that has no text yet; every root gets a name, and so does
        what is in `named`.

        `then` gives lines that follow a root at once: its store, so that it need not stay alive.
        """
        then = then or {}
        wanted = list(dict.fromkeys(roots))
        todo = self.order(self._missing(wanted), [n for n in wanted if n not in then])
        uses = Counter(a for n in todo for a in self.operands(n))
        passed = {a for n in todo if len(self.operands(n)) > 3 for a in self.operands(n)}  # a line holds few arguments
        named = {*wanted, *passed, *named, *(n for n in todo if uses[n] > 1 or n in self.builder.labels)}
        self.joined |= self.join([n for n in todo if n.op == "add"], named)
        inside = set(self.joined.values())
        arguments = {a for n in self.joined for a in (*self.operands(n), *self.joined[n].args)}
        lines: list[str] = []
        for node in todo:
            expression = self.expression(node)
            given = node.op == "size" or constant(node) is not None or expression.isidentifier()
            most = ARGUMENT_WIDTH if node in arguments else self.most(node)
            if given or node in inside or (node not in named and self.length(expression) <= most):
                self.text[node] = expression
            else:
                self.text[node] = self.names.get(self.builder.labels.get(node) or self.wish(node))
                lines.append(f"{self.text[node]} = {strip(expression)}")
            if node in then:
                lines += then[node]()
        known = [n for n in then if n not in todo]  # roots that had their text before
        return [line for n in known for line in then[n]()] + lines

    def most(self, node: Node) -> float:
        """The length up to which a value's expression stands where it is taken, if that is once."""
        return INLINE_WIDTH

    def length(self, expression: str) -> int:
        """An expression's length, by which it stands where it is taken, or on a line of its own."""
        return len(expression)

    def join(self, sums: list[Node], named: set[Node]) -> dict[Node, Node]:
        """The sums x + a b that are one operation, each with its product, if the target has it; none of the named."""
        return {}

    def order(self, nodes: list[Node], kept: list[Node]) -> list[Node]:
        """The nodes in the order in which they are computed; as they come, unless a target cares what stays alive."""
        return nodes

    def _missing(self, roots: list[Node]) -> list[Node]:
        """Nodes under the roots without text, not looking below those that have one."""
        return [n for n in reachable(roots, self.text, self.operands) if n not in self.text]


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
