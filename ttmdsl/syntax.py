"""The syntax tree: what a spec's text says, before any name means anything.

Input: built by `parse`. Output: read by `check`. Knows no shapes, resolves no names.

    layer  = Layer(name, clauses)
    clause = Dims | Tensors | Constants | Function | Let | FeatureClause      declarations
           | Memories | Bias | Retention | OptimizerClause | Project | Read   the choices of a pass
           | Block(name, clauses)                                             one `pass`
    expr   = Number(value) | Name(text)
           | Negate(x) | Operation(op, a, b) | Transposed(x)   - x; a + b, with + - * / ^ @; x^T
           | Bars(x, p) | Pairing(a, b)                        |x| or |x|_p; <a, b>
           | Call(fn, args) | Element(x, index)                f(a, b); x[i]
           | Group(items)                                      (W1, W2)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ttmdsl.errors import Span

Operator: TypeAlias = Literal["+", "-", "*", "/", "^", "@"]


# ---- expressions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    value: float
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Negate:
    x: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Operation:
    op: Operator
    a: Expr
    b: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Transposed:
    x: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Bars:
    x: Expr
    p: Number | Name | None
    span: Span


@dataclass(frozen=True, slots=True)
class Pairing:
    a: Expr
    b: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Call:
    fn: Name
    args: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Element:
    x: Expr
    index: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Group:
    items: tuple[Expr, ...]
    span: Span


Expr: TypeAlias = Number | Name | Negate | Operation | Transposed | Bars | Pairing | Call | Element | Group


# ---- declarations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dims:
    names: tuple[Name, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TensorItem:
    name: Name
    shape: tuple[Name, ...]
    range: Name | None
    span: Span


@dataclass(frozen=True, slots=True)
class Tensors:
    kind: Literal["input", "gate", "param"]
    items: tuple[TensorItem, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class ConstantItem:
    name: Name
    value: Number
    span: Span


@dataclass(frozen=True, slots=True)
class Constants:
    items: tuple[ConstantItem, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Function:
    """With an index a vector function, given by its component formula; without one a macro."""

    name: Name
    args: tuple[Name, ...]
    index: Name | None
    body: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Let:
    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class FeatureClause:
    """A feature map known by its kernel alone; `<., .>` in the kernel is a pairing of two names `.`."""

    name: Name
    kernel: Expr
    span: Span


# ---- the choices of a pass ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extent:
    """A memory's dim: `d`, or the one that a feature map makes of it, `d^p` and `taylor(d, n)`; `kind` is its name."""

    base: Name
    kind: Name | None
    order: Name | Number | None
    span: Span


@dataclass(frozen=True, slots=True)
class MemoryItem:
    name: Name
    shape: tuple[Extent, ...]
    initial: Name | Number | None
    span: Span


@dataclass(frozen=True, slots=True)
class Memories:
    items: tuple[MemoryItem, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Setting:
    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Window:
    """`window(c, weight = gamma) of`, before a bias."""

    size: Expr
    settings: tuple[Setting, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Bias:
    window: Window | None
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Retention:
    values: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class OptimizerClause:
    kind: Name
    settings: tuple[Setting, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Project:
    values: tuple[Expr, ...]
    when: Name | None
    span: Span


@dataclass(frozen=True, slots=True)
class Read:
    value: Expr
    span: Span


Choice: TypeAlias = Memories | Bias | Retention | OptimizerClause | Project | Read


@dataclass(frozen=True, slots=True)
class Block:
    name: Name
    clauses: tuple[Choice, ...]
    span: Span


Clause: TypeAlias = Dims | Tensors | Constants | Function | Let | FeatureClause | Choice | Block


@dataclass(frozen=True, slots=True)
class Layer:
    name: Name
    clauses: tuple[Clause, ...]
    span: Span


Node: TypeAlias = Layer | Clause | TensorItem | ConstantItem | Extent | MemoryItem | Setting | Window | Expr


def children(node: Node) -> Iterator[Node]:
    """The nodes directly below this one, in the order of the text."""
    for slot in node.__slots__:
        value = getattr(node, slot)
        for item in value if isinstance(value, tuple) else (value,):
            if hasattr(item, "span"):
                yield item


def walk(node: Node) -> Iterator[Node]:
    """This node and every node below it."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(tuple(children(node))))
