"""What a token computes on tiles: the same values of fewer sums, and what need not be summed again."""

from __future__ import annotations

import pytest
import torch
from ir_eval import Interpreter, draw_leaf
from test_differentiate import LAYERS, forms

from ttmdsl.builder import Builder, substitute
from ttmdsl.ir import Program, verify
from ttmdsl.tile_sums import cost, handed_on, regrouped

SIZES = {"i": 3, "j": 2, "d_k": 3, "d_v": 5, "d": 3, "m": 2, "h": 5}


def interpreter(*programs: Program) -> Interpreter:
    generator = torch.Generator().manual_seed(0)
    leaves = sorted({n for p in programs for n in p.leaves()}, key=lambda n: n.id)
    return Interpreter({n: draw_leaf(n, SIZES, generator) for n in leaves}, SIZES)


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    form = forms(name, consts)["token"]
    for program in (form.forward, form.backward):
        new = regrouped(program)
        verify(new)
        assert cost(new) <= cost(program)
        assert [*new.outputs] == [*program.outputs]
        value = interpreter(program, new)
        for name_, old in program.outputs.items():
            assert new.outputs[name_].axes == old.axes
            torch.testing.assert_close(value(new.outputs[name_]), value(old), rtol=1e-9, atol=1e-9)
        for found, end in handed_on(new).items():
            ends = {n: new.outputs[f"carry:{n.name}"] for n in new.carries() if f"carry:{n.name}" in new.outputs}
            torch.testing.assert_close(value(end), value(substitute(new.builder.fork(), found, ends)))


def token_program() -> tuple[Builder, Program]:
    """x = u (S w): S pushed by an outer product, read twice."""
    b = Builder(("d", "m"))
    state = b.leaf("carry", "S", ("d", "m"))
    u, w, q = b.leaf("token", "u", ("d",)), b.leaf("token", "w", ("m",)), b.leaf("token", "q", ("m",))
    step = b.add(state, b.mul(u, w))
    reads = b.add(b.contract(step, q, ("m",)), b.contract(step, w, ("m",)))
    return b, Program("token", ("d", "m"), b, {"y": reads, "carry:S": step})


def sums(program: Program) -> int:
    return sum(n.op in ("sum", "contract") and any(len(a.axes) == 2 for a in n.args) for n in program.nodes)


def test_sums_of_one_tile_are_taken_at_once() -> None:
    _, program = token_program()
    new = regrouped(program)
    assert (sums(program), sums(new)) == (2, 1)
    value = interpreter(program)
    torch.testing.assert_close(value(new.outputs["y"]), value(program.outputs["y"]))


def test_squares_are_summed_as_they_stand() -> None:
    """Their terms may cancel: |S + u w|^2 is no sum of |S|^2, 2 S u w and |u w|^2."""
    b, program = token_program()
    step = program.outputs["carry:S"]
    outputs = {"y": b.contract(step, step, ("d",)), "z": b.contract(step.args[0], step.args[0], ("d",))}
    new = regrouped(program.with_outputs(outputs))
    squared = [n for n in new.nodes if n.op == "contract" and n.args[0] is n.args[1]]
    assert {n.args[0].op for n in squared} == {"leaf", "add"}


def test_length_of_what_is_projected_is_handed_on() -> None:
    def found(name: str, **consts: float) -> list[tuple[str, ...]]:
        return [n.axes for n in handed_on(regrouped(forms(name, consts)["token"].forward))]

    assert found("lattice_dec") == [("m",)]
    assert found("lattice_dec", project=0.0) == []  # its length is that of a sum
    assert found("delta_net") == []
