"""IR values as Triton expressions on padded tiles.

Input: nodes, and which dim is blocked. Output: expressions. Does not know kernels or plans, nor how tiles are loaded
and stored (print_tiles.py).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping

from ttmdsl.builder import Builder
from ttmdsl.ir import PAST, TOKEN_AXES, UNIT_AXES, Axes, Node, base_dim, constant, has_dim, is_matmul, original
from ttmdsl.orders import Loads, Products
from ttmdsl.padding import PaddingAnalysis, singular
from ttmdsl.print_tiles import at, extent, shape
from ttmdsl.printer import Names, Printer, strip
from ttmdsl.schedule import Weight, order_by, peak, wide_last, with_early_loads

CALLS = {
    "exp2": "tl.exp2", "sqrt": "tl.sqrt", "erf": "tl.erf", "abs": "tl.abs", "sigmoid": "tl.sigmoid",
}  # fmt: skip
TINY = repr(2.0**-100)  # the logarithm of what has underflowed is finite, and its slope far from overflow
NEGATIVE_INFINITY = 'float("-inf")'
_WAITING = "_shared"  # how the names of tiles end that wait in shared memory


class TritonPrinter(Printer):
    """Prints the values of one kernel.

    Products of a chunk's tiles take the inputs' dtype, but for those that are to be `wide`. What a token program
    multiplies is the state, again and again (Newton-Schulz): it takes float32, as the triangular inverse does.
    """

    def __init__(self, builder: Builder, names: Names, unit: str, weight: Weight, wide: Container[Node] = ()) -> None:
        super().__init__(builder, names)
        self.weight, self.wide = weight, wide
        self.dot = "tl.float32, INVERSE" if unit == "token" else "DOT, PRECISION"
        self.padding = PaddingAnalysis()
        self.alive = 0.0  # the most tiles alive at once, by weight
        self.loaded: set[Node] = set()  # what earlier kernels left in the inputs' dtype
        self.loads: dict[Node, str] = {}  # the text that loads a value, where it is first used
        self.place: dict[Node, int] = {}  # an order that may be the best
        self.ordering = 0  # the number of the order
        self.placing = Loads.LATE  # where values are loaded that are no variables yet
        self.products = Products.SHORT  # where products are computed
        self.turned: Container[Node] = ()  # products that are wanted transposed alone: found so
        self.apart: Mapping[Node, Node] = {}  # by product an operand that lays out nothing before it
        self.in_shared: dict[Node, str] = {}  # by product its left operand, which waits in shared memory
        self.few = False  # whether a unit has fewer tokens than `ROWS`

    def order(self, nodes: list[Node], kept: list[Node]) -> list[Node]:
        def loaded(n: Node) -> bool:
            return n in self.loads and n not in self.text

        rest = [n for n in nodes if not loaded(n)]
        place: dict[Node, int] = {}  # none comes before an operand, which has no place of its own if it is no tile
        for n in rest:
            place[n] = max(self.place.get(n, -1), *(place.get(a, -1) for a in self.operands(n)), -1)
        rest.sort(key=place.__getitem__)
        computed = order_by(self.ordering, rest, kept, self.operands, self.weight, loaded)
        computed = wide_last(computed, self.operands) if self.few else computed
        # a root may be loaded, too, and no operand of anything
        placed = with_early_loads(computed, kept, self.operands, self.weight, loaded, self.placing)
        best = list(dict.fromkeys([*placed, *nodes]))
        self.alive = max(self.alive, peak(best, kept, self.operands, self.weight))
        return best

    def most(self, node: Node) -> float:
        if is_matmul(node) and self.products is not Products.SHORT:
            return math.inf if self.products is Products.TAKEN else 0
        return super().most(node)

    def length(self, expression: str) -> int:
        return super().length(expression.replace(_WAITING, ""))  # in registers or not, the lines are the same

    def wish(self, node: Node) -> str:
        if node.op == "leaf":
            return f"d_{node.name}" if node.role in ("cot", "cocarry") else node.name
        return super().wish(node)

    def known(self, node: Node) -> bool:
        return node in self.loads or super().known(node)

    def raw(self, node: Node) -> bool:
        """Whether a value still has the dtype it was loaded in, as products of tiles want it."""
        node = original(node)
        loaded = node.role in ("token", "before", "cot") and has_dim(node)
        return loaded or node in self.loaded

    def widened(self, node: Node) -> str:
        """A value in float32."""
        return f"{self.text[node]}.to(tl.float32)" if self.raw(node) else self.text[node]

    def operand(self, node: Node, target: Axes) -> str:
        """A value among the target's axes."""
        return at(self.widened(node), node.axes, target) if self.is_tile(node) else self.text[node]

    def tile(self, node: Node) -> str:
        """A value as a tile of its full shape, constants too."""
        number = constant(node)
        return self.widened(node) if number is None else f"tl.full({shape(node.axes)}, {number!r}, tl.float32)"

    def operands(self, node: Node) -> tuple[Node, ...]:
        if node in self.loads:
            return ()
        return super().operands(node)

    def inside(self, axis: str, target: Axes) -> str:
        """A mask: true before the end of the dim."""
        return at(f"m_{base_dim(axis)}", (axis,), target)

    def masked(self, node: Node, axes: Axes, fill: str = "0.0") -> str:
        """The value with zero (or fill) beyond the ends of these axes."""
        if not axes:
            return self.tile(node)
        keep = " & ".join(self.inside(x, node.axes) for x in axes)
        return f"tl.where({keep}, {strip(self.tile(node))}, {fill})"

    def sanitized(self, node: Node) -> str:
        """The value with zero beyond the end of every dim, as a carry must be."""
        dims = (x for x in node.axes if x not in UNIT_AXES)
        return self.masked(node, tuple(x for x in dims if self.padding.of(node, x) != "zero"))

    def _summands(self, nodes: tuple[Node, ...], over: Axes) -> list[str]:
        """Texts of the factors of a sum over axes, masked so that padding adds nothing."""
        return [self.masked(n, mask) for n, mask in zip(nodes, self._masks(nodes, over), strict=True)]

    def _masks(self, nodes: tuple[Node, ...], over: Axes) -> list[Axes]:
        """Of each factor of a sum over axes those that it is masked in."""
        dims = [x for x in over if x not in UNIT_AXES]
        result = []
        clean = {x: any(self.padding.of(n, x) == "zero" for n in nodes) for x in dims}
        for n in nodes:
            mask = tuple(x for x in dims if self.padding.of(n, x) == "wild" or not clean[x])
            clean |= dict.fromkeys(mask, True)
            result.append(mask)
        return result

    def expression(self, node: Node) -> str:
        axes, args = node.axes, node.args
        if node in self.loads:
            return self.loads[node]
        ops = [self.operand(a, axes) for a in self.operands(node)]
        match node.op:
            case "const" | "neg" | "mul" | "add":
                return self.arithmetic(node)
            case "size":
                return extent(str(node.attr[0]))
            case "recip":
                return self._tame(node, f"1.0 / {ops[0]}")
            case "log2":
                return self._tame(node, f"tl.log2(tl.maximum({strip(ops[0])}, {TINY}, tl.PropagateNan.ALL))")
            case "rsqrt":
                return self._tame(node, f"tl.rsqrt({strip(ops[0])})")
            case "pow":
                return self._tame(node, f"tl.exp2({float(node.attr[0])!r} * tl.log2({ops[0]}))")
            case "tanh" | "softplus":
                return f"_{node.op}({strip(ops[0])})"
            case "max" | "min":
                return f"tl.{node.op}imum({strip(ops[0])}, {strip(ops[1])})"
            case "sign":
                return f"tl.where({ops[0]} > 0, 1.0, tl.where({ops[0]} < 0, -1.0, 0.0))"
            case "step":
                return f"tl.where({ops[0]} > 0, 1.0, 0.0)"
            case "select":
                flag = self.text[args[0]]
                # where a loop hands on either zeros or a sum of products, Triton fails for Blackwell (NOTES.md)
                if constant(args[1]) == 0.0:
                    return f"(tl.where({flag}, 0.0, 1.0) * {ops[2]})"
                if constant(args[2]) == 0.0:
                    return f"(tl.where({flag}, 1.0, 0.0) * {ops[1]})"
                return f"tl.where({flag}, {strip(ops[1])}, {strip(ops[2])})"
            case "expand":
                return ops[0]
            case "rename":
                source, target = map(str, node.attr)
                moved = tuple(target if a == source else a for a in args[0].axes)
                same = moved == axes or args[0] in self.turned
                return self.text[args[0]] if same else f"tl.trans({self.text[args[0]]})"
            case "sum":
                return self._reduce("sum", self._summands(args, node.reduced)[0], args[0].axes, node.reduced)
            case "amax":
                dims = tuple(x for x in node.reduced if x not in UNIT_AXES)
                return self._reduce("max", self.masked(args[0], dims, NEGATIVE_INFINITY), args[0].axes, node.reduced)
            case "contract":
                return self._contract(node)
            case "mask":
                fill = float(node.attr[1])
                return f"tl.where({node.attr[0]}, {strip(ops[0])}, {'0.0' if fill == 0 else NEGATIVE_INFINITY})"
            case "diagonal":
                by, axis = node.attr
                return f"tl.where({self._ago(str(axis), axes)} == {by}, {strip(ops[0])}, 0.0)"
            case "behind":
                by, axis, fill = node.attr
                where = self._ago(str(axis), axes)
                return f"tl.where({where} >= {by}, {strip(ops[0])}, {NEGATIVE_INFINITY if fill else '0.0'})"
            case "shift":
                return self._shift(node)
            case "cumsum":
                reverse = ", reverse=True" if node.attr[1] else ""
                return f"tl.cumsum({self.tile(args[0])}, {axes.index(str(node.attr[0]))}{reverse})"
            case "tri_inv":
                return f"_tile_inverse({self.tile(args[0])}, BT, INVERSE)"
            case "newton_schulz" | "newton_schulz_back":
                turned = axes[1] != node.attr[0]  # the tiles' products run over x^T x
                texts = [f"tl.trans({self.sanitized(a)})" if turned else strip(self.sanitized(a)) for a in args]
                text = f"_tile_{node.op}({', '.join(texts)}, {node.attr[1]}, INVERSE)"
                return f"tl.trans({text})" if turned else text
            case "decay_dot" | "decay_mix" | "decay_mix_t":
                texts = [self.tile(a) for a in args]
                if node.op == "decay_dot":
                    q, k = self._summands(args[:2], (str(node.attr[1]),))
                    texts = [q, k, *map(self.sanitized, args[2:])]
                return f"_tile_{node.op}({', '.join(texts)}, {node.attr[0]}, BT, PRECISION)"
            case _:
                return f"{CALLS[node.op]}({strip(ops[0])})"

    def _ago(self, axis: str, target: Axes) -> str:
        """How many tokens before t a token of the axis is."""
        here = at("t_" if axis == "s" else "place", ("t",), target)
        there = f"- {at('t_', ('s',), target)}" if axis == "s" else f"+ {at(f'o_{PAST}', (PAST,), target)}"
        return f"{here} {there}"

    def _shift(self, node: Node) -> str:
        """A vector over tokens at others, which is gathered from these."""
        (x,), (by, axis) = node.args, node.attr
        later = "t" in x.axes
        if axis == "s":
            return f"_tile_shifted({self.tile(x)}, t_ {'+' if later else '-'} {by}, BT)"
        if later:
            at_token = f"tl.where(o_{PAST} < {by}, ahead + {int(by) - 1} - o_{PAST}, -1)"
            return f"_tile_shifted({self.tile(x)}, {at_token}, BT)"
        found = self.masked(x, (PAST,)) if self.padding.of(x, PAST) != "zero" else self.tile(x)
        return f"_tile_shifted({strip(found)}, {by} - place, P_{PAST})"

    def _tame(self, node: Node, text: str) -> str:
        """A function; if it is infinite at 0, with 0 beyond the ends of the dims."""
        dims = [x for x in node.axes if x not in UNIT_AXES]
        if not dims or not singular(node):
            return f"({text})"
        return f"tl.where({' & '.join(self.inside(x, node.axes) for x in dims)}, {text}, 0.0)"

    def _reduce(self, how: str, text: str, axes: Axes, over: Axes) -> str:
        for x in sorted(over, key=axes.index, reverse=True):
            text = f"tl.{how}({text}, {axes.index(x)})"
        return text

    def put_in_shared(self, nodes: Iterable[Node]) -> list[str]:
        """Lines that put into shared memory, where launches ask for it, the left operands that products among these
        values, a walk's, take from before it. Triton would have them in registers, which takes these from all else; and
        ptxas 12.8 gives them to operands that the walk loads, so that its next step reads the wrong ones."""
        found: dict[str, str] = {}
        for n in (n for n in nodes if is_matmul(n) and n not in self.wide and n not in self.in_shared):
            (a, mask), _ = self._sides(n)
            if a in self.text and original(a) not in self.loads and self.apart.get(n) is not a:
                text = self._factor(a, mask)
                called = self.text[a] if self.text[a].isidentifier() else self.wish(a)
                name = found.get(text) or self.names.get(f"{called}{_WAITING}")
                found[text] = self.in_shared[n] = name
        return [f"{name} = _in_shared({text}, DOT, IN_SHARED)" for text, name in found.items()]

    def _sides(self, product: Node) -> list[tuple[Node, Axes]]:
        """A product's operands, the left one first, and in which axes each is masked."""
        sides = [*zip(product.args, self._masks(product.args, product.reduced), strict=True)]
        return sides[::-1] if product.axes[product in self.turned] in sides[1][0].axes else sides

    def _factor(self, node: Node, mask: Axes) -> str:
        """An operand of a product, masked, in the dtype that it was loaded in."""
        text = self.masked(node, mask)
        return text.removesuffix(".to(tl.float32)") if self.raw(node) else text

    def _contract(self, node: Node) -> str:
        over = node.reduced
        if is_matmul(node):
            (a, mask), (b, other) = self._sides(node)
            left, right = self.in_shared.get(node) or self._factor(a, mask), self._factor(b, other)
            left = left if a.axes[1] == over[0] else f"tl.trans({left})"
            right = right if b.axes[0] == over[0] else f"tl.trans({right})"
            held = self.apart.get(node)
            left = f"_apart({left}, True)" if held is a else left
            right = f"_apart({right}, BY_WARP)" if held is b else right
            # weights of tokens are made of gates: they have no rounding to share with an input
            weights = not has_dim(a) and not has_dim(b)
            wide = node in self.wide
            how = "DOT, PRECISION" if wide else "tl.float32, INVERSE" if weights else self.dot
            rows, columns = (x for n in (a, b) for x in n.axes if x not in over)
            if not self.few and rows in UNIT_AXES and columns not in TOKEN_AXES:
                how += ", DIMS_FIRST"
            return f"{'_wide_dot' if wide else '_tile_dot'}({left}, {right}, {how})"
        a, b = node.args
        left, right = self._summands((a, b), over)
        union = self.builder.order((*a.axes, *b.axes))
        product = f"{at(left, a.axes, union)} * {at(right, b.axes, union)}"
        return self._reduce("sum", product, union, over)
