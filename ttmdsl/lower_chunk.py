"""The chunk form: what a whole chunk of tokens makes of the carry, by matrix products.

Input: `UpdateRule`. Output: `Program` with unit "chunk", or `NotChunkable` with the reason.

Inside a chunk a memory is known by its start, its decays and its writes, outer products l_s r_s^T (or frozen matrix
times diagonal), and can be read through a vector (chunk_memory.py).

Three of the five classes of recurrence are this form: writes that are free of the state; writes that are affine in
reads of the state just before (solved by triangular inverses, in solve.py); writes that depend on the state at a
frozen point. But for the second, a window's gradients are each written once, spread over the tokens that the window
reaches from there; so are those of the tokens before the chunk that it reaches from inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from ttmdsl import expr as ex
from ttmdsl import spec as sp
from ttmdsl.builder import Builder
from ttmdsl.chunk_memory import Band, ChunkMemory, Moment, Write, normalised
from ttmdsl.functions import X, aggregate
from ttmdsl.ir import PAST, TOKEN_AXES, Axes, Node, Program, addends, base_dim, depends_on, factors
from ttmdsl.lower_expr import ExprLowering, NotChunkable, Value, matrix_axes
from ttmdsl.lower_token import bind_tensors, inner_dim
from ttmdsl.rule import Jacobian, PassRule, UpdateRule
from ttmdsl.solve import Probe, Unknown, solve
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
        log_decay, derived = self._live_log(decay, live), self.derived
        own = None
        if derived.first is not None:
            first = self.lower.vector(derived.first, env)
            own, log_decay = log_decay, b.mul(log_decay, first)
            log_momentum = log_momentum and b.mul(log_momentum, first)
        if derived.last is not None:
            live = b.mul(live, self.lower.vector(derived.last, env))
        return ChunkMemory(
            b, memory.name, rows, columns, start, log_decay, live, last, momentum, log_momentum, derived.group, own
        )

    def _live_log(self, decay: Node, live: Node) -> Node:
        """log2 of a decay at every token, zero where there is no token."""
        b = self.lower.b
        if not positive(decay):
            raise NotChunkable("a retention factor that may be negative has no logarithm")
        return b.expand(b.mul(log2(b, decay), live), {"t"})

    def _unit_axis(self, name: str, e: ex.Expr) -> str:
        """The axis of the vectors that a projection makes unit length."""
        memory = next(m for m in self.pass_.memories if m.name == name)
        if isinstance(e, ex.Columns | ex.Rows) and isinstance(e.m, ex.Ref) and e.m.name == name:
            rows, columns = matrix_axes(memory.shape)
            if _makes_unit_length(self.lower.jacobians[e.fn]):
                return rows if isinstance(e, ex.Columns) else columns
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
        unknowns: list[Unknown] = []
        probes = {name: Probe(self.lower.b, memory, unknowns) for name, memory in memories.items()}
        found = self._gradients(memories, {**env, **probes}, {**self.before, **probes}, rate)
        if self.derived.group > 1 and not unknowns:
            raise NotChunkable("a window whose gradients are free of the memory needs no point of its own")
        if unknowns and self.derived.delays:
            raise NotChunkable("a window whose gradients read the memory at every token has no one read for each")
        moment: Moment = "retained" if self.pass_.optimizer.at == "retained" else "before"
        for name, made in (solve(self.lower.b, unknowns, found, moment) if unknowns else found).items():
            memories[name].writes += made


def _makes_unit_length(of: Jacobian) -> bool:
    """Whether a vector function is x / |x|."""
    return of.aggregates == (X**2,) and sympy.simplify(of.value - X / sympy.sqrt(aggregate(0))) == 0


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
