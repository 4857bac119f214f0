"""An interpreter of the IR, on float64 tensors: what a program means, apart from every printer.

Input: nodes, a tensor for each leaf, the length of each axis. Output: a tensor for each node, its dims the node's axes.
Autograd goes through it. Tiles may be longer than their dims (`tile`), as in the Triton kernels: then sums leave out
what is beyond a dim's end, leaves are padded with zeros there, and functions that are infinite at 0 give 0, just as the
emitter has it; everything else is computed on whatever the padding holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ttmdsl.ir import PAST, UNIT_AXES, Axes, Node, base_dim, groups, reachable
from ttmdsl.padding import singular

BEFORE = 3  # tokens before a chunk that windows reach

SCALAR: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "neg": torch.neg,
    "recip": torch.reciprocal,
    "exp2": torch.exp2,
    "log2": lambda x: torch.log2(x.clamp(min=torch.finfo(x.dtype).tiny ** 0.8)),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "abs": torch.abs,
    "sign": torch.sign,
    "step": lambda x: (x > 0).to(x.dtype),
    "select": lambda flag, x, y: torch.where(flag > 0, x, y),
}


def spread(x: Tensor, axes: Axes, target: Axes) -> Tensor:
    """The tensor with a dim of one for each of the target's axes that it lacks."""
    for i, axis in enumerate(target):
        if axis not in axes:
            x = x.unsqueeze(i)
    return x


class Interpreter:
    """Evaluates nodes, each once."""

    def __init__(self, leaves: Mapping[Node, Tensor], sizes: Mapping[str, int], tile: int = 0) -> None:
        self.leaves, self.sizes, self.tile = leaves, {PAST: BEFORE, **sizes}, tile
        self.known: dict[Node, Tensor] = {}

    def length(self, axis: str) -> int:
        """How many positions a tile has along an axis."""
        return self.sizes["t"] if axis in UNIT_AXES else max(self.sizes[base_dim(axis)], self.tile)

    def inside(self, axes: Axes) -> Tensor:
        """True where no axis is beyond its dim's end."""
        keep = torch.ones([self.length(x) for x in axes], dtype=torch.bool)
        for i, x in enumerate(axes):
            if x not in UNIT_AXES:
                keep &= spread(torch.arange(self.length(x)) < self.sizes[base_dim(x)], (x,), axes[i:])
        return keep

    def __call__(self, node: Node) -> Tensor:
        """The node's value."""
        for n in reachable([node]):
            if n not in self.known:
                value = self._value(n)
                self.known[n] = value.expand([self.length(x) for x in n.axes])
        return self.known[node]

    def _leaf(self, node: Node) -> Tensor:
        given = self.leaves[node]
        padded = given.new_zeros([self.length(x) for x in node.axes])
        padded[tuple(slice(n) for n in given.shape)] = given
        return padded

    def _value(self, node: Node) -> Tensor:
        args, axes = [self.known[a] for a in node.args], node.axes
        both = [spread(x, a.axes, axes) for x, a in zip(args, node.args, strict=True)] if node.op in SCALAR else []
        match node.op:
            case "leaf":
                return self._leaf(node)
            case "const":
                return torch.tensor(float(str(node.attr[0])), dtype=torch.float64)
            case "size":
                return torch.tensor(float(self.sizes[str(node.attr[0])]), dtype=torch.float64)
            case "pow":
                return self._tame(node, args[0] ** float(str(node.attr[0])))
            case op if op in SCALAR:
                return self._tame(node, SCALAR[op](*both))
            case "expand":
                return spread(args[0], node.args[0].axes, axes)
            case "rename":
                moved = [node.attr[1] if x == node.attr[0] else x for x in node.args[0].axes]
                return args[0].permute([moved.index(x) for x in axes])
            case "sum":
                return self._sum(args[0], node.args[0].axes, node.reduced)
            case "amax":
                x, inner = args[0], node.args[0].axes
                x = x.masked_fill(~self.inside(inner), -torch.inf)
                return x.amax([inner.index(a) for a in node.reduced])
            case "contract":
                return self._product(node.args[0], node.args[1], node.reduced, axes)
            case "mask":
                return spread(args[0], node.args[0].axes, axes).masked_fill(
                    ~self.keep(str(node.attr[0]), axes), float(str(node.attr[1]))
                )
            case "diagonal":
                ago = self._ago(str(node.attr[1]), axes)
                return torch.where(ago == int(node.attr[0]), spread(args[0], node.args[0].axes, axes), 0.0)
            case "behind":
                by, axis, fill = int(node.attr[0]), str(node.attr[1]), float(str(node.attr[2]))
                return torch.where(self._ago(axis, axes) >= by, spread(args[0], node.args[0].axes, axes), fill)
            case "shift":
                by, axis = int(node.attr[0]), str(node.attr[1])
                (source,) = node.args[0].axes
                both = tuple(x for x in (PAST, "t", "s") if x in (source, *axes))
                found = torch.where(self._ago(axis, both) == by, spread(args[0], (source,), both), 0.0)
                return found.sum(both.index(source))
            case "cumsum":
                dim = axes.index(str(node.attr[0]))
                return args[0].flip(dim).cumsum(dim).flip(dim) if node.attr[1] else args[0].cumsum(dim)
            case "tri_inv":
                return torch.linalg.inv(torch.eye(self.sizes["t"], dtype=torch.float64) - args[0])
            case "implicit":
                return args[0].detach() + args[1] - args[1].detach()
            case "newton_schulz":
                return self._newton_schulz(node, args[0])
            case "newton_schulz_back":
                x = args[0].detach().requires_grad_()
                with torch.enable_grad():
                    return torch.autograd.grad(self._newton_schulz(node, x), x, args[1])[0]
            case "norm_scan":
                return self._tame(node, self._norms(*args))
            case "norm_slopes":
                return self._norm_slopes(*args)
            case "norm_adjoint":
                eye = torch.eye(len(args[1]), dtype=torch.float64)
                return torch.linalg.solve(eye + args[0].permute(2, 1, 0), args[1].T[..., None])[..., 0].T
            case "decay_dot" | "decay_mix" | "decay_mix_t":
                return self._decayed(node, args)
            case _:
                raise AssertionError(node.op)

    def _tame(self, node: Node, value: Tensor) -> Tensor:
        return value.where(self.inside(node.axes), 0.0) if singular(node) else value

    def keep(self, kind: str, axes: Axes) -> Tensor:
        """Where a mask of this kind keeps what it masks."""
        n = self.sizes["t"]
        if group := groups(kind):
            place = torch.arange(n) // group
            return spread(place[:, None] > place, ("t", "s"), axes)
        lower = torch.ones(n, n, dtype=torch.bool).tril(0 if kind == "lower" else -1)
        return spread(lower, ("t", "s"), axes)

    def _ago(self, axis: str, axes: Axes) -> Tensor:
        """How many tokens before t one of the axis is; those before the first token come last one first."""
        t, other = torch.arange(self.length("t")), torch.arange(self.length(axis))
        if axis == "s":
            return spread(t, ("t",), axes) - spread(other, (axis,), axes)
        return spread(t + 1, ("t",), axes) + spread(other, (axis,), axes)

    def _sum(self, x: Tensor, axes: Axes, over: Axes) -> Tensor:
        dims = [axes.index(a) for a in over]
        beyond = ~self.inside(tuple(over)) if over else torch.tensor(False)
        return x.masked_fill(spread(beyond, tuple(over), axes), 0.0).sum(dims)

    def _product(self, a: Node, b: Node, over: Axes, axes: Axes) -> Tensor:
        union = tuple(sorted({*a.axes, *b.axes}, key=lambda x: (*axes, *over).index(x)))
        x, y = (self._ordered(n, union) for n in (a, b))
        return self._sum(x * y, union, over)

    def _ordered(self, node: Node, target: Axes) -> Tensor:
        """The value with its axes in the target's order."""
        present = [x for x in target if x in node.axes]
        return spread(self.known[node].permute([node.axes.index(x) for x in present]), tuple(present), target)

    def _newton_schulz(self, node: Node, x: Tensor) -> Tensor:
        """Some steps of the odd polynomial that moves singular values towards 1; beyond the ends it takes zeros."""
        rows, steps = str(node.attr[0]), int(str(node.attr[1]))
        x = x.where(self.inside(node.axes), 0.0)
        x = x if node.axes[0] == rows else x.mT
        for _ in range(steps):
            gram = x @ x.mT
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        return x if node.axes[0] == rows else x.mT

    def _norms(self, e: Tensor, g: Tensor, p: Tensor, w: Tensor, r: Tensor, a: Tensor, c: Tensor) -> Tensor:
        """1 / |2^g_t x + w_t| token by token, from the inner products: `seen` holds those of x with every write."""
        seen, norms = p, []
        for t in range(len(e)):
            mu = torch.exp2(g[t])
            norms.append((e[t] + 2 * mu * seen[t]) ** -0.5)
            overlap = w[t][:, None] * r[t] * r + a[t] * c + c[t] * a
            seen = norms[-1] * (mu * seen + overlap)
        return torch.stack(norms)

    def _norm_slopes(self, w: Tensor, x: Tensor, r: Tensor, a: Tensor, c: Tensor, *earlier_and_logs: Tensor) -> Tensor:
        """[t, s, channel]: what is added up to s under the decays to t; masked before the exponential."""
        r_u, a_u, c_u, gq, gk = earlier_and_logs
        strict = self.keep("strict", ("t", "s"))[:, :, None]
        decay = torch.exp2((gq[:, None] - gk).masked_fill(~strict, -torch.inf))
        added = w[:, :, None] * (r[:, None] * r_u) + a[:, None] * c_u + c[:, None] * a_u
        return (x[:, None] + (decay * added).cumsum(1)).where(strict, 0.0)

    def _decayed(self, node: Node, args: list[Tensor]) -> Tensor:
        """The three products under a decay per channel, over [t, s, channel]; masked before the exponential."""
        first, second, gq, gk = args
        gap = gq[:, None, :] - gk[None, :, :]
        decay = torch.exp2(gap.masked_fill(~self.keep(str(node.attr[0]), ("t", "s"))[:, :, None], -torch.inf))
        match node.op:
            case "decay_dot":
                terms = first[:, None, :] * second[None, :, :] * decay
                return self._sum(terms, ("t", "s", *node.reduced), node.reduced)
            case "decay_mix":
                return (first[:, :, None] * second[None, :, :] * decay).sum(1)
            case _:
                return (first[:, :, None] * second[:, None, :] * decay).sum(0)


def draw_leaf(node: Node, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """A value for a leaf: small numbers, negative logarithms of decays, flags where the role asks for them."""
    shape = [sizes["t"] if x in UNIT_AXES else {PAST: BEFORE, **sizes}[base_dim(x)] for x in node.axes]
    match node.role:
        case "live":
            return torch.ones(shape, dtype=torch.float64)
        case "last":
            return torch.eye(sizes["t"], dtype=torch.float64)[-1]
        case "fresh":
            return torch.tensor(1.0, dtype=torch.float64)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7
    return -x.abs() if node.name.startswith("log_") else x
