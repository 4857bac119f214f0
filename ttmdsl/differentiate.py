"""Reverse mode over programs: a program and cotangents in, the program of its gradients out.

Input: `Program`. Output: a joint `Program` that recomputes what it needs from the same leaves, with the extra leaves
cot (per-token outputs) and cocarry (carries at the unit's end), and outputs `d:<leaf>` and `carry:<cocarry>`.
The same table of rules serves every layer; nothing here knows which layer it differentiates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ttmdsl.builder import Builder
from ttmdsl.ir import Node, Program, depends_on, reachable

Contribution: TypeAlias = tuple[Node, Node]
Rule: TypeAlias = Callable[[Builder, Node, Node], Iterator[Contribution]]

LN2 = math.log(2.0)


def _add(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    yield from ((a, d) for a in n.args)


def _neg(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    yield n.args[0], b.neg(d)


def _mul(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    x, y = n.args
    yield x, b.mul(d, y)
    yield y, b.mul(d, x)


def _extremum(sign: float) -> Rule:
    def rule(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
        x, y = n.args
        first = b.map("step", b.mul(b.const(sign), b.sub(x, y)))
        yield x, b.mul(d, first)
        yield y, b.mul(d, b.sub(b.const(1.0), first))

    return rule


def _unary(slope: Callable[[Builder, Node, Node], Node]) -> Rule:
    """An elementwise function whose derivative is `slope(builder, argument, result)`."""

    def rule(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
        yield n.args[0], b.mul(d, slope(b, n.args[0], n))

    return rule


def _pow(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    exponent = float(n.attr[0])
    x = n.args[0]
    below = b.mul(n, _over(b, x)) if 0 < exponent < 1 else b.pow(x, exponent - 1)
    yield x, b.mul(d, b.mul(b.const(exponent), below))


def _over(b: Builder, x: Node) -> Node:
    """1 / x for x >= 0, finite at 0: a root's slope is infinite there, and taken as 0."""
    return b.recip(b.map("max", x, b.const(1e-30)))


def _flat(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    yield from ()


def _select(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    flag, x, y = n.args
    nothing = b.zero(d.axes)
    yield x, b.select(flag, d, nothing)
    yield y, b.select(flag, nothing, d)


def _rename(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    source, target = map(str, n.attr)
    yield n.args[0], b.rename(d, target, source)


def _contract(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    for x, y in (n.args, n.args[::-1]):
        over = (set(d.axes) | set(y.axes)) - set(x.axes)
        yield x, b.contract(d, y, over) if over else b.mul(d, y)


def _mask(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    yield n.args[0], b.mask(d, n.attr[0])


def _by_delay(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    """What keeps or moves values by how many tokens are between two does the same to their cotangents."""
    yield n.args[0], getattr(b, n.op)(d, int(n.attr[0]), str(n.attr[1]))


def _cumsum(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    yield n.args[0], b.cumsum(d, str(n.attr[0]), not n.attr[1])


def _tri_inv(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    # Y = (I - N)^-1 gives dN = Y^T dY Y^T
    left = b.contract(b.rename(n, "s", "u"), d, {"t"})  # [row u, s] = sum_t Y[t, u] dY[t, s]
    both = b.contract(left, n, {"s"})  # [row u, column t] = sum_s left[u, s] Y[t, s]
    yield n.args[0], b.mask(b.rename(b.rename(both, "t", "s"), "u", "t"), "strict")


def _implicit(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    yield n.args[1], d


def _newton_schulz(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    x = n.args[0]
    yield x, b.make("newton_schulz_back", (x, b.expand(d, x.axes)), x.axes, *n.attr)


def _decay_dot(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    q, k, gq, gk = n.args
    kind = str(n.attr[0])
    d = b.mask(d, kind)
    dq = b.decay_mix(d, k, gq, gk, kind)
    dk = b.decay_mix_t(d, q, gq, gk, kind)
    yield q, dq
    yield k, dk
    yield gq, b.mul(b.const(LN2), b.mul(q, dq))
    yield gk, b.mul(b.const(-LN2), b.mul(k, dk))


def _decay_mix(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    a, k, gq, gk = n.args
    kind = str(n.attr[0])
    axis = next(x for x in gq.axes if x != "t")
    dk = b.decay_mix_t(a, d, gq, gk, kind)
    yield a, b.decay_dot(d, k, gq, gk, kind, axis)
    yield k, dk
    yield gq, b.mul(b.const(LN2), b.mul(n, d))
    yield gk, b.mul(b.const(-LN2), b.mul(k, dk))


def _decay_mix_t(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    a, q, gq, gk = n.args
    kind = str(n.attr[0])
    axis = next(x for x in gq.axes if x != "t")
    dq = b.decay_mix(a, d, gq, gk, kind)
    yield a, b.decay_dot(q, d, gq, gk, kind, axis)
    yield q, dq
    yield gq, b.mul(b.const(LN2), b.mul(q, dq))
    yield gk, b.mul(b.const(-LN2), b.mul(n, d))


def _norm_scan(b: Builder, n: Node, d: Node) -> Iterator[Contribution]:
    # squared norm = e + 2^(g+1) x, where x_t = 2^before_t p_t + sum_{s<t} n_s 2^(before_t - total_s) w_t . w_s
    e, g, p, w, r, a, c = n.args
    own = b.add(g, b.map("log2", n))
    total = b.cumsum(own)
    before, after = b.sub(total, own), b.rename(total, "t", "s")
    start, every = b.map("exp2", before), b.mask(b.const(1.0), "strict")
    square = b.mul(n, n)
    by_x = b.mul(square, b.map("exp2", g))  # how log(1 / n_t) moves with x_t, where n_s scales what is up to s
    later = [b.mul(by_x, v) for v in (b.mul(start, p), r, a, c)]
    slopes = b.make("norm_slopes", (w, *later, *(b.mul(n, v) for v in (r, a, c)), before, after), ("s", *n.axes))
    d_log = b.make("norm_adjoint", (slopes, b.neg(b.mul(n, d))), n.axes)

    def past(weights: Node, x: Node) -> Node:
        return b.decay_mix(weights, b.rename(b.mul(n, x), "t", "s"), before, after, "strict")

    def future(weights: Node, x: Node) -> Node:
        return b.mul(n, b.rename(b.decay_mix_t(weights, x, before, after, "strict"), "s", "t"))

    d_x = b.mul(by_x, d_log)
    by_r, by_c, by_a = past(w, r), past(every, c), past(every, a)
    to_r, to_c, to_a = future(w, b.mul(d_x, r)), future(every, b.mul(d_x, a)), future(every, b.mul(d_x, c))
    x = b.add(b.add(b.mul(start, p), b.mul(r, by_r)), b.add(b.mul(a, by_c), b.mul(c, by_a)))
    d_before = b.mul(b.const(LN2), b.mul(d_x, x))
    d_after = b.mul(b.const(-LN2), b.add(b.mul(r, to_r), b.add(b.mul(c, to_c), b.mul(a, to_a))))
    yield e, b.mul(b.const(0.5), b.mul(square, d_log))
    yield g, b.cumsum(b.add(d_before, d_after), reverse=True)
    yield p, b.mul(start, d_x)
    yield w, b.decay_dot(b.mul(d_x, r), b.rename(b.mul(n, r), "t", "s"), before, after, "strict", n.axes[1])
    yield r, b.add(b.mul(d_x, by_r), to_r)
    yield a, b.add(b.mul(d_x, by_c), to_a)
    yield c, b.add(b.mul(d_x, by_a), to_c)


RULES: dict[str, Rule] = {
    "add": _add,
    "neg": _neg,
    "mul": _mul,
    "max": _extremum(1.0),
    "min": _extremum(-1.0),
    "pow": _pow,
    "recip": _unary(lambda b, x, y: b.neg(b.mul(y, y))),
    "exp2": _unary(lambda b, x, y: b.mul(b.const(LN2), y)),
    "log2": _unary(lambda b, x, y: b.mul(b.const(1 / LN2), b.map("exp2", b.neg(y)))),  # finite where log2(0) is
    "sqrt": _unary(lambda b, x, y: b.mul(b.const(0.5), b.mul(y, _over(b, x)))),
    "rsqrt": _unary(lambda b, x, y: b.mul(b.const(-0.5), b.mul(y, b.mul(y, y)))),
    "tanh": _unary(lambda b, x, y: b.sub(b.const(1.0), b.mul(y, y))),
    "erf": _unary(
        lambda b, x, y: b.mul(b.const(2 / math.sqrt(math.pi)), b.map("exp2", b.mul(b.const(-1 / LN2), b.mul(x, x))))
    ),
    "sigmoid": _unary(lambda b, x, y: b.mul(y, b.sub(b.const(1.0), y))),
    "softplus": _unary(lambda b, x, y: b.map("sigmoid", x)),
    "abs": _unary(lambda b, x, y: b.map("sign", x)),
    "sign": _flat,
    "step": _flat,
    "amax": _flat,
    "select": _select,
    "expand": lambda b, n, d: iter([(n.args[0], d)]),
    "rename": _rename,
    "sum": lambda b, n, d: iter([(n.args[0], b.expand(d, n.args[0].axes))]),
    "contract": _contract,
    "mask": _mask,
    "diagonal": _by_delay,
    "behind": _by_delay,
    "shift": _by_delay,
    "cumsum": _cumsum,
    "tri_inv": _tri_inv,
    "implicit": _implicit,
    "newton_schulz": _newton_schulz,
    "decay_dot": _decay_dot,
    "decay_mix": _decay_mix,
    "decay_mix_t": _decay_mix_t,
    "norm_scan": _norm_scan,
}

DIFFERENTIABLE = ("token", "param", "before", "carry", "saved")


def gradients(b: Builder, outputs: list[tuple[Node, Node]]) -> dict[Node, Node]:
    """Cotangent of every differentiable leaf, given (value, cotangent) of the outputs."""
    order = reachable(v for v, _ in outputs)
    wanted = depends_on(order, [n for n in order if n.op == "leaf" and n.role in DIFFERENTIABLE])
    found: dict[Node, Node] = {}

    def accumulate(node: Node, d: Node) -> None:
        d = b.expand(b.sum(d, set(d.axes) - set(node.axes)), node.axes)
        found[node] = b.add(found[node], d) if node in found else d

    for value, cotangent in outputs:
        if value in wanted:
            accumulate(value, cotangent)
    for node in reversed(order):
        if node in found and node in wanted and node.op != "leaf":
            for argument, d in RULES[node.op](b, node, found.pop(node)):
                if argument in wanted:
                    accumulate(argument, d)
    return {n: d for n, d in found.items() if n.op == "leaf"}


def differentiate(program: Program) -> Program:
    """The backward program: outputs `d:<name>` for tokens and params, `carry:<name>` for the carries' cotangents."""
    b = program.builder
    seeds: list[tuple[Node, Node]] = []
    for name, value in program.outputs.items():
        if name.startswith("carry:"):
            seeds.append((value, b.leaf("cocarry", name[6:], value.axes)))
        else:
            seeds.append((value, b.leaf("cot", name, value.axes)))
    outputs: dict[str, Node] = {}
    for leaf, d in gradients(b, seeds).items():
        d = b.expand(d, leaf.axes)
        outputs[f"carry:{leaf.name}" if leaf.role == "carry" else f"d:{leaf.name}"] = d
        b.label(d, f"d_{leaf.name}")
    return program.with_outputs(outputs)


def values_alone(program: Program) -> Program:
    """The program without `implicit`, once nothing more is to be differentiated."""
    if all(n.op != "implicit" for n in program.nodes):
        return program
    b = program.builder
    new: dict[Node, Node] = {}
    for n in program.nodes:
        new[n] = new[n.args[0]] if n.op == "implicit" else b.again(n, new)
        if n in b.labels:
            b.label(new[n], b.labels[n])
    return program.with_outputs({k: new[v] for k, v in program.outputs.items()})
