"""The sequential form in stages, where all that a token waits for from the one before it is light: Newton-Schulz
iterations, which cost more than all else, are then computed for many tokens at once.

Input: the sequential `Form`. Output: `Stages`, programs of a unit: a group of tokens that share a gradient point, or a
part of one. What is orthogonalised follows from the point, so in a unit no token's depends on what Newton-Schulz makes
of another's. Vectors that follow from tokens and the point are found for all of a unit's tokens at once (`vectors`), by
products of tiles; a walk over the tokens makes the matrices of them (`writes`), a kernel for every token turns these
(`turns`), and a second walk takes the steps and reads (`reads`). Backward each of them in reverse.

Knows no layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ttmdsl.builder import Builder, substitute
from ttmdsl.differentiate import differentiate
from ttmdsl.ir import Node, Program, depends_on, nearest, reachable
from ttmdsl.lower import Form
from ttmdsl.tile_sums import regrouped


@dataclass(frozen=True)
class Stage:
    """A program and its gradients. What one leaves for another is an output of the first, `d:` before it if it is a
    cotangent, and a leaf of the other, of the role "saved": by the same name, `d_` before it."""

    forward: Program
    backward: Program


@dataclass(frozen=True)
class Stages:
    """Stages in the order in which they run: `vectors` is a chunk's program, if there are such vectors, the others are
    those of a token. `frozen`: carries that hold the gradient point, each with the carry that it is taken from where a
    group begins; they stay as they are through a unit."""

    vectors: Stage | None
    writes: Stage
    turns: tuple[Stage, ...]
    reads: Stage
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
    matrices = {f"matrix__{i}": n.args[0] for i, n in enumerate(turned)}
    steps = {n: b.leaf("saved", f"turned__{i}", n.axes) for i, n in enumerate(turned)}
    outputs = {k: v for k, v in program.outputs.items() if not k.startswith("carry:")}
    outputs |= {f"carry:{k}": v for k, v in ends.items() if k not in early}
    writes = _made(program, b, {**matrices, **{f"carry:{k}": v for k, v in early.items()}}, points)
    reads = _made(program, b, outputs, steps)
    if _alien(writes, ends.keys() - early.keys()) or _alien(reads, early):
        return None
    vectors, writes = _apart(writes, frozen)
    chain = [reads, writes, *([vectors] if vectors else [])]
    d_reads, d_writes, *rest = _together([_given(differentiate(p)) for p in chain])
    return Stages(
        Stage(vectors, *rest) if vectors else None,
        Stage(regrouped(writes), regrouped(d_writes)),
        tuple(_turn(program, b, i, n) for i, n in enumerate(turned)),
        Stage(regrouped(reads), regrouped(d_reads)),
        frozen,
    )


def _made(program: Program, b: Builder, outputs: Mapping[str, Node], given: Mapping[Node, Node]) -> Program:
    return Program("token", program.dims, b, {k: substitute(b, v, given) for k, v in outputs.items()})


def _alien(program: Program, carries: Collection[str]) -> bool:
    """Whether a token's program takes one of these carries, or asks where a group begins."""
    return any(n.role == "fresh" or (n.role == "carry" and n.name in carries) for n in program.leaves())


def _apart(writes: Program, frozen: Collection[str]) -> tuple[Program | None, Program]:
    """What follows from tokens and the gradient point alone, for all tokens of a chunk at once: vectors; and the
    program that is given them. None where a chunk would need more than tiles."""
    b, values = writes.builder, writes.outputs.values()
    points = [n for n in writes.carries() if n.name in frozen]
    chained = depends_on(values, [n for n in writes.carries() if n not in points])
    of_point = depends_on(values, points)

    def vector(n: Node) -> bool:
        return n in of_point and n not in chained and len(n.axes) < 2

    found = dict.fromkeys(n for v in values for n in nearest(v, vector, lambda n: n not in of_point))
    names = {n: f"vector__{i}" for i, n in enumerate(found)}
    rows = {n: b.leaf("token", n.name, ("t", *n.axes)) for n in writes.leaves() if n.role == "token"}
    outputs = {name: b.expand(substitute(b, n, rows), ("t",)) for n, name in names.items()}
    kept = {f"carry:{n.name}": n for n in points}
    told = {x for n in writes.leaves() if n.role in ("token", "param") for x in n.axes}
    inner = next((x for n in points for x in n.axes if x not in told), "")
    chunk = Program("chunk", writes.dims, b, {**outputs, **kept}, inner)
    if not found or any(len(n.axes) > 2 for n in chunk.nodes):
        return None, writes
    leaves = {n: b.leaf("saved", name, n.axes) for n, name in names.items()}
    rest = {k: substitute(b, v, leaves) for k, v in writes.outputs.items() if k not in kept}
    # a point that a token takes itself, too, has a cotangent there
    taken = {n.name for n in reachable(rest.values()) if n.role == "carry"}
    return chunk, writes.with_outputs(rest | {k: v for k, v in kept.items() if v.name in taken})


def _given(program: Program) -> Program:
    """A backward program to which others leave the cotangents of all but y."""
    b = program.builder
    leaves = {n: b.leaf("saved", f"d_{n.name}", n.axes) for n in program.leaves() if n.role == "cot" and n.name != "y"}
    return program.with_outputs({k: substitute(b, v, leaves) for k, v in program.outputs.items()})


def _together(programs: Iterable[Program]) -> list[Program]:
    """The same, where each leaves its share of a tensor's gradient to the next that has one, which adds its own."""
    programs = list(programs)
    for i, first in enumerate(programs):
        for j, last in enumerate(programs[i + 1 :], i + 1):
            b = last.builder
            for key in [k for k in first.outputs if k.startswith("d:") and k in last.outputs]:
                share, value = f"share__{i}{j}__{key[2:]}", first.outputs[key]
                rows = ("t",) if last.unit == "chunk" else ()
                leaf = b.leaf("saved", share, (*rows, *value.axes))
                added = leaf if set(leaf.axes) <= set(last.outputs[key].axes) else b.sum(leaf, rows)
                programs[j] = last = last.with_outputs({**last.outputs, key: b.add(last.outputs[key], added)})
                first = first.with_outputs({share if k == key else k: v for k, v in first.outputs.items()})
        programs[i] = first
    return programs


def _turn(program: Program, b: Builder, i: int, node: Node) -> Stage:
    """Newton-Schulz of one token's matrix, and its gradient."""
    x, d = b.leaf("saved", f"matrix__{i}", node.axes), b.leaf("saved", f"d_turned__{i}", node.axes)
    turned = b.make("newton_schulz", (x,), node.axes, *node.attr)
    back = b.make("newton_schulz_back", (x, d), node.axes, *node.attr)
    forward = Program("token", program.dims, b, {f"turned__{i}": turned})
    return Stage(forward, Program("token", program.dims, b, {f"d:matrix__{i}": back}))
