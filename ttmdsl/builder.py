"""Makes values of the IR: each once, its axes in canonical order, with the cheap algebra applied on the way.

Input: the dims of a layer, and values. Output: `Node`s. Sums of products become contractions, factors that lack a
summed axis are pulled out, signs and expands stay outside, zeros and ones vanish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from ttmdsl.ir import (
    ELEMENTWISE,
    MASKS,
    REDUCING,
    TOKEN_AXES,
    Axes,
    Node,
    Role,
    TokenMask,
    base_dim,
    constant,
    factors,
    is_zero,
    reachable,
)


class Builder:
    """Makes nodes, each once, in canonical axis order, with the cheap algebra applied on the way."""

    def __init__(self, dims: Iterable[str]) -> None:
        self._rank: dict[str, int] = {}
        for axis in TOKEN_AXES:
            self._rank[axis] = len(self._rank)
        for dim in dims:
            self._rank[dim] = len(self._rank)
            self._rank[dim + "'"] = len(self._rank)
            self._rank[dim + "''"] = len(self._rank)
        self._interned: dict[tuple[object, ...], Node] = {}
        self.labels: dict[Node, str] = {}

    def fork(self) -> Builder:
        """A builder that has all values of this one, and of which this one has no new ones."""
        other = Builder(())
        other._rank, other._interned, other.labels = self._rank, dict(self._interned), dict(self.labels)
        return other

    # -- construction ----------------------------------------------------------------------------------------

    def order(self, axes: Iterable[str]) -> Axes:
        """The axes without repeats, in canonical order."""
        return tuple(sorted(set(axes), key=self._rank.__getitem__))

    def make(self, op: str, args: tuple[Node, ...], axes: Iterable[str], *attr: object) -> Node:
        """The node with these parts, without any algebra."""
        ordered = self.order(axes)
        key = (op, args, ordered, attr)
        node = self._interned.get(key)
        if node is None:
            node = Node(len(self._interned), op, args, ordered, attr)
            self._interned[key] = node
        return node

    def label(self, node: Node, name: str) -> Node:
        """Names a value in generated code, if it has no name yet."""
        if node.op not in ("leaf", "const"):
            self.labels.setdefault(node, name)
        return node

    def leaf(self, role: Role, name: str, axes: Iterable[str]) -> Node:
        return self.make("leaf", (), axes, role, name)

    def const(self, value: float) -> Node:
        return self.make("const", (), (), float(value))

    def size(self, dim: str) -> Node:
        return self.make("size", (), (), dim)

    def _elementwise(self, op: str, *args: Node, attr: tuple[object, ...] = ()) -> Node:
        number = folded(op, *map(constant, args))
        if number is not None:
            return self.expand(self.const(number), (a for x in args for a in x.axes))
        bare = tuple(x.args[0] if x.op == "expand" else x for x in args)  # expands stay outside
        value = self.make(op, bare, (a for x in bare for a in x.axes), *attr)
        return self.expand(value, (a for x in args for a in x.axes))

    def add(self, a: Node, b: Node) -> Node:
        for x, y in ((a, b), (b, a)):
            if is_zero(x):
                return self.expand(y, x.axes)
        if a.value is not None and b.value is not None:
            return self.const(a.value + b.value)
        if b.op == "neg" and b.args[0] is a:
            return self.zero(a.axes)
        return self._elementwise("add", a, b)

    def sub(self, a: Node, b: Node) -> Node:
        return self.add(a, self.neg(b))

    def neg(self, a: Node) -> Node:
        if a.op == "neg":
            return a.args[0]
        number = constant(a)
        if number is not None:
            return self.expand(self.const(-number), a.axes)
        if a.op == "expand":
            return self.expand(self.neg(a.args[0]), a.axes)
        return self._elementwise("neg", a)

    def mul(self, a: Node, b: Node) -> Node:
        for x, y in ((a, b), (b, a)):
            if x.value == 1:
                return y
            if x.value == -1:
                return self.neg(y)
            if is_zero(x):
                return self.zero((*x.axes, *y.axes))
        if a.value is not None and b.value is not None:
            return self.const(a.value * b.value)
        for i, x in enumerate((a, b)):  # signs stay outside of products
            inner = x.args[0] if x.op in ("neg", "expand") else x
            if x.op == "neg" or inner.op == "neg":
                bare = inner if x.op == "neg" else self.expand(inner.args[0], x.axes)
                return self.neg(self.mul(bare, b) if i == 0 else self.mul(a, bare))
        for x, y in ((a, b), (b, a)):
            if x.op == "mask" and x.attr[1] == 0 and constant(x.args[0]) is not None:
                return self.mask(self.mul(x.args[0], y), x.attr[0])
            if x.op == "expand" and set(x.axes) <= set(y.axes):
                return self.mul(x.args[0], y)
        # keep small factors together, so that a scalar never multiplies a matrix twice
        if len(b.axes) < len(a.axes):
            a, b = b, a
        if b.op == "mul" and set(a.axes) <= set(b.args[0].axes) and len(b.args[0].axes) < len(b.axes):
            return self.mul(self.mul(a, b.args[0]), b.args[1])
        return self._elementwise("mul", a, b)

    def zero(self, axes: Iterable[str]) -> Node:
        return self.expand(self.const(0.0), axes)

    def div(self, a: Node, b: Node) -> Node:
        return self.mul(a, self.recip(b))

    def recip(self, a: Node) -> Node:
        if a.op == "sqrt":
            return self.rsqrt(a.args[0])
        return self._elementwise("recip", a)

    def rsqrt(self, a: Node) -> Node:
        return self._elementwise("rsqrt", a)

    def pow(self, a: Node, exponent: float) -> Node:
        match exponent:
            case 0:
                return self.expand(self.const(1.0), a.axes)
            case 1:
                return a
            case 2:
                return self.mul(a, a)
            case 3:
                return self.mul(a, self.mul(a, a))
            case 0.5:
                return self.map("sqrt", a)
            case -0.5:
                return self.rsqrt(a)
            case -1:
                return self.recip(a)
            case -1.5:
                return self.pow(self.rsqrt(a), 3)
            case -2:
                return self.pow(self.recip(a), 2)
            case _ if float(exponent).is_integer() and abs(exponent) <= 16:  # of a negative number too
                if exponent < 0:
                    return self.pow(self.recip(a), -exponent)
                return self.mul(self.pow(a, exponent % 2), self.pow(self.mul(a, a), exponent // 2))
            case _:
                number = constant(a)
                if number is not None and number > 0:
                    return self.expand(self.const(number**exponent), a.axes)
                return self._elementwise("pow", a, attr=(float(exponent),))

    def map(self, op: str, *args: Node) -> Node:
        """An elementwise function by its name in ELEMENTWISE."""
        assert op in ELEMENTWISE, op
        x = args[0]
        if op == "exp2" and x.op in MASKS and x.attr[-1] == float("-inf") and constant(x.args[0]) is not None:
            return getattr(self, x.op)(self.map("exp2", x.args[0]), *x.attr[:-1])  # type: ignore[no-any-return]
        return self._elementwise(op, *args)

    def select(self, flag: Node, a: Node, b: Node) -> Node:
        if flag.value is not None:
            return a if flag.value else b
        return self._elementwise("select", flag, a, b)

    def expand(self, a: Node, axes: Iterable[str]) -> Node:
        axes = self.order((*a.axes, *axes))
        if axes == a.axes:
            return a
        source = a.args[0] if a.op == "expand" else a
        return self.make("expand", (source,), axes)

    def rename(self, a: Node, source: str, target: str) -> Node:
        if source not in a.axes or source == target:
            return a
        assert target not in a.axes, (a.axes, source, target)
        if a.op == "rename" and a.attr[1] == source and a.attr[0] == target:
            return a.args[0]
        if a.op == "expand":
            axes = [target if x == source else x for x in a.axes]
            return self.expand(self.rename(a.args[0], source, target), axes)
        return self.make("rename", (a,), [target if x == source else x for x in a.axes], source, target)

    def mask(self, a: Node, kind: TokenMask, fill: float = 0.0) -> Node:
        if a.op == "mask" and a.attr == (kind, fill):
            return a
        return self.make("mask", (a,), (*a.axes, "t", "s"), kind, fill)

    def diagonal(self, a: Node, by: int, axis: str = "s") -> Node:
        return a if is_zero(a) else self.make("diagonal", (a,), (*a.axes, "t", axis), by, axis)

    def behind(self, a: Node, by: int, axis: str = "s", fill: float = 0.0) -> Node:
        vanishes = any(
            x.op == "exp2" and x.args[0].op == "behind" and x.args[0].attr == (by, axis, float("-inf"))
            for x in (factors(a) if a.op == "mul" and fill == 0 else ())
        )
        return a if vanishes else self.make("behind", (a,), (*a.axes, "t", axis), by, axis, fill)

    def shift(self, a: Node, by: int, axis: str = "s") -> Node:
        source, target = ("t", axis) if "t" in a.axes else (axis, "t")
        if is_zero(a) or (by == 0 and axis == "s"):
            return self.rename(a, source, target)
        return self.make("shift", (a,), [target if x == source else x for x in a.axes], by, axis)

    def cumsum(self, a: Node, axis: str = "t", reverse: bool = False) -> Node:
        if is_zero(a):
            return a
        return self.make("cumsum", (a,), a.axes, axis, reverse)

    def amax(self, a: Node, axes: Iterable[str]) -> Node:
        over = self.order(axes)
        return self.make("amax", (a,), (x for x in a.axes if x not in over), over)

    def tri_inv(self, n: Node) -> Node:
        return self.make("tri_inv", (n,), n.axes)

    def implicit(self, x: Node, y: Node) -> Node:
        """x, with the derivative of y: of a constant, none."""
        return self.make("implicit", (x, y), x.axes)

    def decay_dot(self, q: Node, k: Node, gq: Node, gk: Node, kind: str, axis: str) -> Node:
        if is_zero(q) or is_zero(k):
            return self.zero(("t", "s"))
        return self.make("decay_dot", (q, k, gq, gk), ("t", "s"), kind, axis)

    def decay_mix(self, a: Node, k: Node, gq: Node, gk: Node, kind: str) -> Node:
        if is_zero(a) or is_zero(k):
            return self.zero(gq.axes)
        return self.make("decay_mix", (a, k, gq, gk), gq.axes, kind)

    def decay_mix_t(self, a: Node, q: Node, gq: Node, gk: Node, kind: str) -> Node:
        if is_zero(a) or is_zero(q):
            return self.zero(gk.axes)
        return self.make("decay_mix_t", (a, q, gq, gk), gk.axes, kind)

    def norm_scan(self, e: Node, g: Node, p: Node, w: Node, r: Node, a: Node, c: Node) -> Node:
        return self.make("norm_scan", (e, g, p, w, r, a, c), e.axes)

    # -- sums of products ------------------------------------------------------------------------------------

    def product(self, factors: Iterable[Node]) -> Node:
        """The factors multiplied together, small ones first."""
        result = self.const(1.0)
        for f in sorted(factors, key=lambda f: len(f.axes)):
            result = self.mul(result, f)
        return result

    def sum(self, a: Node, axes: Iterable[str]) -> Node:
        """Sum over axes; factors that lack an axis are pulled out, and products become contractions."""
        over = set(axes) & set(a.axes)
        if not over:
            return a
        if is_zero(a):
            return self.zero(x for x in a.axes if x not in over)
        if a.op == "neg":
            return self.neg(self.sum(a.args[0], over))
        if a.op == "expand":
            repeated = over - set(a.args[0].axes)
            count = self.product(self.count(x) for x in sorted(repeated))
            rest = self.sum(a.args[0], over & set(a.args[0].axes))
            return self.expand(self.mul(count, rest), (x for x in a.axes if x not in over))
        if a.op == "add" and any(over - set(x.axes) for x in a.args):
            x, y = (self.sum(self.expand(x, over), over) for x in a.args)
            return self.expand(self.add(x, y), (x for x in a.axes if x not in over))
        if a.op == "mul":
            parts = factors(a)
            repeated = over - {x for p in parts for x in p.axes}  # axes that only an expand gave the product
            return self.sum_product([*parts, *map(self.count, sorted(repeated))], over - repeated, a.axes, over)
        return self.make("sum", (a,), (x for x in a.axes if x not in over), self.order(over))

    def count(self, axis: str) -> Node:
        """How many positions an axis has."""
        assert axis not in TOKEN_AXES, "a chunk's length is a schedule, not a number of the program"
        return self.size(base_dim(axis))

    def sum_product(self, parts: list[Node], over: set[str], axes: Axes, gone: set[str]) -> Node:
        """Sum over axes of a product, one axis at a time, as contractions of two tiles; axes minus gone remain."""
        outside = [p for p in parts if not over & set(p.axes)]
        inside = [p for p in parts if over & set(p.axes)]
        keep = tuple(x for x in axes if x not in gone)
        while over and inside:
            axis = min(over, key=self._rank.__getitem__)
            having = [p for p in inside if axis in p.axes]
            inside = [p for p in inside if axis not in p.axes]
            # a factor without the axis' companions multiplies into the smaller side, so that two tiles remain
            having.sort(key=lambda p: len(p.axes))
            while len(having) > 2:
                small = having.pop(0)
                host = min(range(len(having)), key=lambda i: (len(set(small.axes) - set(having[i].axes)), -i))
                having[host] = self.mul(small, having[host])
                having.sort(key=lambda p: len(p.axes))
            if len(having) == 1:
                inside.append(self.sum(having[0], {axis}))
                over = over - {axis}
            else:
                inside.append(self.contract(having[0], having[1], {axis}))
                over = over - {axis}
        return self.expand(self.product([*outside, *inside]), keep)

    def _balanced(self, a: Node, b: Node, over: set[str]) -> tuple[Node, Node]:
        """Factors over the summed axes alone, moved from a state to the tokens' side: the state stays one tile."""
        for x, y in ((a, b), (b, a)):
            if x.op == "mul" and "t" in y.axes and "t" not in x.axes and len(x.axes) == 2:
                moved = [f for f in factors(x) if set(f.axes) <= over]
                kept = self.product(f for f in factors(x) if not set(f.axes) <= over)
                if moved and len(kept.axes) == 2:
                    other = self.mul(self.product(moved), y)
                    return (kept, other) if x is a else (other, kept)
        return a, b

    def contract(self, a: Node, b: Node, axes: Iterable[str]) -> Node:
        """Sum over axes of a * b; an operand without an axis is summed out of the other."""
        over = set(axes)
        if is_zero(a) or is_zero(b):
            return self.zero(x for x in (*a.axes, *b.axes) if x not in over)
        for x, y in ((a, b), (b, a)):
            if x.op == "neg":
                return self.neg(self.contract(x.args[0], y, over))
            missing = over - set(x.axes)
            if missing:
                return self.contract(x, self.sum(y, missing), over - missing)
        for x, y in ((a, b), (b, a)):  # now both have every axis
            if x.op == "expand" and over - set(x.args[0].axes):
                gone = over - set(x.args[0].axes)
                inner = self.contract(x.args[0], self.sum(y, gone), over - gone)
                return self.expand(inner, (z for z in (*a.axes, *b.axes) if z not in over))
            if x.value is not None:
                return self.mul(x, self.sum(y, over))
        if not over:
            return self.mul(a, b)
        for x, y in ((a, b), (b, a)):
            if x.op == "expand" and not set(x.axes) <= {*x.args[0].axes, *y.axes}:
                return self.expand(self.contract(x.args[0], y, over), (z for z in (*a.axes, *b.axes) if z not in over))
        # a factor that lacks the summed axes stays outside the product of tiles
        for x, y in ((a, b), (b, a)):
            if x.op == "mul":
                out = [f for f in factors(x) if not over & set(f.axes)]
                if out and len(out) < len(factors(x)):
                    rest = self.product(f for f in factors(x) if over & set(f.axes))
                    if set(rest.axes) | set(y.axes) >= {z for f in out for z in f.axes}:
                        return self.mul(self.product(out), self.contract(rest, y, over))
        a, b = self._balanced(a, b, over)
        if (b.axes, b.id) < (a.axes, a.id):
            a, b = b, a
        return self.make("contract", (a, b), (x for x in (*a.axes, *b.axes) if x not in over), self.order(over))

    def again(self, node: Node, new: Mapping[Node, Node]) -> Node:
        """The same operation on what its operands have become; the node, where these are as they were."""
        args = tuple(new[a] for a in node.args)
        return node if args == node.args else self.remade(node, args)

    def remade(self, node: Node, args: tuple[Node, ...]) -> Node:
        """The same operation on other operands, through the algebra."""
        match node.op:
            case "add" | "mul" | "neg" | "recip" | "rsqrt":
                return getattr(self, node.op)(*args)  # type: ignore[no-any-return]
            case "contract":
                return self.contract(args[0], args[1], node.reduced)
            case "sum":
                return self.sum(args[0], node.reduced)
            case "expand":
                return self.expand(args[0], node.axes)
            case "exp2":
                return self.map("exp2", *args)
            case "mask" if is_zero(args[0]):
                return self.zero(node.axes)
            case "cumsum" | "rename" | "behind" | "shift" | "decay_dot" | "decay_mix" | "decay_mix_t":
                return getattr(self, node.op)(*args, *node.attr)  # type: ignore[no-any-return]
            case _:
                found = (x for a in args for x in a.axes if x not in node.reduced)
                axes = found if node.op in ELEMENTWISE | REDUCING else node.axes
                return self.make(node.op, args, axes, *node.attr)


def substitute(b: Builder, root: Node, given: Mapping[Node, Node]) -> Node:
    """The value with some nodes replaced; the algebra drops what has become zero."""
    new = dict(given)
    for n in reachable([root], given):
        if n not in new:
            new[n] = b.again(n, new)
    return new[root]


_FOLDED: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "max": max,
    "min": min,
    "recip": lambda x: 1 / x,
    "exp2": lambda x: 2.0**x,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "tanh": math.tanh,
    "erf": math.erf,
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "abs": abs,
    "sign": lambda x: math.copysign(1.0, x) if x else 0.0,
    "step": lambda x: float(x > 0),
}


def folded(op: str, *numbers: float | None) -> float | None:
    """What an elementwise operation makes of constants; None where an operand is none, or there is no such number."""
    if op not in _FOLDED or None in numbers:
        return None
    try:
        return _FOLDED[op](*numbers)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
