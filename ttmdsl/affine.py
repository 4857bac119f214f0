"""The chain of a backward scan, in few steps: cotangents are affine in those that the units after hand on.

Input: a backward program. Output: the same, each of whose ends is a sum of few values of the chain times coefficients
that are free of it, so that these are found for all units at once before the scan; itself, where that spares little. Of
the chain are left its products of tiles, and sums of their elements, each found once. Knows no layer.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TypeAlias

from ttmdsl.ir import (
    REDUCING,
    Axes,
    Node,
    Program,
    addends,
    constant,
    has_dim,
    in_order,
    is_large,
    is_token_tile,
    is_zero,
    reachable,
    tied,
)

# A coefficient: for each product of factors that vary along a dim, what it is multiplied by, which does not.
Coefficient: TypeAlias = "dict[tuple[Node, ...], Node]"
# What a value is made of: coefficients of values of the chain; what is free of it stands apart.
Form: TypeAlias = "tuple[dict[Node, Coefficient], Node | None]"

LOAD = 2  # values of single elements that a tile's way from memory counts as
SPARED = 20  # least that is worth other kernels (measured)
MOST = 16  # terms of a coefficient
MANY = 2  # users of a value


class _Chain:
    """Forms of the values that depend on a chain, operands first: all are linear in it, but for what is free."""

    def __init__(self, program: Program) -> None:
        self.b = program.builder
        self.ends = program.ends()
        self.bound = tied(program, "cocarry", self.ends.values())
        self.one = self.b.const(1.0)
        self.uses = Counter(a for n in self.bound for a in n.args)
        self.forms: dict[Node, Form] = {}

    def made(self) -> dict[str, Node]:
        """The ends, made anew."""
        for node in reachable(self.ends.values()):
            if node in self.bound and node not in self.forms:
                self.forms[node] = self.affine(node) or self.atom(self.rebuilt(node))
        return {k: self.built(*self.seen(v), v.axes) for k, v in self.ends.items()}

    # -- forms -----------------------------------------------------------------------------------------------

    def atom(self, node: Node) -> Form:
        return {node: {(): self.one}}, None

    def seen(self, node: Node) -> Form:
        return self.forms[node] if node in self.bound else ({}, node)

    def affine(self, node: Node) -> Form | None:
        """The form of a value; None where it has to be computed of its operands as they are."""
        free = [a for a in node.args if a not in self.bound]
        forms = [self.seen(a) for a in node.args if a in self.bound]
        match node.op:
            case "add":
                found = self.added(*map(self.seen, node.args))
                # else what is free of it would take all the ways of the others once more
                return found if found[1] is None or is_large(node) or self.uses[node] <= MANY else None
            case "neg":
                return self.scaled(forms[0], self.b.const(-1.0))
            case "expand":
                return forms[0]
            case "mul" if free:
                return self.scaled(forms[0], free[0])
            case "sum":
                return self.summed(forms[0], node.reduced)
            case "contract" if free:
                (x,) = (a for a in node.args if a in self.bound)
                if set(free[0].axes) <= set(x.axes):
                    scaled = self.scaled(forms[0], free[0])
                    return self.summed(scaled, node.reduced) if scaled else None
                return self.multiplied(forms[0], x.axes, free[0], node)
        return None

    def added(self, x: Form, y: Form) -> Form:
        found = {atom: dict(c) for atom, c in x[0].items()}
        for atom, c in y[0].items():
            here = found.setdefault(atom, {})
            for wide, narrow in c.items():
                self.put(here, wide, narrow)
        return found, y[1] if x[1] is None else x[1] if y[1] is None else self.b.add(x[1], y[1])

    def scaled(self, form: Form, factor: Node) -> Form | None:
        """None where a coefficient would be as large as a state: there would be one for every unit."""
        by = self.coefficient(factor)
        found = {atom: self.times(c, by) for atom, c in form[0].items()}
        if any(is_large(self.value(c)) for c in found.values()):
            return None
        return found, None if form[1] is None else self.b.mul(form[1], factor)

    def summed(self, form: Form, over: Axes) -> Form | None:
        coefficients, free = form
        found: Form = {}, None if free is None else self.b.sum(self.b.expand(free, over), over)
        for atom, c in coefficients.items():
            if not set(over) <= set(atom.axes):
                if set(over) & set(atom.axes):
                    return None
                value = self.b.sum(self.b.expand(self.value(c), over), over)
                found = self.added(found, ({atom: self.coefficient(value)}, None))
                continue
            for wide, narrow in c.items():
                factors = (*wide, narrow)
                inside = self.b.product(f for f in factors if set(over) & set(f.axes))
                outside = self.b.product(f for f in factors if not set(over) & set(f.axes))
                total = self.b.contract(inside, atom, over) if inside.axes else self.b.sum(atom, over)
                found = self.added(found, ({total: self.coefficient(outside)}, None))
        return found

    def multiplied(self, form: Form, axes: Axes, other: Node, node: Node) -> Form:
        """A product of tiles: of what is free ahead of the chain, and of all else in it."""
        bound, free = self.built(form[0], None, axes), form[1]
        pair = (other, bound) if node.args[0] is other else (bound, other)
        product = self.b.make("contract", pair, node.axes, *node.attr)
        return {product: {(): self.one}}, None if free is None else self.b.contract(free, other, node.reduced)

    # -- coefficients ----------------------------------------------------------------------------------------

    def coefficient(self, node: Node) -> Coefficient:
        """A free value as a coefficient: sums are multiplied out where an addend has a factor that varies along no
        dim."""

        def whole(n: Node) -> bool:
            if n.op != "add":
                return False
            parts = addends(n, lambda f: f.op not in ("add", "mul", "neg", "expand"))
            return all(any(map(has_dim, fs)) and all(map(has_dim, fs)) for _, fs in parts)

        found: Coefficient = {}
        for number, fs in addends(node, whole):
            wide = in_order(f for f in fs if has_dim(f))
            narrow = self.b.product([self.b.const(number), *(f for f in fs if not has_dim(f))])
            self.put(found, wide, narrow)
        return found

    def put(self, found: Coefficient, wide: tuple[Node, ...], narrow: Node) -> None:
        """Adds a term to a coefficient."""
        found[wide] = self.b.add(found[wide], narrow) if wide in found else narrow

    def times(self, x: Coefficient, y: Coefficient) -> Coefficient:
        found: Coefficient = {}
        for a, c in x.items():
            for b, d in y.items():
                wide = in_order((*a, *b))
                narrow = self.b.mul(c, d)
                self.put(found, wide, narrow)
        if len(found) > MOST:
            return {(self.value(found),): self.one}
        return found

    def value(self, c: Coefficient) -> Node:
        """A coefficient as one value, by Horner's rule: the factor that most terms have is outside."""
        if len(c) == 1:
            ((wide, narrow),) = c.items()
            return self.b.mul(narrow, self.b.product(wide))
        times = Counter(f for wide in c for f in dict.fromkeys(wide))
        common = max(times, key=lambda f: (times[f], -f.id), default=None)
        if common is None or times[common] < 2:
            terms = [self.value({wide: narrow}) for wide, narrow in c.items()]
            return functools.reduce(self.b.add, terms, self.b.const(0.0))
        inside: Coefficient = {}
        for wide, narrow in c.items():
            if common in wide:
                at = wide.index(common)
                inside[wide[:at] + wide[at + 1 :]] = narrow
        product = self.b.mul(self.value(inside), common)
        rest = {wide: narrow for wide, narrow in c.items() if common not in wide}
        return self.b.add(product, self.value(rest)) if rest else product

    # -- making them -----------------------------------------------------------------------------------------

    def rebuilt(self, node: Node) -> Node:
        """A value of operands made anew."""
        args = tuple(self.built(*self.forms[a], a.axes) if a in self.bound else a for a in node.args)
        return self.b.remade(node, args) if args else node

    def built(self, coefficients: dict[Node, Coefficient], free: Node | None, axes: Axes) -> Node:
        """The sum of a form's terms, tiles last."""
        terms = [] if free is None else [free]
        terms += [self.term(self.value(c), atom) for atom, c in coefficients.items() if not is_zero(self.value(c))]
        total = self.b.const(0.0)
        for term in sorted(terms, key=lambda t: len(t.axes)):
            total = self.b.add(total, term)
        return self.b.expand(total, axes)

    def term(self, c: Node, atom: Node) -> Node:
        """c * atom with its sign outside, and otherwise as it is: so that c is found before the chain."""
        if c.op == "neg":
            return self.b.neg(self.term(c.args[0], atom))
        bare = c.args[0] if c.op == "expand" else c
        return atom if bare is self.one else self.b.make("mul", (bare, atom), (*bare.axes, *atom.axes))


def work(program: Program) -> int:
    """What a unit of the chain takes beside its products: values of single elements, or their sums, as large as its
    tokens times a dim; and tiles that are free of it, of which each is loaded or made."""
    chain = tied(program, "cocarry", program.ends().values())
    here = [n for n in chain if n.op not in ("leaf", "expand", "rename")]
    tiles = [n for n in here if is_token_tile(n) and n.op not in REDUCING]
    sums = [n for n in here if n.op in REDUCING and len(n.axes) < 2 and any(map(is_token_tile, n.args))]
    free = {a for n in here for a in n.args if a not in chain and len(a.axes) == 2 and constant(a) is None}
    return len(tiles) + len(sums) + LOAD * len(free)


def affine(program: Program) -> Program:
    """The program with its chain in few steps, where that spares some."""
    ends = {f"carry:{name}": end for name, end in _Chain(program).made().items()}
    found = program.with_outputs({**program.outputs, **ends})
    return found if work(found) + SPARED <= work(program) else program
