"""The text of a kernel, as data: its pointers, lines of code, and what is known of it.

Input: what write_kernel.py and its kin write. Output: `KernelText`, which the templates in codegen/ frame. Writes
nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ttmdsl.ir import Axes, groups
from ttmdsl.kernels import Kind
from ttmdsl.printer import Names
from ttmdsl.tuning import in_step, without_gradients

When = Literal["", "step", "more"]


@dataclass(frozen=True)
class Argument:
    """A pointer of a kernel and the Python expression that launches pass for it. `dtype`: input, gate, float32 or
    int64. `when`: it is given for one token's step alone, or for more tokens, if not for both."""

    name: str
    value: str
    dtype: str
    when: When = ""


@dataclass(frozen=True)
class Ahead:
    """A tensor's value at a token, loaded while the token before it is computed: a walk would wait for it else."""

    name: str
    next: str
    value: str


# of the sequential form: a walk over the tokens of a unit, or of a segment, or of many of these; a kernel for one
# token of these, or for all of a unit; or for a step's one token
TokenKind = Literal["walk", "segment", "piece", "turn", "unit", "step"]


@dataclass(frozen=True)
class Kept:
    """Tiles that are kept of every token, so many: as products take them, of all that a tile's axes are padded to."""

    name: str
    axes: Axes
    count: int


@dataclass
class KernelText:
    """What a kernel template needs; lists are lines of code. `of`: what alone a map holds, if it holds no state;
    `by_token`: a scan over single tokens. `found`: what a walk that finds a segment's states again leaves of every
    token, and its axes. `shared`: a dim whose blocks programs may share out; `handed_in`: axes of each round's sums,
    which these hand to one another; `together`: the body of such a program, if each has one block. `steps`: gradient
    steps of a token that it deals out by itself. `parts`: of each token so many, where it takes what is of whole tokens
    beside what is of these. `aside`: what no token's value takes part in, once the first token is being loaded.
    `others`: the body in other orders, by their numbers."""

    name: str
    doc: str
    kind: Kind | TokenKind = "scan"
    alive: float = 0.0
    arguments: list[Argument] = field(default_factory=list)
    dims: list[str] = field(default_factory=list)
    blocked: str = ""
    inner: str = ""
    held: list[str] = field(default_factory=list)
    shared: str = ""
    handed_in: list[list[Axes]] = field(default_factory=list)
    reverse: bool = False
    of: Literal["", " of tokens", " of vectors"] = ""
    by_token: bool = False
    before: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    others: dict[int, list[str]] = field(default_factory=dict)
    together: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    ahead: list[Ahead] = field(default_factory=list)
    found: dict[str, Axes] = field(default_factory=dict)
    kept: Kept | None = None
    steps: int = 1
    parts: int = 1
    uses: set[str] = field(default_factory=set)
    fresh: list[int] = field(default_factory=list)
    signature: str = ""

    @property
    def earlier(self) -> dict[str, int]:
        """The masks of earlier groups that it uses, each with the tokens of a group."""
        return {use: groups(use) for use in sorted(self.uses) if groups(use)}

    @property
    def way(self) -> str:
        """How the kernel runs: a map, one of tokens alone, a scan, or a scan in reverse; of the tokens of one
        unit a walk, each in its turn, or all at once."""
        scan = "reverse" if self.reverse and self.kind == "scan" else self.kind
        return scan + self.of

    @property
    def staged(self) -> bool:
        """Whether its loop loads what Triton copies to shared memory ahead."""
        return self.kind == "piece" or (self.kind == "scan" and not (self.by_token or self.inner))

    @property
    def signatures(self) -> dict[str, str]:
        """Its signature, by its name; and what it is where no backward pass may follow, if it stores less then; and in
        a step, if it walks over tokens, or is for one alone."""
        forward = self.kind in ("scan", "map") and not self.reverse
        stores_less = forward and (self.keep or any("KEEP" in line for line in self.body))
        found = {self.name: self.signature}
        if stores_less:
            found[without_gradients(self.name)] = without_gradients(self.signature)
        if self.kind == "step" or self.by_token:
            found[in_step(self.name)] = in_step(self.signature)
        return found

    def pointer(self, name: str, value: str, dtype: str, when: When = "") -> str:
        """Declares a pointer once; `d_q` may be both the cotangent of q and an input of its own."""
        known = {(a.value, a.dtype): a.name for a in self.arguments}
        if (value, dtype) not in known:
            known[value, dtype] = Names(known.values()).get(f"{name}_ptr")
            self.arguments.append(Argument(known[value, dtype], value, dtype, when))
        return known[value, dtype]
