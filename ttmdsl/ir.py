"""The program IR: pure functions on tiles whose axes have names.

Input: nodes made through a `Builder`. Output: `Program`, read by every pass after lowering.
Knows nothing about layers, devices or code; the meaning of a layer is fixed before and the text after.

A value is a tile; its axes are names in one canonical order: token axes first (past__: tokens before one chunk, the
last one first; t, s, u: positions in it), then the layer's dims. Operands broadcast by name, so there is no transpose
and no reshape. A token program is the same IR without token axes. A dim that occurs twice in one tile has a primed
second axis (d, d').

log2 takes 0 for a number next to it: a share that has underflowed still has a logarithm, and that a finite slope.

    node  = leaf(role, name)         per-token or per-head tensor, carry, cotangent: see Role
          | const(value) | size(dim)
          | add(a, b) | mul(a, b) | max(a, b) | min(a, b) | neg(a) | recip(a) | pow(a; exponent)
          | exp2(a) | log2(a) | sqrt(a) | rsqrt(a) | tanh(a) | erf(a) | sigmoid(a) | softplus(a) | abs(a)
          | sign(a) | step(a)
          | select(flag, a, b)       flag is a 0/1 scalar
          | expand(a; axes)          the only implicit-free broadcast: repeats along new axes
          | rename(a; from, to)      the same tile under another axis name
          | sum(a; axes) | amax(a; axes)       amax is constant under differentiation (a stabilising shift)
          | contract(a, b; axes)     sum over axes of a * b
          | mask(a; kind, fill)      kind lower: keep t >= s, strict: keep t > s, earlier4: keep
                                     t // 4 > s // 4; elsewhere fill
          | diagonal(a; by, axis)    keep where a token of the axis, s or past__, is `by` tokens before t; elsewhere 0
          | behind(a; by, axis, fill)      keep where it is so many, or more; elsewhere fill
          | shift(a; by, axis)       from t to the axis, or back: at a token of one, a where the other's is `by` tokens
                                     after it, or before; 0 where there is none
          | cumsum(a; axis, reverse)
          | tri_inv(n)               (I - n)^-1 for n[t, s] that is zero unless t > s
          | implicit(x, y)           x, with the derivative of y; in no program that is done
          | newton_schulz(x; rows, steps)         X <- c0 X + c1 X X^T X + c2 (X X^T)^2 X, X X^T being [rows, rows]
          | newton_schulz_back(x, d; rows, steps) its cotangent of x from that of the result
          | decay_dot(q, k, gq, gk; mask, axis)    out[t, s] = sum_c q[t,c] k[s,c] 2^(gq[t,c] - gk[s,c]), masked
          | decay_mix(a, k, gq, gk; mask)          out[t, c] = sum_s a[t,s] k[s,c] 2^(gq[t,c] - gk[s,c]), masked
          | decay_mix_t(a, q, gq, gk; mask)        out[s, c] = sum_t a[t,s] q[t,c] 2^(gq[t,c] - gk[s,c]), masked
          | norm_scan(e, g, p, w, r, a, c)         n[t, c] = 1/|2^g_t x_{t-1} + w_t|, x_t = n_t (2^g_t x_{t-1} + w_t)
          | norm_slopes(w, x, r, a, c, R, A, C, gq, gk)  m[t, s, c] = x_t
                         + sum_{u <= s} 2^(gq_t - gk_u) (w[t,u] r_t R_u + a_t C_u + c_t A_u), for s < t
          | norm_adjoint(m, d)                     y[s, c] = d_s - sum_{t > s} m[t, s] y_t

In norm_scan, vectors x (one for each c) are pushed by writes w_t and normalised after each; of them are given
the inner products alone: e_t = |w_t|^2 + 4^g_t |x_{t-1}|^2, p_t = x_start . w_t and
w_t . w_s = w[t,s] r_t r_s + a_t c_s + c_t a_s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from ttmdsl.builder import Builder

Axes: TypeAlias = tuple[str, ...]
Role: TypeAlias = Literal[
    "token",  # an input or gate of `op`, one value per token
    "param",  # one value per head
    "before",  # an input or gate of the tokens before the unit
    "carry",  # state at the start of the unit (chunk or token)
    "cot",  # cotangent of a per-token output
    "cocarry",  # cotangent of a carry at the end of the unit
    "live",  # 1 where the unit's token exists, else 0
    "seen",  # the same of the tokens before the unit
    "last",  # 1 at the unit's last position, else 0
    "fresh",  # scalar: 1 where a new group of that many tokens (its name) starts with this unit
    "saved",  # a value that an earlier kernel computed for this unit
]

TokenMask: TypeAlias = str  # which pairs of tokens a mask keeps: "lower", "strict", or those of `earlier`


def earlier(group: int) -> TokenMask:
    """The mask that keeps s where it is in a group of so many tokens before the group of t."""
    return "strict" if group == 1 else f"earlier{group}"


def groups(kind: TokenMask) -> int:
    """How many tokens a group has by which such a mask looks; 0 where it is none."""
    return int(kind.removeprefix("earlier")) if kind.startswith("earlier") else 0


UNIT_AXES: Axes = ("t", "s", "u")
PAST = "past__"
TOKEN_AXES: Axes = (PAST, *UNIT_AXES)  # these few are no columns of a product, which Triton wants many of
# products of tiles under a decay per channel
DECAYED = frozenset({"decay_dot", "decay_mix", "decay_mix_t"})
# what takes much longer than a product of tiles
DEAR = DECAYED | {"tri_inv"}
ELEMENTWISE = frozenset(
    "add mul max min neg recip pow exp2 log2 sqrt rsqrt tanh erf sigmoid softplus abs sign step select".split()
)
STRUCTURAL = frozenset(
    "leaf const size expand rename sum amax contract mask diagonal behind shift cumsum tri_inv implicit newton_schulz"
    " newton_schulz_back decay_dot decay_mix decay_mix_t norm_scan norm_slopes norm_adjoint".split()
)
REDUCING = frozenset({"sum", "amax", "contract"})
_ALONG = frozenset({"sum", "amax", "cumsum", "shift", "tri_inv"})  # what goes along an axis, and needs it whole
MASKS = frozenset({"mask", "behind"})  # what keeps a part of a tile of tokens; their last attribute fills the rest


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


def constant(node: Node) -> float | None:
    """The number that a constant of any shape holds everywhere, else None."""
    return node.args[0].value if node.op == "expand" else node.value


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


def in_order(values: Iterable[Node]) -> tuple[Node, ...]:
    """The values, repeats included, in the order of their ids: the same however they were come by."""
    return tuple(sorted(values, key=lambda n: n.id))


def is_large(node: Node) -> bool:
    """Whether a value is as large as a state, or larger."""
    return len(node.axes) > 2 or (len(node.axes) == 2 and node.axes[0] not in TOKEN_AXES)


def is_token_tile(node: Node) -> bool:
    """Whether a value is a tile of tokens: with each other, or times a dim."""
    return len(node.axes) == 2 and not is_large(node)


def has_dim(node: Node) -> bool:
    """Whether a value lies along a dim; otherwise it is a number, or lies along tokens alone."""
    return not set(node.axes) <= set(TOKEN_AXES)


def is_product(node: Node) -> bool:
    """Whether a value is a product of two tiles."""
    return node.op == "contract" and len(node.axes) == 2


def is_matmul(node: Node) -> bool:
    """Whether a value is a product of two matrices over one axis, which is all that they share."""
    if node.op != "contract" or len(node.reduced) != 1:
        return False
    a, b = node.args
    return len(a.axes) == len(b.axes) == 2 and set(a.axes) & set(b.axes) == set(node.reduced)


def original(node: Node) -> Node:
    """The value that this is under other names of its axes."""
    while node.op == "rename":
        node = node.args[0]
    return node


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
    have token axes) or "token". `dims` in canonical order; `inner` is one that memories have and no tensor, or "".
    """

    unit: Literal["chunk", "token"]
    dims: Axes
    builder: Builder = field(compare=False, repr=False)
    outputs: dict[str, Node]
    inner: str = ""

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """All nodes that an output needs, operands first."""
        return reachable(self.outputs.values())

    def leaves(self) -> list[Node]:
        return [n for n in self.nodes if n.op == "leaf"]

    def carries(self) -> list[Node]:
        return [n for n in self.leaves() if n.role == "carry"]

    def ends(self) -> dict[str, Node]:
        """The carries at the end of the unit, by name; of a backward pass, their cotangents at its start."""
        return {k[6:]: v for k, v in self.outputs.items() if k.startswith("carry:")}

    def with_outputs(self, outputs: dict[str, Node]) -> Program:
        return Program(self.unit, self.dims, self.builder, outputs, self.inner)

    def __str__(self) -> str:
        labels = self.builder.labels
        lines = [f"program {self.unit}({', '.join(self.dims)})"]
        for n in self.nodes:
            attr = "; " + ", ".join(map(str, n.attr)) if n.attr else ""
            call = f"{n.op}({', '.join(map(repr, n.args))}{attr})"
            note = f"  # {labels[n]}" if n in labels else ""
            lines.append(f"  {n!r}[{' '.join(n.axes)}] = {call}{note}")
        lines += [f"  return {k} = {v!r}" for k, v in self.outputs.items()]
        return "\n".join(lines)


def reachable(
    roots: Iterable[Node],
    given: Container[Node] = (),
    operands: Callable[[Node], tuple[Node, ...]] | None = None,
) -> list[Node]:
    """The roots and all they need, operands before users, each once; not looking below what is given. `operands`: what
    a value needs, if not all its arguments."""
    found: list[Node] = []
    begun: set[Node] = set()
    stack: list[Node | None] = [*reversed([*roots])]
    while stack:
        node = stack.pop()
        if node is None:  # the operands of the next are done
            done = stack.pop()
            assert done
            found.append(done)
        elif node not in begun:
            begun.add(node)
            below = () if node in given else operands(node) if operands else node.args
            if below:
                stack += (node, None)
                stack += below[::-1]
            else:
                found.append(node)
    return found


def nearest(node: Node, wanted: Callable[[Node], bool], skipped: Callable[[Node], bool]) -> list[Node]:
    """The wanted values that a value follows from by way of no other such, or itself; nothing below what is skipped."""
    if skipped(node):
        return []
    if wanted(node):  # as most are
        return [node]
    found: list[Node] = []
    stack, seen = [*node.args], {node}
    while stack:
        n = stack.pop()
        if n in seen or skipped(n):
            continue
        seen.add(n)
        if wanted(n):
            found.append(n)
        else:
            stack.extend(n.args)
    return found


def users(nodes: Iterable[Node], given: Container[Node] = ()) -> dict[Node, list[Node]]:
    """What takes each of some values, among them; what is given takes none."""
    nodes = list(nodes)
    found: dict[Node, list[Node]] = {n: [] for n in nodes}
    for n in nodes:
        for a in () if n in given else n.args:
            found[a].append(n)
    return found


def depends_on(
    roots: Iterable[Node],
    sources: Iterable[Node],
    operands: Callable[[Node], tuple[Node, ...]] | None = None,
) -> set[Node]:
    """Those nodes under the roots that depend on a source (a source under the roots included)."""
    origins = set(sources)
    tainted: set[Node] = set()
    for node in reachable(roots, operands=operands):
        if node in origins or not tainted.isdisjoint(operands(node) if operands else node.args):
            tainted.add(node)
    return tainted


@functools.lru_cache(1 << 14)
def operands(node: Node) -> tuple[Node, ...]:
    """What a value is made of; of a tile with three axes, which no kernel holds, what that is made of."""
    return tuple(x for a in node.args for x in (a.args if len(a.axes) > 2 else (a,)))


def tied(program: Program, role: Role, roots: Iterable[Node] | None = None) -> set[Node]:
    """Nodes that depend on what is handed from unit to unit: the carries, or in a backward program their cotangents;
    those under the roots, or under any output."""
    nodes = program.outputs.values() if roots is None else roots
    return depends_on(nodes, [n for n in program.leaves() if n.role == role])


def verify(program: Program) -> None:
    """Raises AssertionError where a node breaks the grammar: a bug of the compiler, never of a spec."""
    held: dict[Node, set[str]] = {}  # axes along which a value varies, or could: those that no expand gave it
    for n in program.nodes:
        held[n] = {*n.axes}
        if n.op in ELEMENTWISE or n.op in ("expand", "contract"):
            held[n] &= {x for a in n.args for x in held[a]}
        assert n.op == "expand" or held[n] == {*n.axes}, (n.op, n.axes, held[n])
        assert n.op in ELEMENTWISE | STRUCTURAL, n.op
        assert n.op not in _ALONG or n.args[0].op != "expand", (n.op, n.args[0].axes)
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
