"""Component formulas of vector functions: `fn phi(s)[i] = s[i] / sqrt(sum(j, s[j]^2))`.

Input: a `syntax.Function` with an index, and the scope. Output: `spec.VectorFn`, or None, the errors in the scope.
Calls of other functions are inlined, indices renamed so that no two sums share one. Takes no derivative.

A vector stands for its component at the index in force: `at` is that index, set by `x[j]`, and None where a single
number is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import assert_never

from ttmdsl import syntax
from ttmdsl.check_expr import OPS
from ttmdsl.errors import Span
from ttmdsl.expr import BinaryOp, CBinary, CConst, CElem, CMap, CMean, CNum, Comp, CRef, CSize, CSum, VectorFn
from ttmdsl.known import arithmetic, known_number
from ttmdsl.names import FUNCTIONS, PREPARED, SCALAR_FUNCTIONS
from ttmdsl.scope import Scope


def vector_fn(fn: syntax.Function, scope: Scope) -> VectorFn | None:
    """The checked function; the dim that its vector params fix, if any, goes into the scope."""
    assert fn.index is not None
    if len(fn.args) != 1:
        scope.error(fn.args[1].span, "a vector function has one argument", "params and consts need not be passed")
        return None
    arg, index = fn.args[0].text, fn.index.text
    reader = _Reader(scope, {*scope.declared, arg, index})
    body = reader.read(fn.body, _Local({index: index}, {arg: None}), None)
    if len(reader.dims) > 1:
        lengths = ", ".join(f"[{d}]" for d in sorted(reader.dims))
        scope.error(fn.span, f"`{fn.name.text}` uses params of different lengths: {lengths}")
        return None
    scope.fn_dims[fn.name.text] = next(iter(reader.dims), None)
    return None if body is None else VectorFn(fn.name.text, arg, index, body, span=fn.span)


@dataclass(frozen=True)
class _Local:
    """Names inside one function: its indices, by their names in the result, and its arguments; None is the result's."""

    indices: Mapping[str, str]
    args: Mapping[str, _Given | None]


@dataclass(frozen=True)
class _Given:
    value: syntax.Expr
    local: _Local


@dataclass
class _Reader:
    scope: Scope
    taken: set[str]
    dims: set[str] = field(default_factory=set)

    def read(self, e: syntax.Expr, local: _Local, at: str | None) -> Comp | None:
        with self.scope.room(e.span):
            return self._read(e, local, at)

    def _read(self, e: syntax.Expr, local: _Local, at: str | None) -> Comp | None:
        match e:
            case syntax.Number(value=value, span=span):
                return CNum(value, span=span)
            case syntax.Name():
                return self._name(e, local, at)
            case syntax.Negate(x=x, span=span):
                return self._binary("mul", CNum(-1.0, span=span), self.read(x, local, at), span)
            case syntax.Operation(op="@", span=span) | syntax.Transposed(span=span) | syntax.Group(span=span):
                self.scope.error(span, "a component formula holds numbers alone", "no matrices, no lists")
                return None
            case syntax.Operation(op=op, a=a, b=b, span=span):
                if op == "^" and isinstance(a, syntax.Bars) and self._is_vector(a.x, local):
                    return self._norm(a, self.read(b, local, None), local, span)
                return self._binary(OPS[op], self.read(a, local, at), self.read(b, local, at), span)
            case syntax.Element(x=x, index=index, span=span):
                return self._element(x, index, local)
            case syntax.Bars(x=x, p=p, span=span):
                if self._is_vector(x, local):
                    return self._norm(e, CNum(1.0), local, span)
                if p is not None:
                    self.scope.error(span, "the norm of a scalar has no p", "one bar on each side: |x|_p")
                    return None
                return self._map("abs", self.read(x, local, at), span)
            case syntax.Pairing(a=a, b=b, span=span):
                j = self._fresh("j")
                product = self._binary("mul", self.read(a, local, j), self.read(b, local, j), span)
                return None if product is None else CSum(j, product, span=span)
            case syntax.Call():
                return self._call(e, local, at)
            case _:
                assert_never(e)

    # -- names and components

    def _name(self, name: syntax.Name, local: _Local, at: str | None) -> Comp | None:
        text, span, scope = name.text, name.span, self.scope
        if text in local.args:
            given = local.args[text]
            if given is not None:
                return self.read(given.value, given.local, at)
            return self._component(CElem(at or "", span=span), text, at)
        if text in local.indices:
            scope.error(span, f"`{text}` is an index, not a number")
        elif text in scope.consts:
            return CConst(text, scope.consts[text], span=span)
        elif text in scope.tensors and scope.tensors[text].kind == "param":
            shape = scope.tensors[text].shape
            if not shape:
                return CRef(text, "", span=span)
            if len(shape) == 1:
                self.dims.add(shape[0])
                return self._component(CRef(text, at or "", span=span), text, at)
            scope.error(span, f"`{text}` is a matrix: a component formula holds numbers alone")
        elif text in scope.declared:
            hint = "only its argument, params and consts, so that it has one derivative for all tokens"
            scope.error(span, f"a vector function may not use `{text}`", hint)
        else:
            scope.unknown(name, "name", {*local.args, *scope.consts, *scope.tensors})
        return None

    def _component(self, c: CElem | CRef, name: str, at: str | None) -> Comp | None:
        if at is None:
            self.scope.error(c.span, f"`{name}` is a vector, and one number is wanted here", f"write `{name}[i]`")
            return None
        return c

    def _element(self, x: syntax.Expr, index: syntax.Expr, local: _Local) -> Comp | None:
        if not isinstance(index, syntax.Name):
            known = ", ".join(local.indices)
            self.scope.error(index.span, "a component is picked by an index", f"indices here: {known}")
            return None
        if index.text not in local.indices:
            self.scope.unknown(index, "index", local.indices)
            return None
        if not self._is_vector(x, local):
            name = x.text if isinstance(x, syntax.Name) else ""
            if name and name not in local.args and name not in self.scope.consts:
                return self._name(x, local, local.indices[index.text]) if isinstance(x, syntax.Name) else None
            self.scope.error(x.span, "this is no vector, and has no components")
            return None
        return self.read(x, local, local.indices[index.text])

    def _is_vector(self, e: syntax.Expr, local: _Local) -> bool:
        """Whether an expression stands for all components of a vector, none of them picked."""
        with self.scope.room(e.span):
            match e:
                case syntax.Name(text=text):
                    if text in local.args:
                        given = local.args[text]
                        return given is None or self._is_vector(given.value, given.local)
                    tensor = self.scope.tensors.get(text)
                    return tensor is not None and tensor.kind == "param" and len(tensor.shape) == 1
                case syntax.Negate(x=x):
                    return self._is_vector(x, local)
                case syntax.Operation(a=a, b=b):
                    return self._is_vector(a, local) or self._is_vector(b, local)
                case syntax.Call(fn=fn, args=args):
                    own = self.scope.functions.get(fn.text)
                    if own is None:
                        return fn.text not in ("sum", "mean", "size") and any(self._is_vector(a, local) for a in args)
                    if own.index is not None or own.name.text in self.scope.failed:
                        return True
                    return len(args) == len(own.args) and self._is_vector(own.body, _inside(own, args, local, None))
                case _:
                    return False

    # -- numbers

    def _binary(self, op: BinaryOp, a: Comp | None, b: Comp | None, span: Span) -> Comp | None:
        if a is None or b is None:
            return None
        x, y = known_number(a), known_number(b)
        if op == "pow" and y is None:
            hint = "a literal or a `const`"
            self.scope.error(b.span, "an exponent must be a number known at compile time", hint)
            return None
        if op == "div" and y == 0:
            self.scope.error(span, "division by zero")
            return None
        if x is not None and y is not None:
            value = arithmetic(op, x, y)
            if value is None:
                self.scope.error(span, "this has no value as a number")
                return None
            if isinstance(a, CNum) and isinstance(b, CNum):
                return CNum(value, span=span)
        if op == "pow" and y is not None and not isinstance(b, CConst):
            b = CNum(y, span=b.span)
        return CBinary(op, a, b, span=span)

    def _map(self, fn: str, x: Comp | None, span: Span) -> Comp | None:
        return None if x is None else CMap(fn, x, span=span)

    def _norm(self, bars: syntax.Bars, power: Comp | None, local: _Local, span: Span) -> Comp | None:
        """|x|_p^power as (sum_j |x_j|^p)^(power/p)."""
        j = self._fresh("j")
        x = self.read(bars.x, local, j)
        p: Comp | None = CNum(2.0) if bars.p is None else self.read(bars.p, _Local({}, {}), None)
        if x is None or p is None or power is None:
            return None
        exponent, outer = known_number(p), known_number(power)
        if exponent is None or outer is None or not exponent > 0 or not outer > 0:
            self.scope.error(span, "a norm's p and exponent must be positive numbers known at compile time")
            return None
        x = x if exponent == 2 else self._map("abs", x, span)
        term = x if exponent == 1 else self._binary("pow", x, CNum(exponent), span)
        if term is None:
            return None
        total = CSum(j, term, span=span)
        if outer == exponent:
            return total
        if 2 * outer == exponent:
            return CMap("sqrt", total, span=span)
        return self._binary("pow", total, CNum(outer / exponent), span)

    # -- calls

    def _call(self, call: syntax.Call, local: _Local, at: str | None) -> Comp | None:
        name, args, span, scope = call.fn.text, call.args, call.span, self.scope
        own = scope.functions.get(name)
        if name in local.args:
            scope.error(call.fn.span, f"`{name}` is an argument here, not a function")
            return None
        if own is not None:
            return self._own(own, call, local, at)
        if name not in FUNCTIONS:
            scope.unknown(call.fn, "function", {*FUNCTIONS, *scope.functions})
            return None
        if name in ("softmax", "columns", "rows", "stop", "normalized", "last", *PREPARED):
            hint = "write it out: exp(x[i]) / sum(j, exp(x[j]))" if name == "softmax" else ""
            scope.error(span, f"`{name}` has no place in a component formula", hint)
            return None
        if name in ("sum", "mean", "size"):
            return self._total(call, local)
        wanted = 2 if name in ("max", "min") else 1
        if len(args) != wanted:
            scope.error(span, f"`{name}` wants {wanted} argument{'s' if wanted > 1 else ''}, found {len(args)}")
            return None
        if name in SCALAR_FUNCTIONS:
            return self._map(name, self.read(args[0], local, at), span)
        a, b = (self.read(arg, local, at) for arg in args)
        return self._binary("max" if name == "max" else "min", a, b, span)

    def _total(self, call: syntax.Call, local: _Local) -> Comp | None:
        """sum(j, x[j]), mean(j, x[j]); sum(x), mean(x), size(x) of a whole vector."""
        name, args, span = call.fn.text, call.args, call.span
        make = CSum if name == "sum" else CMean
        match args:
            case (x,) if self._is_vector(x, local):
                if name == "size":
                    return CSize(span=span)
                j = self._fresh("j")
                body = self.read(x, local, j)
            case (syntax.Name(text=index), x) if name != "size" and index not in local.args:
                j = self._fresh(index)
                body = self.read(x, _Local({**local.indices, index: j}, local.args), None)
            case _:
                hint = "" if name == "size" else f"or `{name}(j, x[j])`, with a new name for the index"
                self.scope.error(span, f"`{name}` wants a vector: `{name}(x)`", hint)
                return None
        return None if body is None else make(j, body, span=span)

    def _own(self, fn: syntax.Function, call: syntax.Call, local: _Local, at: str | None) -> Comp | None:
        name, args = fn.name.text, call.args
        if name in self.scope.failed:
            return None
        if len(args) != len(fn.args):
            self.scope.error(call.span, f"`{name}` wants {len(fn.args)} argument(s), found {len(args)}")
            return None
        if fn.index is None:
            return self.read(fn.body, _inside(fn, args, local, None), at)
        if at is None:
            hint = f"write `{name}(...)[i]`"
            self.scope.error(call.span, f"`{name}` gives a vector, and one number is wanted here", hint)
            return None
        if not self._is_vector(args[0], local):
            self.scope.error(args[0].span, f"`{name}` wants a vector, and this is one number", "leave the index away")
            return None
        return self.read(fn.body, _inside(fn, args, local, at), None)

    def _fresh(self, name: str) -> str:
        candidate, n = name, 2
        while candidate in self.taken:
            candidate, n = f"{name}{n}", n + 1
        self.taken.add(candidate)
        return candidate


def _inside(fn: syntax.Function, args: tuple[syntax.Expr, ...], local: _Local, at: str | None) -> _Local:
    """The names within an inlined body: hygienic, because the caller's names stay with the caller's expressions."""
    indices = {} if fn.index is None or at is None else {fn.index.text: at}
    return _Local(indices, {a.text: _Given(value, local) for a, value in zip(fn.args, args, strict=True)})
