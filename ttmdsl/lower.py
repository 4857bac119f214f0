"""From the derived rule to programs: the class of recurrence decides the form.

Input: `UpdateRule`. Output: `Lowered`: the exact sequential form, which every layer has, and the chunk form where
there is one, with the backward program of each. Decides nothing by a layer's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ttmdsl.differentiate import differentiate, values_alone
from ttmdsl.ir import Program
from ttmdsl.kernel_form import LoweredKernel, lower_kernel
from ttmdsl.lower_chunk import lower_chunk
from ttmdsl.lower_expr import NotChunkable
from ttmdsl.lower_token import lower_token
from ttmdsl.prelude import Bands, MicroTokens, Parts, Prelude
from ttmdsl.rule import UpdateRule
from ttmdsl.unfold import unfold

Recurrence = Literal["additive", "affine", "frozen", "sequential"]

TITLES: dict[Recurrence, str] = {
    "additive": "additive: the gradient is free of the state; a gated scan over chunks",
    "affine": "affine: the gradient is affine in the state; chunks by a triangular inverse",
    "frozen": "frozen: the gradient is taken at the state before a group of tokens; each group is a chunk",
    "sequential": "sequential: exact, token by token, the state kept in registers",
}


@dataclass(frozen=True)
class Form:
    """One unit of the recurrence, forward and backward."""

    forward: Program
    backward: Program


@dataclass(frozen=True)
class Lowered:
    """All programs of a layer, for the rule without windows, features and steps; `prelude` makes the tensors that it
    takes. `chunk` is None where the recurrence has no chunk form; `reason` then says why.

    `resumed` is the chunk form for a sequence that resumes inside a group of tokens that share a gradient point; None
    where there are no groups.
    """

    rule: UpdateRule
    recurrence: Recurrence
    reason: str
    token: Form
    chunk: Form | None
    resumed: Form | None
    prelude: Prelude

    @property
    def batch(self) -> int:
        """Tokens after which groups start over: those that share a gradient point, or 1 where there are no groups."""
        return math.lcm(*self.batches)

    @property
    def batches(self) -> list[int]:
        """The sizes of the passes' groups of tokens; several only where there is no chunk form."""
        return sorted({p.optimizer.batch for p in self.rule.spec.passes} - {1})

    @property
    def apart(self) -> Bands | MicroTokens | None:
        """What chunks take, if it is something else than single tokens take."""
        return self.prelude.bands or self.prelude.micro

    @property
    def kernel_forms(self) -> dict[str, Form]:
        """The forms that kernels have, by name, the sequential one last."""
        found = {"chunk": self.chunk, "resumed": self.resumed, "token": self.token}
        # a chunk form that walks over its tokens, too, takes longer than the sequential one (benchmarks/NOTES.md)
        return {k: f for k, f in found.items() if f and all(n.op != "norm_scan" for n in f.forward.nodes)}

    @property
    def parts(self) -> Parts | None:
        """What chunks' kernels walk over, if it is no tokens."""
        return self.prelude.parts if "chunk" in self.kernel_forms else None

    def whole_tokens(self, number: int) -> int:
        """The most micro-tokens, up to so many, that make whole tokens; or those of one."""
        each = self.prelude.micro.number if self.prelude.micro else 1
        return max(1, number // each) * each

    @property
    def inner(self) -> str:
        """The dim over whose blocks kernels of chunks walk; or ""."""
        return self.kernel_forms["chunk"].forward.inner if "chunk" in self.kernel_forms else ""

    @property
    def in_units(self) -> bool:
        """Whether one token with gradients may be a unit, too: where memories have an inner dim, since a token's
        kernels keep their states whole, and take minutes to compile for wide heads."""
        return bool(self.inner)

    @property
    def walked(self) -> str:
        """The dim of features over whose blocks all kernels walk, so that there may be any number of them; or ""."""
        return self.inner if self.inner in self.rule.spec.features else ""

    @property
    def title(self) -> str:
        """The class of recurrence in words, with the reason for a sequential form."""
        return TITLES[self.recurrence] + (f" ({self.reason})" if self.reason else "")


def _form(forward: Program) -> Form:
    return Form(values_alone(forward), values_alone(differentiate(forward)))


def lower(rule: UpdateRule) -> Lowered | LoweredKernel:
    """Lowers a rule; needs neither torch nor triton."""
    if rule.spec.kernels:
        return lower_kernel(rule)
    rule, alone, ways = unfold(rule)
    grouped = any(p.optimizer.batch > 1 for p in rule.spec.passes)
    reason = ""
    for own, prelude in ways:
        try:
            chunk = lower_chunk(own, aligned=True)
            resumed = _form(lower_chunk(own, aligned=False, dims=chunk.dims)) if grouped else None
        except NotChunkable as found:
            reason = str(found)
        else:
            return _in_chunks(rule, own, prelude, chunk, resumed)
    token = _form(lower_token(rule, rule.spec.dims))
    return Lowered(rule, "sequential", reason, token, None, None, alone)


def _in_chunks(rule: UpdateRule, own: UpdateRule, prelude: Prelude, chunk: Program, resumed: Form | None) -> Lowered:
    """A layer with a chunk form, by a rule of its own or that of single tokens."""
    token = _form(lower_token(rule, chunk.dims))  # forms hand their states to one another
    inverted = any(n.op == "tri_inv" for n in chunk.nodes)
    recurrence: Recurrence = "frozen" if resumed else "affine" if inverted else "additive"
    if own is not rule:  # a backend's code for both knows the tensors of both
        tensors = dict.fromkeys((*rule.spec.tensors, *own.spec.tensors))
        rule = replace(rule, spec=replace(rule.spec, tensors=tuple(tensors)))
    return Lowered(rule, recurrence, "", token, _form(chunk), resumed, prelude)
