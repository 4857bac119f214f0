"""Several gradient steps for each token: by hand, at every cut, where sequences are packed, and beside windows."""

from __future__ import annotations

import contextlib
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_window import no_room
from tiers import beyond

import ttmdsl
from ttmdsl.check import check
from ttmdsl.derive import derive
from ttmdsl.drawing import Shape, draw
from ttmdsl.explain import explain
from ttmdsl.loader import read
from ttmdsl.parity import parity
from ttmdsl.parse import parse

BACKENDS = ("reference", "torch")

GROUPED = """
layer Grouped {
  dim       d_k, d_v
  input     q[d_k], k[n, d_k], v[d_v]
  gate      lam: unit, alpha[d_k]: decay, eta[n]: unit, gamma[n, c]: unit
  const     n = 3, b = 2, c = 2
  fn        ball(x)[i] = x[i] / sqrt(sum(j, x[j]^2) + 1)
  memory    S[d_v, d_k^2]
  bias      window(c, weight = gamma) of 1/2 * |S @ power(k, 2) - v|^2
  retention lam * S
  optimizer gd(rate = eta, steps = n, batch = b)
  project   columns(ball, S)
  read      S @ power(alpha * q, 2)
}
"""
REPEATED = """
layer Repeated {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      eta: unit
  param     alpha: decay
  const     times = 3
  memory    S[d_v, d_k]
  bias      1/2 * |S @ k - v|^2
  retention alpha * S
  optimizer gd(rate = eta, steps = times, at = POINT)
  read      S @ q
}
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_steps_in_order_after_one_decay(backend: str, n: int) -> None:
    module = ttmdsl.load("delta_product", n=n)
    x = draw(module, Shape("", batch=2, tokens=5, heads=2, dims=(4, 3), state=False), seed=4).x
    y, final = module.op(**x, output_final_state=True, backend=backend)
    s = torch.zeros(2, 2, 3, 4, dtype=torch.float64)
    for t in range(5):
        s = s * x["log_alpha"][:, t].exp()[..., None, None]
        for j in range(n):
            k, v, beta = (x[name][:, t, :, j] for name in ("k", "v", "beta"))
            s = s - beta[..., None, None] * ((s @ k[..., None])[..., 0] - v)[..., :, None] * k[..., None, :]
        torch.testing.assert_close(y[:, t], (s @ x["q"][:, t, ..., None])[..., 0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(final["S"], s, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("point", ["previous", "retained"])
def test_the_same_step_again(backend: str, point: str) -> None:
    """Without a dim of its own, an input is the same at every step; the first gradient is where `at` says."""
    module = ttmdsl.compile(REPEATED.replace("POINT", point))
    x = draw(module, Shape("", tokens=4, heads=2, dims=(4, 3), state=False), seed=5).x
    y, _ = module.op(**x, backend=backend)
    s = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    for t in range(4):
        k, v, eta = x["k"][:, t], x["v"][:, t], x["eta"][:, t][..., None, None]
        kept = x["log_alpha"].exp()[None, :, None, None] * s
        at = s if point == "previous" else kept
        s = kept
        for _ in range(3):
            s = s - eta * ((at @ k[..., None])[..., 0] - v)[..., :, None] * k[..., None, :]
            at = s
        torch.testing.assert_close(y[:, t], (s @ x["q"][:, t, ..., None])[..., 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "text", ["delta_product", GROUPED, REPEATED.replace("POINT", "retained")], ids=["delta", "grouped", "repeated"]
)
def test_cuts_packs_and_gradients(text: str) -> None:
    module = ttmdsl.compile(text) if text.startswith("\n") else ttmdsl.load(text)
    shapes = (
        *(Shape(f"cut at {cut}", batch=2, tokens=5, heads=2, dims=(3, 4), cuts=(cut,)) for cut in range(1, 5)),
        Shape("T=70", tokens=70, dims=(3, 2)),
        Shape("packed", dims=(3, 4), lengths=(3, 0, 1, 6)),
    )
    rows = parity(module, dtypes=(torch.float64,), shapes=shapes, backends=("torch",))
    assert [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_at_a_time(backend: str) -> None:
    module = ttmdsl.compile(GROUPED)
    drawn = draw(module, Shape("", batch=2, tokens=5, heads=2, dims=(3, 4), state=False), seed=6)
    whole, end = module.op(**drawn.x, output_final_state=True, backend="reference")
    state = None
    for t in range(5):
        y, state = module.step(**{key: v[:, t] for key, v in drawn.x.items()}, initial_state=state, backend=backend)
        torch.testing.assert_close(y, whole[:, t], rtol=1e-9, atol=1e-11)
    assert state is not None
    assert state["position"].tolist() == end["position"].tolist() == [1, 1]  # of tokens, not of steps
    assert state["tokens"].tolist() == [5, 5]


def test_every_sequence_starts_with_its_own_first_step() -> None:
    module = ttmdsl.load("delta_product")
    bounds = (0, 3, 3, 7)
    x = draw(module, Shape("", heads=2, dims=(4, 3), lengths=tuple(b - a for a, b in pairwise(bounds)))).x
    y, _ = module.op(**x, cu_seqlens=torch.tensor(bounds))
    for start, end in pairwise(bounds):
        one, _ = module.op(**{key: t[:, start:end] for key, t in x.items()}, backend="reference")
        torch.testing.assert_close(y[:, start:end], one, rtol=1e-10, atol=1e-12)


ALIKE = REPEATED.replace("param     alpha: decay", "").replace("alpha * S", "S").replace("POINT", "previous")
KERNELS = {
    "entries": ("delta_product", {}),
    "of no whole tokens in a chunk": ("delta_product", {"n": 3}),
    "the same again": (REPEATED.replace("POINT", "retained"), {}),
    "in groups": (ALIKE.replace("steps = times", "steps = times, batch = 4"), {"times": 2}),
    "longer groups than a chunk": (ALIKE.replace("steps = times", "steps = times, batch = 40"), {}),
}


def kernels(why: str, where: str = "") -> list[str]:
    """What the kernels of chunks miss, which take whole tokens' tensors; or, where they find no room, others."""
    text, consts = KERNELS[why]
    module = ttmdsl.compile(text, **consts) if text.startswith("\n") else ttmdsl.load(text, **consts)
    shapes = (
        Shape("T=70, cut at 1 and 23", batch=2, tokens=70, heads=2, dims=(3, 4), cuts=(1, 23)),
        Shape("packed", heads=2, dims=(4, 3), lengths=(33, 0, 1, 30)),
        Shape("y alone", batch=2, tokens=32, dims=(3, 4), state=False, final=False),
    )
    with no_room(module, where) if where else contextlib.nullcontext():
        rows = parity(module, dtypes=(torch.float32,), shapes=shapes, backends=("triton",))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


@pytest.mark.parametrize("why", KERNELS)
def test_kernels_are_the_reference(why: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(kernels, why).result() == []


@st.composite
def layers(draw: st.DrawFn) -> str:
    """Layers of several steps a token: what has an entry for each, which gates there are, what the readout takes."""
    own = {name: "n, " if draw(st.booleans()) else "" for name in ("k", "v")}
    beta = "beta[n]: unit" if draw(st.booleans()) else "beta: unit"
    decays = [("", "S"), (", alpha: decay", "alpha * S"), (", alpha[d_k]: decay", "S * alpha")]
    alpha, retention = draw(st.sampled_from(decays))
    powers = "d_k" not in alpha and draw(st.booleans())
    k, q, rows = ("power(k, 2)", "power(q, 2)", "d_k^2") if powers else ("k", "q", "d_k")
    gate = draw(st.booleans())
    groups = draw(st.sampled_from(["at = previous", "at = retained", "batch = 2", "batch = 4"]))
    return f"""
layer Drawn {{
  dim       d_k, d_v
  input     q[d_k], k[{own["k"]}d_k], v[{own["v"]}d_v]
  gate      {beta}{alpha}{", g: unit" if gate else ""}
  const     n = {draw(st.integers(2, 5))}
  memory    S[d_v, {rows}]
  bias      1/2 * |S @ {k} - v|^2
  retention {retention}
  optimizer gd(rate = beta, steps = n, {groups})
  read      {"g * " if gate else ""}(S @ {q})
}}
"""


def drawn(text: str, tokens: int, cut: int) -> list[str]:
    shapes = (
        Shape("cut", batch=2, tokens=tokens, heads=2, dims=(3, 4), cuts=(min(cut, tokens - 1),)),
        Shape("packed", heads=3, dims=(4,), lengths=(tokens, 0, 1, cut)),
    )
    rows = parity(ttmdsl.compile(text), dtypes=(torch.float32,), shapes=shapes, backends=("triton", "torch"))
    assert rows
    # steps along keys of powers, that nothing forgets, lose up to 3e-5 in float32; a wrong row is another number
    return [f"{row.backend} {row.shape}: {row.quantity} {row.error:.1e}" for row in rows if row.error > 1e-4]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers(), st.integers(2, 70), st.integers(1, 40))
def test_drawn_layers_are_the_reference(interpreter: ProcessPoolExecutor, text: str, tokens: int, cut: int) -> None:
    assert interpreter.submit(drawn, text, tokens, cut).result() == []


@pytest.mark.parametrize("where", beyond(["_forward", "_backward"], "_forward"))
def test_where_chunks_find_no_room_others_stand_in(where: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(kernels, "entries", where).result() == []


def unused() -> float:
    """By how much y differs from the reference where few tokens have gradients of an input alone that nothing takes."""
    module = ttmdsl.compile(REPEATED.replace("v[d_v]", "v[d_v], spare[d_v]").replace("POINT", "retained"))
    given = draw(module, Shape("", batch=2, tokens=7, heads=2, dims=(5, 4), state=False)).x
    x = {k: t.float() if k in module.PARAMS else t.bfloat16() for k, t in given.items()}
    x["spare"].requires_grad_()
    y, _ = module.op(**x, backend="triton")
    expected, _ = module.op(**{k: t.double() for k, t in x.items()}, backend="reference")
    return float((y.double() - expected).norm() / expected.norm())


def test_gradients_of_what_nothing_takes(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(unused).result() < 1e-2


def test_the_chunk_form_stays() -> None:
    source = Path(str(ttmdsl.load("delta_product", n=3).__file__)).read_text(encoding="utf-8")
    assert "Recurrence affine" in source


def test_explain_prints_the_steps() -> None:
    text, filename = read("delta_product")
    lines = explain(derive(check(parse(text), text, filename))).splitlines()
    assert [line.strip() for line in lines if line.strip().startswith(("S_t", "Sₜ"))] == [
        "S_t,0 = α Sₜ₋₁",
        "S_t,j = S_t,j-1 - βⱼ eⱼ kⱼᵀ   (j = 1 .. 2)",
        "Sₜ    = S_t,2",
    ]
