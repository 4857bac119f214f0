"""What `check` knows of a layer while it reads it: the declared names, the errors so far, the room left.

Input: filled by `check`. Output: read by the expression checkers. Decides nothing about shapes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ttmdsl import syntax
from ttmdsl.errors import Diagnostic, Span
from ttmdsl.expr import FeatureKind, Shape, VectorFn
from ttmdsl.parse import MAX_DEPTH
from ttmdsl.spec import FeatureDim, KernelMap, Memory, Tensor

MAX_NODES = 5_000
MAX_ERRORS = 20


class Abandon(Exception):
    """Checking cannot go on: what was found so far is in the scope's errors."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What an argument stands for inside a function: the caller's expression, with the caller's own arguments."""

    value: syntax.Expr
    env: Env


Env = Mapping[str, Bound]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expression stands, and which memories and passes it may use there."""

    title: str
    memories: frozenset[str] = frozenset()
    passes: frozenset[str] = frozenset()
    inside: str = ""  # the pass that the place belongs to
    learns: bool = False  # whether a gradient is taken of what stands here
    step_dim: str = ""  # the dim of tensors that stand for their entry at one gradient step here


@dataclass
class Scope:
    """A layer's names. Whoever uses a name whose own declaration `failed` stays silent."""

    dims: dict[str, Span] = field(default_factory=dict)
    features: dict[str, FeatureDim] = field(default_factory=dict)
    kernel_names: set[str] = field(default_factory=set)  # declared feature maps of infinitely many components
    kernels: dict[str, KernelMap] = field(default_factory=dict)  # those that have been read
    step_dims: set[str] = field(default_factory=set)  # constants that count a pass's gradient steps
    tensors: dict[str, Tensor] = field(default_factory=dict)
    consts: dict[str, float] = field(default_factory=dict)
    functions: dict[str, syntax.Function] = field(default_factory=dict)
    vector_fns: dict[str, VectorFn] = field(default_factory=dict)
    fn_dims: dict[str, str | None] = field(default_factory=dict)  # the dim that a vector fn's params fix
    lets: dict[str, Shape] = field(default_factory=dict)
    memories: dict[str, Memory] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # memory -> its pass
    passes: dict[str, Shape] = field(default_factory=dict)
    declared: dict[str, Span] = field(default_factory=dict)  # every name, those that come later included
    failed: set[str] = field(default_factory=set)
    errors: list[Diagnostic] = field(default_factory=list)
    nodes: int = 0
    depth: int = 0

    def error(self, span: Span, message: str, hint: str = "") -> None:
        """Note an error, once: a macro's body is checked anew at each of its calls."""
        found = Diagnostic(span, message, hint)
        if found not in self.errors:
            self.errors.append(found)
        if len(self.errors) >= MAX_ERRORS:
            raise Abandon

    def unknown(self, name: syntax.Name, what: str, known: Iterable[str]) -> None:
        self.error(name.span, f"unknown {what} `{name.text}`", suggestion(name.text, known))

    def feature_dim(self, base: str, kind: FeatureKind, order: int, span: Span) -> str | None:
        """The name of the dim that a feature map makes of `base`: the base itself for the first power."""
        if kind == "power" and order == 1:
            return base
        name = f"{base}_{'pow' if kind == 'power' else 'taylor'}_{order}"
        if name in self.declared:
            self.error(span, f"`{name}` is the name of this dim", "give what is declared under it another name")
            return None
        self.features.setdefault(name, FeatureDim(base, kind, order))
        return name

    @contextmanager
    def room(self, span: Span) -> Iterator[None]:
        """One more node, one level deeper: macros that call macros may not grow without bound."""
        self.nodes += 1
        if self.nodes > MAX_NODES or self.depth >= MAX_DEPTH:
            size = f"{MAX_NODES} nodes" if self.nodes > MAX_NODES else f"{MAX_DEPTH} levels"
            found = Diagnostic(span, f"the layer's formulas unfold to more than {size}", "use fewer nested calls")
            self.errors.append(found)
            raise Abandon
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest of the known names, or all of them if they are few."""
    names = sorted(known)
    if close := difflib.get_close_matches(name, names, 1):
        return f"did you mean `{close[0]}`?"
    return f"known here: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def describe(shape: Shape) -> str:
    return f"[{', '.join(shape)}]" if shape else "a scalar"
