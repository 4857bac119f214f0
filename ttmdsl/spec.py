"""The checked layer: what a spec means, with every name resolved and every shape known.

Input: built by `check`. Output: `LayerSpec`, read by `derive`, by the reference emitter and by `explain`.
Holds no behaviour beyond small queries; derivation, lowering and printing live in their own files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ttmdsl.errors import Span
from ttmdsl.expr import Expr, FeatureKind, Shape, VectorFn, no_span

Range: TypeAlias = Literal["real", "decay", "unit", "positive"]
Initial: TypeAlias = Literal["zero", "orthonormal", "uniform"]
OptimizerKind: TypeAlias = Literal["gd", "momentum", "muon", "implicit", "least_squares"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A keyword of `op`: an input `[B, T, H, *shape]`, a gate alike, or a param `[H, *shape]`.

    `range` is what the spec declares of it: any real, decay (0, 1], unit (0, 1), positive (0, inf). `entries`: of a
    made one how many values a token has (the last axis), where what is computed takes each by a name of its own; or 0.
    """

    name: str
    kind: Literal["input", "gate", "param"]
    shape: Shape
    range: Range = "real"
    span: Span = no_span()
    entries: int = 0

    @property
    def keyword(self) -> str:
        """The name in `op`'s signature: a decay is passed as its natural logarithm."""
        return f"log_{self.name}" if self.range == "decay" else self.name

    @property
    def each(self) -> tuple[str, ...]:
        """The names of its entries."""
        return tuple(f"{self.name}__{i}" for i in range(self.entries))


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory parameter: a matrix `[rows, columns]` by its dims' names, and the state it starts from.

    zero; orthonormal: the first columns of the identity (needs columns <= rows); uniform: 1 / columns everywhere.
    """

    name: str
    shape: Shape
    initial: Initial = "zero"
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How the memory learns.

    gd:        P_t = R(P_{t-1}) - rate * G_t
    momentum:  U_t = decay * U_{t-1} - rate * G_t;  P_t = R(P_{t-1}) + U_t
    muon:      U_t = decay * U_{t-1} + G_t;  P_t = R(P_{t-1}) - rate * N(U_t), N being `newton_schulz` steps of
               X <- 3.4445 X - 4.7750 X X^T X + 2.0315 (X X^T)^2 X from U / (|U| + 1e-7)
    implicit:  P_t = argmin 1/2 |P - R(P_{t-1})|^2 + rate * bias(P); a rate along rows or columns weighs their shares
    least_squares:  P_t = argmin of the bias summed over all tokens so far + ridge/2 |P|^2; no retention

    G_t is the bias's gradient at P_{t-1} (at="previous"), at R(P_{t-1}) (at="retained"), or, with batch b > 1, at the
    state left by the last token of the previous group of b tokens.

    With `per_token` n > 1, gd takes n such steps in order, each from where the last one led; R is applied once, before
    the first, and everything else once, after the last. A tensor whose first dim is `step_dim` has an entry for each
    step, and stands in the bias and the rate for its entry at the step (its Ref's shape lacks that dim).
    """

    kind: OptimizerKind
    rate: Expr
    decay: Expr | None = None
    at: Literal["previous", "retained"] = "previous"
    batch: int = 1
    per_token: int = 1
    step_dim: str = ""
    newton_schulz: int = 5
    ridge: Expr | None = None
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Window:
    """The bias is a sum over the last `size` tokens, each at its own inputs and gates.

    `weight` is a vector of that length, taken at the current token, which its last component belongs to; None is 1 for
    all. Weights that point before the first token count for nothing.
    """

    size: int
    weight: Expr | None = None
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class FeatureDim:
    """A dim that a feature map makes: size(base)^order for a power, for taylor the sum of size(base)^i, i <= order."""

    base: str
    kind: FeatureKind
    order: int

    def size(self, base: int) -> int:
        """The dim's size from its base's."""
        return base**self.order if self.kind == "power" else sum(base**i for i in range(self.order + 1))


@dataclass(frozen=True, slots=True)
class KernelMap:
    """`feature name = exp(scale * <., .>)`: <phi(x), phi(y)> = exp(scale <x, y>), and phi has infinitely many parts.

    phi(x) is Apply(name, x, (name,)), and a memory over it has the shape (rows, name). Both occur as the product of the
    two alone, in a readout possibly inside Apply("normalized", ...): divided by the sum of the weighted kernel values.
    """

    name: str
    scale: Expr
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class Pass:
    """One memory and its four choices. A layer without `pass` blocks has one pass, named y.

    `bias` is a scalar expression of this pass's memories; `retention` maps every memory to a matrix expression of
    itself (identity: the Ref); `project`, where a memory has one, is applied after every token; `read` is the
    output, evaluated at the state after the token. Later passes refer to it by `name`. `last`: how many tokens a memory
    over a feature map keeps; older ones leave it before the token's step.
    """

    name: str
    memories: tuple[Memory, ...]
    bias: Expr
    retention: dict[str, Expr]
    optimizer: Optimizer
    project: dict[str, Expr]
    read: Expr
    window: Window | None = None
    last: int | None = None
    span: Span = no_span()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A whole layer. `lets` are per-token definitions in order; `consts` hold the values in force.

    `dims` are the declared ones; `features` the dims that feature maps make, by their names.
    """

    name: str
    source: str
    dims: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    consts: dict[str, float]
    fns: dict[str, VectorFn]
    lets: tuple[tuple[str, Expr], ...]
    passes: tuple[Pass, ...]
    filename: str = "<spec>"
    features: dict[str, FeatureDim] = field(default_factory=dict)
    kernels: dict[str, KernelMap] = field(default_factory=dict)

    @property
    def memories(self) -> tuple[Memory, ...]:
        return tuple(m for p in self.passes for m in p.memories)

    @property
    def entries(self) -> dict[str, tuple[Tensor, int]]:
        """Of which tensor a name is an entry, and which one."""
        return {name: (t, i) for t in self.tensors for i, name in enumerate(t.each)}

    def tensor(self, name: str) -> Tensor:
        """The input, gate or param of that name (the spec's own name, without `log_`)."""
        return next(t for t in self.tensors if t.name == name)
