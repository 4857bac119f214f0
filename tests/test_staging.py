"""Kernels in a row in place of one: gates' gradients come last where that costs less, and what passes is taken."""

from __future__ import annotations

import pytest
from test_differentiate import forms

from ttmdsl import staging
from ttmdsl.kernels import Kernel
from ttmdsl.plan import plan
from ttmdsl.rounding import ENLARGING, enlarged
from ttmdsl.schedule import weights
from ttmdsl.staging import cost

CUT = [("titans_linear", {"b": 64}), ("trellis", {"b": 64}), ("gsa", {})]


def gradient_maps(name: str, consts: dict[str, float]) -> list[Kernel]:
    return [k for k in plan("chunk", forms(name, consts)["chunk"]).backward if k.name.startswith("_chunk_backward_1")]


@pytest.mark.parametrize(("name", "consts"), CUT)
def test_kernels_in_a_row_cost_less_with_gradients_of_gates_last(
    name: str, consts: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates_last = plan("chunk", forms(name, consts)["chunk"])
    monkeypatch.setattr(staging, "_gates_last", lambda *_: [])
    as_ever = plan("chunk", forms(name, consts)["chunk"])
    weight = weights(64)
    now, before = (sum(cost(k, weight) for k in found.backward) for found in (gates_last, as_ever))
    assert now < before / 1.02


@pytest.mark.parametrize(("name", "consts"), CUT)
def test_what_passes_is_taken_later(name: str, consts: dict[str, float]) -> None:
    kernels = gradient_maps(name, consts)
    for i, k in enumerate(kernels):
        assert {*k.saves} <= {n for later in kernels[i + 1 :] for n in later.given}


@pytest.mark.parametrize(("name", "consts"), [("dplr", {}), ("rwkv7", {}), ("trellis", {"b": 64})])
def test_what_passes_is_exact_where_its_rounding_is_enlarged(name: str, consts: dict[str, float]) -> None:
    kernels = gradient_maps(name, consts)
    passed = {n for k in kernels for n in k.saves if len(n.axes) == 2}
    exact = passed.intersection(*(k.exact for k in kernels))
    assert exact <= enlarged(kernels[0].program.nodes)
    assert exact >= {a for n in kernels[0].program.nodes if n.op in ENLARGING for a in n.args} & passed
    assert passed > exact
    assert exact


def test_vectors_that_follow_from_inputs_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def passed() -> list[str]:
        return [n.op for k in gradient_maps("trellis", {"b": 64}) for n in k.saves if len(n.axes) < 2]

    found_again = passed()
    assert not {"recip", "exp2"}.intersection(found_again)
    monkeypatch.setattr(staging, "_spared", lambda kernel, parts: parts)
    assert {"recip", "exp2"} <= {*passed()}
    assert len(found_again) < len(passed())


@pytest.mark.parametrize(("name", "consts"), [("titans_linear", {"b": 64}), ("gsa", {})])
def test_a_kernel_is_given_what_it_would_load_tiles_for(
    name: str, consts: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def price() -> float:
        return sum(cost(k, weights(64)) for k in plan("chunk", forms(name, consts)["chunk"]).backward)

    given = price()
    monkeypatch.setattr(staging, "_handed_on", lambda kernel, parts, weight: parts)
    assert given < price()
