"""Evaluates spec expressions, component formulas and derived Jacobians, on float64 tensors or on sympy symbols.

Input: expressions and an environment of arrays by name; object arrays of numpy hold the symbols. Output: arrays.
Written for the tests, apart from the compiler's own lowerings, and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import sympy
import torch

from ttmdsl import expr as ex
from ttmdsl import functions
from ttmdsl.rule import Jacobian, PassRule

Array = Any

TORCH_MAPS: dict[str, Callable[[Array], Array]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "sign": torch.sign,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "softplus": torch.nn.functional.softplus,
    "erf": torch.erf,
}


def torch_formula(e: sympy.Expr, values: Mapping[str, Array]) -> Array:
    """A scalar formula on tensors."""
    e = sympy.sympify(e)
    if e.is_Symbol:
        return torch.as_tensor(values[e.name], dtype=torch.float64)
    if e.is_Number or e.is_NumberSymbol:
        return torch.tensor(float(e), dtype=torch.float64)
    args = [torch_formula(a, values) for a in e.args]
    if e.is_Add:
        return reduce(torch.add, args)
    if e.is_Mul:
        return reduce(torch.mul, args)
    if e.is_Pow:
        return args[0] ** args[1]
    name = {"Abs": "abs", "Max": "max", "Min": "min"}.get(type(e).__name__, type(e).__name__)
    if name in ("max", "min"):
        return reduce(torch.maximum if name == "max" else torch.minimum, args)
    return TORCH_MAPS[name](*args)


def sympy_formula(e: sympy.Expr, values: Mapping[str, Array]) -> Array:
    """A scalar formula on object arrays, component by component."""

    def one(**at: sympy.Expr) -> sympy.Expr:
        return sympy.sympify(e).subs({functions.symbol(n): v for n, v in at.items()}, simultaneous=True)

    used = {s.name: values[s.name] for s in sympy.sympify(e).free_symbols}
    if not used:
        return e
    return np.vectorize(lambda *a: one(**dict(zip(used, a, strict=True))), otypes=[object])(*used.values())


@dataclass
class Evaluator:
    """One environment. `symbolic` says whether the arrays hold symbols."""

    env: dict[str, Array]
    sizes: Mapping[str, int]
    fns: Mapping[str, ex.VectorFn]
    jacobians: Mapping[str, Jacobian]
    symbolic: bool = False

    def gradients(self, rule: PassRule) -> dict[str, Array]:
        """The derived gradients, definitions first."""
        inner = Evaluator(dict(self.env), self.sizes, self.fns, self.jacobians, self.symbolic)
        for name, e in rule.definitions:
            inner.env[name] = inner(e)
        return {name: inner(g) for name, g in rule.gradients.items()}

    def __call__(self, e: ex.Expr) -> Array:
        match e:
            case ex.Num(value=value, shape=shape):
                number = sympy.nsimplify(value) if self.symbolic else value
                return number * self._ones(shape) if shape else number
            case ex.Const(value=value):
                return sympy.nsimplify(value) if self.symbolic else value
            case ex.Size(dim=dim):
                return self.sizes[dim]
            case ex.Ref(name=name):
                return self.env[name]
            case ex.Map(fn=fn, x=x):
                return self.map(fn, self(x))
            case ex.Binary(op=op, a=a, b=b):
                return self._binary(op, self._aligned(a, e.shape), self._aligned(b, e.shape))
            case ex.MatVec(m=m, x=x):
                return self(m) @ self(x)
            case ex.Transpose(m=m):
                return self(m).T
            case ex.Inner(a=a, b=b):
                return (self(a) * self(b)).sum()
            case ex.Norm(x=x, p=p, power=power):
                parts = self(x) * self(x) if p == 2 else self.map("abs", self(x)) ** self._exponent(p)
                return parts.sum() ** self._exponent(power / p)
            case ex.Stop(x=x):
                return self(x)
            case ex.Total(x=x):
                return self(x).sum()
            case ex.Mean(x=x):
                return self(x).sum() / len(self(x))
            case ex.Apply(fn=fn, x=x):
                return self.apply(fn, self(x))
            case ex.Columns(fn=fn, m=m):
                return self._stack([self.apply(fn, c) for c in self(m).T]).T
            case ex.Rows(fn=fn, m=m):
                return self._stack([self.apply(fn, r) for r in self(m)])
            case ex.Outer(a=a, b=b):
                return self(a)[:, None] * self(b)[None, :]
            case ex.JacT(fn=fn, at=at, cot=cot):
                return self.pull_back(fn, self(at), self(cot))
            case ex.ColumnsJacT(fn=fn, m=m, cot=cot):
                pairs = zip(self(m).T, self(cot).T, strict=True)
                return self._stack([self.pull_back(fn, s, c) for s, c in pairs]).T
            case ex.RowsJacT(fn=fn, m=m, cot=cot):
                return self._stack([self.pull_back(fn, s, c) for s, c in zip(self(m), self(cot), strict=True)])

    def apply(self, fn: str, x: Array) -> Array:
        """A vector function by its component formula: no derived form takes part."""
        if fn == "softmax" and fn not in self.fns:
            powers = self.map("exp", x)
            return powers / powers.sum()
        return self._ones_like(x) * self.component(self.fns[fn].body, x)

    def pull_back(self, fn: str, x: Array, cot: Array) -> Array:
        """J^T cot by the derived Jacobian."""
        j = self.jacobians[fn]
        formula = sympy_formula if self.symbolic else torch_formula
        values: dict[str, Array] = {**self.env, "x": x, "n": len(x)}
        for r, summand in enumerate(j.aggregates):
            values[f"s{r}"] = (self._ones_like(x) * formula(summand, values)).sum()
        values["y"] = formula(j.value, values)
        result = formula(j.diagonal, values) * cot
        for left, right in j.low_rank:
            result = result + formula(right, values) * (formula(left, values) * cot).sum()
        return result

    def component(self, c: ex.Comp, x: Array) -> Array:
        match c:
            case ex.CNum(value=value) | ex.CConst(value=value):
                return sympy.nsimplify(value) if self.symbolic else value
            case ex.CSize():
                return len(x)
            case ex.CElem():
                return x
            case ex.CRef(name=name):
                return self.env[name]
            case ex.CMap(fn=fn, x=inner):
                return self.map(fn, self.component(inner, x))
            case ex.CBinary(op=op, a=a, b=b):
                return self._binary(op, self.component(a, x), self.component(b, x))
            case ex.CSum(body=body):
                return (self._ones_like(x) * self.component(body, x)).sum()
            case ex.CMean(body=body):
                return (self._ones_like(x) * self.component(body, x)).sum() / len(x)

    def map(self, fn: str, x: Array) -> Array:
        if self.symbolic:
            return sympy_formula(functions.formula(fn), {"x": np.asarray(x, dtype=object)})
        if fn in TORCH_MAPS:
            return TORCH_MAPS[fn](torch.as_tensor(x, dtype=torch.float64))
        return torch_formula(functions.formula(fn), {"x": x})

    def _binary(self, op: str, a: Array, b: Array) -> Array:
        match op:
            case "add":
                return a + b
            case "sub":
                return a - b
            case "mul":
                return a * b
            case "div":
                return a / b
            case "pow":
                return a**b
        assert not self.symbolic
        a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (a, b))
        return torch.maximum(a, b) if op == "max" else torch.minimum(a, b)

    def _aligned(self, e: ex.Expr, shape: ex.Shape) -> Array:
        value = self(e)
        return value[:, None] if len(shape) == 2 and e.shape == shape[:1] != shape[1:] else value

    def _exponent(self, p: float) -> Array:
        return sympy.nsimplify(p) if self.symbolic else p

    def _stack(self, vectors: list[Array]) -> Array:
        return np.stack(vectors) if self.symbolic else torch.stack(vectors)

    def _ones(self, shape: ex.Shape) -> Array:
        sizes = [self.sizes[d] for d in shape]
        return np.full(sizes, sympy.S.One, dtype=object) if self.symbolic else torch.ones(sizes, dtype=torch.float64)

    def _ones_like(self, x: Array) -> Array:
        return np.full(len(x), sympy.S.One, dtype=object) if self.symbolic else torch.ones_like(x)
