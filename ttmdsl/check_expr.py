"""Expressions of the syntax tree to expressions of the spec: names resolved, shapes inferred, macros inlined.

Input: a `syntax.Expr`, the scope and the place it stands in. Output: a `spec.Expr`, or None, the errors in the scope.
Component formulas are check_fn.py's; which clause wants which shape is check.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import assert_never

from ttmdsl import check_past, syntax
from ttmdsl.errors import Span
from ttmdsl.expr import (
    Apply,
    Binary,
    BinaryOp,
    Columns,
    Const,
    Expr,
    Inner,
    Map,
    MatVec,
    Mean,
    Norm,
    Num,
    Ref,
    Rows,
    Shape,
    Size,
    Stop,
    Total,
    Transpose,
)
from ttmdsl.known import arithmetic, known_number
from ttmdsl.names import FUNCTIONS, PREPARED, SCALAR_FUNCTIONS
from ttmdsl.scope import Bound, Env, Place, Scope, describe

OPS: dict[syntax.Operator, BinaryOp] = {"+": "add", "-": "sub", "*": "mul", "/": "div", "^": "pow"}


@dataclass(frozen=True)
class Reader:
    """Reads the expressions of one place. `chosen` is the item to take of a group such as `(W1, W2)`."""

    scope: Scope
    place: Place
    chosen: int | None = None

    def read(self, e: syntax.Expr, env: Env | None = None) -> Expr | None:
        """The checked expression. Arguments are read where they are used: what is counted is what unfolds."""
        with self.scope.room(e.span):
            return self._read(e, env or {})

    def _read(self, e: syntax.Expr, env: Env) -> Expr | None:
        match e:
            case syntax.Number(value=value, span=span):
                return Num(value, span=span)
            case syntax.Name():
                return self._name(e, env)
            case syntax.Negate(x=x, span=span):
                negated = self.read(x, env)
                return None if negated is None else self.binary("mul", Num(-1.0, span=span), negated, span)
            case syntax.Operation(op="@", a=a, b=b, span=span):
                return self._matvec(self.read(a, env), self.read(b, env), span)
            case syntax.Operation(op=op, a=a, b=b, span=span):
                return self._operation(OPS[op], e, self.read(a, env), self.read(b, env))
            case syntax.Transposed(x=x, span=span):
                m = self.read(x, env)
                if m is None or self._rank(m, 2, "`^T` transposes a matrix", "for vectors a, b write `<a, b>`"):
                    return None
                return m.m if isinstance(m, Transpose) else Transpose(m, m.shape[::-1], span=span)
            case syntax.Bars(span=span):
                return self._norm(e, env, span)
            case syntax.Pairing(a=left, b=right, span=span):
                return self._inner(self.read(left, env), self.read(right, env), span)
            case syntax.Call():
                return self._call(e, env)
            case syntax.Element():
                return self._element(e, env)
            case syntax.Group(items=items, span=span):
                if self.chosen is not None and self.chosen < len(items):
                    return self.read(items[self.chosen], env)
                hint = "`retention alpha * (W1, W2)` is the place for such a list"
                self.scope.error(span, "several values where one is wanted", hint)
                return None
            case _:
                assert_never(e)

    def _element(self, e: syntax.Element, env: Env) -> Expr | None:
        names = {n.text for n in syntax.walk(e.index) if isinstance(n, syntax.Name)}
        if not names <= {*self.scope.consts, *env, *self.scope.declared}:
            hint = "an index without a value stands in `fn name(x)[i] = ...` alone; here vectors are taken whole"
            self.scope.error(e.span, "a component outside of a component formula", hint)
            return None
        x, index = self.read(e.x, env), self.read(e.index, env)
        return None if x is None or index is None else check_past.component(x, index, e, self.scope)

    # -- names

    def _name(self, name: syntax.Name, env: Env) -> Expr | None:
        scope, text, span = self.scope, name.text, name.span
        if text in env:
            return self.read(env[text].value, env[text].env)
        if text in scope.failed:
            return None
        if text in scope.consts:
            return Const(text, scope.consts[text], span=span)
        if text in scope.tensors:
            tensor = scope.tensors[text]
            shape = tensor.shape
            if tensor.kind != "param" and shape and shape[0] in scope.step_dims:
                if shape[0] != self.place.step_dim:
                    hint = f"the bias and the rate of `gd(steps = {shape[0]})` take them one at a time"
                    scope.error(span, f"`{text}` has an entry for each of {shape[0]} gradient steps", hint)
                    return None
                shape = shape[1:]
            return Ref(text, tensor.kind, shape, span=span)
        if text in scope.lets:
            return Ref(text, "let", scope.lets[text], span=span)
        if text in self.place.memories:
            return Ref(text, "memory", scope.memories[text].shape, span=span)
        if text in self.place.passes:
            return Ref(text, "pass", scope.passes[text], span=span)
        if text in scope.dims:
            return Size(text, span=span)
        self._refuse(name)
        return None

    def _refuse(self, name: syntax.Name) -> None:
        scope, place, text = self.scope, self.place, name.text
        if text == ".":
            hint = "`feature phi = exp(scale * <., .>)`; elsewhere write `<a, b>`"
            scope.error(name.span, "<., .> stands in a `feature` alone", hint)
        elif text in scope.functions or text in FUNCTIONS or text in scope.kernels:
            scope.error(name.span, f"`{text}` is a function", f"write `{text}(...)`")
        elif text in scope.owners and place.inside and scope.owners[text] != place.inside:
            owner = scope.owners[text]
            hint = f"a later pass sees only what an earlier one reads out: `{owner}`"
            scope.error(name.span, f"`{text}` is a memory of pass `{owner}`", hint)
        elif text in scope.owners:
            scope.error(name.span, f"{place.title} may not use the memory `{text}`")
        elif text in scope.passes or text == place.inside:
            scope.error(name.span, f"{place.title} may not use `{text}`, a pass that is not finished before it")
        elif text in scope.declared:
            scope.error(name.span, f"`{text}` is declared further down", "declare it before its first use")
        else:
            known = {*scope.consts, *scope.tensors, *scope.lets, *place.memories, *place.passes}
            scope.unknown(name, "name", known)

    # -- arithmetic

    def _operation(self, op: BinaryOp, e: syntax.Operation, a: Expr | None, b: Expr | None) -> Expr | None:
        if a is None or b is None:
            return None
        if op == "pow":
            exponent = known_number(b)
            if exponent is None:
                hint = "a literal or a `const`; for x to the power of a gate write exp(gate * log(x))"
                self.scope.error(e.b.span, "an exponent must be a number known at compile time", hint)
                return None
            if isinstance(e.a, syntax.Bars) and (norm := self._raised(a, exponent, e)) is not None:
                return norm
            b = b if isinstance(b, Const) else Num(exponent, span=b.span)
        return self.binary(op, a, b, e.span)

    def binary(self, op: BinaryOp, a: Expr, b: Expr, span: Span) -> Expr | None:
        """`a op b`, broadcast by dim names; literals are folded, constants stay."""
        x, y = known_number(a), known_number(b)
        if x is not None and y is not None:
            value = arithmetic(op, x, y)
            if value is None:
                self.scope.error(span, "this has no value as a number")
                return None
            if isinstance(a, Num) and isinstance(b, Num):
                return Num(value, span=span)
        if op == "div" and y == 0:
            self.scope.error(span, "division by zero")
            return None
        shape = self._broadcast(a.shape, b.shape, span)
        return None if shape is None else Binary(op, a, b, shape, span=span)

    def _broadcast(self, a: Shape, b: Shape, span: Span) -> Shape | None:
        if a == b or not a or not b:
            return a or b
        small, large = sorted((a, b), key=len)
        hint = ""
        if set(small) <= set(large):
            if len(small) < len(large) and len(set(large)) == len(large):
                return large
            if set(small) == set(large) and len(small) == len(large):
                hint = "transpose one of them with ^T"
            else:
                hint = f"it could run along the rows or the columns of {describe(large)}: give the two dims two names"
        self.scope.error(span, f"shapes {describe(a)} and {describe(b)} do not go together", hint)
        return None

    # -- vectors and matrices

    def _rank(self, e: Expr, rank: int, message: str, hint: str = "") -> bool:
        """Whether the rank is wrong, which is then noted."""
        if len(e.shape) != rank:
            self.scope.error(e.span, f"{message}, and this is {describe(e.shape)}", hint)
        return len(e.shape) != rank

    def _matvec(self, m: Expr | None, x: Expr | None, span: Span) -> Expr | None:
        if m is None or x is None:
            return None
        if len(m.shape) != 2 or len(x.shape) != 1:
            message = f"`@` applies a matrix to a vector, and these are {describe(m.shape)} and {describe(x.shape)}"
            self.scope.error(span, message, "`*` multiplies componentwise, `<a, b>` is the inner product")
            return None
        if m.shape[1] != x.shape[0]:
            hint = "transpose it with ^T" if m.shape[0] == x.shape[0] else ""
            self.scope.error(span, f"a matrix {describe(m.shape)} cannot be applied to {describe(x.shape)}", hint)
            return None
        return MatVec(m, x, (m.shape[0],), span=span)

    def _inner(self, a: Expr | None, b: Expr | None, span: Span) -> Expr | None:
        if a is None or b is None:
            return None
        if len(a.shape) != 1 or a.shape != b.shape:
            shapes = f"{describe(a.shape)} and {describe(b.shape)}"
            self.scope.error(span, f"`<a, b>` wants two vectors of one length, and these are {shapes}")
            return None
        return Inner(a, b, span=span)

    def _norm(self, bars: syntax.Bars, env: Env, span: Span) -> Expr | None:
        x = self.read(bars.x, env)
        p = None if bars.p is None else self.read(bars.p, {})
        if x is None or (bars.p is not None and p is None):
            return None
        exponent = 2.0 if p is None else known_number(p)
        if exponent is None or not exponent > 0:
            self.scope.error(bars.p.span if bars.p else span, "the p of a norm must be a positive number or `const`")
            return None
        if x.shape:
            return Norm(x, exponent, 1.0, span=span)
        if bars.p is not None:
            self.scope.error(bars.span, "the norm of a scalar has no p", "one bar on each side: |x|_p")
            return None
        return x if isinstance(x, Norm) else Map("abs", x, (), span=span)

    def _raised(self, norm: Expr, exponent: float, e: syntax.Operation) -> Expr | None:
        """|x|_p^e as one norm: its gradient needs no root."""
        if not isinstance(norm, Norm):
            return None
        if not exponent > 0:
            self.scope.error(e.b.span, "a norm's exponent must be positive", "divide by the norm instead")
        return Norm(norm.x, norm.p, norm.power * exponent, span=e.span)

    # -- calls

    def _call(self, call: syntax.Call, env: Env) -> Expr | None:
        name = call.fn.text
        if name in env:
            self.scope.error(call.fn.span, f"`{name}` is an argument here, not a function")
            return None
        if name in self.scope.functions:
            return self._own(self.scope.functions[name], call, env)
        if name in self.scope.kernels:
            return self._kernel(call, env)
        if name not in FUNCTIONS:
            self.scope.unknown(call.fn, "function", {*FUNCTIONS, *self.scope.functions, *self.scope.kernels})
            return None
        if name == "window":
            hint = "`bias window(c, weight = gamma) of ...`"
            self.scope.error(call.span, "a window stands before the whole bias", hint)
            return None
        wanted = 2 if name in ("max", "min", "columns", "rows", *PREPARED) else 1
        if not self.arity(call, wanted):
            return None
        if name in ("columns", "rows"):
            return self._along(call, env)
        values = [self.read(a, env) for a in call.args]
        a, b = values[0], values[-1]
        if a is None or b is None:
            return None
        match name:
            case "delay":
                return check_past.delay(a, b, call, self.scope)
            case "power" | "taylor":
                return check_past.features("power" if name == "power" else "taylor", a, b, call, self.scope)
            case "residual":
                return self.binary("add", a, b, call.span) if a.shape == b.shape else b
            case "max" | "min":
                return self.binary("max" if name == "max" else "min", a, b, call.span)
            case "sum" | "mean":
                wrong = self._rank(a, 1, f"`{name}` adds up a vector's components")
                return None if wrong else (Total if name == "sum" else Mean)(a, span=call.span)
            case "size":
                return (
                    None
                    if self._rank(a, 1, "`size` counts a vector's components")
                    else Size(a.shape[0], span=call.span)
                )
            case "stop":
                if not self.place.learns:
                    hint = "it makes a constant of what the bias's gradient would go through"
                    message = f"`stop` means something in the bias alone, not in {self.place.title}"
                    self.scope.error(call.span, message, hint)
                    return None
                return Stop(a, a.shape, span=call.span)
            case "normalized":
                wrong = self._rank(a, 1, "`normalized` wants a memory's readout")
                return None if wrong else Apply("normalized", a, a.shape, span=call.span)
            case "last":
                hint = "`retention last(c)`, or along with a decay `retention alpha * S, last(c)`"
                self.scope.error(call.span, "`last` stands alone, in the retention", hint)
                return None
            case "softmax":
                hint = "columns(softmax, S) or rows(softmax, S)" if len(a.shape) == 2 else ""
                wrong = self._rank(a, 1, "`softmax` wants a vector", hint)
                return None if wrong else Apply("softmax", a, a.shape, span=call.span)
            case _:
                assert name in SCALAR_FUNCTIONS
                return Map(name, a, a.shape, span=call.span)

    def _kernel(self, call: syntax.Call, env: Env) -> Expr | None:
        """A feature map at a vector: known by its inner products alone, so only a memory over it may be next to it."""
        x = self.read(call.args[0], env) if self.arity(call, 1) else None
        if x is None or self._rank(x, 1, f"`{call.fn.text}` wants a vector"):
            return None
        return Apply(call.fn.text, x, (call.fn.text,), span=call.span)

    def arity(self, call: syntax.Call, wanted: int) -> bool:
        if len(call.args) != wanted:
            name, counts = call.fn.text, f"{wanted} argument{'s' if wanted > 1 else ''}, found {len(call.args)}"
            inside = f"`{name}(j, x[j])` stands in `fn f(x)[i] = ...` alone; here vectors are taken whole: `{name}(x)`"
            self.scope.error(call.span, f"`{name}` wants {counts}", inside if name in ("sum", "mean") else "")
        return len(call.args) == wanted

    def _own(self, fn: syntax.Function, call: syntax.Call, env: Env) -> Expr | None:
        if fn.name.text in self.scope.failed or not self.arity(call, len(fn.args)):
            return None
        if fn.index is None:
            inner = {a.text: Bound(value, env) for a, value in zip(fn.args, call.args, strict=True)}
            return self.read(fn.body, inner)
        x = self.read(call.args[0], env)
        hint = f"columns({fn.name.text}, ...) or rows({fn.name.text}, ...)" if x and len(x.shape) == 2 else ""
        if x is None or self._rank(x, 1, f"`{fn.name.text}` wants a vector", hint):
            return None
        return Apply(fn.name.text, x, x.shape, span=call.span) if self._fits(fn, x.shape[0], call.span) else None

    def _along(self, call: syntax.Call, env: Env) -> Expr | None:
        where, (first, second) = call.fn.text, call.args
        fn = first.text if isinstance(first, syntax.Name) else ""
        own = self.scope.functions.get(fn)
        if fn != "softmax" and (own is None or own.index is None):
            hint = "declare it by its component formula, `fn name(s)[i] = ...`"
            self.scope.error(first.span, f"`{where}` wants the name of a vector function first", hint)
            return None
        m = self.read(second, env)
        if m is None or self._rank(m, 2, f"`{where}` wants a matrix"):
            return None
        along = m.shape[0] if where == "columns" else m.shape[1]
        if own is not None and not self._fits(own, along, call.span):
            return None
        return (Columns if where == "columns" else Rows)(fn, m, m.shape, span=call.span)

    def _fits(self, fn: syntax.Function, dim: str, span: Span) -> bool:
        """Whether the function, and the vector params in its formula, can take a vector of this dim."""
        name = fn.name.text
        wanted = self.scope.fn_dims.get(name)
        if wanted is not None and wanted != dim:
            self.scope.error(span, f"`{name}` uses a param of shape [{wanted}], and its argument is [{dim}]")
            return False
        return name not in self.scope.failed
