"""What backends take in place of a layer's declared tensors, and how a generated module makes it: the prelude, as data.

Input: made by unfold.py. Output: read by the lowerings' and the backends' writers, of which emit_prelude.py prints the
code that makes the tensors. Makes nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ttmdsl.expr import Expr, Ref
from ttmdsl.ir import TokenMask, earlier
from ttmdsl.past import before_name, kept_name
from ttmdsl.spec import Tensor
from ttmdsl.walk_expr import walk

FIRST, LAST = "step__first", "step__last"


@dataclass(frozen=True)
class Weights:
    """Those of a window, an expression's values: `each` by itself, by how many tokens ago, zero where there is no such
    token; `whole`: all of them, the current token's last. `given`: the declared tensor that they are, if any."""

    each: tuple[Tensor, ...]
    whole: Tensor
    value: Expr
    given: Tensor | None


@dataclass(frozen=True)
class Bands:
    """What a chunk form takes whose windows are bands of weights: `tensors`, and of some of them, `before`, those of as
    many tokens before each chunk as `depth`. `alone`: one of the tensors that single tokens take instead."""

    tensors: tuple[Tensor, ...]
    before: tuple[Tensor, ...]
    depth: int
    alone: str

    @property
    def table(self) -> dict[str, tuple[str, str]]:
        """What tensors are before a chunk, by name: of which tensor, and the name of what it was before the call."""
        return {before_name(t): (t.keyword, kept_name(t)) for t in self.before}


@dataclass(frozen=True)
class MicroTokens:
    """What a chunk form takes in which every token is as many as its window has, `number`: `tensors`. Some of them are
    made of others, one for each token of the window, the current one's first; of the rest each micro-token has its
    token's. `alone`: one of the tensors that single tokens take instead."""

    number: int
    tensors: tuple[Tensor, ...]
    parts: tuple[tuple[Tensor, tuple[Tensor, ...]], ...]
    alone: str

    @property
    def mask(self) -> TokenMask:
        """What keeps the micro-tokens of earlier tokens."""
        return earlier(self.number)

    @property
    def marks(self) -> dict[str, int]:
        """The marks of each token's first one, and of the last one where that is taken, with their places."""
        places = {FIRST: 0, LAST: self.number - 1}
        return {name: place for name, place in places.items() if any(t.name == name for t in self.tensors)}

    @property
    def repeated(self) -> tuple[Tensor, ...]:
        """Those of which each micro-token has its token's."""
        made = {made for made, _ in self.parts}
        return tuple(t for t in self.tensors if t not in made and t.name not in self.marks)


@dataclass(frozen=True)
class Parts:
    """What a chunk walks over where that are parts of tokens, `number` of each: one for each gradient step, or token of
    a window. y is what the last part reads; `read`: tensors that the readout alone takes; `own`: those that have an
    entry for each part. Kernels take, and leave, all of these at whole tokens."""

    number: int
    read: tuple[str, ...]
    own: tuple[str, ...]


@dataclass(frozen=True)
class Prelude:
    """What the backends take, and how the frame makes it, in this order.

    declared: what the call takes. past: a made tensor, the declared one, by how many tokens. seen: the delays that
    weights ask about. With `steps` > 1 every token becomes that many, tensors with `step_dim` first being dealt out to
    them; `firsts` are decays that are 1 but at a token's first step. values: expressions of declared tensors, pasts and
    `seen`. weights: of windows. bands, micro: what chunks take, if it is something else; read: what of that the readout
    alone takes.
    """

    tensors: tuple[Tensor, ...]
    declared: tuple[Tensor, ...] = ()
    history: dict[str, int] = field(default_factory=dict)
    past: tuple[tuple[Tensor, Tensor, int], ...] = ()
    seen: tuple[int, ...] = ()
    steps: int = 1
    step_dim: str = ""
    firsts: tuple[tuple[Tensor, Tensor], ...] = ()
    values: tuple[tuple[Tensor, Expr], ...] = ()
    weights: tuple[Weights, ...] = ()
    bands: Bands | None = None
    micro: MicroTokens | None = None
    read: tuple[str, ...] = ()

    @property
    def parts(self) -> Parts | None:
        """What a chunk walks over, if it is no tokens."""
        if self.micro:
            return Parts(self.micro.number, self.read, ())
        sources = [e for _, e in self.values] + [w.value for w in self.weights]
        made_of = {n.name for e in sources for n in walk(e) if isinstance(n, Ref)} | {t.name for _, t in self.firsts}
        taken = {t.keyword for t in self.tensors}
        given = [t for t in self.declared if t.kind != "param" and t.keyword in taken and t.name not in made_of]
        own = tuple(t.keyword for t in given if self.stepped(t))
        read = tuple(t.keyword for t in given if t.keyword in self.read and t.keyword not in own)
        known = own or (read and len(read) < len(given))  # by which it shows whether tokens are dealt out
        return Parts(self.steps, read, own) if self.steps > 1 and known else None

    @property
    def empty(self) -> bool:
        """Whether the backends take the declared tensors as they are."""
        return not (self.history or self.values or self.steps > 1 or self.step_dim)

    def stepped(self, tensor: Tensor) -> bool:
        """Whether a declared tensor has an entry for each gradient step."""
        return at_step(tensor, self.step_dim) is not tensor


def at_step(tensor: Tensor, step_dim: str) -> Tensor:
    """A declared tensor at one gradient step: the tensor itself, if it has no entry for each."""
    own = tensor.kind != "param" and step_dim and tensor.shape[:1] == (step_dim,)
    return replace(tensor, shape=tensor.shape[1:]) if own else tensor


def seen_name(by: int) -> str:
    return f"seen__{by}"
