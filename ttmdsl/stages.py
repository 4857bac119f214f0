"""The sequential form in stages, where all that a token waits for from the one before it is light: Newton-Schulz
iterations, which cost more than all else, are then computed for many tokens at once.

Input: the sequential `Form`. Output: `Stages`, programs for single tokens. A unit is a group of tokens that share a
gradient point, or a part of one. What is orthogonalised follows from the point, so in a unit no token's depends on what
Newton-Schulz makes of another's: a walk over the unit's tokens finds the matrices (`writes`), a kernel for every token
turns them (`turns`), and a second walk takes the steps and reads (`reads`). Backward each of them in reverse.

Knows no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ttmdsl.builder import Builder, substitute
from ttmdsl.differentiate import differentiate
from ttmdsl.ir import Node, Program, depends_on, reachable
from ttmdsl.lower import Form
from ttmdsl.tile_sums import regrouped


@dataclass(frozen=True)
class Turn:
    """Newton-Schulz of one matrix: the value, of a leaf, and its gradient, of two; `leaf` and `d_leaf` name what is
    given, `name` and `d_name` what is found."""

    forward: Program
    backward: Program


@dataclass(frozen=True)
class Stages:
    """Programs of a token: what is passed from one to the other are leaves of the role "saved", outputs of the same name,
    or of `d:` and their name. `frozen`: carries that hold the gradient point, each with the carry that it is taken
    from where a group begins; they stay as they are through a unit."""

    writes: Program
    turns: tuple[Turn, ...]
    reads: Program
    d_reads: Program
    d_writes: Program
    frozen: Mapping[str, str]


def stages(form: Form, batch: int) -> Stages | None:
    """The form in stages; None where nothing is orthogonalised, tokens share no gradient point, or not all the same."""
    program = form.forward
    turned = [n for n in program.nodes if n.op == "newton_schulz"]
    if not turned or batch == 1:
        return None
    ends, later = program.ends(), depends_on(program.outputs.values(), turned)
    if any(n.args[0] in later for n in turned):
        return None
    b = program.builder.fork()
    fresh, frozen = b.leaf("fresh", str(batch), ()), {}
    points: dict[Node, Node] = {}
    for name, end in ends.items():
        if end.op == "select" and end.args[0] is fresh and end.args[2] is b.leaf("carry", name, end.axes):
            frozen[name] = end.args[1].name
            points[end] = end.args[2]
    early = {k: v for k, v in ends.items() if v not in later}
    found = {f"matrix__{i}": n.args[0] for i, n in enumerate(turned)}
    steps = {n: b.leaf("saved", f"turned__{i}", n.axes) for i, n in enumerate(turned)}
    outputs = {k: v for k, v in program.outputs.items() if not k.startswith("carry:")}
    outputs |= {f"carry:{k}": v for k, v in ends.items() if k not in early}
    writes = _made(program, b, {**found, **{f"carry:{k}": v for k, v in early.items()}}, points)
    reads = _made(program, b, outputs, steps)
    if any(_alien(p, ends, mine) for p, mine in ((writes, early), (reads, ends.keys() - early.keys()))):
        return None
    d_writes, d_reads = _together(_given(differentiate(writes)), differentiate(reads))
    return Stages(
        regrouped(writes),
        tuple(_turn(program, b, i, n) for i, n in enumerate(turned)),
        regrouped(reads),
        regrouped(d_reads),
        regrouped(d_writes),
        frozen,
    )


def _made(program: Program, b: Builder, outputs: Mapping[str, Node], given: Mapping[Node, Node]) -> Program:
    return Program("token", program.dims, b, {k: substitute(b, v, given) for k, v in outputs.items()})


def _alien(program: Program, carries: Mapping[str, Node], mine: object) -> bool:
    """Whether a token's program takes a carry that is not one of its own, or asks where a group begins."""
    return any(
        n.role == "fresh" or (n.role == "carry" and n.name in carries and n.name not in mine)  # type: ignore[operator]
        for n in program.leaves()
    )


def _given(program: Program) -> Program:
    """A backward program whose cotangents were found by others before."""
    b = program.builder
    leaves = {n: b.leaf("saved", f"d_{n.name}", n.axes) for n in program.leaves() if n.role == "cot"}
    return program.with_outputs({k: substitute(b, v, leaves) for k, v in program.outputs.items()})


def _together(last: Program, first: Program) -> tuple[Program, Program]:
    """Both, where the first leaves its share of a tensor's gradient to the last, which adds its own."""
    b = last.builder
    both = [k for k in first.outputs if k.startswith("d:") and k in last.outputs]
    shares = {k: b.leaf("saved", f"share__{k[2:]}", first.outputs[k].axes) for k in both}
    sums = {k: b.add(v, shares[k]) if k in shares else v for k, v in last.outputs.items()}
    return last.with_outputs(sums), first.with_outputs(
        {shares[k].name if k in shares else k: v for k, v in first.outputs.items()}
    )


def _turn(program: Program, b: Builder, i: int, node: Node) -> Turn:
    x, d = b.leaf("saved", f"matrix__{i}", node.axes), b.leaf("saved", f"d_turned__{i}", node.axes)
    turned = b.make("newton_schulz", (x,), node.axes, *node.attr)
    back = b.make("newton_schulz_back", (x, d), node.axes, *node.attr)
    forward = Program("token", program.dims, b, {f"turned__{i}": turned})
    return Turn(forward, Program("token", program.dims, b, {f"d_matrix__{i}": back}))
