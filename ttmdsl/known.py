"""Numbers known at compile time: the arithmetic of literals and constants.

Input: checked expressions and component formulas. Output: their values, where literals and constants alone decide them.
Folds nothing into the expressions; their readers do.
"""

from __future__ import annotations

import math

from typing_extensions import assert_never

from ttmdsl.expr import Binary, BinaryOp, CBinary, CConst, CNum, Comp, Const, Expr, Num
from ttmdsl.parse import MAX_NUMBER


def arithmetic(op: BinaryOp, a: float, b: float) -> float | None:
    """The value of `a op b`; None where it is no number, or too large for one."""
    try:
        match op:
            case "add":
                value = a + b
            case "sub":
                value = a - b
            case "mul":
                value = a * b
            case "div":
                value = a / b
            case "pow":
                value = math.pow(a, b)
            case "max":
                value = max(a, b)
            case "min":
                value = min(a, b)
            case _:
                assert_never(op)
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    return value if abs(value) <= MAX_NUMBER else None


def known_number(e: Expr | Comp) -> float | None:
    """The value of an expression of literals and constants alone."""
    match e:
        case Num(value=value) | Const(value=value) | CNum(value=value) | CConst(value=value):
            return value
        case Binary(op=op, a=a, b=b) | CBinary(op=op, a=a, b=b):
            x, y = known_number(a), known_number(b)
            return None if x is None or y is None else arithmetic(op, x, y)
        case _:
            return None
