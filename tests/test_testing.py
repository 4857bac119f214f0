"""parity and testing on a layer written here by hand: what is right passes, and every kind of wrong is found."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

import ttmdsl
from ttmdsl.drawing import Shape, dims_at, draw, is_deep, sizes_of
from ttmdsl.parity import SHAPES, Row, parity, relative_error, table
from ttmdsl.testing import check_layer, layer_inputs

State = dict[str, Tensor]
QUICK = (Shape("small", batch=2, tokens=7, heads=2, dims=(4, 3)),)


def _recurrence(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    ys = []
    for t in range(q.shape[1]):
        s = log_alpha[:, t].exp()[..., None, None] * s + v[:, t, :, :, None] * k[:, t, :, None, :]
        ys.append(scale[:, None] * (s @ q[:, t, :, :, None])[..., 0])
    return torch.stack(ys, 1) if ys else v.new_zeros(v.shape), s


def _parallel(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    total = log_alpha.cumsum(1)
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()[None, :, :, None]
    gap = (total[:, :, None] - total[:, None]).masked_fill(~causal, -math.inf)
    weights = torch.einsum("bthk,bshk->btsh", q, k) * gap.exp()
    y = torch.einsum("btsh,bshv->bthv", weights, v)
    y = y + total.exp()[..., None] * torch.einsum("bhvk,bthk->bthv", s, q)
    if not q.shape[1]:
        return y, s
    left = (total[:, -1:] - total).exp()
    s = total[:, -1].exp()[..., None, None] * s + torch.einsum("bthv,bthk,bth->bhvk", v, k, left)
    return scale[:, None] * y, s


def fake(fault: str = "") -> Any:
    """Gated linear attention with a gain for each head; its torch backend has the fault asked for."""

    def op(
        *,
        initial_state: State | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        **x: Tensor,
    ) -> tuple[Tensor, State | None]:
        given = x["q"].dtype
        if fault == "none, in float64":
            x = {key: t.double() for key, t in x.items()}
        bounds = [0, x["q"].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        number = x["q"].shape[0] if cu_seqlens is None else len(bounds) - 1
        start = x["q"].new_zeros(number, x["q"].shape[2], x["v"].shape[-1], x["k"].shape[-1])
        if initial_state is not None:
            start = initial_state["S"].expand_as(start).to(x["q"].dtype)
        ys, finals = [], []
        for n, (a, b) in enumerate(pairwise(bounds)):
            s = start if cu_seqlens is None else start[n : n + 1]
            part = {key: t if key == "scale" else t[:, a:b] for key, t in x.items()}
            if backend == "reference":
                y, s = _recurrence(**part, s=s)
            else:
                if fault == "gradient":
                    part["log_alpha"] = part["log_alpha"].detach()
                y, s = _parallel(**part, s=s.detach() if fault == "initial" else s)
            ys.append(y)
            finals.append(s)
        y, final = torch.cat(ys, 1), {"S": torch.cat(finals)}
        if backend != "reference":
            match fault:
                case "slightly":
                    y = y * (1 + 1e-4)
                case "nan":
                    y = y + math.nan
                case "state":
                    final = {"S": final["S"].mT.contiguous().mT + 1}
                case "missing":
                    final = {}
                case "raises":
                    raise ValueError("no such kernel")
        return y.to(given), final if output_final_state else None

    return SimpleNamespace(
        op=op,
        INPUTS={"q": ("d_k",), "k": ("d_k",), "v": ("d_v",)},
        GATES={"log_alpha": ()},
        PARAMS={"scale": ()},
        MEMORY={"S": ("d_v", "d_k")},
        STATE={"S": ("d_v", "d_k")},
        CONSTS={},
        RANGES={"q": "real", "k": "real", "v": "real", "log_alpha": "decay", "scale": "positive"},
        INITIAL={"S": "zero"},
    )


def test_a_right_backend_passes_at_every_shape() -> None:
    rows = parity(fake(), device="cpu", backends=("torch",))
    assert all(row.ok for row in rows)
    assert {row.shape for row in rows} == {shape.label for shape in SHAPES}
    assert {row.dtype for row in rows} == {"float64", "float32"}
    quantities = {"y", "final S", "grad q", "grad k", "grad v", "grad log_alpha", "grad scale", "grad initial S"}
    assert {row.quantity for row in rows} == quantities
    check_layer(fake(), device="cpu", backends=("torch",), shapes=QUICK)


def test_bfloat16_is_held_to_its_own_tolerance() -> None:
    rows = parity(fake(), device="cpu", backends=("torch",), shapes=QUICK, dtypes=(torch.bfloat16,))
    assert {row.tolerance for row in rows} == {5e-3}


def test_bfloat16_loses_no_more_than_what_is_rounded_last() -> None:
    """By a backend that is exact but for that: no sum of cotangents that cancel enlarges what these lost before."""
    for seed in range(5):
        rows = parity(fake("none, in float64"), device="cpu", dtypes=(torch.bfloat16,), shapes=QUICK, seed=seed)
        assert [f"{row.quantity} {row.error:.1e}" for row in rows if row.error > 2**-8] == []


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        ("slightly", "y"),
        ("nan", "y"),
        ("state", "final S"),
        ("missing", "final S"),
        ("gradient", "grad log_alpha"),
        ("initial", "grad initial S"),
    ],
)
def test_a_wrong_backend_is_found(fault: str, missed: str) -> None:
    rows = parity(fake(fault), device="cpu", backends=("torch",), shapes=QUICK)
    assert missed in {row.quantity for row in rows if not row.ok}
    with pytest.raises(AssertionError, match=missed):
        check_layer(fake(fault), device="cpu", backends=("torch",), shapes=QUICK)


def test_a_reference_that_loses_nothing_by_luck() -> None:
    """What half a unit in the inputs' last place makes of the result counts too, or a right backend would miss."""
    module = fake()
    inner = module.op

    def op(*, scale: Tensor, backend: str = "auto", **rest: Any) -> Any:
        exact = scale.double() if backend == "reference" else scale
        return inner(scale=torch.sin(1e3 * exact).to(scale.dtype), backend=backend, **rest)

    module.op = op
    rows = parity(module, device="cpu", backends=("torch",), shapes=QUICK, dtypes=(torch.float32,))
    assert all(row.ok for row in rows)


def test_a_fault_at_a_seam_is_found() -> None:
    whole = [row for row in parity(fake("state"), device="cpu", backends=("torch",)) if row.quantity == "y"]
    assert {row.shape for row in whole if not row.ok} == {"T=37, cut at 5 and 22"}


def test_a_backend_that_raises_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"torch, torch.float64, small: ValueError: no such kernel"):
        parity(fake("raises"), device="cpu", backends=("torch",), shapes=QUICK)


def test_the_table_shows_the_worst_of_each_quantity() -> None:
    rows = [
        Row("torch", "float64", "one", "y", 1e-16, 1e-9, True),
        Row("torch", "float64", "two", "y", math.nan, 1e-9, False),
        Row("torch", "float32", "one", "y", 2e-7, 1e-5, True),
    ]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(rows))
    assert "nan MISS" in capture.get()
    assert "2.0e-07" in capture.get()


def test_sizes_keep_orthonormal_columns_and_constants() -> None:
    module = SimpleNamespace(
        INPUTS={"k": ("m",), "v": ("d",)},
        GATES={"gamma": ("c",)},
        PARAMS={},
        MEMORY={"S": ("d", "m")},
        CONSTS={"c": 4.0, "b": 2.0},
        INITIAL={"S": "orthonormal"},
    )
    assert sizes_of(module, (16, 8)) == {"m": 8, "d": 16, "c": 4}


def test_an_inner_dim_is_four_times_as_wide_as_a_head() -> None:
    deep, features, plain = (ttmdsl.load(layer) for layer in ("ttt_mlp", "polynomial_attention", "gla"))
    assert sizes_of(deep, dims_at(deep, 16)) == {"d": 16, "h": 64}
    assert [is_deep(module) for module in (deep, features, plain)] == [True, False, False]
    assert set(sizes_of(plain, dims_at(plain, 16)).values()) == {16}


def test_drawn_gates_are_in_their_ranges() -> None:
    drawn = draw(fake(), Shape("", batch=2, tokens=50, heads=3))
    assert float(drawn.x["log_alpha"].max()) <= 0
    assert float(drawn.x["scale"].min()) > 0
    assert drawn.state is not None
    assert draw(fake(), Shape("", state=False)).state is None


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layer_inputs(fake(), max_tokens=9))
def test_drawn_keywords_can_be_passed(keywords: dict[str, Any]) -> None:
    y, _ = fake().op(**keywords)
    expected, _ = fake().op(**keywords, backend="reference")
    assert y.shape == keywords["v"].shape
    torch.testing.assert_close(y, expected)


def test_drawn_gates_reach_their_edges() -> None:
    seen: set[float] = set()

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(layer_inputs(fake(), max_tokens=3), st.none())
    def collect(keywords: dict[str, Any], _: None) -> None:
        seen.add(float(keywords["log_alpha"].min()))

    collect()
    assert {0.0, -20.0} <= seen


def test_decays_of_heads_are_drawn_as_models_keep_them() -> None:
    module = ttmdsl.load("gla"), ttmdsl.load("mamba2")
    for exact, kept in ((False, torch.bfloat16), (True, torch.float32)):
        shape = Shape("", tokens=3, dims=(4,), exact=exact)
        channels, head = (draw(m, shape, dtype=torch.bfloat16).x for m in module)
        assert head["log_alpha"].dtype == kept
        assert {t.dtype for t in (*channels.values(), *head.values()) if t is not head["log_alpha"]} == {torch.bfloat16}


def test_an_error_of_values_whose_squares_float32_does_not_hold() -> None:
    large = torch.tensor([1e30, -3e30])
    assert relative_error(large * 1.5, large) == pytest.approx(0.5)
