"""Constructors of spec expressions that simplify as they build.

Input and output: `Expr` of expr.py. Numbers are folded and pulled to the front, zeros and ones vanish, and matrices
stay factored (an elementwise factor of an outer product goes into its vectors). A cotangent may have fewer dims than
the value it belongs to: it then stands for its broadcast. Does not expand products or look for a normal form.
"""

from __future__ import annotations

from ttmdsl.expr import (
    Binary,
    BinaryOp,
    ColumnsJacT,
    Const,
    Expr,
    Inner,
    JacT,
    Map,
    MatVec,
    Norm,
    Num,
    Outer,
    Ref,
    RowsJacT,
    Shape,
    Size,
    Total,
    Transpose,
)
from ttmdsl.walk_expr import walk as walk  # check_pass.py has it from here

ZERO = Num(0.0)
ONE = Num(1.0)


# ---- numbers ------------------------------------------------------------------------------------------------


def split(e: Expr) -> tuple[float, Expr]:
    """The numeric coefficient and the rest; a number's rest is ONE (of the number's shape)."""
    match e:
        case Num(value=value, shape=shape):
            return value, (ONE if shape == () else Num(1.0, shape))
        case Binary(op="mul", a=a, b=b):
            (ca, ra), (cb, rb) = split(a), split(b)
            return (ca * cb, _mul(ra, rb)) if (ca, cb) != (1.0, 1.0) else (1.0, e)
        case Binary(op="div", a=a, b=b):
            (ca, ra), (cb, rb) = split(a), split(b)
            if cb == 0.0 or (ca, cb) == (1.0, 1.0):
                return 1.0, e
            return ca / cb, (ra if rb == ONE else Binary("div", ra, rb, e.shape))
        case Binary(op="sub", a=Num(value=0.0), b=b):
            c, r = split(b)
            return -c, r
        case _:
            return 1.0, e


def scale(c: float, e: Expr) -> Expr:
    """c * e for a number c."""
    own, rest = split(e)
    c = c * own
    if c == 0.0:
        return ZERO
    if c == 1.0:
        return rest
    return Num(c, rest.shape) if isinstance(rest, Num) else Binary("mul", Num(c), rest, rest.shape)


def neg(e: Expr) -> Expr:
    return scale(-1.0, e)


def constant(e: Expr) -> float | None:
    """The value of a number, a const or arithmetic on them."""
    match e:
        case Num(value=value, shape=()) | Const(value=value):
            return value
        case Binary(op=op, a=a, b=b):
            x, y = constant(a), constant(b)
            if x is None or y is None:
                return None
            match op:
                case "add":
                    return x + y
                case "sub":
                    return x - y
                case "mul":
                    return x * y
                case "div":
                    return x / y if y else None
                case _:
                    return None
        case _:
            return None


def is_zero(e: Expr) -> bool:
    return isinstance(e, Num) and e.value == 0.0


def full(e: Expr, shape: Shape) -> Expr:
    """The expression with all the dims of `shape`: a cotangent's broadcast, written out."""
    if e.shape == shape:
        return e
    if len(shape) == 2:
        rows, columns = Num(1.0, shape[:1]), Num(1.0, shape[1:])
        return mul(e, Outer(rows, columns, shape))
    c, rest = split(e)
    ones = Num(1.0, shape)
    return scale(c, ones if rest == ONE else Binary("mul", rest, ones, shape))


# ---- elementwise --------------------------------------------------------------------------------------------


def joint_shape(a: Expr, b: Expr) -> Shape:
    """The shape of an elementwise operation: the larger of the two, or rows by columns."""
    if set(b.shape) <= set(a.shape) and len(b.shape) <= len(a.shape):
        return a.shape
    if set(a.shape) <= set(b.shape):
        return b.shape
    return a.shape + b.shape


def _terms(e: Expr) -> list[tuple[float, Expr]]:
    c, rest = split(e)
    match rest:
        case Binary(op="add", a=a, b=b):
            inner = _terms(a) + _terms(b)
        case Binary(op="sub", a=a, b=b):
            inner = _terms(a) + [(-k, r) for k, r in _terms(b)]
        case _:
            inner = [(1.0, rest)]
    return [(c * k, r) for k, r in inner]


def add(a: Expr, b: Expr) -> Expr:
    collected: dict[Expr, float] = {}
    for c, rest in _terms(a) + _terms(b):
        collected[rest] = collected.get(rest, 0.0) + c
    result: Expr = ZERO
    leading = next((rest for rest, c in collected.items() if c > 0), None)  # b - a reads better than -a + b
    for rest, c in sorted(collected.items(), key=lambda item: item[0] is not leading):
        if c == 0.0:
            continue
        if is_zero(result):
            result = scale(c, rest)
        elif c < 0:
            result = Binary("sub", result, scale(-c, rest), joint_shape(result, rest))
        else:
            result = Binary("add", result, scale(c, rest), joint_shape(result, rest))
    return result


def sub(a: Expr, b: Expr) -> Expr:
    return add(a, neg(b))


def _mul(a: Expr, b: Expr) -> Expr:
    """The product of two factors without numeric coefficients."""
    if a == ONE:
        return b
    if b == ONE:
        return a
    for factor, other in ((a, b), (b, a)):
        if isinstance(other, Outer) and not isinstance(factor, Outer):
            rows, columns = other.a, other.b
            if factor.shape == ():
                return Outer(_mul(factor, rows), columns, other.shape)
            if rows.shape != columns.shape and factor.shape == rows.shape:
                return Outer(_mul(factor, rows), columns, other.shape)
            if rows.shape != columns.shape and factor.shape == columns.shape:
                return Outer(rows, _mul(factor, columns), other.shape)
    if isinstance(a, Outer) and isinstance(b, Outer):
        return Outer(_mul(a.a, b.a), _mul(a.b, b.b), a.shape)
    for factor, other in ((a, b), (b, a)):  # (1 / c) * x is x / c
        if isinstance(factor, Binary) and factor.op == "div" and factor.a == ONE:
            return Binary("div", other, factor.b, joint_shape(other, factor.b))
    return Binary("mul", a, b, joint_shape(a, b))


def mul(a: Expr, b: Expr) -> Expr:
    (ca, ra), (cb, rb) = split(a), split(b)
    return scale(ca * cb, _mul(ra, rb))


def div(a: Expr, b: Expr) -> Expr:
    (ca, ra), (cb, rb) = split(a), split(b)
    if cb == 0.0:
        return Binary("div", a, b, joint_shape(a, b))
    if is_zero(a):
        return ZERO
    if rb == ONE:
        return scale(ca / cb, ra)
    if ra == rb:
        return Num(ca / cb, ra.shape)
    if isinstance(ra, Outer) and rb.shape == ():
        return scale(ca / cb, Outer(div(ra.a, rb), ra.b, ra.shape))
    return scale(ca / cb, Binary("div", ra, rb, joint_shape(ra, rb)))


def power(a: Expr, exponent: float) -> Expr:
    if exponent == 0.0:
        return ONE
    if exponent == 1.0:
        return a
    return Binary("pow", a, Num(exponent), a.shape)


def elementwise(op: BinaryOp, a: Expr, b: Expr) -> Expr:
    """A binary operation without simplification."""
    return Binary(op, a, b, joint_shape(a, b))


def map_(fn: str, x: Expr) -> Expr:
    return Map(fn, x, x.shape)


# ---- linear algebra -----------------------------------------------------------------------------------------


def transpose(m: Expr) -> Expr:
    c, m = split(m)
    shape = m.shape[::-1]
    match m:
        case Transpose(m=inner):
            return scale(c, inner)
        case Outer(a=a, b=b):
            return scale(c, Outer(b, a, shape))
        case Binary(op=op, a=a, b=b):
            a, b = (transpose(x) if len(x.shape) == 2 else x for x in (a, b))
            return scale(c, Binary(op, a, b, shape))
        case ColumnsJacT(fn=fn, m=at, cot=cot):
            return scale(c, RowsJacT(fn, transpose(at), transpose(cot), shape))
        case RowsJacT(fn=fn, m=at, cot=cot):
            return scale(c, ColumnsJacT(fn, transpose(at), transpose(cot), shape))
        case _:
            return scale(c, Transpose(m, shape))


def matvec(m: Expr, x: Expr) -> Expr:
    (cm, m), (cx, x) = split(m), split(x)
    if cm * cx == 0.0:
        return ZERO
    if isinstance(m, Outer):
        return scale(cm * cx, mul(inner(m.b, x), m.a))
    return scale(cm * cx, MatVec(m, x, m.shape[:1]))


def outer(a: Expr, b: Expr) -> Expr:
    (ca, a), (cb, b) = split(a), split(b)
    return scale(ca * cb, Outer(a, b, a.shape + b.shape))


def inner(a: Expr, b: Expr) -> Expr:
    (ca, a), (cb, b) = split(a), split(b)
    for x, other in ((a, b), (b, a)):  # <c x, y> = c <x, y> for a scalar c
        match x:
            case Binary(op="mul", a=Binary() | Ref() | Norm() | Inner() | Total() as s, b=rest) if s.shape == ():
                return scale(ca * cb, mul(s, inner(rest, other)))
            case Binary(op="div", a=rest, b=s) if s.shape == () and rest.shape != ():
                return scale(ca * cb, div(inner(rest, other), s))
            case _:
                pass
    return scale(ca * cb, Inner(a, b))


def total(x: Expr) -> Expr:
    c, x = split(x)
    match x:
        case Num(shape=(dim,)):
            return scale(c, Size(dim))
        case Binary(op="mul", a=a, b=b) if a.shape == b.shape:
            return scale(c, inner(a, b))
        case Binary(op="mul", a=a, b=b):
            s, rest = (a, b) if a.shape == () else (b, a)
            return scale(c, mul(s, total(rest)))
        case Binary(op="div", a=a, b=b) if b.shape == () and a.shape != ():
            return scale(c, div(total(a), b))
        case _:
            return scale(c, Total(x))


def jact(fn: str, at: Expr, cot: Expr) -> Expr:
    c, cot = split(cot)
    return scale(c, JacT(fn, at, cot, at.shape))


def columns_jact(fn: str, m: Expr, cot: Expr) -> Expr:
    c, cot = split(cot)
    return scale(c, ColumnsJacT(fn, m, cot, m.shape))


def rows_jact(fn: str, m: Expr, cot: Expr) -> Expr:
    c, cot = split(cot)
    return scale(c, RowsJacT(fn, m, cot, m.shape))


def sum_to(g: Expr, factor: Expr, shape: Shape, target: Shape) -> Expr:
    """The sum of g * factor, broadcast to `shape`, over the dims that `target` lacks; factored if g is."""
    lost = [d for d in shape if d not in target]
    assert len(lost) + len(target) == len(shape), "check refuses what could run along rows or columns"
    if len(target) == len(shape) and not lost:
        return mul(g, factor)
    product = mul(g, factor)
    if is_zero(product):
        return ZERO
    if len(shape) == 1:
        return total(product) if product.shape else mul(product, Size(shape[0]))
    if is_zero(g):
        return ZERO
    rows, columns = shape[0] in lost, shape[1] in lost
    if len(g.shape) == 2 and len(factor.shape) == 2:
        return _contract(g, factor, rows, columns)
    if len(product.shape) < 2:
        for dim in lost:
            product = total(product) if dim in product.shape else mul(product, Size(dim))
        return product
    ones = Outer(Num(1.0, shape[:1]), Num(1.0, shape[1:]), shape)
    return _contract(product, ones, rows, columns)


def _contract(g: Expr, m: Expr, rows: bool, columns: bool) -> Expr:
    """The sum of the matrices' elementwise product over rows, columns or both."""
    c, g = split(g)
    match g:
        case Binary(op="add" | "sub" as op, a=a, b=b) if a.shape == b.shape:
            left, right = _contract(a, m, rows, columns), _contract(b, m, rows, columns)
            return scale(c, add(left, right) if op == "add" else sub(left, right))
        case Outer(a=a, b=b) if rows and columns:
            return scale(c, inner(a, matvec(m, b)))
        case Outer(a=a, b=b) if rows:
            return scale(c, mul(matvec(transpose(m), a), b))
        case Outer(a=a, b=b):
            return scale(c, mul(matvec(m, b), a))
        case _ if isinstance(m, Outer):
            return scale(c, _contract(m, g, rows, columns))
        case _ if rows and columns:
            return scale(c, inner(g, m))
        case _ if rows:
            return scale(c, matvec(transpose(_mul(g, m)), Num(1.0, g.shape[:1])))
        case _:
            return scale(c, matvec(_mul(g, m), Num(1.0, g.shape[1:])))
