"""Prints declared expressions as torch code, for the reference.

Input: `Expr` and `Comp` nodes of a `LayerSpec`. Output: `Code`, and in the `Printer` the locals that the code uses.
Knows nothing of clauses, tokens or gradients (emit_reference.py does); prints no node that `derive` makes.

Expressions are printed over tensors `[B, H, *shape]` (params `[H, *shape]`), component formulas over tensors
whose last axes are the formula's indices, outermost first; a value without an index keeps one last axis of length 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from typing_extensions import assert_never

from ttmdsl import expr as ex
from ttmdsl import spec as s
from ttmdsl.past import roots
from ttmdsl.walk_expr import walk

Axes: TypeAlias = tuple[str | int, ...]

_ADD, _MUL, _NEG, _POW, _ATOM = range(5)

_SCALAR = {
    "abs": "{}.abs()",
    "exp": "torch.exp({})",
    "gelu": "torch.nn.functional.gelu({})",
    "log": "torch.log({})",
    "relu": "torch.relu({})",
    "sigmoid": "torch.sigmoid({})",
    "sign": "torch.sign({})",
    "silu": "torch.nn.functional.silu({})",
    "softplus": "torch.nn.functional.softplus({}, threshold=60)",
    "sqrt": "torch.sqrt({})",
    "tanh": "torch.tanh({})",
}
_VECTOR = {"softmax": "torch.softmax({}, -1)"}

# What the emitted functions say themselves; a local of that name gets an underscore.
_RESERVED = re.compile(r"torch|__debug__|_ref_.*|(total|mean)_\d+")


@dataclass(frozen=True, slots=True)
class Code:
    """Source text, its precedence, and the dims (or index depths) of its last axes; None for a Python number."""

    text: str
    axes: Axes | None
    level: int = _ATOM

    def at(self, level: int) -> str:
        """The text, in parentheses where it binds less tightly than `level`."""
        return self.text if self.level >= level else f"({self.text})"

    @property
    def atom(self) -> str:
        return self.at(_ATOM)


def _number(value: float) -> Code:
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e6
    text = str(int(value)) if whole else repr(float(value)) if math.isfinite(value) else f'float("{value}")'
    return Code(text, None, _NEG if text.startswith("-") else _ATOM)


def _aligned(code: Code, target: Axes) -> Code:
    """The tensor with new axes of length 1 where `target` has more; equal names match from the last axis on."""
    assert code.axes is not None
    rest, marks = list(code.axes), []
    for axis in reversed(target):
        if rest and rest[-1] == axis:
            rest.pop()
            marks.append(":")
        else:
            marks.append("None")
    assert not rest, f"{code.axes} are not among {target}"
    while marks and marks[-1] == ":":
        marks.pop()
    return Code(f"{code.atom}[..., {', '.join(reversed(marks))}]", target) if marks else code


def to_shape(code: Code, shape: Axes) -> Code:
    """An expression's operand for a value of that shape."""
    if code.axes is None or code.axes == shape:
        return code
    if code.axes == shape[::-1]:
        return Code(f"{code.atom}.mT", shape)
    return _aligned(code, shape)


def _to_indices(code: Code, axes: Axes) -> Code:
    """A component formula's operand for a value with those indices."""
    if code.axes is None or len(axes) < 2:
        return code
    return _aligned(code if code.axes else replace(code, axes=axes[:1]), axes)


def _binary(op: ex.BinaryOp, a: Code, b: Code, axes: Axes | None) -> Code:
    match op:
        case "add":
            return Code(f"{a.at(_ADD)} + {b.at(_MUL)}", axes, _ADD)
        case "sub":
            return Code(f"{a.at(_ADD)} - {b.at(_MUL)}", axes, _ADD)
        case "mul" if a.text == "-1":
            return Code(f"-{b.at(_NEG)}", axes, _NEG)
        case "mul":
            return Code(f"{a.at(_MUL)} * {b.at(_NEG)}", axes, _MUL)
        case "div":
            return Code(f"{a.at(_MUL)} / {b.at(_NEG)}", axes, _MUL)
        case "pow":
            base = f"float({a.text})" if a.axes is None else a.atom
            return Code(f"{base} ** {b.at(_NEG)}", axes, _POW)
        case "max" | "min":
            return Code(f"torch.{op}imum({a.text}, {b.text})", axes)
        case _:
            assert_never(op)


@dataclass(slots=True)
class Printer:
    """Prints the expressions of one function. `like` is a tensor at hand; the rest is what the function needs."""

    spec: s.LayerSpec
    like: str
    arguments: tuple[str, ...] = ()
    locals: dict[str, str] = field(default_factory=dict)
    definitions: list[tuple[str, str]] = field(default_factory=list)
    prefix: str = "_ref_"  # of functions that the printed code calls
    stopped: bool = False  # inside of stop(...), where memories are not what is differentiated

    def local(self, name: str, source: str = "") -> str:
        """The local variable that holds the spec's `name`; `source` fetches it."""
        if name not in self.locals:
            local = name.replace("|", "")
            while _RESERVED.fullmatch(local) or local in self.arguments or local in self.locals.values():
                local += "_"
            self.locals[name] = local
            if source:
                self.definitions.append((local, source))
        return self.locals[name]

    def define(self, kind: str, text: str) -> str:
        """A local for a sum or a mean; the same one for the same text."""
        for name, known in self.definitions:
            if known == text:
                return name
        self.definitions.append((f"{kind}_{len(self.definitions)}", text))
        return self.definitions[-1][0]

    # ---- what expressions and component formulas share ------------------------------------------------------

    def tensor(self, code: Code) -> Code:
        return Code(f"{self.like}.new_tensor({code.text})", ()) if code.axes is None else code

    def map(self, fn: str, x: Code) -> Code:
        template, x = _SCALAR[fn], self.tensor(x)
        return Code(template.format(x.atom if template.startswith("{}") else x.text), x.axes)

    def binary(self, op: ex.BinaryOp, a: Code, b: Code, axes: Axes, align: Callable[[Code, Axes], Code]) -> Code:
        if op in ("max", "min"):
            a, b = self.tensor(a), self.tensor(b)
        numbers = a.axes is None and b.axes is None
        return _binary(op, align(a, axes), align(b, axes), None if numbers else axes)

    # ---- expressions -------------------------------------------------------------------------------------------

    def total(self, x: Code, how: str = "sum") -> Code:
        dims = {0: "", 1: "-1", 2: "(-2, -1)"}[len(x.axes or ())]
        return Code(f"{x.atom}.{how}({dims})", ()) if dims else x

    def power(self, x: Code, r: float) -> Code:
        """x^r of an x that is not negative; derivatives that are not finite at 0 are taken as 0."""
        if r == 1:
            return x
        if r < 0 or r == int(r):
            return _binary("pow", x, _number(r), x.axes)
        return Code(f"_ref_power({x.text}, {_number(r).text})", x.axes)

    def norm(self, x: Code, p: float, power: float) -> Code:
        size = Code(f"{x.atom}.abs()", x.axes)
        if not x.axes:
            return self.power(size, power)
        if math.isinf(p):
            return self.power(self.total(size, "amax"), power)
        return self.power(self.total(self.power(x if p > 0 and p % 2 == 0 else size, p)), power / p)

    def applied(self, fn: str, x: str, rows: bool) -> str:
        """A call of a vector function along the last axis; with `rows`, of a tensor that has one axis before it."""
        if fn not in self.spec.fns:
            return _VECTOR[fn].format(x)
        arguments = [x]
        for name in fn_params(self.spec.fns[fn]):
            shape = self.spec.tensor(name).shape or ("",)
            param = Code(self.local(name, f'x["{name}"]'), self.spec.tensor(name).shape)
            arguments.append(_aligned(param, ("", *shape) if rows else shape).text)
        return f"_ref_fn_{fn}({', '.join(arguments)})"

    def expr(self, e: ex.Expr) -> Code:
        match e:
            case ex.Num(value) | ex.Const(_, value):
                return _number(value)
            case ex.Size(dim):
                return Code(size_of(self.spec, dim), None)
            case ex.Delay(x, by, shape):
                return Code(f"_ref_delayed(_ref_past_{delayed(self.spec).index(x)}, x, {by})", shape)
            case ex.Component(x, index):
                return Code(f"{self.expr(x).atom}[..., {index}]", ())
            case ex.Features(x, kind, order, shape):
                return Code(f"{self.prefix}{kind}_features({self.expr(x).text}, {order})", shape)
            case ex.Stop(x):
                return replace(self, stopped=True).expr(x)
            case ex.Ref(name, "memory", shape) if self.stopped:
                return Code(self.local(f"|{name}|", f'memory["|{name}|"]'), shape)
            case ex.Ref(name, kind, shape):
                return Code(self.local(name, _source(name, kind)), shape)
            case ex.Map(fn, x):
                return self.map(fn, self.expr(x))
            case ex.Binary(op, a, b, shape):
                return self.binary(op, self.expr(a), self.expr(b), shape, to_shape)
            case ex.MatVec(ex.Ref(name, kind), ex.Apply(fn, x), shape) if fn in self.spec.kernels:
                return Code(f"{self.local(name, _source(name, kind))}({self.expr(x).text})", shape)
            case ex.Apply("normalized", ex.MatVec(ex.Ref(name, kind), ex.Apply(_, x)), shape):
                return Code(f"{self.local(name, _source(name, kind))}.normalized({self.expr(x).text})", shape)
            case ex.MatVec(m, x, shape):
                return Code(f"({self.expr(m).atom} @ {self.expr(x).atom}[..., None])[..., 0]", shape)
            case ex.Transpose(m, shape):
                return Code(f"{self.expr(m).atom}.mT", shape)
            case ex.Inner(a, b):
                return self.total(self.binary("mul", self.expr(a), self.expr(b), a.shape, to_shape))
            case ex.Norm(x, p, power):
                return self.norm(self.tensor(self.expr(x)), p, power)
            case ex.Total(x):
                return self.total(self.expr(x))
            case ex.Mean(x):
                return self.total(self.expr(x), "mean")
            case ex.Apply(fn, x, shape):
                return Code(self.applied(fn, self.expr(x).text, rows=False), shape)
            case ex.Rows(fn, m, shape):
                return Code(self.applied(fn, self.expr(m).text, rows=True), shape)
            case ex.Columns(fn, m, shape):
                return Code(f"{self.applied(fn, f'{self.expr(m).atom}.mT', rows=True)}.mT", shape)
            case ex.Outer() | ex.JacT() | ex.ColumnsJacT() | ex.RowsJacT():
                raise AssertionError("only derive makes such a node; a declared layer holds none")
            case _:
                assert_never(e)

    # ---- component formulas --------------------------------------------------------------------------------------

    def comp(self, c: ex.Comp, scope: tuple[str, ...]) -> Code:
        """`scope`: the indices in force, outermost first; an inner one hides an outer one of the same name."""
        match c:
            case ex.CNum(value) | ex.CConst(_, value):
                return _number(value)
            case ex.CSize():
                return Code(f"{self.like}.shape[-1]", None)
            case ex.CElem(index):
                return Code(self.like, (_depth(scope, index),))
            case ex.CRef(name, index):
                return Code(self.local(name), (_depth(scope, index),) if index else ())
            case ex.CMap(fn, x):
                return self.map(fn, self.comp(x, scope))
            case ex.CBinary(op, a, b):
                left, right = self.comp(a, scope), self.comp(b, scope)
                union = {int(i) for i in (left.axes or ()) + (right.axes or ())}
                return self.binary(op, left, right, tuple(sorted(union)), _to_indices)
            case ex.CSum(index, body) | ex.CMean(index, body):
                inner = self.comp(body, (*scope, index))
                if not inner.axes or inner.axes[-1] != len(scope):
                    size = Code(f"{self.like}.shape[-1]", None)
                    return _binary("mul", inner, size, inner.axes) if isinstance(c, ex.CSum) else inner
                dims = "-1" if len(inner.axes) > 1 else "-1, keepdim=True"
                kind, how = ("total", "sum") if isinstance(c, ex.CSum) else ("mean", "mean")
                return Code(self.define(kind, f"{inner.atom}.{how}({dims})"), inner.axes[:-1])
            case _:
                assert_never(c)


def _source(name: str, kind: ex.RefKind) -> str:
    match kind:
        case "let":
            return f"_ref_let_{name}(memory, x)"
        case "memory":
            return f'memory["{name}"]'
        case "input" | "gate" | "param" | "pass":
            return f'x["{name}"]'
        case _:
            assert_never(kind)


def _depth(scope: tuple[str, ...], index: str) -> int:
    return len(scope) - 1 - scope[::-1].index(index)


def fn_params(fn: ex.VectorFn) -> tuple[str, ...]:
    """The tensors that a vector function's formula mentions, in order of first mention."""

    def names(c: ex.Comp) -> Iterable[str]:
        match c:
            case ex.CRef(name, _):
                yield name
            case ex.CMap(_, x) | ex.CSum(_, x) | ex.CMean(_, x):
                yield from names(x)
            case ex.CBinary(_, a, b):
                yield from names(a)
                yield from names(b)
            case ex.CNum() | ex.CConst() | ex.CSize() | ex.CElem():
                return
            case _:
                assert_never(c)

    return tuple(dict.fromkeys(names(fn.body)))


def size_of(spec: s.LayerSpec, dim: str) -> str:
    """Code for a dim's size inside a clause: of a tensor that has it, else the entry that every token carries."""
    if dim in spec.consts:
        return str(int(spec.consts[dim]))
    if dim in spec.features:
        return feature_size(spec.features[dim], size_of(spec, spec.features[dim].base))
    for tensor in spec.tensors:
        if dim in tensor.shape:
            return f'x["{tensor.name}"].shape[{tensor.shape.index(dim) - len(tensor.shape)}]'
    return f'x["|{dim}|"]'


def feature_size(feature: s.FeatureDim, base: str) -> str:
    """Code for the size of a dim that a feature map makes of one of size `base`."""
    if feature.kind == "power":
        return f"{base} ** {feature.order}"
    return f"sum({base} ** i for i in range({feature.order + 1}))"


def delayed(spec: s.LayerSpec) -> list[ex.Expr]:
    """What the layer's delays are taken of, each once."""
    return list(dict.fromkeys(n.x for root in roots(spec) for n in walk(root) if isinstance(n, ex.Delay)))
