"""Windows over past tokens and delays: against loops written by hand, at every cut, and where sequences are packed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiers import mostly_beyond
from torch import Tensor

import ttmdsl
from ttmdsl.check import check
from ttmdsl.derive import derive
from ttmdsl.drawing import Shape, draw
from ttmdsl.explain import explain
from ttmdsl.ir import is_product
from ttmdsl.loader import read
from ttmdsl.lower import Lowered, lower
from ttmdsl.parity import parity
from ttmdsl.parse import parse
from ttmdsl.past import history
from ttmdsl.unfold import MOST_MICRO

BACKENDS = ("reference", "torch")

DELAYS = """
layer Delayed {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      alpha: decay, eta: unit, g[n]
  const     n = 3
  let       u = exp(k) + delay(k, 1)
  memory    S[d_v, d_k]
  bias      1/2 * |S @ (delay(u, 2) + g[n - 1] * k) - v|^2
  retention alpha * S
  optimizer gd(rate = eta)
  read      S @ q + delay(v, 2)
}
"""
LONG = """
layer Long {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      alpha: decay, theta: decay, eta: unit, g[c]
  const     c = 7, b = 4
  fn        ln(x)[i] = x[i] / sqrt(mean(j, x[j]^2) + 0.1)
  memory    S[d_v, d_k]
  bias      window(c, weight = softmax(2 * g)) of 1/2 * |ln(S @ k) - alpha * v|^2
  retention alpha * S
  optimizer momentum(decay = theta, rate = eta, batch = b)
  read      S @ q
}
"""
NORMALISED = """
layer Normalised {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      eta: unit
  memory    S[d_v, d_k]
  bias      window(4) of 1/2 * |S @ (k / |k|) - v / |v|^2|^2
  optimizer gd(rate = eta)
  read      S @ q
}
"""
GATED = """
layer Gated {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      alpha: decay, eta: unit, g, lam: decay
  param     scale[d_v]
  const     b = 3
  let       u = tanh(k) * (1 + g)
  memory    S[d_v, d_k]
  bias      window(5) of 1/2 * lam * |S @ u - scale * v|^2
  retention alpha * S
  optimizer gd(rate = eta, batch = b)
  read      S @ q
}
"""
PASSES = """
layer Passes {
  dim   d_k, d_v, m
  input q[d_k], k[d_k], v[d_v], a[m]
  gate  eta: unit
  const b = 4
  pass h {
    memory    K[m, d_k]
    bias      window(3) of 1/2 * |tanh(K @ k) - a|^2
    optimizer gd(rate = eta, batch = b)
    read      K @ q
  }
  pass y {
    memory    V[m, d_v]
    bias      window(2) of 1/2 * |V @ v - a|^2
    optimizer gd(rate = eta, batch = b)
    read      V^T @ h
  }
}
"""


OMEGA, SWLA = read("omega_linear")[0], read("swla")[0]
MOMENTUM = OMEGA.replace("gd(rate", "momentum(decay = alpha, rate")
BY_CHANNEL = OMEGA.replace("alpha: decay", "alpha[d_k]: decay").replace("alpha * S", "S * alpha")


def tensors(module: ModuleType, tokens: int, dims: tuple[int, ...] = (5, 3), batch: int = 2) -> dict[str, Tensor]:
    return draw(module, Shape("", batch=batch, tokens=tokens, heads=2, dims=dims, state=False), seed=1).x


def span(module: ModuleType, x: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    return {key: t if key in module.PARAMS else t[:, start:end] for key, t in x.items()}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ---- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("c", [1, 2, 4, 9])
def test_additive_window(backend: str, c: int) -> None:
    module = ttmdsl.load("swla", c=c)
    x = tensors(module, 6)
    y, final = module.op(**x, output_final_state=True, backend=backend)
    s = torch.zeros(2, 2, 3, 5, dtype=torch.float64)  # dims: q and k have 5, v has 3
    for t in range(6):
        s = s * x["log_alpha"][:, t].exp()[..., None, None]
        for i in range(max(0, t - c + 1), t + 1):
            weight = x["gamma"][:, t, :, c - 1 - (t - i)]
            s = s + weight[..., None, None] * x["v"][:, i, :, :, None] * x["k"][:, i, :, None, :]
        close(y[:, t], (s @ x["q"][:, t, ..., None])[..., 0])
    close(final["S"], s)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("c", "b"), [(1, 1), (3, 1), (4, 3), (5, 2)])
def test_l2_window_at_each_group_s_point(backend: str, c: int, b: int) -> None:
    """Old tokens are evaluated again at the current gradient point, across the borders of groups."""
    module = ttmdsl.load("omega_linear", c=c, b=b)
    x = tensors(module, 8)
    y, final = module.op(**x, output_final_state=True, backend=backend)
    s = point = torch.zeros(2, 2, 3, 5, dtype=torch.float64)
    for t in range(8):
        point = s if t % b == 0 else point
        gradient = torch.zeros_like(s)
        for i in range(max(0, t - c + 1), t + 1):
            k, v = x["k"][:, i], x["v"][:, i]
            e = (point @ k[..., None])[..., 0] - v
            weight = x["gamma"][:, t, :, c - 1 - (t - i)]
            gradient = gradient + weight[..., None, None] * e[..., :, None] * k[..., None, :]
        s = s * x["log_alpha"][:, t].exp()[..., None, None] - x["eta"][:, t][..., None, None] * gradient
        close(y[:, t], (s @ x["q"][:, t, ..., None])[..., 0])
    close(final["S"], s)


@pytest.mark.parametrize("backend", BACKENDS)
def test_delays_by_hand(backend: str) -> None:
    module = ttmdsl.compile(DELAYS)
    x = tensors(module, 6, batch=1)
    y, _ = module.op(**x, backend=backend)
    k, v, zero = x["k"], x["v"], torch.zeros(1, 2, 5, dtype=torch.float64)
    u = [k[:, t].exp() + (k[:, t - 1] if t else zero) for t in range(6)]
    s = torch.zeros(1, 2, 3, 5, dtype=torch.float64)
    for t in range(6):
        key = (u[t - 2] if t >= 2 else zero) + x["g"][:, t, :, 2:] * k[:, t]
        e = (s @ key[..., None])[..., 0] - v[:, t]
        step = x["eta"][:, t][..., None, None] * e[..., :, None] * key[..., None, :]
        s = x["log_alpha"][:, t].exp()[..., None, None] * s - step
        delayed = v[:, t - 2] if t >= 2 else torch.zeros_like(v[:, t])
        close(y[:, t], (s @ x["q"][:, t, ..., None])[..., 0] + delayed)


# ---- resumption and packing -----------------------------------------------------------------------------------------

LAYERS = {
    "swla": lambda: ttmdsl.load("swla"),
    "omega_linear": lambda: ttmdsl.load("omega_linear", c=3),
    "omega_linear in groups": lambda: ttmdsl.load("omega_linear", c=3, b=2),
    "omega_linear in groups of two units": lambda: ttmdsl.load("omega_linear", c=20, b=128),
    "with momentum": lambda: ttmdsl.compile(MOMENTUM, c=3),
    "by channel": lambda: ttmdsl.compile(BY_CHANNEL, c=3),
    "omega_linear of squares": lambda: ttmdsl.load("omega_linear", c=6, b=4, p=2),
    "normalised": lambda: ttmdsl.compile(NORMALISED.replace("(rate = eta)", "(rate = eta, batch = 3)")),
    "gated": lambda: ttmdsl.compile(GATED),
    "omega_net": lambda: ttmdsl.load("omega_net", c=3, b=4),
    "delays": lambda: ttmdsl.compile(DELAYS),
    "long": lambda: ttmdsl.compile(LONG),
    "passes": lambda: ttmdsl.compile(PASSES),
}


@pytest.fixture(scope="module", params=LAYERS)
def layer(request: pytest.FixtureRequest) -> ModuleType:
    return LAYERS[request.param]()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_cut(layer: ModuleType, backend: str) -> None:
    x = tensors(layer, 7)
    state = {} if all(d in "d_k d_v m" for dims in layer.MEMORY.values() for d in dims) else None
    if state is None:  # an MLP learns nothing from zeros, and its inner size is the state's
        drawn = draw(layer, Shape("", batch=2, tokens=7, heads=2, dims=(5, 3)), seed=1).state
        assert drawn is not None
        state = {key: drawn[key] for key in layer.MEMORY}
    whole, end = layer.op(**x, initial_state=state, output_final_state=True, backend=backend)
    for cut in range(8):
        y, middle = layer.op(**span(layer, x, 0, cut), initial_state=state, output_final_state=True, backend=backend)
        assert middle["tokens"].tolist() == [cut] * 2
        rest, final = layer.op(**span(layer, x, cut, 7), initial_state=middle, output_final_state=True, backend=backend)
        close(torch.cat([y, rest], 1), whole)
        assert list(final) == list(layer.STATE)
        for key, value in final.items():
            close(value, end[key])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_ends_where_its_sequence_begins(layer: ModuleType, backend: str) -> None:
    bounds = (0, 2, 2, 9, 10)
    shape = Shape("", heads=2, dims=(5, 3), lengths=tuple(b - a for a, b in pairwise(bounds)))
    drawn = draw(layer, shape, seed=3)
    assert drawn.state is not None
    y, final = layer.op(
        **drawn.x,
        initial_state=drawn.state,
        output_final_state=True,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        backend=backend,
    )
    for n, (start, end) in enumerate(pairwise(bounds)):
        state = {key: t[n : n + 1] for key, t in drawn.state.items()}
        one, left = layer.op(
            **span(layer, drawn.x, start, end), initial_state=state, output_final_state=True, backend="reference"
        )
        close(y[:, start:end], one)
        for key, value in left.items():
            close(final[key][n : n + 1], value)


def test_backends_agree(layer: ModuleType) -> None:
    shapes = (
        Shape("a state", batch=3, tokens=19, heads=2, dims=(4, 3), cuts=(1, 3, 12)),
        Shape("packed", heads=1, dims=(3, 4), lengths=(5, 0, 1, 11)),
    )
    rows = parity(layer, dtypes=(torch.float64,), shapes=shapes, backends=("torch",))
    assert [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok] == []


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_before_the_first_makes_no_nan(backend: str) -> None:
    """A token that does not exist has no key of length zero to divide by."""
    module = ttmdsl.compile(NORMALISED)
    x = {key: t.requires_grad_() for key, t in tensors(module, 3).items()}
    y, _ = module.op(**x, backend=backend)
    grads = torch.autograd.grad(y.square().sum(), list(x.values()))
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_for_tokens_that_never_were_make_no_nan(dtype: torch.dtype) -> None:
    """A chunk finds some of its sequence's own tokens before it, where there are none."""
    module = LAYERS["normalised"]()
    x = {key: t.to(dtype).requires_grad_() for key, t in tensors(module, 5).items()}
    past = {key: torch.zeros(2, 2, 3, d, dtype=dtype) for key, d in (("k_past", 5), ("v_past", 3))}
    given = {**past, "tokens": torch.tensor([0, 2])}
    past["k_past"][1, :, 1:] = past["v_past"][1, :, 1:] = 1.0
    y, _ = module.op(**x, initial_state=given, backend="torch")
    exact, _ = module.op(**x, initial_state=given, backend="reference")
    torch.testing.assert_close(y, exact)
    for g in torch.autograd.grad(y.square().sum(), list(x.values())):
        assert g.isfinite().all()


@pytest.mark.parametrize("name", ["swla", "omega_linear in groups"])
def test_garbage_in_the_past_counts_for_nothing(name: str) -> None:
    module = LAYERS[name]()
    x = tensors(module, 3)
    depth = int(module.STATE["k_past"][0])
    garbage = {key: torch.full((2, 2, depth, d), 1e6, dtype=torch.float64) for key, d in (("k_past", 5), ("v_past", 3))}
    given = {**garbage, "tokens": torch.tensor([0, 0])}
    for backend in BACKENDS:
        close(module.op(**x, initial_state=given, backend=backend)[0], module.op(**x, backend=backend)[0])


def test_a_past_and_its_length_come_together() -> None:
    module = ttmdsl.load("swla")
    x = tensors(module, 2)
    with pytest.raises(ValueError, match="expected 'k_past' along with 'tokens'"):
        module.op(**x, initial_state={"tokens": torch.tensor([1, 1])})
    with pytest.raises(ValueError, match="expected 'tokens' along with the past"):
        module.op(**x, initial_state={"k_past": torch.zeros(2, 2, 3, 5), "v_past": torch.zeros(2, 2, 3, 3)})
    with pytest.raises(ValueError, match=r"k_past: expected shape \[N, H, 3, d_k\], got \[2, 2, 2, 5\]"):
        module.op(**x, initial_state={"k_past": torch.zeros(2, 2, 2, 5)})


def test_history_is_what_the_formulas_reach() -> None:
    assert history(check(parse(DELAYS), DELAYS)) == {"k": 3, "v": 2}
    assert history(check(parse(LONG), LONG)) == {"k": 6, "v": 6, "alpha": 6}
    module = ttmdsl.compile(LONG)
    assert module.STATE["log_alpha_past"] == ("6",)
    assert module.STATE["v_past"] == ("6", "d_v")


# ---- chunks --------------------------------------------------------------------------------------------------------


def chunk_of(text: str, **consts: float) -> Lowered:
    found = lower(derive(check(parse(text), text, "<spec>", consts)))
    assert isinstance(found, Lowered)
    return found


def test_a_token_is_written_once_however_long_the_window_is() -> None:
    """Windows are bands of weights: products do not grow with them, nor do vectors of a chunk's tokens."""
    text, _ = read("omega_linear")
    work = set()
    for c in (2, 4, 16):
        found = chunk_of(text, b=64, c=c)
        assert found.chunk is not None
        assert found.prelude.bands is not None
        assert found.prelude.bands.depth == c - 1
        program = found.chunk.forward
        vectors = [n.name for n in program.leaves() if n.role in ("token", "before") and len(n.axes) > 1]
        assert sorted(vectors) == ["k", "k__before", "q", "v", "v__before"]
        work.add((sum(map(is_product, program.nodes)), sum(map(is_product, found.chunk.backward.nodes))))
    assert len(work) == 1


NO_BANDS = {
    "nothing before a chunk is reached": (OMEGA, {"b": 4, "c": 1}),
    "gradients take delayed tensors": (
        DELAYS.replace("1/2", "window(3) of 1/2").replace("rate = eta", "rate = eta, batch = 4"),
        {},
    ),
    "a decay per channel": (SWLA.replace("alpha: decay", "alpha[d_k]: decay").replace("alpha * S", "S * alpha"), {}),
    "a rate per channel": (OMEGA.replace("eta: unit", "eta[d_v]: unit"), {"b": 4}),
    "several steps for a token": (OMEGA.replace("batch = b", "batch = b, steps = 2"), {"b": 4}),
}


@pytest.mark.parametrize("why", NO_BANDS)
def test_other_windows_are_sums_over_delayed_tensors(why: str) -> None:
    text, consts = NO_BANDS[why]
    found = chunk_of(text, **consts)
    assert found.chunk is not None
    assert found.prelude.bands is None
    assert not any(n.role == "before" for n in found.chunk.forward.leaves())


def test_a_window_over_a_rate_per_channel_compiles() -> None:
    module = ttmdsl.compile(NO_BANDS["a rate per channel"][0], b=4)
    rows = parity(module, dtypes=(torch.float64,), shapes=[Shape("", tokens=11, dims=(4, 3))], backends=("torch",))
    assert [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok] == []


def test_a_momentum_and_a_deep_memory_have_bands_too() -> None:
    for text, consts in ((LONG, {}), (read("omega_net")[0], {"b": 4})):
        found = chunk_of(text, **consts)
        assert found.chunk is not None
        assert found.prelude.bands is not None
        assert any(n.op == "diagonal" for n in found.chunk.forward.nodes)


def kernels(name: str) -> list[str]:
    """What a layer's kernels miss, in units that windows reach beyond; in the interpreter's process."""
    torch.set_num_threads(1)
    shapes = (
        Shape("T=21, cut at 6", tokens=21, heads=2, dims=(5, 3, 4), cuts=(6,)),
        Shape("packed", heads=2, dims=(3, 4, 5), lengths=(5, 0, 1, 11)),
        Shape("y alone", batch=2, tokens=18, dims=(4, 3, 5), state=False, final=False),
    )
    return missed(LAYERS[name](), shapes)


def missed(module: ModuleType, shapes: tuple[Shape, ...]) -> list[str]:
    rows = parity(module, dtypes=(torch.float32,), shapes=shapes, backends=("triton",))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


# those that test_interpreter.py has not
OTHERS = [
    *["omega_linear in groups", "omega_linear in groups of two units", "omega_linear of squares", "with momentum"],
    *["by channel", "normalised", "gated", "long", "passes"],
]
FIRST = ["omega_linear in groups", "with momentum", "by channel", "normalised"]


@pytest.mark.parametrize("name", mostly_beyond(OTHERS, *FIRST))
def test_kernels_are_the_reference(name: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(kernels, name).result() == []


@contextlib.contextmanager
def no_room(module: ModuleType, where: str) -> Iterator[None]:
    """A device that has no room for kernels of chunks."""
    import triton

    original = getattr(module, where)

    def crowded(s: Any, *arguments: Any) -> Any:
        if s.form != "token":
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return original(s, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, where, crowded)
        yield
        module._too_large.clear()


def without_room(name: str, where: str) -> list[str]:
    module = LAYERS[name]()
    shapes = (
        Shape("a state", batch=2, tokens=9, heads=2, dims=(4, 3), cuts=(3,)),
        Shape("packed", heads=1, dims=(3, 4), lengths=(5, 0, 1, 4)),
        Shape("y alone", tokens=9, dims=(4, 3), state=False, final=False),
    )
    with no_room(module, where):
        return missed(module, shapes)


@pytest.mark.parametrize("where", ["_forward", "_backward"])
@pytest.mark.parametrize("name", ["omega_linear in groups", "swla", "omega_linear"])
def test_where_chunks_find_no_room_others_stand_in(name: str, where: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(without_room, name, where).result() == []


# ---- as the papers print it ------------------------------------------------------------------------------------------


def test_explain_sums_over_the_window() -> None:
    text = explained("swla")
    assert "L  = Σ_{t-4 < i ≤ t} γᵢ ℓᵢ" in text
    assert "Sₜ = α Sₜ₋₁ + Σ_{t-4 < i ≤ t} γᵢ vᵢ kᵢᵀ" in text
    assert r"\sum_{t-4 < i \leq t} \boldsymbol{\gamma}_{i} \ell_{i}" in explained("swla", latex=True)
    assert "eᵢ    = S kᵢ - vᵢ" in explained("omega_linear")


def test_explain_says_why_there_is_no_chunk_form() -> None:
    source = Path(str(ttmdsl.load("omega_linear", c=MOST_MICRO + 1).__file__)).read_text(encoding="utf-8")
    assert "Recurrence sequential" in source
    assert "writes more than 2 vectors that follow from the state" in " ".join(source.replace("#", "").split())


def explained(layer: str, latex: bool = False) -> str:
    text, filename = read(layer)
    return explain(derive(check(parse(text), text, filename)), latex=latex)
