"""What the backward pass of the sequential form finds again: the same gradients, and fewer sums on their way."""

from __future__ import annotations

import pytest
import torch
from test_differentiate import LAYERS, forms
from test_tile_sums import interpreter, sums

from ttmdsl.builder import substitute
from ttmdsl.ir import REDUCING, Program, depends_on, verify
from ttmdsl.lower import Form
from ttmdsl.replay import Replay, replay
from ttmdsl.tile_sums import regrouped


def joined(walks: Replay) -> Program:
    """The gradients alone, with what the first walk would have saved."""
    builder = walks.again.builder
    found = {n: walks.again.outputs[n.name] for n in walks.backward.leaves() if n.role == "saved"}
    outputs = {k: substitute(builder, v, found) for k, v in walks.backward.outputs.items()}
    return Program("token", walks.backward.dims, builder, outputs)


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_layer(name: str, consts: dict[str, float]) -> None:
    form = forms(name, consts)["token"]
    walks = replay(form)
    verify(walks.again)
    gradients = joined(walks)
    value = interpreter(form.forward, form.backward, gradients, walks.again)
    assert [*gradients.outputs] == [*form.backward.outputs]
    assert {*walks.again.ends()} == {*form.forward.ends()}
    carried = {f"carry:{k}": v for k, v in walks.again.ends().items()}
    for old, new in ((form.forward.outputs, carried), (form.backward.outputs, gradients.outputs)):
        for k, found in new.items():
            assert found.axes == old[k].axes
            torch.testing.assert_close(value(found), value(old[k]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "consts"), LAYERS, ids=lambda p: str(p))
def test_no_sum_of_states_alone_is_left(name: str, consts: dict[str, float]) -> None:
    backward = replay(forms(name, consts)["token"]).backward
    roots, leaves = backward.outputs.values(), backward.leaves()
    chained = depends_on(roots, [n for n in leaves if n.role == "cocarry"])
    free = depends_on(roots, [n for n in leaves if n.role in ("carry", "saved")]) - chained
    assert not [n for n in free if n.op in REDUCING and len(n.axes) < 2]


def test_lattice_takes_fewer_sums_in_reverse() -> None:
    """Exact Lattice: the length of a column, what is read of it, its error and the length of the step are the first
    walk's, which takes them anyway; of y's gradient what the state alone is multiplied by."""
    form: Form = forms("lattice_dec", {})["token"]
    walks = replay(form)
    assert (sums(walks.backward), sums(regrouped(form.backward))) == (4, 9)
    carried = {k: v for k, v in form.forward.outputs.items() if k != "y"}
    assert sums(walks.again) == sums(regrouped(form.forward.with_outputs(carried))) + 1


@pytest.mark.parametrize("name", ["atlas_linear", "atlas"])
def test_newton_schulz_iterations_are_left_by_the_first_walk(name: str) -> None:
    form = forms(name, {})["token"]
    taken = [n for n in form.forward.nodes if n.op == "newton_schulz"]
    assert [n for n in form.backward.nodes if n in taken]  # gradients take them
    walks = replay(form)
    assert not [n for n in walks.backward.nodes if n.op == "newton_schulz"]
    assert sum(n.op == "newton_schulz" for n in walks.again.nodes) == len(taken)
