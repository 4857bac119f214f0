"""The kernel form: a memory over an infinite-dimensional feature map, as coefficients of the keys it was written at.

Input: `UpdateRule`. Output: one `KernelForm` for each pass: which per-token values the recurrence over coefficients
takes (a token program), what is done with its readout, and the few facts that decide the arithmetic. DeriveError where
the gradient leads to no such recurrence. Knows neither torch nor triton, and no layer.

S_t = sum_i u_i(t) phi(k_i)^T. One step adds -rate * (slope * S' phi(k) - value) to the coefficient of phi(k), S' being
the memory at the gradient point; all coefficients decay with the memory. With slope 0 the coefficients are scalar
weights of the values (`additive`); else they solve a unit lower triangular system, a block of tokens after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ttmdsl import expr as ex
from ttmdsl import spec as sp
from ttmdsl.builder import Builder
from ttmdsl.derive import gradient, with_lets
from ttmdsl.errors import DeriveError, Diagnostic, Span
from ttmdsl.ir import Node, Program
from ttmdsl.lower_expr import Env, ExprLowering
from ttmdsl.lower_token import bind_tensors
from ttmdsl.rule import UpdateRule
from ttmdsl.simplify_expr import ONE, ZERO, add, div, is_zero, mul, neg, sub
from ttmdsl.walk_expr import children, rewrite, walk

READ = "read__out"  # stands for the memory's readout in the expression around it
_BIASES = "a bias with a kernel form: `-<S @ phi(k), v>` or `1/2 * |S @ phi(k) - v|^2`"


@dataclass(frozen=True)
class KernelForm:
    """One pass. `terms` has the outputs query, key, value and, where they are not 0, 1 or absent, slope, rate, weight
    and log_decay; `readout` has the output y, a function of the leaf READ."""

    name: str
    memory: sp.Memory
    scale: ex.Expr
    terms: Program
    readout: Program
    normalized: bool
    window: int
    last: int | None
    batch: int
    retained: bool

    @property
    def additive(self) -> bool:
        """Whether the gradient is free of the memory."""
        return "slope" not in self.terms.outputs

    @property
    def decays(self) -> bool:
        return "log_decay" in self.terms.outputs

    @property
    def key_dim(self) -> str:
        """The dim of keys and queries."""
        return self.terms.outputs["key"].axes[0]

    @property
    def value_dim(self) -> str:
        return self.memory.shape[0]


@dataclass(frozen=True)
class LoweredKernel:
    """All passes of a layer over feature maps."""

    rule: UpdateRule
    forms: tuple[KernelForm, ...]
    recurrence: Literal["kernel"] = "kernel"

    @property
    def batch(self) -> int:
        """Tokens that share a gradient point; 1 where there are no groups, or no gradient depends on the point."""
        return max(1 if f.additive else f.batch for f in self.forms)

    @property
    def title(self) -> str:
        """The class of recurrence in words."""
        solved = any(not f.additive for f in self.forms)
        how = "coefficients by a triangular solve, block by block" if solved else "all pairs of tokens, block by block"
        return f"kernel: the memory is a sum over its keys, quadratic in the length; {how}"

    def __str__(self) -> str:
        return "\n\n".join(f"pass {f.name}\n{f.terms}\n{f.readout}" for f in self.forms)


def lower_kernel(rule: UpdateRule) -> LoweredKernel:
    """The kernel forms of a layer whose memories are over feature maps."""
    return LoweredKernel(rule, tuple(_form(rule, p) for p in rule.spec.passes))


# ---- the gradient, as a recurrence over coefficients ------------------------------------------------------------


def _form(rule: UpdateRule, p: sp.Pass) -> KernelForm:
    spec, (memory,) = rule.spec, p.memories
    key, cotangent = _written(spec, p, memory)
    prediction = ex.MatVec(ex.Ref(memory.name, "memory", memory.shape), key, memory.shape[:1])
    slope, rest = _affine(cotangent, prediction, spec, p.bias.span)
    query, normalized, around = _readout(spec, p)
    if normalized and not is_zero(slope):
        hint = "the bias `-<S @ phi(k), v>` makes it an average of values; else read `S @ phi(q)`"
        raise _refused(spec, p.read.span, "a readout is an average only if the gradient is free of the memory", hint)
    if query.shape != key.x.shape:
        hint = "both go into the same inner product"
        raise _refused(spec, query.span, f"the query is [{query.shape[0]}], and the key is [{key.x.shape[0]}]", hint)
    values: dict[str, ex.Expr] = {"query": query, "key": key.x, "value": neg(rest)}
    if not is_zero(slope):
        values["slope"] = slope
    if p.optimizer.rate != ONE:
        values["rate"] = p.optimizer.rate
    if p.window and p.window.weight:
        values["weight"] = p.window.weight
    b = Builder(_dims(spec))
    lower = ExprLowering(b, rule.jacobians)
    env: dict[str, Node] = bind_tensors(spec, b, ())
    env |= {q.name: b.leaf("token", q.name, q.read.shape) for q in spec.passes}
    for name, e in spec.lets:
        env[name] = b.label(lower.vector(e, env), name)
    vectors = {name: b.label(b.expand(lower.vector(e, env), e.shape), name) for name, e in values.items()}
    vectors["value"] = b.expand(vectors["value"], memory.shape[:1])
    decay = _log_decay(p.retention[memory.name], lower, env, spec)
    if decay is not None:
        vectors["log_decay"] = b.label(decay, "log_decay")
    read_env: Env = {**env, READ: b.leaf("token", READ, memory.shape[:1])}
    y = b.label(b.expand(lower.vector(around, read_env), p.read.shape), "y")
    return KernelForm(
        name=p.name,
        memory=memory,
        scale=spec.kernels[memory.shape[1]].scale,
        terms=Program("token", _dims(spec), b, vectors),
        readout=Program("token", _dims(spec), b, {"y": y}),
        normalized=normalized,
        window=p.window.size if p.window else 1,
        last=p.last,
        batch=p.optimizer.batch,
        retained=p.optimizer.at == "retained",
    )


def _dims(spec: sp.LayerSpec) -> tuple[str, ...]:
    shapes = [*(t.shape for t in spec.tensors), *(p.read.shape for p in spec.passes)]
    return tuple(dict.fromkeys((*spec.dims, *(d for shape in shapes for d in shape))))


def _refused(spec: sp.LayerSpec, span: Span, message: str, hint: str) -> DeriveError:
    return DeriveError((Diagnostic(span, message, hint),), spec.source, spec.filename)


def _written(spec: sp.LayerSpec, p: sp.Pass, memory: sp.Memory) -> tuple[ex.Apply, ex.Expr]:
    """The one feature vector that a step writes at, and the bias's derivative by the prediction there."""
    found: dict[ex.Apply, ex.Expr] = {}
    for cotangent, at in _outer_products(gradient(with_lets(spec, p), p.memories)[memory.name]):
        found[at] = add(found.get(at, ZERO), cotangent)
    if len(found) != 1:
        hint = "a bias of one key; for several tokens at once write `window(c, weight = gamma) of`"
        raise _refused(spec, p.bias.span, f"the bias reads `{memory.name}` at {len(found)} keys", hint)
    return next(iter(found.items()))


def _outer_products(g: ex.Expr) -> Iterator[tuple[ex.Expr, ex.Apply]]:
    """The gradient as a sum of (a, phi(x)), each standing for a phi(x)^T."""
    match g:
        case ex.Outer(a=a, b=ex.Apply() as b):
            yield a, b
        case ex.Binary(op="add" | "sub" as op, a=a, b=b):
            yield from _outer_products(a)
            for cotangent, at in _outer_products(b):
                yield (neg(cotangent) if op == "sub" else cotangent), at
        case ex.Binary(op="mul", a=a, b=b):
            factor, matrix = (a, b) if len(b.shape) == 2 else (b, a)
            for cotangent, at in _outer_products(matrix):
                yield mul(factor, cotangent), at
        case ex.Binary(op="div", a=a, b=b):
            for cotangent, at in _outer_products(a):
                yield div(cotangent, b), at
        case _:
            raise AssertionError(f"a gradient by what is only read is a sum of outer products, not {g!r}")


def _affine(e: ex.Expr, p: ex.Expr, spec: sp.LayerSpec, span: Span) -> tuple[ex.Expr, ex.Expr]:
    """Slope and rest of e = slope * p + rest, with a scalar slope that is free of the memory."""
    if e == p:
        return ONE, ZERO
    if not any(isinstance(n, ex.Ref) and n.kind == "memory" for n in walk(e)):
        return ZERO, e
    match e:
        case ex.Binary(op="add" | "sub" as op, a=a, b=b):
            (s, r), (t, q) = _affine(a, p, spec, span), _affine(b, p, spec, span)
            return (add(s, t), add(r, q)) if op == "add" else (sub(s, t), sub(r, q))
        case ex.Binary(op="mul", a=a, b=b):
            for x, y in ((a, b), (b, a)):
                s, r = _affine(x, p, spec, span) if x.shape == () else (ONE, ZERO)
                if s == ZERO:
                    t, q = _affine(y, p, spec, span)
                    return mul(x, t), mul(x, q)
        case ex.Binary(op="div", a=a, b=b) if b.shape == () and _affine(b, p, spec, span)[0] == ZERO:
            t, q = _affine(a, p, spec, span)
            return div(t, b), div(q, b)
        case _:
            pass
    message = "the bias must be linear in what it reads, or half its squared distance from a target"
    raise _refused(spec, span, message, _BIASES)


def _readout(spec: sp.LayerSpec, p: sp.Pass) -> tuple[ex.Expr, bool, ex.Expr]:
    """The query, whether the readout is normalised, and the expression with Ref(READ) in the readout's place."""
    reads = [n for n in walk(p.read) if isinstance(n, ex.MatVec) and _is_memory(n.m)]
    averages = [n for n in walk(p.read) if isinstance(n, ex.Apply) and n.fn == "normalized"]
    bare = _occurrences(p.read, reads[0], averages[0] if averages else None) if reads else 0
    if len(reads) != 1 or (averages and bare):
        hint = "such as `read S @ phi(q)`"
        how = "in two ways" if averages and bare else f"at {len(reads)} queries"
        raise _refused(spec, p.read.span, f"the readout reads the memory {how}, and it must at one", hint)
    whole = averages[0] if averages else reads[0]
    at = reads[0].x
    assert isinstance(at, ex.Apply)
    stand_in = ex.Ref(READ, "let", whole.shape)
    return at.x, bool(averages), rewrite(p.read, lambda n: stand_in if n == whole else None)


def _is_memory(e: ex.Expr) -> bool:
    return isinstance(e, ex.Ref) and e.kind == "memory"


def _occurrences(e: ex.Expr, of: ex.Expr, outside: ex.Expr | None) -> int:
    """How often `of` stands in the expression, `outside` not looked into."""
    if e == outside:
        return 0
    return (e == of) + sum(_occurrences(c, of, outside) for c in children(e))


def _log_decay(kept: ex.Expr, lower: ExprLowering, env: Env, spec: sp.LayerSpec) -> Node | None:
    """The logarithm of what the memory is multiplied by; None for 1. A declared decay is passed as its logarithm."""
    b = lower.b
    match kept:
        case ex.Ref(kind="memory"):
            return None
        case ex.Binary(op="mul" | "div" as op, a=x, b=y):
            factor, rest = (y, x) if any(_is_memory(n) for n in walk(x)) else (x, y)
            if isinstance(factor, ex.Ref) and _is_decay(factor, spec):
                tensor = spec.tensor(factor.name)
                log = b.leaf("token" if tensor.kind != "param" else "param", tensor.keyword, tensor.shape)
            else:
                log = lower.map("log", lower.vector(factor, env))
            before = _log_decay(rest, lower, env, spec)
            log = b.neg(log) if op == "div" else log
            return log if before is None else b.add(before, log)
        case _:
            raise AssertionError(f"the checker has seen that the memory decays as a whole, not {kept!r}")


def _is_decay(e: ex.Ref, spec: sp.LayerSpec) -> bool:
    return e.kind in ("gate", "param") and spec.tensor(e.name).range == "decay"
