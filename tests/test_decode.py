"""A token at a time by kernels: the host asks the device for nothing, wherever in their groups the sequences stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import ttmdsl
from ttmdsl.drawing import Drawn, Shape, draw
from ttmdsl.parity import parity, step_errors

STEPS = """
layer Steps {
  dim       d_k, d_v
  input     q[d_k], k[n, d_k], v[d_v]
  gate      alpha: decay, eta[n]: unit
  const     n = 2, b = 3, c = 2
  memory    S[d_v, d_k]
  bias      window(c) of 1/2 * |S @ k - v|^2
  retention alpha * S
  optimizer gd(rate = eta, steps = n, batch = b)
  read      S @ q
}
"""
DEALT = """
layer Dealt {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[n, d_v]
  gate      lam: unit, eta[n]: unit
  const     n = 3
  fn        ball(x)[i] = x[i] / sqrt(sum(j, x[j]^2) + 1)
  memory    S[d_v, d_k]
  bias      1/2 * |S @ k - v|^2
  retention lam * S
  optimizer gd(rate = eta, steps = n)
  project   columns(ball, S)
  read      S @ q
}
"""
REPEATED = """
layer Repeated {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      eta[n]: unit, mu: decay
  param     alpha[d_k]: decay
  const     n = 2
  memory    S[d_v, d_k]
  bias      1/2 * |S @ k - v|^2
  retention mu * S * alpha
  optimizer gd(rate = eta, steps = n)
  read      S @ q
}
"""
LAYERS: dict[str, Callable[[], Any]] = {
    "lattice_dec": lambda: ttmdsl.load("lattice_dec", b=5, project=0),
    "lattice_enc": lambda: ttmdsl.load("lattice_enc", b=3),
    "trellis": lambda: ttmdsl.load("trellis", b=4),
    "titans_linear": lambda: ttmdsl.load("titans_linear", b=6),
    "omega_linear": lambda: ttmdsl.load("omega_linear", b=4, c=3),
    "power": lambda: ttmdsl.load("omega_linear", b=4, c=3, p=2),
    "titans": lambda: ttmdsl.load("titans", b=2),
    "omega_net": lambda: ttmdsl.load("omega_net", b=4),
    "swla": lambda: ttmdsl.load("swla"),
    "ttt_mlp": lambda: ttmdsl.load("ttt_mlp", b=3),
    "atlas_linear": lambda: ttmdsl.load("atlas_linear", b=3),
    "delta_product": lambda: ttmdsl.load("delta_product", n=3),
    "steps": lambda: ttmdsl.compile(STEPS),
    "dealt": lambda: ttmdsl.compile(DEALT),
    "repeated": lambda: ttmdsl.compile(REPEATED),
}


class Asked(TorchDispatchMode):
    """Counts what makes the host wait for a device, and all that computes there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.computes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            self.waits.append(name)
        if not function.is_view and not name.startswith(("empty", "new_empty")):
            self.computes[name] += 1
        return function(*args, **(kwargs or {}))


def asked(name: str) -> tuple[list[str], int]:
    """What a layer's step waits for, and how many operations it takes beside its kernel."""
    module = LAYERS[name]()
    drawn = draw(module, Shape("", batch=3, heads=2, dims=(4,)), dtype=torch.float32)
    token = {k: t if k in module.PARAMS else t[:, 0] for k, t in drawn.x.items()}

    def stand_in(s: Any, keep: bool, final: bool, x: Any, start: Any) -> Any:
        end = {k: s.room(k, s.N) if v is None else torch.empty_like(v) for k, v in start.items()}
        if "position" in module.STATE:
            end["position"] = torch.empty(s.N, dtype=torch.int64)
        return module._outputs(s, x), end, {}

    # a CPU's decays are looked at, a GPU's are not; what kernels do is theirs, and the interpreter's
    looked_at = mock.patch.object(module, "_above_zero", return_value=False)
    started = mock.patch.object(module._Around, "launch")
    with looked_at, started, mock.patch.object(module, "_forward", stand_in):
        module.step(**token, initial_state=drawn.state, backend="triton")
        with Asked() as found:
            module.step(**token, initial_state=drawn.state, backend="triton")
    return found.waits, sum(found.computes.values())


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_asks_nothing_of_the_device(name: str, interpreter: ProcessPoolExecutor) -> None:
    waits, computes = interpreter.submit(asked, name).result()
    assert waits == []
    # several steps are dealt out, beside a window; a power's weights are multiplied by whether there are the tokens
    assert computes <= {"steps": 15, "power": 10}.get(name, 0)


def far_on(name: str, batch: int, groups: int, seed: int) -> list[str]:
    """What a step misses, forward and backward, where the sequences have had so many groups of tokens and some more."""
    torch.set_num_threads(1)
    module = LAYERS[name]()
    b = int(module.CONSTS.get("b", 1))

    def far(*arguments: Any, **options: Any) -> Drawn:
        found = draw(*arguments, **options)
        if found.state is not None and "position" in found.state:
            found.state["position"] = torch.arange(seed, seed + batch) % b + b * groups
        return found

    shape = Shape("a step", batch=batch, heads=2, dims=(4, 3))
    with mock.patch("ttmdsl.parity.draw", far):
        rows = parity(module, dtypes=(torch.float32,), shapes=(shape,), backends=("triton",), seed=seed)
    assert rows
    loses = 3e-5 if name == "ttt_mlp" else 0  # at one draw, by its norms over three numbers
    return [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok and row.error > loses]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*LAYERS]), st.integers(1, 4), st.integers(0, 2), st.integers(0, 99))
def test_sequences_decode_together_wherever_they_stand(
    interpreter: ProcessPoolExecutor, name: str, batch: int, groups: int, seed: int
) -> None:
    assert interpreter.submit(far_on, name, batch, groups, seed).result() == []


def apart(name: str, dims: tuple[int, ...], number: int, seed: int) -> dict[str, float]:
    """By how much steps without gradients differ from those with, whose tensors torch makes and whose kernel is the
    walk over tokens; of sequences some of which have had no token."""
    torch.set_num_threads(1)
    module = LAYERS[name]()
    drawn = draw(module, Shape("", batch=3, tokens=number, heads=2, dims=dims), dtype=torch.float32, seed=seed)
    if "tokens" in module.STATE:
        assert drawn.state is not None
        drawn.state["tokens"] = torch.tensor([0, 1, 5])
    return step_errors(module, drawn, "triton")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*LAYERS]), st.sampled_from([(4, 3), (5,), (20, 6), (5, 40)]), st.integers(1, 4), st.integers(0, 99)
)
def test_steps_without_gradients_are_those_with(
    interpreter: ProcessPoolExecutor, name: str, dims: tuple[int, ...], number: int, seed: int
) -> None:
    worst = interpreter.submit(apart, name, dims, number, seed).result()
    assert max(worst.values()) < 1e-4, worst
