"""The exact sequential form: one token of the recurrence as a program.

Input: `UpdateRule`. Output: `Program` with unit "token": carries in, one token's inputs in; output y and carries out.
Every spec has this form. Also holds what both lowerings share: how a layer's tensors and states become leaves.
"""

from __future__ import annotations

from ttmdsl import spec as sp
from ttmdsl.builder import Builder
from ttmdsl.ir import Axes, Node, Program
from ttmdsl.lower_expr import LOG2E, Env, ExprLowering, matrix_axes
from ttmdsl.lower_optimizer import newton_schulz, wider
from ttmdsl.past import before_name
from ttmdsl.rule import PassRule, UpdateRule
from ttmdsl.state import momentum_name, point_name


def bind_tensors(spec: sp.LayerSpec, b: Builder, token_axes: Axes, before: bool = False) -> dict[str, Node]:
    """Leaves for the op's tensors, by the spec's own names: a decay is two to the power of its logarithm. `before`: of
    the tokens before a chunk."""
    env: dict[str, Node] = {}
    for tensor in spec.tensors:
        if tensor.entries:
            env |= {} if before else {name: b.leaf("token", name, token_axes) for name in tensor.each}
            continue
        per_token = tensor.kind != "param"
        axes = (*token_axes, *tensor.shape) if per_token else tensor.shape
        if before and per_token:
            leaf = b.leaf("before", before_name(tensor), axes)
        else:
            leaf = b.leaf("token" if per_token else "param", tensor.keyword, axes)
        is_decay = tensor.range == "decay"
        env[tensor.name] = b.label(b.map("exp2", b.mul(b.const(LOG2E), leaf)), tensor.name) if is_decay else leaf
    return env


def inner_dim(spec: sp.LayerSpec) -> str:
    """A dim over whose blocks kernels walk: one that memories have and no tensor, as the inner one of a deep memory, or
    else one that a feature map makes; or none, ""."""
    told = {dim for t in spec.tensors for dim in t.shape}
    dims = [dim for p in spec.passes for m in p.memories for dim in m.shape]
    return next((d for d in dims if d not in told), next((d for d in dims if d in spec.features), ""))


def lower_token(rule: UpdateRule, dims: Axes) -> Program:
    """One token: gradient at the point, retention, optimizer step, projection, then the readout.

    dims: in the order that tiles have them.
    """
    spec = rule.spec
    b = Builder(dims)
    lower = ExprLowering(b, rule.jacobians)
    env: dict[str, Node] = bind_tensors(spec, b, ())
    for name, e in spec.lets:
        env[name] = b.label(lower.vector(e, env), name)
    outputs: dict[str, Node] = {}
    for pass_, derived in zip(spec.passes, rule.passes, strict=True):
        env[pass_.name] = _pass(lower, spec, pass_, derived, env, outputs)
    return Program("token", dims, b, {"y": env[spec.passes[-1].name], **outputs})


def _pass(
    lower: ExprLowering,
    spec: sp.LayerSpec,
    pass_: sp.Pass,
    derived: PassRule,
    env: dict[str, Node],
    outputs: dict[str, Node],
) -> Node:
    b, optimizer = lower.b, pass_.optimizer
    memories = (*pass_.memories, *derived.auxiliary)
    state: dict[str, Node] = {}
    point: dict[str, Node] = {}
    for memory in memories:
        axes = matrix_axes(memory.shape)
        state[memory.name] = b.leaf("carry", memory.name, axes)
        if optimizer.batch > 1:
            frozen = b.leaf("carry", point_name(memory.name), axes)
            point[memory.name] = b.select(b.leaf("fresh", str(optimizer.batch), ()), state[memory.name], frozen)
            outputs[f"carry:{point_name(memory.name)}"] = point[memory.name]
        else:
            point[memory.name] = state[memory.name]
    kept = state | {m: lower.vector(e, {**env, **state}) for m, e in pass_.retention.items()}
    if optimizer.at == "retained":
        point = {m: lower.vector(e, {**env, **point}) for m, e in pass_.retention.items()}
    at_point: dict[str, Node] = {**env, **point}
    for name, e in derived.definitions:
        at_point[name] = b.label(lower.vector(e, at_point), name)
    rate = lower.vector(optimizer.rate, env)
    new: dict[str, Node] = {}
    for memory in memories:
        name, axes = memory.name, matrix_axes(memory.shape)
        step = lower.vector(derived.gradients[name], at_point)
        if optimizer.kind != "muon":
            step = b.mul(b.neg(rate), step)
        if optimizer.decay is not None:
            push = b.mul(lower.vector(optimizer.decay, env), b.leaf("carry", momentum_name(name), axes))
            step = b.expand(b.add(push, step), axes)
            outputs[f"carry:{momentum_name(name)}"] = b.label(step, momentum_name(name))
        if optimizer.kind == "muon":
            rows, columns = axes[::-1] if wider(spec, *memory.shape) else axes
            step = b.mul(b.neg(rate), newton_schulz(b, step, rows, columns, optimizer.newton_schulz))
        new[name] = b.label(b.add(kept[name], step), f"{name}_step")
    for name, e in pass_.project.items():
        new[name] = lower.vector(e, {**env, **new})
    for name, value in new.items():
        outputs[f"carry:{name}"] = b.label(b.expand(value, state[name].axes), f"{name}_new")
    read_env: Env = {**env, **new}
    return b.label(b.expand(lower.vector(pass_.read, read_env), pass_.read.shape), f"read_{pass_.name}")
