"""The chunk form: what a whole chunk of tokens makes of the carry, by matrix products.

Input: `UpdateRule`. Output: `Program` with unit "chunk", or `NotChunkable` with the reason.

Inside a chunk a memory is known by its start, its decays and its writes, outer products l_s r_s^T (or frozen matrix
times diagonal), and can be read through a vector (chunk_memory.py).

Three of the five classes of recurrence are this form: writes that are free of the state; writes that are affine in a
read of the state just before (solved by a triangular inverse); writes that depend on the state at a frozen point. But
for the second, a window's gradients are each written once, spread over the tokens that the window reaches from there;
so are those of the tokens before the chunk that it reaches from inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from ttmdsl import spec as sp
from ttmdsl.builder import Builder
from ttmdsl.chunk_memory import Band, ChunkMemory, Moment, Write, normalised, total
from ttmdsl.functions import X, aggregate
from ttmdsl.ir import PAST, TOKEN_AXES, Axes, Node, Program, addends, base_dim, depends_on, factors
from ttmdsl.lower_expr import ExprLowering, NotChunkable, Value, matrix_axes
from ttmdsl.lower_token import bind_tensors, inner_dim
from ttmdsl.rule import Jacobian, PassRule, UpdateRule
from ttmdsl.state import momentum_name, point_name


def lower_chunk(rule: UpdateRule, aligned: bool, dims: Axes = ()) -> Program:
    """One chunk of tokens. Raises NotChunkable where a pass has no chunk form.

    aligned: every chunk starts a group of tokens that share a gradient point, so the point is the carry itself;
    otherwise the point is a carry too, and the leaf `fresh` says where a new group starts.
    dims: in the order that tiles have them; if it is not given, the best one.
    """
    if dims:
        return _lowered(rule, aligned, dims)
    program = _lowered(rule, aligned, rule.spec.dims)
    best = _rows_first(program)
    return program if best == program.dims else _lowered(rule, aligned, best)


def _rows_first(program: Program) -> Axes:
    """The dims, those first along which sums over states lie.

    A sum over the rows of a tile would cross warps, and what it finds lies along the columns, of which each thread
    holds many (measured: benchmarks/NOTES.md).
    """
    uses: Counter[str] = Counter()
    for user in program.nodes:
        if user.axes:  # else it adds up what another sum has found: a number lies nowhere
            uses.update(base_dim(n.axes[0]) for n in user.args if _is_sum_over_state(n))
    return tuple(sorted(program.dims, key=lambda dim: -uses[dim]))


def _is_sum_over_state(n: Node) -> bool:
    over_tile = any(len(a.axes) == 2 and not set(a.axes) & set(TOKEN_AXES) for a in n.args)
    return n.op in ("sum", "contract") and len(n.axes) == 1 and over_tile


def _lowered(rule: UpdateRule, aligned: bool, dims: Axes) -> Program:
    spec = rule.spec
    batches = {p.optimizer.batch for p in spec.passes if p.optimizer.batch > 1}
    if len(batches) > 1:
        raise NotChunkable("the passes share gradient points among different numbers of tokens")
    b = Builder(dims)
    lower = ExprLowering(b, rule.jacobians)
    env: dict[str, Node] = bind_tensors(spec, b, ("t",))
    for name, e in spec.lets:
        env[name] = b.label(lower.vector(e, env), name)
    before: dict[str, Node] = {}
    if any(derived.delays for derived in rule.passes):
        before = bind_tensors(spec, b, (PAST,), before=True)
        for name, e in spec.lets:
            before[name] = lower.vector(e, before)
    outputs: dict[str, Node] = {}
    for pass_, derived in zip(spec.passes, rule.passes, strict=True):
        env[pass_.name] = _PassLowering(lower, pass_, derived, aligned, before).run(env, outputs)
    y = b.expand(env[spec.passes[-1].name], {"t", *spec.passes[-1].read.shape})
    return Program("chunk", dims, b, {"y": y, **outputs}, inner_dim(spec))


@dataclass
class _PassLowering:
    lower: ExprLowering
    pass_: sp.Pass
    derived: PassRule
    aligned: bool
    before: dict[str, Node]

    def run(self, env: dict[str, Node], outputs: dict[str, Node]) -> Node:
        """Adds the pass's carries to the outputs and gives its readout."""
        b, pass_, optimizer = self.lower.b, self.pass_, self.pass_.optimizer
        if pass_.project and optimizer.batch == 1:
            raise NotChunkable("the projection after every token needs the memory at every token")
        if optimizer.kind == "muon":
            raise NotChunkable("Newton-Schulz is nonlinear in the momentum of every token")
        if optimizer.kind == "least_squares":
            raise NotChunkable("the inverse of all keys' sum changes with every token")
        live = b.leaf("live", "live", ("t",))
        memories = {m.name: self._memory(m, env, live) for m in pass_.memories}
        rate = b.mul(self.lower.vector(optimizer.rate, env), live)
        if optimizer.batch > 1:
            self._write_at_frozen_point(memories, env, rate, outputs)
            for name, e in pass_.project.items():
                memories[name] = normalised(memories[name], self._unit_axis(name, e))
        else:
            self._write_at_each_token(memories, env, rate)
        reads: dict[str, Value] = {**env, **memories}
        for name, memory in memories.items():
            outputs[f"carry:{name}"] = b.label(memory.end(), f"{name}_end")
            if memory.momentum is not None:
                outputs[f"carry:{momentum_name(name)}"] = b.label(memory.end_momentum(), f"{momentum_name(name)}_end")
        return b.label(self.lower.vector(pass_.read, reads), f"read_{pass_.name}")

    def _memory(self, memory: sp.Memory, env: dict[str, Node], live: Node) -> ChunkMemory:
        b, optimizer = self.lower.b, self.pass_.optimizer
        rows, columns = matrix_axes(memory.shape)
        start = b.leaf("carry", memory.name, (rows, columns))
        decay = quotient(b, self.lower.vector(self.pass_.retention[memory.name], {**env, memory.name: start}), start)
        if decay is None:
            raise NotChunkable(f"the retention of {memory.name} is no product of {memory.name} and a decay")
        momentum = log_momentum = None
        if optimizer.decay is not None:
            momentum = b.leaf("carry", momentum_name(memory.name), (rows, columns))
            log_momentum = self._live_log(self.lower.vector(optimizer.decay, env), live)
        last = b.leaf("last", "last", ("t",))
        return ChunkMemory(
            b, memory.name, rows, columns, start, self._live_log(decay, live), live, last, momentum, log_momentum
        )

    def _live_log(self, decay: Node, live: Node) -> Node:
        """log2 of a decay at every token, zero where there is no token."""
        b = self.lower.b
        if not positive(decay):
            raise NotChunkable("a retention factor that may be negative has no logarithm")
        return b.expand(b.mul(log2(b, decay), live), {"t"})

    def _unit_axis(self, name: str, e: sp.Expr) -> str:
        """The axis of the vectors that a projection makes unit length."""
        memory = next(m for m in self.pass_.memories if m.name == name)
        if isinstance(e, sp.Columns | sp.Rows) and isinstance(e.m, sp.Ref) and e.m.name == name:
            rows, columns = matrix_axes(memory.shape)
            if _makes_unit_length(self.lower.jacobians[e.fn]):
                return rows if isinstance(e, sp.Columns) else columns
        raise NotChunkable(f"the projection of {name} after every token is no scaling of its vectors to unit length")

    # -- gradient at a frozen point: everything is linear in the writes -----------------------------------------

    def _write_at_frozen_point(
        self, memories: dict[str, ChunkMemory], env: dict[str, Node], rate: Node, outputs: dict[str, Node]
    ) -> None:
        b, pass_ = self.lower.b, self.pass_
        point: dict[str, Node] = {}
        for name, memory in memories.items():
            if self.aligned:
                point[name] = memory.start
            else:
                frozen = b.leaf("carry", point_name(name), memory.start.axes)
                point[name] = b.select(b.leaf("fresh", str(pass_.optimizer.batch), ()), memory.start, frozen)
            outputs[f"carry:{point_name(name)}"] = point[name]
        for name, found in self._gradients(memories, {**env, **point}, {**self.before, **point}, rate).items():
            memories[name].writes += found

    def _gradients(
        self, memories: Mapping[str, ChunkMemory], env: Mapping[str, Value], before: Mapping[str, Value], rate: Node
    ) -> dict[str, list[Write]]:
        """What a gradient step writes: of a window each token's gradient once, spread over the tokens that step along
        it; `before` has the values of the tokens before the chunk."""
        b, delays = self.lower.b, self.derived.delays
        if not delays:
            return self._steps(memories, env, b.neg(rate))
        if set(rate.axes) - {"t"} or any(memory.channel for memory in memories.values()):
            raise NotChunkable("a window over a rate or a decay per channel has no one weight for each token")
        rates = tuple(b.neg(b.mul(rate, self.lower.vector(e, env))) for e in delays)
        one = b.const(1.0)
        here, earlier = self._steps(memories, env, one), self._steps(memories, before, one, PAST)
        return {
            name: [
                replace(w, band=Band(rates, axis))
                for found, axis in ((here, "s"), (earlier, PAST))
                for w in found[name]
            ]
            for name in memories
        }

    def _steps(
        self, memories: Mapping[str, ChunkMemory], env: Mapping[str, Value], times: Node, axis: str = "t"
    ) -> dict[str, list[Write]]:
        """Each memory's gradient, so many times, as writes of the tokens along an axis."""
        b, at_point = self.lower.b, dict(env)
        for name, e in self.derived.definitions:
            value = self.lower.vector(e, at_point)
            at_point[name] = b.label(value, name) if axis == "t" else value
        gradients = {name: self.lower.vector(self.derived.gradients[name], at_point) for name in memories}
        return {name: writes(b, b.mul(times, g), memories[name], axis) for name, g in gradients.items()}

    # -- gradient at the state just before each token -----------------------------------------------------------

    def _write_at_each_token(self, memories: dict[str, ChunkMemory], env: dict[str, Node], rate: Node) -> None:
        b = self.lower.b
        probes = {name: Probe(b, memory) for name, memory in memories.items()}
        found = self._gradients(memories, {**env, **probes}, {**self.before, **probes}, rate)
        reads = [(name, probe) for name, probe in probes.items() if probe.x is not None]
        if not reads:
            for name, memory in memories.items():
                memory.writes += found[name]
            return
        if self.derived.delays:
            raise NotChunkable("a window whose gradients read the memory at every token has no one read for each")
        if len(memories) > 1:
            raise NotChunkable("several memories whose gradients read each other at every token")
        ((name, probe),) = reads
        moment: Moment = "retained" if self.pass_.optimizer.at == "retained" else "before"
        memories[name].writes += solve(b, memories[name], probe, found[name], moment)


def _makes_unit_length(of: Jacobian) -> bool:
    """Whether a vector function is x / |x|."""
    return of.aggregates == (X**2,) and sympy.simplify(of.value - X / sympy.sqrt(aggregate(0))) == 0


@dataclass
class Probe:
    """Stands for a memory at each token's own gradient point; its one read is an unknown that `solve` finds."""

    b: Builder
    memory: ChunkMemory
    x: Node | None = None
    over: str = ""
    unknown: Node | None = None

    def read(self, x: Node, over: str) -> Node:
        if self.x is not None and (self.x is not x or self.over != over):
            raise NotChunkable("the gradient at every token reads the memory through more than one vector")
        self.x, self.over = x, over
        self.unknown = self.b.leaf("saved", f"{self.memory.name} read", ("t", self.memory.other(over)))
        return self.unknown


def solve(b: Builder, memory: ChunkMemory, probe: Probe, found: list[Write], moment: Moment) -> list[Write]:
    """Writes affine in the unknown read: the read follows from a triangular system over the chunk's tokens.

    With writes l = c z + l' (z the unknown, c a scalar per token), z = P_0 x + sum_w scores_w l_w.
    """
    x, over, unknown = probe.x, probe.over, probe.unknown
    assert x is not None
    assert unknown is not None
    if memory.channel not in ("", over):
        raise NotChunkable("a decay per channel of the read makes one triangular system for every channel")
    start = memory.read_start(x, over, moment)
    known: list[Node] = [start]
    open_: list[tuple[Write, Node, Node, Node]] = []  # writes that hold the unknown, their scores, slopes and rests
    for w in found:
        content, key = (w.left, w.right) if over == memory.columns else (w.right, w.left)
        if w.frozen is not None or unknown in depends_on([key], [unknown]):
            raise NotChunkable("the gradient at every token is not affine in the memory")
        slope, rest = affine(b, content, unknown)
        scores = memory.scores(key, x, over, moment)
        if slope is None:
            known.append(memory.mix(scores, rest, moment, over))
        else:
            open_.append((w, scores, slope, rest))
    if not open_:
        return found
    if len(open_) == 1:
        # for the one write that reads, l = c (P_0 x + sum of the others) + l' + c scores l, solved for l itself
        ((w, scores, slope, rest),) = open_
        target = b.add(b.mul(slope, total(b, known)), rest)
        content = _triangular(b, b.mul(slope, scores), target)
        solved = {w: b.label(content, "write")}
    else:
        system = total(b, [b.mul(scores, b.rename(slope, "t", "s")) for _, scores, slope, _ in open_])
        target = total(b, [*known, *(memory.mix(scores, rest, moment, over) for _, scores, _, rest in open_)])
        z = b.label(_triangular(b, system, target), f"{memory.name}_read")
        solved = {w: b.add(b.mul(slope, z), rest) for w, _, slope, rest in open_}
    return [
        w if w not in solved else Write(solved[w], w.right) if over == memory.columns else Write(w.left, solved[w])
        for w in found
    ]


def _triangular(b: Builder, system: Node, target: Node) -> Node:
    """(I - system)^-1 target over the chunk's tokens, for a strictly lower system."""
    inverse = b.label(b.tri_inv(b.mask(system, "strict")), "inverse")
    return b.contract(inverse, b.rename(target, "t", "s"), {"s"})


def affine(b: Builder, value: Node, unknown: Node) -> tuple[Node | None, Node]:
    """value = slope * unknown + rest, with slope a scalar per token (None: value is free of the unknown)."""
    slope: Node | None = None
    rest = b.zero(value.axes)
    tainted = depends_on([value], [unknown])
    for number, parts in addends(value, lambda n: n not in tainted):
        if not tainted & set(parts):
            rest = b.add(rest, b.mul(b.const(number), b.product(parts)))
            continue
        others = list(parts)
        if sum(p in tainted for p in parts) > 1 or not all(_linear(p, unknown) for p in parts if p in tainted):
            raise NotChunkable("the gradient at every token is not affine in the memory")
        if unknown not in others or any(set(p.axes) - {"t"} for p in others if p is not unknown):
            raise NotChunkable("the gradient at every token is not a scalar times a read of the memory")
        others.remove(unknown)
        term = b.expand(b.mul(b.const(number), b.product(others)), {"t"})
        slope = term if slope is None else b.add(slope, term)
    return slope, b.expand(rest, value.axes)


def _linear(value: Node, unknown: Node) -> bool:
    """Whether a value is a sum of terms, each of which holds the unknown once, under no function."""
    if value is unknown:
        return True
    held = [a for a in value.args if unknown in depends_on([a], [unknown])]
    alone = value.op in ("mul", "contract", "sum", "neg", "expand", "rename") and len(held) == 1
    return (alone or value.op == "add") and all(_linear(a, unknown) for a in held)


def writes(b: Builder, value: Node, memory: ChunkMemory, axis: str = "t") -> list[Write]:
    """A gradient step, summed out of products, as writes of the tokens along an axis: every product must separate into
    rows and columns."""
    rows, columns = memory.rows, memory.columns
    outer: dict[Node, Node] = {}  # right factor -> sum of left factors, so that equal keys are written once
    result: list[Write] = []
    separate = ({axis, rows}, {axis, columns}, {rows, columns})
    for number, parts in addends(value, lambda n: any(set(n.axes) <= axes for axes in separate)):
        left, right, both = [b.const(number)], [], []
        for p in parts:
            match rows in p.axes, columns in p.axes:
                case True, True:
                    both.append(p)
                case False, True:
                    right.append(p)
                case _:
                    left.append(p)
        mixed = both and right and any(rows in p.axes for p in left)
        if mixed or any(axis in p.axes for p in both):
            raise NotChunkable("a term of the gradient does not separate into rows and columns")
        if both:
            scale = b.product([*left, *right])
            result.append(Write(b.const(1.0), scale, b.product(both)))
        else:
            key = b.expand(b.product(right), {columns})
            content = b.expand(b.product(left), {rows})
            outer[key] = b.add(outer[key], content) if key in outer else content
    return [*(Write(content, key) for key, content in outer.items()), *result]


def quotient(b: Builder, value: Node, start: Node) -> Node | None:
    """value / start, if value is a product that holds start once; else None."""
    if value is start:
        return b.const(1.0)
    if value.op != "mul":
        return None
    parts = factors(value)
    others = [p for p in parts if p is not start]
    if len(others) != len(parts) - 1 or start in depends_on(others, [start]):
        return None
    return b.product(others)


def log2(b: Builder, value: Node) -> Node:
    """log2 of a positive product; the logarithm of a declared decay is its input, without any rounding."""
    match value.op:
        case "exp2":
            return value.args[0]
        case "mul":
            return b.add(log2(b, value.args[0]), log2(b, value.args[1]))
        case "recip":
            return b.neg(log2(b, value.args[0]))
        case "expand":
            return b.expand(log2(b, value.args[0]), value.axes)
        case _:
            return b.map("log2", value)


def positive(value: Node) -> bool:
    """Whether a value is positive for all inputs that the spec allows."""
    match value.op:
        case "exp2" | "sigmoid" | "softplus":
            return True
        case "const":
            return bool(value.value and value.value > 0)
        case "mul" | "add" | "max":
            return all(positive(a) for a in value.args)
        case "recip" | "sqrt" | "rsqrt" | "expand" | "rename":
            return positive(value.args[0])
        case _:
            return False
