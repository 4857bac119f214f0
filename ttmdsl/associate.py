"""Sums over three tiles, by way of a product that is there anyway.

The gradient of a gate sums over what the gate has scaled. For a read of the state that is sum_v (S k)_v d_v, which
takes the product S k; or it is sum_c k_c (S^T d)_c, whose product the gradient of k takes as well. Differentiation
knows the first form alone. This takes the one for which fewest products are computed beside those of the gradients
that have a value for every token and channel; of several such forms one over the dim over which most others sum, so
that one kernel has what they share.

Input: a backward program. Output: the same gradients. Knows no layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ttmdsl.builder import Builder
from ttmdsl.ir import Node, Program, is_matmul, is_product, reachable


def associated(program: Program) -> Program:
    """The program with each sum over three tiles in its cheapest form."""
    dims = _Sums(program, "").dims
    return _Sums(program, dims.most_common(1)[0][0]).program if dims else program


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
