"""What the backward pass of the sequential form finds again, walking over a segment's tokens: its states, and what
follows from them alone.

Input: the sequential `Form`. Output: `Replay`, a program for either walk over the segment: forward, to find the states,
and in reverse, for the gradients. Sums over tiles are what a token costs, and each waits for the one before it; Newton-
Schulz iterations cost more than all else. Those that no cotangent has a part in that is handed from token to token are
left to the walk forward, which takes most of them anyway, and goes over all segments at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttmdsl.builder import substitute
from ttmdsl.ir import REDUCING, Node, Program, depends_on, tied
from ttmdsl.lower import Form
from ttmdsl.tile_sums import SUM, cost, crosses, regrouped


@dataclass(frozen=True)
class Replay:
    """`again`: the carries of a token, and what it saves, by name. `backward`: its gradients, in which these are
    leaves."""

    again: Program
    backward: Program


def replay(form: Form) -> Replay:
    """Both programs, made anew with few sums over tiles."""
    left: dict[Node, Node] = {}  # what the first walk leaves the second, in whatever terms it stands there: the leaf
    backward = _given(form.backward, left)
    backward = _given(regrouped(backward, lambda p: _price(p, left)), left)
    b = backward.builder
    meant: dict[Node, Node] = {}
    for node, leaf in left.items():
        meant.setdefault(leaf, substitute(b, node, meant))
    saved = {n.name: meant[n] for n in backward.leaves() if n.role == "saved"}
    carried = {f"carry:{k}": v for k, v in form.forward.ends().items()}
    return Replay(regrouped(Program(backward.unit, backward.dims, b, {**carried, **saved})), backward)


def _price(backward: Program, left: dict[Node, Node]) -> float:
    """What both walks take for a way to find the gradients: for the first, the sums that only this one asks for."""
    asked = dict(left)
    gradients = cost(_given(backward, asked))
    more = {leaf: node for node, leaf in asked.items() if leaf not in left.values()}
    return gradients + SUM * sum(map(crosses, more.values()))


def _given(program: Program, left: dict[Node, Node]) -> Program:
    """The program with leaves for what is saved: dear values, and sums, of states and of no cotangent handed on."""
    states = [n for n in program.leaves() if n.role in ("carry", "saved")]
    of_states = depends_on(program.outputs.values(), states) - tied(program, "cocarry")
    dear = [n for n in program.nodes if n in of_states and (n.op == "newton_schulz" or _is_sum(n))]
    if not dear:
        return program
    b = program.builder.fork()
    for node in dear:
        leaf = left.setdefault(node, b.leaf("saved", f"{node.op}_{len(set(left.values()))}", node.axes))
        left.setdefault(b.remade(node, tuple(substitute(b, a, left) for a in node.args)), leaf)
    return Program(program.unit, program.dims, b, {k: substitute(b, v, left) for k, v in program.outputs.items()})


def _is_sum(node: Node) -> bool:
    """Whether a value is a vector or a number, and found by a sum."""
    return node.op in REDUCING and len(node.axes) < 2
