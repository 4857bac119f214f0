"""Walks over spec expressions.

Input: any `Expr`. Output: its subexpressions, or the same tree with some replaced. Does not simplify.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from typing_extensions import assert_never

from ttmdsl.expr import (
    Apply,
    Binary,
    Columns,
    ColumnsJacT,
    Component,
    Const,
    Delay,
    Expr,
    Features,
    Inner,
    JacT,
    Map,
    MatVec,
    Mean,
    Norm,
    Num,
    Outer,
    Ref,
    Rows,
    RowsJacT,
    Size,
    Stop,
    Total,
    Transpose,
)


def children(e: Expr) -> tuple[Expr, ...]:
    """The direct subexpressions, in the order they are written."""
    match e:
        case Num() | Const() | Size() | Ref():
            return ()
        case Map(x=x) | Norm(x=x) | Total(x=x) | Mean(x=x) | Apply(x=x) | Stop(x=x):
            return (x,)
        case Delay(x=x) | Component(x=x) | Features(x=x):
            return (x,)
        case Transpose(m=m) | Columns(m=m) | Rows(m=m):
            return (m,)
        case Binary(a=a, b=b) | Inner(a=a, b=b) | Outer(a=a, b=b):
            return (a, b)
        case MatVec(m=m, x=x):
            return (m, x)
        case JacT(at=at, cot=cot):
            return (at, cot)
        case ColumnsJacT(m=m, cot=cot) | RowsJacT(m=m, cot=cot):
            return (m, cot)
        case _:
            assert_never(e)


def with_children(e: Expr, new: tuple[Expr, ...]) -> Expr:
    """The same node over other subexpressions."""
    if all(a is b for a, b in zip(children(e), new, strict=True)):
        return e
    names = [f.name for f in dataclasses.fields(e) if f.name in ("m", "x", "a", "b", "at", "cot")]
    changes: dict[str, Expr] = dict(zip(names, new, strict=True))
    return dataclasses.replace(e, **changes)  # type: ignore[arg-type]


def rewrite(e: Expr, f: Callable[[Expr], Expr | None]) -> Expr:
    """Replace, from the top, every node for which `f` has an answer."""
    found = f(e)
    return found if found is not None else with_children(e, tuple(rewrite(c, f) for c in children(e)))


def walk(e: Expr) -> Iterator[Expr]:
    """Every node once, subexpressions first."""
    seen: set[Expr] = set()

    def visit(node: Expr) -> Iterator[Expr]:
        if node in seen:
            return
        seen.add(node)
        for c in children(node):
            yield from visit(c)
        yield node

    yield from visit(e)
