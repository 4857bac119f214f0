"""Expressions of a checked spec, with every name resolved and every shape known; some that only `derive` makes.

Input: built by `check_expr` and `check_fn`, then by `derive`. Output: frozen dataclasses; `LayerSpec` holds a layer's.
Holds no behaviour: derivation, lowering and printing live in their own files.

Grammar of expressions (shapes are tuples of dim names; `span` takes no part in equality):

    expr   = Num(value) | Const(name, value) | Size(dim)             numbers: literal, `const`, size of a dim
           | Ref(name, kind, shape)                                  kind: input gate param let memory pass
           | Map(fn, x)                                              scalar function, elementwise (functions.py)
           | Binary(op, a, b)                op: add sub mul div pow max min; shapes equal, or one is a subset of
                                             the other: broadcast by dim name (alpha[d_k] * S[d_v, d_k])
           | MatVec(m, x) | Transpose(m)     m: matrix expression, never materialised when it is derived
           | Inner(a, b)                     <a, b>, a scalar
           | Norm(x, p, power)               (sum |x_i|^p)^(power/p): |x|^2 is p=2 power=2, |x| is p=2 power=1
           | Total(x) | Mean(x)              sum, mean of a vector's components
           | Apply(fn, x)                    vector function of a vector
           | Columns(fn, m) | Rows(fn, m)    vector function of every column, or row, of a matrix
           | Stop(x)                         x, a constant to the bias's gradient; in a bias alone
    free of memories, and made before the recurrence (unfold.py):
           | Delay(x, by)                    x at the token `by` tokens ago; zero before the first token
           | Component(x, index)             one component of a vector whose length is known at compile time
           | Features(x, kind, order)        power: x^(tensor order), flattened; taylor: sqrt(1/i!) x^(tensor i), joined
    derived only (made by `derive`, never by `check`):
           | Outer(a, b)                     a b^T, a matrix
           | JacT(fn, at, cot)               J_fn(at)^T cot
           | ColumnsJacT(fn, m, cot)         J_fn(column)^T applied to every column of the matrix cot; RowsJacT alike

    component formula of a vector function (one number for index i):
    comp   = CNum(value) | CConst(name, value) | CSize | CElem(index) | CRef(name, index)
           | CMap(fn, x) | CBinary(op, a, b) | CSum(index, body) | CMean(index, body)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ttmdsl.errors import NOWHERE, Span

Shape: TypeAlias = tuple[str, ...]
RefKind: TypeAlias = Literal["input", "gate", "param", "let", "memory", "pass"]
BinaryOp: TypeAlias = Literal["add", "sub", "mul", "div", "pow", "max", "min"]
FeatureKind: TypeAlias = Literal["power", "taylor"]


def no_span() -> Span:
    """A field for where the spec says it: nowhere unless given, and no part of equality."""
    return field(default=NOWHERE, compare=False, repr=False, kw_only=True)


# ---- component formulas -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CNum:
    value: float
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CConst:
    name: str
    value: float
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CSize:
    """Length of the argument vector."""

    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CElem:
    """The argument's component at `index`."""

    index: str
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CRef:
    """A vector param's (or, with an empty index, a scalar param's) component; constant in the derivative."""

    name: str
    index: str
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CMap:
    fn: str
    x: Comp
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CBinary:
    op: BinaryOp
    a: Comp
    b: Comp
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CSum:
    index: str
    body: Comp
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class CMean:
    index: str
    body: Comp
    span: Span = no_span()


Comp: TypeAlias = CNum | CConst | CSize | CElem | CRef | CMap | CBinary | CSum | CMean


@dataclass(frozen=True, slots=True)
class VectorFn:
    """`fn name(arg)[index] = body`: component `index` of the result, a vector as long as the argument."""

    name: str
    arg: str
    index: str
    body: Comp
    span: Span = no_span()


# ---- expressions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Num:
    value: float
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Const:
    name: str
    value: float
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Size:
    dim: str
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Ref:
    name: str
    kind: RefKind
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Map:
    fn: str
    x: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Binary:
    op: BinaryOp
    a: Expr
    b: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class MatVec:
    m: Expr
    x: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Transpose:
    m: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Inner:
    a: Expr
    b: Expr
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Norm:
    x: Expr
    p: float
    power: float
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Total:
    x: Expr
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Mean:
    x: Expr
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Apply:
    fn: str
    x: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Columns:
    fn: str
    m: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Rows:
    fn: str
    m: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Stop:
    x: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Delay:
    x: Expr
    by: int
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Component:
    x: Expr
    index: int
    shape: Shape = ()
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Features:
    x: Expr
    kind: FeatureKind
    order: int
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Outer:
    a: Expr
    b: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class JacT:
    fn: str
    at: Expr
    cot: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class ColumnsJacT:
    fn: str
    m: Expr
    cot: Expr
    shape: Shape
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class RowsJacT:
    fn: str
    m: Expr
    cot: Expr
    shape: Shape
    span: Span = no_span()


Expr: TypeAlias = (
    Num
    | Const
    | Size
    | Ref
    | Map
    | Binary
    | MatVec
    | Transpose
    | Inner
    | Norm
    | Total
    | Mean
    | Apply
    | Columns
    | Rows
    | Stop
    | Delay
    | Component
    | Features
    | Outer
    | JacT
    | ColumnsJacT
    | RowsJacT
)
