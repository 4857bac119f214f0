"""Sums over three tiles, by way of a product that is there anyway.

The gradient of a gate sums over what the gate has scaled. For a read of the state that is sum_v (S k)_v d_v, which
takes the product S k; or it is sum_c k_c (S^T d)_c, whose product the gradient of k takes as well. Differentiation
knows the first form alone. This takes the one for which fewest products are computed beside those of the gradients
that have a value for every token and channel; of several such forms one over the dim over which most others sum, so
that one kernel has what they share.

A scan waits for such a sum, too: sum_t k_t (S^T e_t), which takes a product of the state with what follows from one, is
sum_v (sum_t e_t k_t^T)_v S_v, of a product that the state's next value takes anyway. So one product fewer has to wait
for another between two units.

Input: a program. Output: the same values. Knows no layer.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from ttmdsl.builder import Builder, substitute
from ttmdsl.ir import (
    TOKEN_AXES,
    Node,
    Program,
    Role,
    addends,
    in_order,
    is_matmul,
    is_product,
    reachable,
    tied,
)


def associated(program: Program) -> Program:
    """The program with each sum over three tiles in its cheapest form."""
    dims = _Sums(program, "").dims
    return _Sums(program, dims.most_common(1)[0][0]).program if dims else program


def shortened(program: Program, role: Role) -> Program:
    """The program whose carries' ends take sums over tokens by way of products that they take anyway, where these are
    there before a sum's own product is."""
    while found := _shorter(program, role):
        ends = {f"carry:{name}": substitute(program.builder, end, found) for name, end in program.ends().items()}
        program = program.with_outputs({**program.outputs, **ends})
    return program


def _shorter(program: Program, role: Role) -> dict[Node, Node]:
    """The first sum that can be changed, if there is one, and what it becomes: its terms of which a product is there by
    way of that, the others as they are."""
    b, ends = program.builder, program.ends().values()
    chained, there = tied(program, role, ends), dict[object, tuple[float, Node]]()
    for n in filter(is_matmul, reachable(ends)):
        number, multiplied = _of_product(n.args)
        there[multiplied, n.reduced] = number, n

    def other(node: Node, parts: list[Node]) -> tuple[float, Node] | None:
        """A term of the sum by way of a product that is there."""
        for i, product in enumerate(parts):
            if product in chained and is_matmul(product) and {*node.reduced} <= {*product.axes}:
                state, tokens = sorted(product.args, key=lambda x: {*node.reduced} <= {*x.axes})
                number, multiplied = _of_product([tokens, *parts[:i], *parts[i + 1 :]])
                if (multiplied, node.reduced) in there:
                    scale, found = there[multiplied, node.reduced]
                    return number / scale, b.contract(state, found, product.reduced)
        return None

    def apart(n: Node) -> bool:
        return len(n.axes) < 2 or n not in chained

    for node in reachable(ends):
        if node not in chained or not sums_tiles(node) or node.reduced[0] not in TOKEN_AXES:
            continue
        for whole in (_is_sum, apart):  # as it is, or multiplied out
            terms = [*itertools.product(*(addends(a, whole) for a in node.args))]
            products = [(math.prod(c for c, _ in term), [f for _, fs in term for f in fs]) for term in terms]
            ways = [other(node, parts) for _, parts in products]
            if any(ways):
                total = b.zero(node.axes)
                for (number, parts), way in zip(products, ways, strict=True):
                    scale, term = way or (1.0, b.sum(b.product(parts), node.reduced))
                    total = b.add(total, b.mul(b.const(number * scale), term))
                return {node: total}
    return {}


def _is_sum(node: Node) -> bool:
    """Whether a value adds up others."""
    return node.op == "add"


def _of_product(values: Iterable[Node]) -> tuple[float, tuple[Node, ...]]:
    """What is multiplied, however it is grouped: a number, and other factors."""
    number, found = 1.0, list[Node]()
    for x in values:
        ((c, fs),) = addends(x, _is_sum)
        number, found = number * c, found + fs
    return number, in_order(found)


class _Sums:
    """`program` with its sums changed, `preferred` being the dim of one of several forms; `dims` counts which dims the
    changed ones are over."""

    def __init__(self, program: Program, preferred: str) -> None:
        self.b, self.preferred = program.builder, preferred
        self.needed = set(reachable(v for v in program.outputs.values() if len(v.axes) > 1))
        self.dims: Counter[str] = Counter()
        new: dict[Node, Node] = {}
        for n in program.nodes:
            made = self.b.again(n, new)
            new[n] = self.cheapest(made) if n not in self.needed and sums_tiles(made) else made
        self.program = program.with_outputs({k: new[v] for k, v in program.outputs.items()})

    def price(self, node: Node) -> int:
        """How many products a value takes beside those that are needed anyway."""
        return sum(is_product(n) and n not in self.needed for n in reachable([node], self.needed))

    def cheapest(self, node: Node) -> Node:
        """A sum of tiles in its cheapest form."""
        b, (over,) = self.b, node.reduced
        total, dims = b.zero(node.axes), []
        for number, parts in _products(b, node.args) if node.op == "contract" else _terms(b, node.args[0]):
            if not any(over in x.axes for x in parts):
                return node
            dim, least = over, b.sum(b.product(parts), {over})
            for other, way in self.ways(parts, over):
                if (self.price(way), other != self.preferred) < (self.price(least), dim != self.preferred):
                    dim, least = other, way
            dims += [dim] * (dim != over)
            total = b.add(total, b.mul(b.const(number), least))
        if not dims or self.price(total) > self.price(node):
            return node
        self.dims.update(dims)
        return total

    def ways(self, parts: list[Node], over: str) -> Iterator[tuple[str, Node]]:
        """A sum over the product of these, for each that is a product of two tiles itself: where that is not computed,
        sum_x (sum_c a_c b_xc) r_x being sum_c a_c (sum_x b_xc r_x)."""
        for i, product in enumerate(parts):
            if is_matmul(product) and over in product.axes:
                (dim,) = product.reduced
                a, inner = sorted(product.args, key=lambda x: over in x.axes)
                rest = self.b.product(parts[:i] + parts[i + 1 :])
                yield dim, self.b.contract(a, self.b.contract(inner, rest, {over}), {dim})


def sums_tiles(node: Node) -> bool:
    """Whether a vector is a sum over one axis of a tile, or of the product of two."""
    summed = node.op in ("sum", "contract") and len(node.axes) == len(node.reduced) == 1
    return summed and all(len(a.axes) == 2 for a in node.args)


def _terms(b: Builder, node: Node) -> Iterator[tuple[float, list[Node]]]:
    """A value as the sum of products (number, factors), a mask of ones being a factor, where no other has it."""
    match node.op:
        case "add":
            for x in node.args:
                yield from _terms(b, x)
        case "neg":
            yield from ((-number, parts) for number, parts in _terms(b, node.args[0]))
        case "mul":
            yield from _products(b, node.args)
        case "mask" if node.attr[1] == 0 and node.args[0].op in ("add", "neg", "mul"):
            kind = node.attr[0]
            for number, parts in _terms(b, node.args[0]):
                yield number, parts if any(_vanishes(x, kind) for x in parts) else [*parts, b.mask(b.const(1.0), kind)]
        case "const":
            yield float(node.value or 0.0), []
        case "expand":
            yield from _terms(b, node.args[0])
        case _:
            yield 1.0, [node]


def _products(b: Builder, values: Iterable[Node]) -> Iterator[tuple[float, list[Node]]]:
    """The product of values in that form; sums among them are factors."""
    number, parts = 1.0, list[Node]()
    for x in values:
        terms = [*_terms(b, x)]
        n, factors = terms[0] if len(terms) == 1 else (1.0, [x])
        number, parts = number * n, parts + factors
    yield number, parts


def _vanishes(node: Node, kind: str) -> bool:
    """Whether a value is zero where a mask of that kind is."""
    masked = node.args[0] if node.op == "exp2" else node
    fill = float("-inf") if node.op == "exp2" else 0.0
    return masked.op == "mask" and masked.attr[1] == fill and masked.attr[0] in (kind, "strict")
