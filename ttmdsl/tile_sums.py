"""What one token computes on tiles, with few operations on them: each tile a sum of few others times vectors.

Input: a token `Program`. Output: one with the same outputs, made anew. Tiles are what costs: an operation on each of
their elements, and above all a sum over an axis, which crosses threads. So a tile is kept as a sum of terms u w T: an
atom T (a state, or what follows from tiles by other than sums and products), times a vector for each of its axes; a sum
over an axis is taken term by term, its vectors outside or multiplied into one another, and each such sum once.

Knows no layer. Squares are summed as they stand: their terms may cancel.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ttmdsl.builder import Builder, substitute
from ttmdsl.ir import REDUCING, Axes, Node, Program, in_order, reachable
from ttmdsl.padding import PaddingAnalysis

SUM = 9.0  # what a sum over an axis of a tile costs, in operations on each of its elements
VECTOR = 0.15  # and what an operation on a vector does
MOST_TRIALS = 24  # tiles that may be taken whole or apart; with more of them, all are the one or the other


@dataclass(frozen=True)
class Term:
    """u w T: vectors over the first and the second axis of a tile, or scalars, and atoms, none or up to two."""

    u: Node
    w: Node
    atoms: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Dot:
    """A sum over one axis of a tile: of parts, each an inner vector over that axis times atoms; all that times an outer
    vector."""

    parts: tuple[tuple[Node, tuple[Node, ...]], ...]
    outer: Node
    axis: str


class _Rewriter:
    """One way to make a program anew: `whole` are the tiles whose users do not look inside."""

    def __init__(self, program: Program, whole: frozenset[Node] = frozenset()) -> None:
        self.b: Builder = program.builder.fork()
        self.whole = whole
        self.one = self.b.const(1.0)
        self.uses = Counter(a for n in program.nodes for a in n.args)
        self.uses.update(program.outputs.values())
        self.made: dict[Node, Node] = {}
        self.terms: dict[Node, list[Term]] = {}
        self.dots: dict[Node, tuple[list[Dot], Node]] = {}
        for node in program.nodes:
            self.visit(node)
        outputs = {k: self.node(v) for k, v in program.outputs.items()}
        self.program = Program(program.unit, program.dims, self.b, outputs)

    def visit(self, node: Node) -> None:
        """Finds the terms of a tile, the sums that a vector is made of, or the value itself."""
        if len(node.axes) == 2:
            terms = self.tile(node)
            if terms is not None:
                self.terms[node] = terms
                if node in self.whole:
                    self.terms[node] = [Term(self.one, self.one, (self.node(node),))]
                return
        elif len(node.axes) < 2:
            found = self.vector(node)
            if found is not None:
                self.dots[node] = found
                return
        self.made[node] = self.rebuilt(node)

    def node(self, old: Node) -> Node:
        """The value made anew."""
        if old not in self.made:
            new = self.sum_of_terms(self.terms[old], old.axes) if old in self.terms else self.sum_of_dots(old)
            self.made[old] = self.labelled(old, new)
        return self.made[old]

    def labelled(self, old: Node, new: Node) -> Node:
        if old in self.b.labels:
            self.b.label(new, self.b.labels[old])
        return new

    def rebuilt(self, node: Node) -> Node:
        """The same operation on operands made anew."""
        args = tuple(map(self.node, node.args))
        if args == node.args:
            return node
        return self.labelled(node, self.b.expand(self.b.remade(node, args), node.axes))

    # -- tiles -----------------------------------------------------------------------------------------------

    def tile(self, node: Node) -> list[Term] | None:
        """The terms of a tile; None where it is no sum of products of others."""
        match node.op:
            case "add":
                parts = [self.seen(a, node.axes) for a in node.args]
                return self.merged([t for terms in parts for t in terms])
            case "neg":
                return [Term(self.b.neg(t.u), t.w, t.atoms) for t in self.seen(node.args[0], node.axes)]
            case "expand":
                return self.seen(node.args[0], node.axes)
            case "mul":
                x, y = node.args
                return self.product(self.seen(x, node.axes), self.seen(y, node.axes), most=1)
        return None

    def seen(self, node: Node, axes: Axes) -> list[Term]:
        """The terms of an operand among a tile's axes."""
        if node in self.terms:
            return self.terms[node]
        new = self.node(node)
        if len(new.axes) == 2 and new.op == "expand":
            new = new.args[0]
        if len(new.axes) == 2:
            return [Term(self.one, self.one, (new,))]
        return [Term(new, self.one) if new.axes == axes[:1] else Term(self.one, new)]

    def product(self, x: list[Term], y: list[Term], most: int) -> list[Term] | None:
        """Every term of one times every one of the other; None where a term would have more than so many atoms."""
        if any(len(s.atoms) + len(t.atoms) > most for s in x for t in y):
            return None
        times = self.b.mul
        found = [Term(times(s.u, t.u), times(s.w, t.w), in_order((*s.atoms, *t.atoms))) for s in x for t in y]
        return self.merged(found)

    def merged(self, terms: list[Term]) -> list[Term]:
        """The terms, those that differ by one vector alone added up."""
        result: list[Term] = []
        for t in map(self.settled, terms):
            for i, s in enumerate(result):
                if s.atoms != t.atoms or not (s.u is t.u or s.w is t.w):
                    continue
                u, w = (s.u, self.b.add(s.w, t.w)) if s.u is t.u else (self.b.add(s.u, t.u), s.w)
                result[i] = Term(u, w, t.atoms)
                break
            else:
                result.append(t)
        return result

    def settled(self, t: Term) -> Term:
        """A term with its sign and scalars in one place: with the vector of the second axis, if it has one."""
        u, w = t.u, t.w
        if u.op == "neg":
            u, w = u.args[0], self.b.neg(w)
        if not u.axes:
            return Term(self.one, self.b.mul(u, w), t.atoms)
        if not w.axes and w is not self.one:
            return Term(self.b.mul(w, u), self.one, t.atoms)
        return Term(u, w, t.atoms)

    def sum_of_terms(self, terms: list[Term], axes: Axes) -> Node:
        """A tile from its terms; atoms first, to which the others are added."""
        ordered = sorted(terms, key=lambda t: not t.atoms)
        return self.b.expand(self.total(self.b.product([t.u, t.w, *t.atoms]) for t in ordered), axes)

    # -- sums over an axis -----------------------------------------------------------------------------------

    def vector(self, node: Node) -> tuple[list[Dot], Node] | None:
        """The sums over tiles whose total a vector or scalar is, and what is added to them."""
        match node.op:
            case "sum" | "contract":
                return self.summed(node)
            case "neg" if self.alone(node.args[0]):
                return self.scaled(node.args[0], self.b.const(-1.0))
            case "mul":
                for x, y in (node.args, node.args[::-1]):
                    if self.alone(x) and set(y.axes) <= set(x.axes):
                        return self.scaled(x, self.node(y))
            case "add" if any(map(self.alone, node.args)) and node.args[0] is not node.args[1]:
                dots, rest = [], self.b.const(0.0)
                for a in node.args:
                    more, other = self.dots[a] if self.alone(a) else ([], self.node(a))
                    dots += more
                    rest = self.b.add(rest, other)
                return self.joined(dots), rest
        return None

    def alone(self, node: Node) -> bool:
        """Whether a value is a total of sums that nothing else takes."""
        return node in self.dots and self.uses[node] == 1 and node not in self.made

    def scaled(self, node: Node, factor: Node) -> tuple[list[Dot], Node]:
        dots, rest = self.dots[node]
        by = self.b.mul
        return self.joined([Dot(d.parts, by(factor, d.outer), d.axis) for d in dots]), by(factor, rest)

    def joined(self, dots: list[Dot]) -> list[Dot]:
        """The sums, those over the same axis and under the same vector added up before they are taken."""
        found: dict[tuple[Node, str], dict[tuple[Node, ...], Node]] = {}
        for d in map(self.pulled, dots):
            parts = found.setdefault((d.outer, d.axis), {})
            for inner, atoms in d.parts:
                parts[atoms] = self.b.add(parts[atoms], inner) if atoms in parts else inner
        return [Dot(tuple((v, k) for k, v in parts.items()), outer, axis) for (outer, axis), parts in found.items()]

    def pulled(self, d: Dot) -> Dot:
        """A sum with the scalars inside, where there are vectors to take them."""
        if d.outer.op == "neg":
            return self.pulled(Dot(tuple((self.b.neg(v), k) for v, k in d.parts), d.outer.args[0], d.axis))
        if not d.outer.axes and d.outer is not self.one and all(v.axes for v, _ in d.parts):
            return Dot(tuple((self.b.mul(d.outer, v), k) for v, k in d.parts), self.one, d.axis)
        return d

    def summed(self, node: Node) -> tuple[list[Dot], Node] | None:
        """A sum over axes of a tile, or of a product of tiles and vectors, term by term."""
        axes = self.b.order(x for a in node.args for x in a.axes)
        if len(axes) != 2 or not any(a in self.terms or len(a.axes) == 2 for a in node.args):
            return None
        if len(node.args) == 2 and node.args[0] is node.args[1]:
            terms = [Term(self.one, self.one, (self.node(node.args[0]),) * 2)]
        else:
            terms = [Term(self.one, self.one)]
            for a in node.args:
                terms = self.product(terms, self.seen(a, axes), most=2) or []
            if not terms:
                return None
        if len(node.reduced) == 2:
            columns = [(t, self.column(t, axes[:1])) for t in terms]
            return [], self.total(self.b.contract(self.b.expand(t.w, axes[1:]), c, axes[1:]) for t, c in columns)
        (axis,) = node.reduced
        dots, rest = [], self.b.const(0.0)
        for t in terms:
            inner, outer = (t.u, t.w) if axis == axes[0] else (t.w, t.u)
            if t.atoms:
                dots.append(Dot(((inner, t.atoms),), outer, axis))
            else:
                rest = self.b.add(rest, self.b.mul(outer, self.b.sum(self.b.expand(inner, (axis,)), (axis,))))
        return self.joined(dots), rest

    def column(self, t: Term, axis: Axes) -> Node:
        """The sum over the first axis of a term, without its vector over the second."""
        if t.atoms:
            return self.sum_of_dot(Dot(((t.u, t.atoms),), self.one, *axis))
        return self.b.sum(self.b.expand(t.u, axis), axis)

    def total(self, values: Iterable[Node]) -> Node:
        return functools.reduce(self.b.add, values, self.b.const(0.0))

    def sum_of_dot(self, d: Dot) -> Node:
        """One sum over an axis, times its outer vector."""
        if len(d.parts) > 1:
            whole = self.total(self.b.product([v, *atoms]) for v, atoms in d.parts)
            return self.b.mul(d.outer, self.b.sum(whole, (d.axis,)))
        ((inner, (x, *more)),) = d.parts
        return self.b.mul(d.outer, self.b.contract(self.b.product([inner, *more]), x, (d.axis,)))

    def sum_of_dots(self, old: Node) -> Node:
        """A vector, or scalar, from the sums that it is the total of."""
        dots, rest = self.dots[old]
        return self.b.expand(self.total([rest, *map(self.sum_of_dot, dots)]), old.axes)


def cost(program: Program) -> float:
    """About how long a token takes, in operations on each element of a tile."""
    total = 0.0
    for n in program.nodes:
        if crosses(n):
            total += SUM * len(n.reduced) + 1
        elif n.op not in ("leaf", "expand", "neg", "const"):
            total += (0.0, VECTOR, 1.0)[min(len(n.axes), 2)]
    return total


def handed_on(program: Program) -> dict[Node, Node]:
    """Sums over the tiles of a state alone, each with what the next token would find for it, where that takes no such
    sum more: it need not take it either. So it is with the lengths of what is projected to unit length."""
    ends = {n: program.outputs[f"carry:{n.name}"] for n in program.carries() if f"carry:{n.name}" in program.outputs}
    inside = set(program.nodes)
    fixed: set[Node] = set()
    for n in program.nodes:
        if n in ends or (n.op != "leaf" and fixed.issuperset(n.args)):
            fixed.add(n)
    found = {}
    padding = PaddingAnalysis()
    for n in program.nodes:
        if n in fixed and crosses(n) and all(padding.of(n, x) == "zero" for x in n.axes):
            end = substitute(program.builder, n, ends)
            if not any(map(crosses, set(reachable([end])) - inside)):
                found[n] = end
    return found


def crosses(node: Node) -> bool:
    """Whether a value is a sum over an axis of a tile."""
    return node.op in REDUCING and len(node.axes) < 2 and any(len(a.axes) == 2 for a in node.args)


def regrouped(program: Program, price: Callable[[Program], float] = cost) -> Program:
    """The program with as little to compute on tiles, by its price, as a few trials find; else the program itself."""
    first = _Rewriter(program)
    shared = [n for n, terms in first.terms.items() if len(terms) > 1 and first.uses[n] > 1]
    best, least = program, price(program)
    for rewriter in (first, *([_Rewriter(program, frozenset(shared))] if shared else [])):
        here = price(rewriter.program)
        for node in shared if len(shared) <= MOST_TRIALS else ():
            other = _Rewriter(program, rewriter.whole ^ {node})
            if (found := price(other.program)) < here:
                rewriter, here = other, found
        if here < least:
            best, least = rewriter.program, here
    return best
