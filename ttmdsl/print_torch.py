"""IR values as PyTorch expressions, on tensors with leading axes of a batch.

Input: nodes, and the texts of what is given. Output: expressions, and assignments in a loop over units. Does not know
forms or segments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ttmdsl.collect import is_matrix_product
from ttmdsl.ir import DECAYED, Axes, Node, base_dim, constant, groups, has_dim
from ttmdsl.printer import Printer, strip

NORMS = frozenset({"norm_scan", "norm_slopes", "norm_adjoint"})
UNARY = frozenset({"exp2", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "abs", "sign"})
CONSTANTS = {math.log2(math.e): "LOG2E", math.log(2.0): "LN2"}
LOCALS = {
    "x",
    "carry",
    "states",
    "end",
    "unit",
    "torch",
    "math",
    "Tensor",
    "d_y",
    "d_carry",
    "i",
    "grads",
    *CONSTANTS.values(),
}


def aligned(text: str, axes: Axes, target: Axes) -> str:
    """Indexing that puts a value's axes among the target's."""
    if axes == target or not target:
        return text
    return f"{text}[..., {', '.join(':' if x in axes else 'None' for x in target)}]"


def _dims(axes: Axes, over: Axes) -> str:
    """Some of the axes as dims counted from the end, as torch's reductions take them."""
    dims = [axes.index(x) - len(axes) for x in over]
    return str(dims[0]) if len(dims) == 1 else str(tuple(dims))


def _ago(axis: str) -> str:
    """How many tokens before t those of an axis are."""
    return f"unit.{'behind' if axis == 's' else 'past'}"


class TorchPrinter(Printer):
    """Prints values with leading batch axes; the unit axis N is one of them, except while `scanning`."""

    scanning = False
    constants = CONSTANTS

    def operands(self, node: Node) -> tuple[Node, ...]:
        """Also what products under the same decays per channel share, what norms are found with and what their slopes
        are made of: values of this printer alone, for all units at once where they are free of the carry."""
        match node.op:
            case op if op in DECAYED:
                x, y, gq, gk = node.args
                kept = x if op == "decay_dot" else self.builder.mask(x, node.attr[0])
                return kept, y, self._decays(gq, gk, str(node.attr[0]))
            case "norm_scan":
                e, g, *rest = node.args
                return self.builder.make("norm_walk", (g,), node.axes), e, *rest
            case "norm_slopes":
                *parts, gq, gk = node.args
                return (self.builder.make("norm_slopes_of", (self._decays(gq, gk, "strict"), *parts), gq.axes),)
        return super().operands(node)

    def _decays(self, gq: Node, gk: Node, kind: str) -> Node:
        return self.builder.make("decays", (gq, gk), gq.axes, kind)

    def join(self, sums: list[Node], named: set[Node]) -> dict[Node, Node]:
        joined = {}
        for node in sums:
            first, second = self.operands(node)
            for x, product in ((first, second), (second, first)):
                fused = self.is_bmm(product) or (product.op == "mul" and not (product is first and self.negates(node)))
                free = fused and product not in named and product not in self.text
                if free and all(constant(n) is None and self.is_tile(n) for n in (x, *product.args)):
                    joined[node] = product
                    break
        return joined

    def is_bmm(self, node: Node) -> bool:
        """Whether a value is one product of batches of matrices, all with the same leading axis."""
        return False

    def wish(self, node: Node) -> str:
        return {"decays": "decays", "norm_walk": "walk", "norm_slopes_of": "slopes"}.get(node.op) or super().wish(node)

    def operand(self, node: Node, target: Axes) -> str:
        return aligned(self.text[node], node.axes, target) if self.is_tile(node) else self.text[node]

    def layout(self, axes: Axes) -> Axes:
        """The axes of the tensor that holds a value with these axes."""
        return axes

    def reduced(self, text: str, axes: Axes, node: Node) -> str:
        """A tensor with these axes summed, or its largest taken, over those that the node is without."""
        return f"{text}.{'amax' if node.op == 'amax' else 'sum'}({_dims(axes, node.reduced)})"

    def tile(self, node: Node) -> str:
        """A value over tokens as a tensor, constants too."""
        number = constant(node)
        if number is None:
            return self.text[node]
        like = "unit.lower[None, :, :1]" if has_dim(node) else "unit.lower[None]"
        return f"torch.full_like({like}, {number!r}, dtype=unit.one.dtype)"

    def expression(self, node: Node) -> str:
        axes, args = node.axes, node.args
        ops = [self.operand(a, axes) for a in self.operands(node)]
        match node.op:
            case "size":
                return f'unit.size["{node.attr[0]}"]'
            case "add" if node in self.joined:
                product = self.joined[node]
                first = self.operands(node)[0] is product
                if product.op == "contract":
                    call, minus = "baddbmm", "beta=-1" if first else "alpha=-1"
                    factors = list(self._factors(product))
                else:
                    call, minus = "addcmul", "value=-1"
                    factors = [self.operand(n, axes) for n in product.args]
                texts = [strip(text) for text in (ops[1 if first else 0], *factors)]
                return f"torch.{call}({', '.join(texts + [minus] * self.negates(node))})"
            case "const" | "neg" | "recip" | "mul" | "add":
                return self.arithmetic(node)
            case "pow":
                return f"({ops[0]} ** {float(node.attr[0])!r})"
            case "log2":
                return f"_log2({strip(ops[0])})"
            case "softplus":  # by itself torch takes x where it exceeds 20
                return f"F.softplus({strip(ops[0])}, threshold=60.0)"
            case "max" | "min":
                bound = {"max": "min", "min": "max"}[node.op]
                for text, limit in ((ops[0], constant(args[1])), (ops[1], constant(args[0]))):
                    if limit is not None:
                        return f"{text}.clamp({bound}={limit!r})"
                return f"torch.{node.op}imum({strip(ops[0])}, {strip(ops[1])})"
            case "step":
                return f"({ops[0]} > 0).to({ops[0]}.dtype)"
            case "select":
                if not self.scanning:
                    return f"torch.where({aligned(self.text[args[0]], (), axes)}, {ops[1]}, {ops[2]})"
                yes, no = (
                    o if constant(a) is None else f"torch.full_like({other}, {o})"
                    for o, a, other in zip(ops[1:], args[1:], ops[:0:-1], strict=True)
                )
                return f"({yes} if {self.text[args[0]]} else {no})"
            case "expand":
                return ops[0]
            case "rename":
                source, target = map(str, node.attr)
                moved = tuple(target if a == source else a for a in self.layout(args[0].axes))
                return self.text[args[0]] if moved == self.layout(axes) else f"{self.text[args[0]]}.mT"
            case "sum" | "amax":
                return self.reduced(self.text[args[0]], args[0].axes, node)
            case "contract":
                return self._contract(node)
            case "mask":
                fill = float(node.attr[1])
                whole = axes == ("t", "s") == args[0].axes and args[0].op != "expand"
                if fill == 0 and whole and not groups(node.attr[0]):
                    return f"{self.text[args[0]]}.tril({0 if node.attr[0] == 'lower' else -1})"
                return self._masked(node, ops[0], f"unit.{node.attr[0]}")
            case "diagonal":
                by, axis = node.attr
                return f"torch.where({_ago(str(axis))} == {by}, {strip(ops[0])}, 0.0)"
            case "behind":
                return self._masked(node, ops[0], f"{_ago(str(node.attr[1]))} >= {node.attr[0]}")
            case "shift":
                return self._shift(node)
            case "cumsum":
                text, dim = self.text[args[0]], _dims(self.layout(args[0].axes), (str(node.attr[0]),))
                return f"{text}.flip({dim}).cumsum({dim}).flip({dim})" if node.attr[1] else f"{text}.cumsum({dim})"
            case "tri_inv":
                return f"_unit_lower_inverse({self.text[args[0]]})"
            case "newton_schulz" | "newton_schulz_back":
                texts = [strip(self.operand(a, axes)) for a in args]  # the helper knows which side is the shorter one
                return f"_{node.op}({', '.join(texts)}, {node.attr[1]})"
            case "decay_dot" | "decay_mix" | "decay_mix_t":
                a, b, decays = self.operands(node)
                return f"{self.text[decays]}.{node.op[6:]}({self.tile(a)}, {self.tile(b)})"
            case "decays":
                return f"_decays({', '.join(map(self.tile, args))}, unit.{node.attr[0]})"
            case "norm_slopes":
                return f"{self.text[self.operands(node)[0]]}()"
            case "norm_walk":
                return f'_norm_walk({self.tile(args[0])}, unit, "{base_dim(axes[-1])}")'
            case "norm_scan":
                walk, *values = self.operands(node)
                return f"{self.text[walk]}({', '.join(map(self.tile, values))})"
            case "norm_slopes_of":
                return f"_norm_slopes(unit, {', '.join(map(self.tile, args))})"
            case "norm_adjoint":
                return f"_norm_adjoint({', '.join(map(self.tile, args))})"
            case _:
                assert node.op in UNARY, node.op
                return f"torch.{node.op}({strip(ops[0])})"

    def _masked(self, node: Node, text: str, where: str) -> str:
        """What a mask is of, where that is kept, and elsewhere the mask's fill."""
        kept, fill = strip(text), float(node.attr[-1])
        if constant(node.args[0]) is not None:  # two numbers would give a tile of torch's default dtype
            kept += " * unit.one"
        return f"torch.where({where}, {kept}, {fill if fill == 0 else '-math.inf'})"

    def _shift(self, node: Node) -> str:
        """A vector over tokens at others."""
        (x,), (by, axis) = node.args, node.attr
        text, later = self.tile(x), "t" in x.axes
        if axis == "s":
            return f"_shifted({text}, {by if later else -by})"
        both = self.builder.order((*x.axes, *node.axes))
        return f"torch.where({_ago(str(axis))} == {by}, {aligned(text, x.axes, both)}, 0.0).sum({_dims(both, x.axes)})"

    def _factors(self, node: Node) -> tuple[str, str]:
        """The two factors of a product of matrices."""
        a, b = node.args
        (k,) = node.reduced
        if len(node.axes) == 2 and node.axes[0] in b.axes:
            a, b = b, a
        left = self.text[a] if a.axes[-1] == k else f"{self.text[a]}.mT"
        return left, self.text[b] if b.axes[0] == k else f"{self.text[b]}.mT"

    def _times_vector(self, node: Node) -> str:
        vector, matrix = sorted(node.args, key=lambda n: len(n.axes))
        left = self.text[matrix] if matrix.axes[-1] in node.reduced else f"{self.text[matrix]}.mT"
        return f"({left} @ {self.text[vector]}[..., None])[..., 0]"

    def _contract(self, node: Node) -> str:
        a, b = node.args
        if is_matrix_product(node):
            if len(node.axes) == 1:
                return self._times_vector(node)
            return self._product(node, *self._factors(node))
        union = self.builder.order((*a.axes, *b.axes))
        return self.reduced(f"({self.operand(a, union)} * {self.operand(b, union)})", union, node)

    def _product(self, node: Node, left: str, right: str) -> str:
        batched = self.scanning and all(map(self.is_tile, node.args))
        return f"torch.bmm({strip(left)}, {strip(right)})" if batched else f"({left} @ {right})"


class ScanPrinter(TorchPrinter):
    """Prints the loop over units, batch and heads one axis there, as a product of batches takes them; what was found
    for all at once is at hand by unit, its axes where they are wanted. All values are matrices, at least: tokens and
    numbers of one column, other vectors of one row, so that they stand beside each other as they are."""

    scanning = True

    def __init__(self, outer: TorchPrinter, given: Iterable[Node], varies: set[Node]) -> None:
        super().__init__(outer.builder, outer.names)
        self.outer, self.varies = outer, varies
        self.lists: dict[str, str] = {}  # text of a value: the name of its list of values, one for each unit
        for node in given:
            if node.role == "fresh":
                self.text[node] = f"unit.starts[{node.name}][i]"
            elif not self.is_tile(node):
                self.text[node] = outer.text[node]
            else:
                self.text[node] = self._of_unit(node, self.held(outer.text[node], node.axes))

    def layout(self, axes: Axes) -> Axes:
        match axes:
            case ():
                return ("", "")
            case ("t",):
                return ("t", "")
            case (x,):
                return ("", x)
        return axes

    def held(self, text: str, axes: Axes) -> str:
        """A tensor with just these axes as the loop holds it."""
        return aligned(text, axes, self.layout(axes))

    def bare(self, text: str, axes: Axes) -> str:
        """A tensor with just these axes, from the one that the loop holds."""
        index = ", ".join(":" if x else "0" for x in self.layout(axes))
        return text if "" not in self.layout(axes) else f"{text}[..., {index}]"

    def operand(self, node: Node, target: Axes) -> str:
        if not self.is_tile(node):
            return self.text[node]
        wanted = self.layout(target)
        if not set(node.axes) <= set(wanted):
            return self.text[node]
        if node in self.outer.text and node.role != "fresh":
            return self._of_unit(node, aligned(self.outer.text[node], node.axes, wanted))
        if len(wanted) > 2:
            return aligned(self.bare(self.text[node], node.axes), node.axes, wanted)
        turned = len(node.axes) == 1 and self.layout(node.axes)[::-1].index(node.axes[0]) == wanted.index(node.axes[0])
        return f"{self.text[node]}.mT" if turned else self.text[node]

    def reduced(self, text: str, axes: Axes, node: Node) -> str:
        if len(axes) > 2:
            return self.held(super().reduced(text, axes, node), node.axes)
        held, left = self.layout(axes), self.layout(node.axes)
        dims = _dims(held, node.reduced)
        turned = ".mT" if any(x and held.index(x) != left.index(x) for x in left) else ""
        return f"{text}.{'amax' if node.op == 'amax' else 'sum'}({dims}, keepdim=True){turned}"

    def _times_vector(self, node: Node) -> str:
        vector, matrix = sorted(node.args, key=lambda n: len(n.axes))
        (k,), column = node.reduced, node.axes == ("t",)
        first = f"{self.text[matrix]}{'.mT' if (matrix.axes[-1] == k) != column else ''}"
        second = f"{self.text[vector]}{'.mT' if (k == 't') != column else ''}"
        return self._product(node, *((first, second) if column else (second, first)))

    def before(self, loop: Iterable[str]) -> list[str]:
        """The lines that make what a loop takes by unit."""
        used = {word for line in loop for word in re.findall(r"\w+", line)}
        return [f"{name} = _by_unit({text}, unit.heads)" for text, name in self.lists.items() if name in used]

    def is_bmm(self, node: Node) -> bool:
        return node.op == "contract" and is_matrix_product(node) and len(node.axes) == 2

    def _of_unit(self, node: Node, text: str) -> str:
        if text not in self.lists:
            wish = text.partition("[")[0].removeprefix("unit.")
            self.lists[text] = self.names.get(f"{wish}_at" if wish.isidentifier() else "x_at")
        return f"{self.lists[text]}[{'i' if node in self.varies else '0'}]"
