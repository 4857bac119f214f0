"""Spec expressions to IR values, for one token or for a chunk of tokens alike.

Input: `Expr`, an environment of values, the derived Jacobians. Output: IR nodes.
Whether a value has a token axis is decided by the environment alone: broadcasting by axis name does the rest. Does not
decide how a memory is read at a token inside a chunk; the environment holds a `VirtualMemory` for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import sympy

from ttmdsl import expr as ex
from ttmdsl import functions
from ttmdsl.builder import Builder
from ttmdsl.errors import TtmError
from ttmdsl.ir import Node
from ttmdsl.rule import Jacobian

LOG2E = math.log2(math.e)


class NotChunkable(TtmError):
    """This layer has no chunk form by the rules we have; the exact sequential form stands in. Holds the reason."""


class VirtualMemory(Protocol):
    """A memory parameter at every token of a chunk, never materialised: it can only be read through a vector."""

    def read(self, x: Node, over: str) -> Node:
        """The contraction of the memory with x over one of its two axes, at every token."""


Value: TypeAlias = "Node | VirtualMemory"
Env: TypeAlias = Mapping[str, Value]


class Matrix(NamedTuple):
    """A matrix value and which of its axes are its rows and columns."""

    node: Value
    rows: str
    columns: str


def matrix_axes(shape: ex.Shape) -> tuple[str, str]:
    """Axes of a matrix with this shape: the columns of a square one get a primed axis."""
    rows, columns = shape
    return rows, columns + "'" if rows == columns else columns


@dataclass(frozen=True)
class ExprLowering:
    """Lowers expressions of one layer into one builder."""

    b: Builder
    jacobians: Mapping[str, Jacobian]

    def vector(self, e: ex.Expr, env: Env) -> Node:
        """A scalar, a vector, or a matrix in its canonical axes."""
        b = self.b
        match e:
            case ex.Num(value=number) | ex.Const(value=number):
                return b.const(number)
            case ex.Size(dim=d):
                return b.size(d)
            case ex.Ref(name=name):
                value = env[name]
                if not isinstance(value, Node):
                    raise NotChunkable(f"memory {name} is used other than by a product with a vector")
                return value
            case ex.Map(fn=fn, x=x):
                return self.map(fn, self.vector(x, env))
            case ex.Binary(op="pow", a=x, b=exponent):
                u, number = self.vector(x, env), _number(exponent)
                return self.inverse_power(u, -number) if u.op == "abs" and -1 < number < 0 else b.pow(u, number)
            case ex.Binary(op=op, a=x, b=y):
                u, v = self.vector(x, env), self.vector(y, env)
                match op:
                    case "add":
                        return b.add(u, v)
                    case "sub":
                        return b.sub(u, v)
                    case "mul":
                        return b.mul(u, v)
                    case "div":
                        return b.mul(u, self.reciprocal(v))
                    case _:
                        return b.map(op, u, v)
            case ex.MatVec(m=m, x=x):
                return self.matvec(self.matrix(m, env), self.vector(x, env), e.shape)
            case ex.Inner(a=x, b=y):
                u, v = self.vector(x, env), self.vector(y, env)
                return b.contract(u, v, set(x.shape)) if len(x.shape) == 1 else self._full_sum(b.mul(u, v), x.shape)
            case ex.Norm(x=x, p=p, power=power):
                u = self.vector(x, env)
                terms = b.mul(u, u) if p == 2 else b.pow(b.map("abs", u), p)
                return b.pow(self._full_sum(terms, x.shape), power / p)
            case ex.Total(x=x):
                return self._full_sum(self.vector(x, env), x.shape)
            case ex.Mean(x=x):
                count = b.product(b.size(d) for d in x.shape)
                return b.div(self._full_sum(self.vector(x, env), x.shape), count)
            case ex.Apply(fn=fn, x=x):
                return self.apply(fn, self.vector(x, env), x.shape[0], env)
            case ex.JacT(fn=fn, at=at, cot=cot):
                return self.jac_t(fn, self.vector(at, env), self.vector(cot, env), at.shape[0], env)
            case _:
                return self.canonical(self.matrix(e, env), e.shape)

    def matrix(self, e: ex.Expr, env: Env) -> Matrix:
        """A matrix with its row and column axes; a transpose swaps the two and moves nothing."""
        match e:
            case ex.Ref(name=name):
                return Matrix(env[name], *matrix_axes(e.shape))
            case ex.Transpose(m=m):
                straight = self.matrix(m, env)
                return Matrix(straight.node, straight.columns, straight.rows)
            case ex.Outer(a=x, b=y):
                rows, columns = matrix_axes(e.shape)
                right = self.b.rename(self.vector(y, env), y.shape[0], columns)
                return Matrix(self.b.mul(self.vector(x, env), right), rows, columns)
            case ex.Columns(fn=fn, m=m) | ex.Rows(fn=fn, m=m):
                at = self._nodes(m, env)
                axis = at.rows if isinstance(e, ex.Columns) else at.columns
                return Matrix(self.apply(fn, at.node, axis, env), at.rows, at.columns)
            case ex.ColumnsJacT(fn=fn, m=m, cot=cot) | ex.RowsJacT(fn=fn, m=m, cot=cot):
                at, back = self._nodes(m, env), self._nodes(cot, env)
                axis = at.rows if isinstance(e, ex.ColumnsJacT) else at.columns
                moved = back.node if back[1:] == at[1:] else self.canonical(back, cot.shape)
                return Matrix(self.jac_t(fn, at.node, moved, axis, env), at.rows, at.columns)
            case _:
                return Matrix(self.vector(e, env), *matrix_axes(e.shape))

    def _nodes(self, e: ex.Expr, env: Env) -> _NodeMatrix:
        m = self.matrix(e, env)
        if not isinstance(m.node, Node):
            raise NotChunkable("a memory is used other than by a product with a vector")
        return _NodeMatrix(m.node, m.rows, m.columns)

    def canonical(self, m: Matrix | _NodeMatrix, shape: ex.Shape) -> Node:
        """The matrix in the axes that its shape has."""
        if not isinstance(m.node, Node):
            raise NotChunkable("a memory is used other than by a product with a vector")
        rows, columns = matrix_axes(shape)
        if (m.rows, m.columns) == (rows, columns):
            return m.node
        spare = rows.rstrip("'") + "''"
        return self.b.rename(self.b.rename(self.b.rename(m.node, m.rows, spare), m.columns, columns), spare, rows)

    def matvec(self, m: Matrix, x: Node, shape: ex.Shape) -> Node:
        x = self.b.rename(x, m.columns.rstrip("'"), m.columns)
        y = self.b.contract(m.node, x, {m.columns}) if isinstance(m.node, Node) else m.node.read(x, m.columns)
        return self.b.rename(y, m.rows, shape[0])

    def _full_sum(self, x: Node, shape: ex.Shape) -> Node:
        return self.b.sum(x, set(shape) if len(shape) < 2 else set(matrix_axes(shape)))

    def reciprocal(self, x: Node) -> Node:
        """1 / x; where x is a length that is 0, its slope there takes the place of 0 / 0: 0, and 0 its slopes."""
        b = self.b
        match x.op:
            case "sqrt":
                return self.inverse_power(x.args[0], 0.5)
            case "pow" if 0 < float(x.attr[0]) < 1:
                return self.inverse_power(x.args[0], float(x.attr[0]))
            case "mul":
                return b.mul(*map(self.reciprocal, x.args))
            case _:
                return b.recip(x)

    def inverse_power(self, x: Node, exponent: float) -> Node:
        """x^-exponent for x >= 0 and an exponent in (0, 1); 0 where x is 0."""
        b = self.b
        least = b.const(10.0 ** (-36 / (1 + exponent)))  # so that the slope stays within float32, too
        return b.mul(b.map("step", x), b.pow(b.map("max", x, least), -exponent))

    # -- functions -------------------------------------------------------------------------------------------

    def map(self, fn: str, x: Node) -> Node:
        """A scalar function of functions.py, elementwise."""
        b = self.b
        match fn:
            case "exp":
                return b.map("exp2", b.mul(b.const(LOG2E), x))
            case "log":
                return b.mul(b.const(1 / LOG2E), b.map("log2", x))
            case "relu":
                return b.map("max", x, b.const(0.0))
            case "sqrt" | "abs" | "sign" | "sigmoid" | "softplus" | "tanh":
                return b.map(fn, x)
            case _:
                return self.formula(functions.formula(fn), {"x": x})

    def apply(self, fn: str, x: Node, axis: str, env: Env) -> Node:
        """A vector function along one axis."""
        if fn == "softmax":
            return self.softmax(x, axis)
        return self.formula(self.jacobians[fn].value, self.symbols(fn, x, axis, env))

    def softmax(self, x: Node, axis: str) -> Node:
        weights = self.map("exp", self.b.sub(x, self.b.amax(x, {axis})))
        return self.b.div(weights, self.b.sum(weights, {axis}))

    def symbols(self, fn: str, x: Node, axis: str, env: Env) -> dict[str, Node]:
        """What the symbols of a Jacobian stand for at the argument x."""
        b, jac = self.b, self.jacobians[fn]
        table: dict[str, Node] = {"x": x, "n": b.size(axis.rstrip("'"))}
        used = jac.value.free_symbols.union(*(s.free_symbols for s in jac.aggregates), jac.diagonal.free_symbols)
        for name in sorted(str(s) for s in used):
            if name in env and name not in table:
                value = env[name]
                assert isinstance(value, Node)
                table[name] = b.rename(value, axis.rstrip("'"), axis)
        for r, summand in enumerate(jac.aggregates):
            table[f"s{r}"] = b.sum(b.expand(self.formula(summand, table), {axis}), {axis})
        return table

    def jac_t(self, fn: str, x: Node, cot: Node, axis: str, env: Env) -> Node:
        """J_fn(x)^T cot along one axis: diagonal part, then one contraction for each rank-one term."""
        b, jac = self.b, self.jacobians[fn]
        if cot.op == "add":
            return b.add(*(self.jac_t(fn, x, c, axis, env) for c in cot.args))
        if cot.op == "neg":
            return b.neg(self.jac_t(fn, x, cot.args[0], axis, env))
        if fn == "softmax":
            table = {"y": self.softmax(x, axis), "n": b.size(axis.rstrip("'"))}
        else:
            table = self.symbols(fn, x, axis, env)
            table["y"] = self.formula(jac.value, table)
        result = b.mul(self.formula(jac.diagonal, table), cot)
        for left, right in jac.low_rank:
            along = b.sum(b.expand(b.mul(self.formula(left, table), cot), {axis}), {axis})
            result = b.add(result, b.mul(self.formula(right, table), along))
        return result

    def formula(self, f: sympy.Expr, table: Mapping[str, Node]) -> Node:
        """A scalar sympy formula over the values its symbols stand for."""
        b = self.b
        match f:
            case sympy.Symbol():
                return table[f.name]
            case sympy.Number() | sympy.NumberSymbol():
                return b.const(float(f))
            case sympy.Add():
                terms = [self.formula(a, table) for a in f.args]
                result = terms[0]
                for t in terms[1:]:
                    result = b.add(result, t)
                return result
            case sympy.Mul():
                return b.product(self.formula(a, table) for a in f.args)
            case sympy.exp():
                return self.map("exp", self.formula(f.args[0], table))
            case sympy.Pow():
                return b.pow(self.formula(f.base, table), float(f.exp))
            case sympy.Max() | sympy.Min():
                op = "max" if isinstance(f, sympy.Max) else "min"
                terms = [self.formula(a, table) for a in f.args]
                result = terms[0]
                for t in terms[1:]:
                    result = b.map(op, result, t)
                return result
            case sympy.Heaviside():
                return b.map("step", self.formula(f.args[0], table))
            case sympy.Function():
                name = type(f).__name__.lower()
                argument = self.formula(f.args[0], table)
                return b.map("erf", argument) if name == "erf" else self.map(name, argument)
            case _:
                raise AssertionError(f"no IR for the formula {f!r}")


class _NodeMatrix(NamedTuple):
    node: Node
    rows: str
    columns: str


def _number(e: ex.Expr) -> float:
    """The number that a constant expression is; the checker has seen that it is one."""
    match e:
        case ex.Num(value=v) | ex.Const(value=v):
            return float(v)
        case ex.Binary(op="div", a=x, b=y):
            return _number(x) / _number(y)
        case ex.Binary(op="sub", a=x, b=y):
            return _number(x) - _number(y)
        case ex.Binary(op="mul", a=x, b=y):
            return _number(x) * _number(y)
        case ex.Binary(op="add", a=x, b=y):
            return _number(x) + _number(y)
        case _:
            raise AssertionError(f"not a number: {e!r}")
