"""How the kernel of one token's step does alone what else the prelude does: it finds the tokens before its own, and
leaves the past of the next one; or it deals the token's gradient steps out.

Input: a layer as it is lowered. Output: for each tensor of the sequential form that the prelude makes what loads it
from the state, or from the declared tensors, instead, as text; and the lines that store the state's past. A launch for
more tokens, or one that a backward pass may follow, gives the kernel what the prelude makes, and no past.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ttmdsl.ir import Axes, Node
from ttmdsl.lower import Lowered
from ttmdsl.past import COUNT, past_name
from ttmdsl.prelude import FIRST, LAST, Prelude, at_step, seen_name
from ttmdsl.print_tiles import OF_TENSORS, Rows, load_block, load_token, store_block
from ttmdsl.spec import Tensor

Point = Callable[..., str]  # `KernelText.pointer`

_LANE = "(n * H + h)"  # a sequence's head
_OF_STEPS = Rows(lone="row_s")  # of tensors with an entry for each gradient step
_PARAM = Rows(lone="h")


class Found(Protocol):
    """A tensor of the sequential form that a step's kernel finds alone."""

    def load(self, leaf: Node, point: Point) -> str:
        """Text that loads it: made by the prelude, where it is, else without that."""


@dataclass(frozen=True)
class Earlier:
    """A tensor that the prelude makes: `tensor` so many tokens ago, of `depth` that are kept; or of a window's
    `weights`, so many, that of the token so many tokens ago; or, of no tensor, whether there is one."""

    made: str
    by: int
    tensor: Tensor | None = None
    depth: int = 0
    weights: int = 0

    def load(self, leaf: Node, point: Point) -> str:
        """Text that loads it from the state, where the prelude has not made it."""
        held = "gate" if self.tensor is None else self.tensor.kind
        shape = self.tensor.shape if self.depth and self.tensor is not None else ()
        made = load_token(point(self.made, f'x.get("{self.made}")', held, "more"), leaf.axes, shape)
        return f"({made} if {_tokens(point)} is None else {self._found(leaf.axes, point)})"

    def _found(self, axes: Axes, point: Point) -> str:
        there = f"tokens >= {self.by}"
        if self.tensor is None:
            return f"tl.where({there}, 1.0, 0.0)"
        now = _now(self.tensor, point)
        if self.weights:
            weight = f"tl.load({now} + row_h * {self.weights} + {self.weights - 1 - self.by})"
            return f"tl.where({there}, {weight}.to(tl.float32), 0.0)"
        base = f"({_LANE} * {self.depth} + {self.depth - self.by})"
        kept = load_block(_kept(self.tensor, point), base, axes, self.tensor.shape)
        dtype = f"{now}.dtype.element_ty" if axes else "tl.float32"
        return f"tl.where({there}, {kept}.to({dtype}), {load_token(now, axes, self.tensor.shape)})"


def _tokens(point: Point) -> str:
    return point(COUNT, f'start.get("{COUNT}")', "int64", "step")


def _now(tensor: Tensor, point: Point) -> str:
    return point(f"{tensor.keyword}_now", f'x.get("{tensor.keyword}")', tensor.kind, "step")


def _kept(tensor: Tensor, point: Point) -> str:
    return point(f"{tensor.keyword}_kept", f'start.get("{past_name(tensor)}")', "float32", "step")


@dataclass(frozen=True)
class Dealt:
    """A declared tensor at one gradient step; with `own`, it has an entry for each."""

    tensor: Tensor
    own: bool

    def load(self, leaf: Node, point: Point) -> str:
        """Text that loads it, whether the prelude has dealt it out or not."""
        return self.at(point(self.tensor.keyword, f'x["{self.tensor.keyword}"]', self.tensor.kind), leaf.axes)

    def at(self, pointer: str, axes: Axes) -> str:
        """Text that loads it from an array as it was given."""
        rows = _OF_STEPS if self.own else _PARAM if self.tensor.kind == "param" else OF_TENSORS
        return load_token(pointer, axes, self.tensor.shape, rows=rows)


@dataclass(frozen=True)
class AtStep:
    """A tensor that the prelude makes, by step: of a declared decay at the first one, and 1 at the others; or, of no
    tensor, whether it is step number `step`."""

    made: str
    step: int
    decay: Dealt | None = None

    def load(self, leaf: Node, point: Point) -> str:
        """Text that loads it, or asks which step it is."""
        shape = self.decay.tensor.shape if self.decay else ()
        made = load_token(point(self.made, f'x.get("{self.made}")', "gate", "more"), leaf.axes, shape)
        here = f"step == {self.step}"
        given = "1.0"
        if self.decay:
            keyword = self.decay.tensor.keyword
            given = self.decay.at(point(f"{keyword}_now", f'x.get("{keyword}")', "gate", "step"), leaf.axes)
        return f"(tl.where({here}, {given}, 0.0) if EVEN else {made})"


@dataclass(frozen=True)
class Alone:
    """All that a step's kernel finds alone: its tensors, by the names that the walk takes them by, and the tensors of
    which a past is kept, with their axes and the number of tokens. `steps`: gradient steps of one token."""

    found: Mapping[str, Found]
    kept: tuple[tuple[Tensor, Axes, int], ...] = ()
    steps: int = 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Entries of the state that it takes and leaves."""
        return (COUNT, *(past_name(tensor) for tensor, _, _ in self.kept)) if self.kept else ()

    def begin(self, point: Point) -> list[str]:
        """Lines before the first load."""
        if not self.kept:
            return []
        return [f"if {_tokens(point)} is not None:", f"    tokens = tl.load({_tokens(point)} + n)"]

    def end(self, point: Point) -> list[str]:
        """Lines that store the past of the next token."""
        if not self.kept:
            return []
        number = point(f"{COUNT}_end", f'end.get("{COUNT}")', "int64", "step")
        lines = ["if h == 0:", f"    tl.store({number} + n, tokens + 1)"]
        for tensor, axes, depth in self.kept:
            ends = point(f"{tensor.keyword}_past_end", f'end.get("{past_name(tensor)}")', "float32", "step")
            now = load_token(_now(tensor, point), axes, tensor.shape)
            kept = load_block(_kept(tensor, point), f"({_LANE} * {depth} + slot)", axes, tensor.shape)
            lines += [
                f"for slot in tl.static_range(1, {depth}):",
                "    " + store_block(ends, f"({_LANE} * {depth} + slot - 1)", axes, tensor.shape, kept),
                store_block(ends, f"({_LANE} * {depth} + {depth - 1})", axes, tensor.shape, now),
            ]
        return [f"if {number} is not None:", *(f"    {line}" for line in lines)]


def step_alone(lowered: Lowered) -> Alone | None:
    """What a step's kernel finds alone; None where there is nothing to find, or where it is more than tensors, decays
    and weights as they are given."""
    prelude = lowered.prelude
    axes = {n.name: n.axes for n in lowered.token.forward.leaves() if n.role == "token"}
    if prelude.steps > 1:
        return _steps(prelude, axes) if lowered.batch == 1 else None
    return _past(prelude, axes) if prelude.history and not prelude.step_dim else None


def _past(prelude: Prelude, axes: dict[str, Axes]) -> Alone | None:
    depths = prelude.history
    known = {made.keyword: Earlier(made.keyword, by, tensor, depths[tensor.name]) for made, tensor, by in prelude.past}
    known |= {seen_name(by): Earlier(seen_name(by), by) for by in prelude.seen}
    for w in prelude.weights:
        if w.given:
            each = (Earlier(t.keyword, by, w.given, weights=len(w.each)) for by, t in enumerate(w.each))
            known |= {weight.made: weight for weight in each}
    found = {name: known[name] for name in axes if name in known}
    reached = {e.tensor: axes[e.made] for e in found.values() if e.tensor is not None and e.depth}
    made_otherwise = axes.keys() - known.keys() - {t.keyword for t in prelude.declared}
    if made_otherwise or {t.name for t in reached} != depths.keys():
        return None
    return Alone(found, tuple((tensor, axes, depths[tensor.name]) for tensor, axes in reached.items()))


def _steps(prelude: Prelude, axes: dict[str, Axes]) -> Alone | None:
    found: dict[str, Found] = {FIRST: AtStep(FIRST, 0), LAST: AtStep(LAST, prelude.steps - 1)}
    for tensor in prelude.declared:
        dealt = Dealt(at_step(tensor, prelude.step_dim), prelude.stepped(tensor))
        found |= {tensor.keyword: dealt} if tensor.kind != "param" else {}
        found |= {made.keyword: AtStep(made.keyword, 0, dealt) for made, decay in prelude.firsts if decay == tensor}
    if prelude.history or axes.keys() - found.keys():
        return None
    return Alone(found, steps=prelude.steps)
