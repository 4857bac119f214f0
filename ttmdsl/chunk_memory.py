"""A memory over one chunk of tokens, never materialised: its start, its decays and its writes.

Input: leaves and values of the chunk. Output: what a read through a vector gives at every token, and the memory at the
chunk's end.

    P_t x = decay(0, t) P_0 x + sum_{s <= t} weight(t, s) l_s (r_s . x)

Knows no layer and no optimizer; which writes there are is found in lower_chunk.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Literal

from ttmdsl.builder import Builder
from ttmdsl.ir import PAST, Node, TokenMask, earlier
from ttmdsl.lower_expr import NotChunkable

Moment = Literal["before", "retained", "after"]


@dataclass(frozen=True)
class Band:
    """How often each token t adds what tokens before it, s or past__, write: `rates` [t], by how many tokens before."""

    rates: tuple[Node, ...]
    axis: str

    @property
    def reach(self) -> int:
        """How many tokens before it a token's window reaches."""
        return len(self.rates) - 1

    @property
    def delays(self) -> range:
        """By how many tokens a token may be before one of the chunk."""
        return range(self.axis == PAST, len(self.rates))


@dataclass(frozen=True)
class Write:
    """Token s adds left_s right_s^T (axes rows, columns); with `frozen`, a matrix scaled by `right` along its axis.

    With a `band`, tokens whose windows reach s add it so many times; of tokens before the chunk, left and right have
    that axis.
    """

    left: Node
    right: Node
    frozen: Node | None = None
    band: Band | None = None

    @property
    def token(self) -> str:
        """The token axis of left and right."""
        return PAST if self.band is not None and self.band.axis == PAST else "t"

    @property
    def source(self) -> str:
        """The same where a product has the tokens that read, too."""
        return "s" if self.token == "t" else PAST


@dataclass
class ChunkMemory:
    """One memory over one chunk; implements `VirtualMemory` for the readout after each token.

    `live`: 1 where the memory decays, and adds its momentum. `group`: what a token writes is read by its own group of
    so many tokens only after the last of them, where alone it is live; `own`: log2 of the decay of its group, which the
    first of them has.
    """

    b: Builder
    name: str
    rows: str
    columns: str
    start: Node
    log_decay: Node
    live: Node
    last: Node
    momentum: Node | None = None
    log_momentum_decay: Node | None = None
    group: int = 1
    own: Node | None = None
    writes: list[Write] = field(default_factory=list)

    def __post_init__(self) -> None:
        b = self.b
        self.total = b.label(b.cumsum(self.log_decay), f"{self.name}_log_decay")
        channels = [x for x in self.log_decay.axes if x != "t"]
        if len(channels) > 1:
            raise NotChunkable("a decay of its own for every entry of the memory has no factored form")
        if channels and self.log_momentum_decay is not None:
            raise NotChunkable("momentum over a decay per channel has no factored form")
        if self.log_momentum_decay is not None and self.log_momentum_decay.axes != ("t",):
            raise NotChunkable("a momentum decay per channel has no factored form")
        self.channel = channels[0] if channels else ""

    def other(self, axis: str) -> str:
        """The other one of the memory's two axes."""
        return self.columns if axis == self.rows else self.rows

    def decayed(self, moment: Moment) -> Node:
        """log2 of the decay from the chunk's start to just before or just after each token's own decay."""
        own = self.log_decay if self.own is None else self.own
        return self.b.sub(self.total, own) if moment == "before" else self.total

    def kept(self, moment: Moment) -> TokenMask:
        """Which writes are in the memory at a token: up to its own, or those of groups before its own."""
        return "lower" if moment == "after" else earlier(self.group)

    def weights(self, moment: Moment, band: Band | None = None) -> Node:
        """weight[t, s] of write s in the memory at t; scalar decay. With momentum, two triangular matrices' product; of
        writes that tokens after s add, these matrices' product with a band."""
        b = self.b
        if band is not None and self.log_momentum_decay is None:
            return self._banded(band)
        if band is not None:
            return b.label(chained(b, self.weights(moment), self._spread(band)), "weights")
        gap = b.sub(self.decayed(moment), b.rename(self.total, "t", "s"))
        if self.log_momentum_decay is None:
            return b.label(b.map("exp2", b.mask(gap, self.kept(moment), float("-inf"))), "weights")
        pushes = b.mul(self._pushes(moment), b.rename(self.live, "t", "s"))
        return b.label(chained(b, pushes, self._impulses()), "weights")

    def _spread(self, band: Band) -> Node:
        """spread[t, s]: how often t adds what s writes."""
        b = self.b
        taken = total(b, [b.diagonal(band.rates[by], by, band.axis) for by in band.delays])
        return b.label(self._where_seen(band, taken), "spread")

    def _where_seen(self, band: Band, x: Node) -> Node:
        """Zero where what wrote is no token."""
        b = self.b
        return b.mul(x, b.leaf("seen", "seen", (PAST,)) if band.axis == PAST else b.rename(self.live, "t", "s"))

    def _banded(self, band: Band) -> Node:
        """The same without a product: once all have added it that do, what s wrote only decays."""
        b = self.b
        masses, reached = self._masses(band)
        gap = b.sub(self.total, reached)
        far = b.map("exp2", b.behind(gap, band.reach, band.axis, float("-inf")))
        near = [b.diagonal(masses[by], by, band.axis) for by in band.delays if by < band.reach]
        return b.label(total(b, [b.mul(far, masses[band.reach]), *near]), "weights")

    def _masses(self, band: Band) -> tuple[list[Node], Node]:
        """How much of what s wrote is there so many tokens after s, as far as windows reach; and log2 of the decay from
        the chunk's start to the last of these."""
        b = self.b
        here, nothing = band.axis == "s", b.zero({PAST})
        masses = [b.rename(band.rates[0], "t", "s") if here else nothing]
        reached = b.rename(self.total, "t", "s") if here else nothing
        for by in range(1, len(band.rates)):
            decay = b.shift(self.log_decay, by, band.axis)
            added = self._where_seen(band, b.shift(band.rates[by], by, band.axis))
            masses.append(b.add(b.mul(b.map("exp2", decay), masses[-1]), added))
            reached = b.add(reached, decay)
        return masses, reached

    def _pushes(self, moment: Moment) -> Node:
        b = self.b
        gap = b.sub(self.decayed(moment), b.rename(self.total, "t", "s"))
        return b.map("exp2", b.mask(gap, self.kept(moment), float("-inf")))

    def _impulses(self) -> Node:
        """2^(m_t - m_s) for t >= s: how much of write s the momentum still holds at t."""
        assert self.log_momentum_decay is not None
        m = self.b.cumsum(self.log_momentum_decay)
        return self.b.map("exp2", self.b.mask(self.b.sub(m, self.b.rename(m, "t", "s")), "lower", float("-inf")))

    def _momentum_weight(self, moment: Moment) -> Node:
        """How much of the momentum at the chunk's start is in the memory at each token."""
        b = self.b
        assert self.log_momentum_decay is not None
        left = b.mul(b.map("exp2", b.cumsum(self.log_momentum_decay)), self.live)
        return b.contract(self._pushes(moment), b.rename(left, "t", "s"), {"s"})

    # -- reads -----------------------------------------------------------------------------------------------

    def read(self, x: Node, over: str) -> Node:
        """The memory after each token, contracted with x over one axis (shape [t, other axis])."""
        y = self.read_start(x, over, "after")
        for w in self.writes:
            y = self.b.add(y, self.read_write(w, x, over, "after"))
        return y

    def read_start(self, x: Node, over: str, moment: Moment) -> Node:
        b, other = self.b, self.other(over)
        decay = b.map("exp2", self.decayed(moment))
        if self.channel == over:
            y = b.contract(self.start, b.mul(decay, x), {over})
        else:
            y = b.mul(decay, b.contract(self.start, x, {over}))
        if self.momentum is not None:
            y = b.add(y, b.mul(self._momentum_weight(moment), b.contract(self.momentum, x, {over})))
        return b.expand(y, {"t", other})

    def read_write(self, w: Write, x: Node, over: str, moment: Moment) -> Node:
        if w.frozen is not None:
            return self._read_frozen(w, w.frozen, x, over, moment)
        content, key = (w.left, w.right) if over == self.columns else (w.right, w.left)
        if w.band is None:
            return self.mix(self.scores(key, x, over, moment), content, moment, over)
        b = self.b
        content, key = (b.rename(b.expand(n, {w.token}), "t", "s") for n in (content, key))
        match = b.contract(b.expand(x, {"t"}), key, {over})
        scores = b.label(b.mul(match, self.weights(moment, w.band)), "scores")
        return b.contract(scores, content, {w.source})

    def scores(self, key: Node, x: Node, over: str, moment: Moment) -> Node:
        """score[t, s]: how much of write s a read through x_t picks up, its decay too unless per content channel."""
        b = self.b
        if self.channel == over:
            axes = {"t", over}
            gq, gk = self.decayed(moment), b.rename(self.total, "t", "s")
            key = b.rename(b.expand(key, axes), "t", "s")
            return b.label(b.decay_dot(b.expand(x, axes), key, gq, gk, self.kept(moment), over), "scores")
        match = b.contract(b.expand(x, {"t"}), b.rename(b.expand(key, {"t"}), "t", "s"), {over})
        return b.label(
            b.mul(match, self.weights(moment)) if not self.channel else b.mask(match, self.kept(moment)), "scores"
        )

    def mix(self, scores: Node, content: Node, moment: Moment, over: str) -> Node:
        b = self.b
        content = b.rename(b.expand(content, {"t"}), "t", "s")
        if self.channel in ("", over):
            return b.contract(scores, content, {"s"})
        gq, gk = self.decayed(moment), b.rename(self.total, "t", "s")
        return b.decay_mix(scores, b.expand(content, gk.axes), gq, gk, self.kept(moment))

    def _read_frozen(self, w: Write, frozen: Node, x: Node, over: str, moment: Moment) -> Node:
        b, scale = self.b, w.right
        if self.channel:
            if set(scale.axes) - {"t", self.channel}:
                raise NotChunkable("a state-shaped gradient term under a decay per channel has no factored form")
            summed = self._sum_decayed(scale, moment)
        else:
            scale = b.rename(b.expand(scale, {w.token}), "t", "s")
            summed = b.contract(self.weights(moment, w.band), scale, {w.source})
        if over in summed.axes:
            return b.contract(frozen, b.mul(summed, x), {over})
        return b.mul(summed, b.contract(frozen, x, {over}))

    def _sum_decayed(self, scale: Node, moment: Moment) -> Node:
        """Sum over writes of a number for every channel, decayed to each token."""
        b = self.b
        gk = b.rename(self.total, "t", "s")
        every = b.mask(b.const(1.0), self.kept(moment))
        return b.decay_mix(
            every, b.rename(b.expand(scale, self.total.axes), "t", "s"), self.decayed(moment), gk, self.kept(moment)
        )

    # -- the chunk's end -------------------------------------------------------------------------------------

    def end(self) -> Node:
        """The memory after the chunk's last token."""
        b = self.b
        log_all = b.sum(self.log_decay, {"t"})
        result = b.mul(b.map("exp2", log_all), self.start)
        if self.momentum is None:
            remaining = b.map("exp2", b.sub(log_all, self.total))
            return b.add(result, self._sum_writes(remaining, log_all))
        result = b.add(result, b.mul(b.sum(b.mul(self.last, self._momentum_weight("after")), {"t"}), self.momentum))
        final_row = b.contract(self.last, self.weights("after"), {"t"})
        return b.add(result, self._sum_writes(b.rename(final_row, "s", "t")))

    def end_momentum(self) -> Node:
        """The momentum after the chunk's last token."""
        b = self.b
        assert self.log_momentum_decay is not None
        assert self.momentum is not None
        log_all = b.sum(self.log_momentum_decay, {"t"})
        remaining = b.map("exp2", b.sub(log_all, b.cumsum(self.log_momentum_decay)))
        return b.add(b.mul(b.map("exp2", log_all), self.momentum), self._sum_writes(remaining))

    def _sum_writes(self, remaining: Node, log_all: Node | None = None) -> Node:
        """All writes at the chunk's end, by how much of what each token adds remains there; `log_all`: log2 of the
        chunk's decay, where nothing else makes it less."""
        b = self.b
        result = b.zero({self.rows, self.columns})
        for w in self.writes:
            left = remaining if w.band is None else self._remaining(w.band, remaining, log_all)
            if w.frozen is not None:
                result = b.add(result, b.mul(w.frozen, b.sum(b.mul(left, w.right), {w.token})))
            elif self.columns in remaining.axes:
                result = b.add(result, b.contract(w.left, b.mul(w.right, left), {w.token}))
            else:
                result = b.add(result, b.contract(b.mul(w.left, left), w.right, {w.token}))
        return result

    def _remaining(self, band: Band, remaining: Node, log_all: Node | None) -> Node:
        """How much of what tokens of the band's axis wrote remains at the chunk's end."""
        b = self.b
        if log_all is None:
            return b.rename(b.contract(remaining, self._spread(band), {"t"}), "s", "t")
        masses, reached = self._masses(band)
        return b.rename(b.mul(b.map("exp2", b.sub(log_all, reached)), masses[band.reach]), "s", "t")


def total(b: Builder, parts: list[Node]) -> Node:
    """The sum of several values."""
    return functools.reduce(b.add, parts)


def chained(b: Builder, first: Node, second: Node) -> Node:
    """The product of two matrices of tokens by tokens."""
    return b.contract(b.rename(first, "s", "u"), b.rename(second, "t", "u"), {"u"})


def normalised(memory: ChunkMemory, over: str) -> ChunkMemory:
    """The memory whose vectors along one axis are made unit length after every token.

    That only scales them: each gets a decay of its own, the reciprocal of its norm before it is scaled. The norms
    follow from the inner products of the vectors' writes alone. Raises NotChunkable where a token's write is more than
    one outer product and one frozen matrix.
    """
    b = memory.b
    channel = memory.other(over)
    if memory.momentum is not None:
        raise NotChunkable("momentum under a projection after every token has no factored form")
    if memory.channel == over:
        raise NotChunkable("a projection along the channels that decay each on their own has no factored form")
    if any(w.band is not None for w in memory.writes):
        raise NotChunkable("a window under a projection after every token has no factored form")
    outer = [w for w in memory.writes if w.frozen is None]
    frozen = [w for w in memory.writes if w.frozen is not None]
    if len(outer) > 1 or len(frozen) > 1 or any(over in w.right.axes for w in frozen):
        raise NotChunkable("a projection after every token, and more writes than one outer product and one matrix")
    axes = {"t", channel}
    overlap, pushes = b.zero({"t", "s"}), b.zero(axes)
    across, scale = b.zero(axes), b.zero(axes)  # of the frozen matrix: its overlap with a token's write, its factor
    start, square = b.zero(axes), b.zero(axes)  # of a token's write: its overlap with the start, its squared norm
    for w in outer:
        along, pushes = (w.left, w.right) if over == memory.rows else (w.right, w.left)
        along, pushes = b.expand(along, {"t", over}), b.expand(pushes, axes)
        overlap = b.contract(along, b.rename(along, "t", "s"), {over})
        start = b.mul(pushes, b.contract(along, memory.start, {over}))
        square = b.mul(b.contract(along, along, {over}), b.mul(pushes, pushes))
    for w in frozen:
        assert w.frozen is not None
        scale = b.expand(w.right, axes)
        start = b.add(start, b.mul(scale, b.contract(w.frozen, memory.start, {over})))
        across = b.mul(b.mul(b.const(0.5), b.contract(w.frozen, w.frozen, {over})), scale)
        for other in outer:
            along = other.left if over == memory.rows else other.right
            across = b.add(across, b.mul(pushes, b.contract(b.expand(along, {"t"}), w.frozen, {over})))
        square = b.add(square, b.mul(b.const(2.0), b.mul(across, scale)))
    # what a token finds: the start, or after the first token of the chunk vectors of unit length
    begun = b.map("step", b.sub(b.cumsum(memory.live), memory.live))
    at_start = b.contract(memory.start, memory.start, {over})
    found = b.add(at_start, b.mul(begun, b.sub(b.const(1.0), at_start)))
    kept = b.mul(b.map("exp2", b.mul(b.const(2.0), memory.log_decay)), found)
    alive = b.mul(memory.live, b.add(kept, square))
    none = b.sub(b.const(1.0), memory.live)
    norm = b.norm_scan(
        b.expand(b.add(alive, none), axes), b.expand(memory.log_decay, axes), start, overlap, pushes, across, scale
    )
    norm = b.label(norm, f"{memory.name}_scale")
    scaled = [
        replace(w, right=b.mul(w.right, norm))
        if w.frozen is not None or over == memory.rows
        else replace(w, left=b.mul(w.left, norm))
        for w in memory.writes
    ]
    return replace(memory, log_decay=b.add(memory.log_decay, b.map("log2", norm)), writes=scaled)
