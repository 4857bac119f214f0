"""What a loop computes, collected: sums of what is free of the carries times as few bound values as possible.

Input: the values that a loop hands on or keeps, and the bound ones among what they need: those that depend on a carry.
Output: the same values, made anew. Products are multiplied out where that is less to compute in the loop, so that
their free factors meet before it, and what is summed over the same axes is added up first. For targets where every
operation of the loop is a call. Knows no layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from ttmdsl.builder import Builder
from ttmdsl.ir import TOKEN_AXES, Axes, Node, constant, is_zero, reachable

# An atom (None: the number 1) and axes: over these it is summed, times the coefficient that a form has for it. A value
# that cannot be taken apart is its own only atom.
Term: TypeAlias = "tuple[Node | None, Axes]"
Form: TypeAlias = "dict[Term, Node]"

FREE: Term = (None, ())
FREE_COST = 0.4  # of an operation before the loop, for all units at once, if one in it is 1


def is_matrix_product(node: Node) -> bool:
    """Whether a contraction is that of a matrix and another, or a vector, with no axis in both but the summed one."""
    a, b = node.args
    common = set(a.axes) & set(b.axes)
    return common == set(node.reduced) and len(common) == 1 and {len(a.axes), len(b.axes)} in ({2}, {1, 2})


class _Collector:
    """Forms of the bound values under some roots, operands first, and the values made of them.

    A value in `shared` is computed once; into any other its users look: they have its atoms in place of it.
    """

    def __init__(self, b: Builder, roots: Iterable[Node], bound: set[Node]) -> None:
        self.b, self.roots, self.bound = b, [r for r in roots if r in bound], set(bound)
        self.values = [n for n in reachable(self.roots) if n in bound]
        self.old = set(reachable(self.roots))
        self.one = b.const(1.0)
        uses = Counter(a for n in self.values for a in set(n.args))
        self.shared = {n for n in self.values if uses[n] > 1}
        self.forms: dict[Node, Form] = {}

    # -- forms -----------------------------------------------------------------------------------------------

    def define(self) -> None:
        """Finds the form of every value, operands first."""
        self.forms = {}
        for node in self.values:
            self.forms[node] = self.linear(node) or self.atom(node)

    def atom(self, node: Node) -> Form:
        return {(node, ()): self.one}

    def seen(self, node: Node) -> Form:
        """The form that a user has for an operand."""
        if node not in self.bound:
            return {FREE: _bare(node)}
        return self.atom(node) if node in self.shared or node not in self.forms else self.forms[node]

    def linear(self, node: Node) -> Form | None:
        """The form of a value that is linear in a bound operand; None where it is not, or would not fit."""
        args = node.args
        free = [a for a in args if a not in self.bound]
        if len(free) == len(args):
            return None
        match node.op:
            case "add":
                return self.added(self.seen(args[0]), self.seen(args[1]))
            case "neg":
                return {term: self.b.neg(c) for term, c in self.seen(args[0]).items()}
            case "expand":
                return self.seen(args[0])
            case "rename":
                return self.renamed(self.seen(args[0]), str(node.attr[0]), str(node.attr[1]))
            case "mul" if free:
                (x,) = (a for a in args if a in self.bound)
                return self.scaled(self.seen(x), free[0]) or self.scaled(self.atom(x), free[0])
            case "mul":
                return self.multiplied(self.seen(args[0]), self.seen(args[1]))
            case "sum":
                return self.summed(self.seen(args[0]), node.reduced)
            case "contract" if free and (not is_matrix_product(node) or self.by_token(node)):
                (x,) = (a for a in args if a in self.bound)
                form = self.scaled(self.seen(x), free[0]) or self.scaled(self.atom(x), free[0])
                return self.summed(form, node.reduced) if form else None
        return None

    def by_token(self, node: Node) -> bool:
        """Whether a contraction only weighs tokens."""
        return set(node.reduced) <= set(TOKEN_AXES) and any(len(a.axes) == 1 for a in node.args)

    def fits(self, new: Node, *parts: Node | None) -> bool:
        """Whether a coefficient made of some parts is no larger than one of them. None is as large as a state: there
        would be one for every unit."""
        if len(new.axes) == 2 and set(TOKEN_AXES).isdisjoint(new.axes) and new not in parts:
            return new.op == "mul" and new.args[0].value is not None and new.args[1] in parts
        return len(new.axes) <= 2 and any(p is not None and set(new.axes) <= set(p.axes) for p in parts)

    def added(self, x: Form, y: Form) -> Form | None:
        """The sum of two forms; here and below None where a coefficient would not fit."""
        result = dict(x)
        for term, c in y.items():
            if term in result:
                twice = result[term] is c
                c = _bare(self.b.mul(self.b.const(2.0), c) if twice else self.b.add(result[term], c))
                if not self.fits(c, term[0], result[term], y[term]) and term != FREE:
                    return None
                del result[term]
            if not is_zero(c):
                result[term] = c
        return result or {FREE: self.b.const(0.0)}

    def scaled(self, form: Form, factor: Node) -> Form | None:
        result = {}
        for (atom, over), c in form.items():
            product = _bare(self.b.mul(c, factor))
            if set(over) & set(factor.axes) or not (
                self.fits(product, atom, c, factor) or (atom is None and "t" in product.axes)
            ):
                return None
            result[atom, over] = product
        return result

    def multiplied(self, x: Form, y: Form) -> Form | None:
        """A product of two bound values, if both have one atom: theirs, times the coefficients."""
        if len(x) > 1 or len(y) > 1:
            return None
        ((a, over_a), c), ((b, over_b), d) = *x.items(), *y.items()
        if a is None or b is None or over_a or over_b or (c is self.one and d is self.one):
            return None
        product = self.b.make("mul", (a, b), (*a.axes, *b.axes))
        self.bound.add(product)
        by_c = self.scaled(self.atom(product), c)
        return self.scaled(by_c, d) if by_c else None

    def renamed(self, form: Form, source: str, target: str) -> Form | None:
        result = {}
        for (atom, over), c in form.items():
            if over or target in c.axes or (atom is not None and (atom.op == "expand" or target in atom.axes)):
                return None
            moved = None
            if atom is not None:
                moved = self.b.rename(atom, source, target)
                self.bound.add(moved)
            result[moved, over] = self.b.rename(c, source, target)
        return result

    def summed(self, form: Form, axes: Axes) -> Form | None:
        result: Form = {}
        for (atom, over), c in form.items():
            held = {*c.axes, *(atom.axes if atom is not None else ())}
            if not set(axes) <= held - set(over):
                return None
            if atom is None or not set(axes) & set(atom.axes):
                new: Form = {(atom, over): _bare(self.b.sum(c, axes))}
            else:
                new = {(atom, self.b.order((*over, *axes))): c}
            joined = self.added(result, new) if result else new
            if joined is None:
                return None
            result = joined
        return result

    # -- what is worth it ------------------------------------------------------------------------------------

    def needs(self, node: Node) -> tuple[Node, ...]:
        """The bound values that a value is made of."""
        if node not in self.bound:
            return ()
        if self.is_atom(node):
            return tuple(a for a in node.args if a in self.bound)
        return tuple(atom for atom, _ in self.forms[node] if atom is not None)

    def is_atom(self, node: Node) -> bool:
        """Whether a value is taken as it is, apart from its operands."""
        return node not in self.forms or (node, ()) in self.forms[node]

    def cost(self) -> float:
        """About how many operations all takes, those before the loop counting less."""
        total, coefficients = 0.0, set()
        for node in reachable(self.roots, operands=self.needs):
            if self.is_atom(node):
                total += node.op not in ("leaf", "rename", "expand")
                continue
            form = self.forms[node]
            ones = any(c is self.one and not over for (_, over), c in form.items())
            total += sum(atom is not None for atom, _ in form) - (ones and FREE not in form)
            total += 2 * len({over for _, over in form if over}) - all(over for _, over in form)
            coefficients |= set(form.values())
        made = [n for n in reachable(coefficients, self.old) if n not in self.old and constant(n) is None]
        return total + FREE_COST * (len(made) + len(coefficients))

    def choose(self) -> None:
        """Lets users look into shared values wherever that makes all cheaper, those last in the loop first."""
        self.define()
        least = self.cost()
        for node in [n for n in reversed(self.values) if n in self.shared]:
            if self.is_atom(node):
                continue
            self.shared.remove(node)
            self.define()
            cost = self.cost()
            if cost > least:
                self.shared.add(node)
            least = min(cost, least)
        self.define()

    # -- making them -----------------------------------------------------------------------------------------

    def make(self) -> dict[Node, Node]:
        """What stands for the roots, and for every value that they need."""
        made: dict[Node, Node] = {}
        for node in reachable(self.roots, operands=self.needs):
            new = self.rebuilt(node, made) if self.is_atom(node) else self.combined(self.forms[node], made)
            made[node] = self.b.expand(new, node.axes)
            if node in self.b.labels:
                self.b.label(made[node], self.b.labels[node])
        return made

    def rebuilt(self, node: Node, made: dict[Node, Node]) -> Node:
        """An atom of operands made anew; those that are now broadcast go through the builder's algebra."""
        args = tuple(made.get(a, a) for a in node.args)
        if node.op == "sum" and args[0].op == "expand":
            return self.b.sum(args[0], node.reduced)
        if node.op == "contract" and any(a.op == "expand" for a in args):
            return self.b.contract(args[0], args[1], node.reduced)
        return self.b.make(node.op, args, node.axes, *node.attr) if args else node

    def combined(self, form: Form, made: dict[Node, Node]) -> Node:
        """The sum of a form's terms, what is summed over axes last."""
        parts: dict[Axes, Node] = {(): form[FREE]} if FREE in form else {}
        for (atom, over), c in sorted(form.items(), key=lambda item: item[1] is not self.one):
            if atom is not None:
                term = self.product(c, _bare(made[atom]))
                parts[over] = self.plus(parts[over], term) if over in parts else term
        total: Node | None = parts.pop((), None)
        for over, part in parts.items():
            left = [x for x in part.axes if x not in over]
            term = self.b.sum(part, over) if part.op == "neg" else self.b.make("sum", (part,), left, over)
            total = term if total is None else self.plus(total, term)
        assert total is not None
        return total

    def product(self, c: Node, x: Node) -> Node:
        """c * x with its sign outside, and otherwise as it is: so that c is found before the loop."""
        if c is self.one:
            return x
        if c.op == "neg" or (c.value is not None and c.value < 0):
            return self.b.neg(self.product(self.b.neg(c), x))
        if c.op == "mul" and c.args[0].value is not None and len(c.axes) > len(x.axes):
            return self.product(c.args[1], self.product(c.args[0], x))
        return self.b.make("mul", (c, x), (*c.axes, *x.axes))

    def plus(self, x: Node, y: Node) -> Node:
        return self.b.make("add", (x, y), (*x.axes, *y.axes))


def _bare(node: Node) -> Node:
    return node.args[0] if node.op == "expand" else node


def collect(b: Builder, roots: Iterable[Node], bound: set[Node]) -> dict[Node, Node]:
    """For each bound root, and for what it is made of, the value that stands for it."""
    collector = _Collector(b, roots, bound)
    collector.choose()
    return collector.make()
