"""The program IR: pure functions on tiles whose axes have names.

Input: nodes made through a `Builder`. Output: `Program`, read by every pass after lowering.
Knows nothing about layers, devices or code; the meaning of a layer is fixed before and the text after.

A value is a tile; its axes are names in one canonical order: token axes first (t, s, u: positions in one chunk),
then the layer's dims. Operands broadcast by name, so there is no transpose and no reshape. A token program is the same
IR without token axes. A dim that occurs twice in one tile has a primed second axis (d, d').

log2 takes 0 for a number next to it: a share that has underflowed still has a logarithm, and that a finite slope.

    node  = leaf(role, name)         per-token or per-head tensor, carry, cotangent: see Role
          | const(value) | size(dim)
          | add(a, b) | mul(a, b) | max(a, b) | min(a, b) | neg(a) | recip(a) | pow(a; exponent)
          | exp2(a) | log2(a) | sqrt(a) | rsqrt(a) | tanh(a) | erf(a) | sigmoid(a) | abs(a) | sign(a) | step(a)
          | select(flag, a, b)       flag is a 0/1 scalar
          | expand(a; axes)          the only implicit-free broadcast: repeats along new axes
          | rename(a; from, to)      the same tile under another axis name
          | sum(a; axes) | amax(a; axes)       amax is constant under differentiation (a stabilising shift)
          | contract(a, b; axes)     sum over axes of a * b
          | mask(a; kind, fill)      kind lower: keep t >= s, strict: keep t > s; elsewhere fill
          | cumsum(a; axis, reverse)
          | tri_inv(n)               (I - n)^-1 for n[t, s] that is zero unless t > s
          | newton_schulz(x; rows, steps)         X <- c0 X + c1 X X^T X + c2 (X X^T)^2 X, X X^T being [rows, rows]
          | newton_schulz_back(x, d; rows, steps) its cotangent of x from that of the result
          | decay_dot(q, k, gq, gk; mask, axis)    out[t, s] = sum_c q[t,c] k[s,c] 2^(gq[t,c] - gk[s,c]), masked
          | decay_mix(a, k, gq, gk; mask)          out[t, c] = sum_s a[t,s] k[s,c] 2^(gq[t,c] - gk[s,c]), masked
          | decay_mix_t(a, q, gq, gk; mask)        out[s, c] = sum_t a[t,s] q[t,c] 2^(gq[t,c] - gk[s,c]), masked
          | norm_scan(e, g, p, w, r, a, c)         n[t, c] = 1/|2^g_t x_{t-1} + w_t|, x_t = n_t (2^g_t x_{t-1} + w_t)
          | norm_slopes(g, p, w, r, a, c, n)       [t, s, c]: what moves norm t, of n_s; for norm_adjoint
          | norm_adjoint(slopes, n, d)             cotangent of the squared norms, from that of n

In the last three, vectors x (one for each c) are pushed by writes w_t and normalised after each; of them are given
the inner products alone: e_t = |w_t|^2 + 4^g_t |x_{t-1}|^2, p_t = x_start . w_t and
w_t . w_s = w[t,s] r_t r_s + a_t c_s + c_t a_s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Axes: TypeAlias = tuple[str, ...]
Role: TypeAlias = Literal[
    "token",  # an input or gate of `op`, one value per token
    "param",  # one value per head
    "carry",  # state at the start of the unit (chunk or token)
    "cot",  # cotangent of a per-token output
    "cocarry",  # cotangent of a carry at the end of the unit
    "live",  # 1 where the unit's token exists, else 0
    "last",  # 1 at the unit's last position, else 0
    "fresh",  # scalar: 1 where a new group of that many tokens (its name) starts with this unit
    "saved",  # a value that an earlier kernel computed for this unit
]

TOKEN_AXES: Axes = ("t", "s", "u")
ELEMENTWISE = frozenset(
    "add mul max min neg recip pow exp2 log2 sqrt rsqrt tanh erf sigmoid abs sign step select".split()
)
STRUCTURAL = frozenset(
    "leaf const size expand rename sum amax contract mask cumsum tri_inv newton_schulz newton_schulz_back"
    " decay_dot decay_mix decay_mix_t norm_scan norm_slopes norm_adjoint".split()
)
REDUCING = frozenset({"sum", "amax", "contract"})


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One value. Equality is identity: a `Builder` makes equal nodes once."""

    id: int
    op: str
    args: tuple[Node, ...]
    axes: Axes
    attr: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"v{self.id}"

    @property
    def role(self) -> str:
        """A leaf's role, else an empty string."""
        return str(self.attr[0]) if self.op == "leaf" else ""

    @property
    def name(self) -> str:
        """A leaf's name, else an empty string."""
        return str(self.attr[1]) if self.op == "leaf" else ""

    @property
    def value(self) -> float | None:
        """The number that a const holds, else None."""
        return float(self.attr[0]) if self.op == "const" else None

    @property
    def reduced(self) -> Axes:
        """The axes that a sum, amax, contract or a product under a decay per channel removes."""
        if self.op in REDUCING:
            return tuple(self.attr[0])
        if self.op == "decay_dot":
            return (str(self.attr[1]),)
        return {"decay_mix": ("s",), "decay_mix_t": ("t",)}.get(self.op, ())


def base_dim(axis: str) -> str:
    """The dim whose size an axis has; token axes have none."""
    return axis.rstrip("'")


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
                return self.mul(self.rsqrt(a), self.recip(a))
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
        if op == "exp2" and x.op == "mask" and x.attr[1] == float("-inf") and constant(x.args[0]) is not None:
            return self.mask(self.map("exp2", x.args[0]), x.attr[0])
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

    def mask(self, a: Node, kind: Literal["lower", "strict"], fill: float = 0.0) -> Node:
        if a.op == "mask" and a.attr == (kind, fill):
            return a
        return self.make("mask", (a,), (*a.axes, "t", "s"), kind, fill)

    def cumsum(self, a: Node, axis: str = "t", reverse: bool = False) -> Node:
        if is_zero(a):
            return a
        return self.make("cumsum", (a,), a.axes, axis, reverse)

    def amax(self, a: Node, axes: Iterable[str]) -> Node:
        over = self.order(axes)
        return self.make("amax", (a,), (x for x in a.axes if x not in over), over)

    def tri_inv(self, n: Node) -> Node:
        return self.make("tri_inv", (n,), n.axes)

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


def constant(node: Node) -> float | None:
    """The number that a constant of any shape holds everywhere, else None."""
    return node.args[0].value if node.op == "expand" else node.value


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


def is_zero(node: Node) -> bool:
    """A constant zero, of any shape."""
    return constant(node) == 0


def factors(node: Node) -> list[Node]:
    """The factors of a product, signs as constants; a node that is no product is its own only factor."""
    if node.op == "mul":
        return [f for x in node.args for f in factors(x)]
    if node.op == "neg":
        raise AssertionError("mul keeps signs outside")
    if node.op == "expand":
        return factors(node.args[0])
    return [node]


def addends(node: Node, whole: Callable[[Node], bool]) -> Iterator[tuple[float, list[Node]]]:
    """The node as a sum of products (number, factors), multiplied out over sums except where `whole` holds."""
    if node.op != "const" and whole(node):
        yield 1.0, [node]
        return
    match node.op:
        case "add":
            for x in node.args:
                yield from addends(x, whole)
        case "neg":
            for c, fs in addends(node.args[0], whole):
                yield -c, fs
        case "const":
            yield float(node.value or 0.0), []
        case "mul":
            x, y = node.args
            for cx, fx in addends(x, whole):
                for cy, fy in addends(y, whole):
                    yield cx * cy, [*fx, *fy]
        case "expand":
            yield from addends(node.args[0], whole)
        case _:
            yield 1.0, [node]


@dataclass(frozen=True)
class Program:
    """One unit of a recurrence: what a chunk, or a token, makes of its inputs and the carry.

    `outputs` are named values; a name `carry:P` is the carry P at the end of the unit. `unit` is "chunk" (values may
    have token axes) or "token". `dims` in canonical order.
    """

    unit: Literal["chunk", "token"]
    dims: Axes
    builder: Builder = field(compare=False, repr=False)
    outputs: dict[str, Node]

    def nodes(self) -> list[Node]:
        """All nodes that an output needs, operands first."""
        return reachable(self.outputs.values())

    def leaves(self) -> list[Node]:
        return [n for n in self.nodes() if n.op == "leaf"]

    def carries(self) -> list[Node]:
        return [n for n in self.leaves() if n.role == "carry"]

    def with_outputs(self, outputs: dict[str, Node]) -> Program:
        return Program(self.unit, self.dims, self.builder, outputs)

    def __str__(self) -> str:
        labels = self.builder.labels
        lines = [f"program {self.unit}({', '.join(self.dims)})"]
        for n in self.nodes():
            attr = "; " + ", ".join(map(str, n.attr)) if n.attr else ""
            call = f"{n.op}({', '.join(map(repr, n.args))}{attr})"
            note = f"  # {labels[n]}" if n in labels else ""
            lines.append(f"  {n!r}[{' '.join(n.axes)}] = {call}{note}")
        lines += [f"  return {k} = {v!r}" for k, v in self.outputs.items()]
        return "\n".join(lines)


def reachable(
    roots: Iterable[Node],
    given: Container[Node] = (),
    operands: Callable[[Node], tuple[Node, ...]] = lambda node: node.args,
) -> list[Node]:
    """The roots and all they need, operands before users, each once; not looking below what is given."""
    seen: dict[Node, None] = {}
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if node in seen:
            continue
        if ready or node in given:
            seen[node] = None
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(operands(node)))
    return list(seen)


def depends_on(roots: Iterable[Node], sources: Iterable[Node]) -> set[Node]:
    """Those nodes under the roots that depend on a source (a source under the roots included)."""
    origins = set(sources)
    tainted: set[Node] = set()
    for node in reachable(roots):
        if node in origins or any(a in tainted for a in node.args):
            tainted.add(node)
    return tainted


def verify(program: Program) -> None:
    """Raises AssertionError where a node breaks the grammar: a bug of the compiler, never of a spec."""
    held: dict[Node, set[str]] = {}  # axes along which a value varies, or could: those that no expand gave it
    for n in program.nodes():
        held[n] = {*n.axes}
        if n.op in ELEMENTWISE or n.op in ("expand", "contract"):
            held[n] &= {x for a in n.args for x in held[a]}
        assert n.op == "expand" or held[n] == {*n.axes}, (n.op, n.axes, held[n])
        assert n.op in ELEMENTWISE | STRUCTURAL, n.op
        union = {x for a in n.args for x in a.axes}
        if n.op in ELEMENTWISE:
            assert set(n.axes) == union, (n.op, n.axes, union)
        elif n.op in REDUCING:
            over = set(n.reduced)
            assert over, "an empty reduction"
            assert set(n.axes) == union - over, (n.op, n.axes, union, over)
            assert all(over <= set(a.axes) for a in n.args), (n.op, over, [a.axes for a in n.args])
        if program.unit == "token":
            assert not set(n.axes) & set(TOKEN_AXES), (n.op, n.axes)
        assert n.axes == program.builder.order(n.axes), n.axes
    for name, value in program.outputs.items():
        if name.startswith("carry:"):
            leaf = next((c for c in program.carries() if c.name == name[6:]), None)
            assert leaf is None or leaf.axes == value.axes, (name, value.axes)
