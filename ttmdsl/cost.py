"""What a layer costs per token and head, as a formula in its dims.

Input: what `lower` gives. Output: multiply-adds of the forward and of the backward pass, and numbers of state, as text.
Counts products of two tiles, and in the exact sequential form also the work done on every entry of a matrix; leaves
out what runs along a single vector, and the few tokens before a chunk that a window reaches. Measures nothing and
chooses nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from ttmdsl.ir import DECAYED, ELEMENTWISE, PAST, TOKEN_AXES, Program, base_dim
from ttmdsl.kernel_form import KernelForm, LoweredKernel
from ttmdsl.lower import Lowered
from ttmdsl.spec import LayerSpec
from ttmdsl.state import POSITION, state_shapes

Monomial: TypeAlias = tuple[str, ...]  # factors in order, a dim or C, the tokens of a chunk; T, the tokens so far
Polynomial: TypeAlias = Counter[Monomial]

_TRIANGULAR = DECAYED | {"norm_scan", "norm_adjoint"}


def per_token(spec: LayerSpec, lowered: Lowered | LoweredKernel) -> list[str]:
    """Lines that say what a token costs."""
    if isinstance(lowered, LoweredKernel):
        work: Polynomial = Counter()
        for form in lowered.forms:
            work.update(_kernel(form))
        kept = "the keys and values that it may still read"
        lines = [f"forward: about {_text(work)} multiply-adds", f"state: {kept}"]
        return [*lines, "T: the tokens so far"] if any("T" in factors for factors in work) else lines
    program, times = lowered.chunk or lowered.token, lowered.prelude.steps
    if lowered.prelude.micro:
        times *= lowered.prelude.micro.number
    state = Counter(tuple(sorted(shape)) for name, shape in state_shapes(spec).items() if name != POSITION)
    lines = [
        f"forward: {_text(_work(program.forward, times))} multiply-adds",
        f"backward: {_text(_work(program.backward, times))}, what it computes once more among them",
        f"state: {_text(state)} numbers",
    ]
    of = "tokens" if times == 1 else f"micro-tokens, {times} for every token,"
    return [*lines, f"C: the {of} of a chunk"] if lowered.chunk else lines


def _kernel(form: KernelForm) -> Polynomial:
    reach = "T" if form.last is None else str(form.last)
    passes = 1 if form.additive else 2  # the coefficients by a solve, then the readout
    return Counter({(reach, form.key_dim): passes, (reach, form.value_dim): passes})


def _work(program: Program, times: int) -> Polynomial:
    """Multiply-adds of one unit, divided among its tokens, each of which is so many of the unit's."""
    work: Polynomial = Counter()
    for node in program.nodes:
        axes = {x for a in node.args for x in a.axes}
        if PAST in axes:
            continue
        if node.op in ("newton_schulz", "newton_schulz_back"):
            rows, steps = str(node.attr[0]), int(str(node.attr[1]))
            products = 3 * steps if node.op == "newton_schulz" else 6 * steps + 3 * steps * (steps - 1) // 2
            work[tuple(sorted(base_dim(x) for x in (*node.axes, rows)))] += products
            continue
        matrix = len([x for x in node.axes if x not in TOKEN_AXES]) == 2
        if node.op == "contract" or node.op in _TRIANGULAR or node.op == "tri_inv":
            axes |= {"u"} if node.op == "tri_inv" else set()
        elif program.unit == "chunk" or not matrix or node.op not in ELEMENTWISE:
            continue
        chunk = sum(x in TOKEN_AXES for x in axes) - (program.unit == "chunk")
        dims = sorted(base_dim(x) for x in axes if x not in TOKEN_AXES)
        if chunk >= 0 and chunk + len(dims) > 1:  # else once a chunk and not for every token, or a vector's
            work[("C",) * chunk + tuple(dims)] += 1
    return Counter({factors: times * count for factors, count in work.items()})


def _text(work: Polynomial) -> str:
    """The largest products first."""
    terms = []
    for factors, count in sorted(work.items(), key=lambda term: (-len(term[0]), term[0])):
        powers = [f if n == 1 else f"{f}^{n}" for f, n in Counter(factors).items()]
        terms.append(" ".join([str(count)] * (count > 1) + powers))
    return " + ".join(terms) or "0"
