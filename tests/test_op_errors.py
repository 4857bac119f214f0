"""Bad input to `op` and `step`: an error that names the argument, what was expected and what came, before any work."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import ttmdsl

B, T, H, K, V = 2, 5, 3, 4, 6


def inputs() -> dict[str, Any]:
    return {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "log_alpha": -torch.rand(B, T, H),
        "beta": torch.rand(B, T, H),
    }


@pytest.fixture(scope="module")
def layer() -> ModuleType:
    return ttmdsl.load("gated_delta_net")


def packed(bounds: Any) -> dict[str, Any]:
    x = {key: t[:1] for key, t in inputs().items()}
    return x | {"cu_seqlens": bounds if not isinstance(bounds, list) else torch.tensor(bounds)}


def with_state(**state: Any) -> dict[str, Any]:
    return inputs() | {"initial_state": state}


def dropped(name: str) -> dict[str, Any]:
    return {key: value for key, value in inputs().items() if key != name}


BAD: dict[str, tuple[type[Exception], Callable[[], dict[str, Any]], str]] = {
    "unknown name": (
        TypeError,
        lambda: dropped("log_alpha") | {"alpha": torch.rand(B, T, H)},
        "op(): alpha: no such argument; expected 'log_alpha'? One of q, k, v, log_alpha, beta,",
    ),
    "misspelt name": (
        TypeError,
        lambda: dropped("beta") | {"betta": 1},
        "op(): betta: no such argument; expected 'beta'?",
    ),
    "missing name": (TypeError, lambda: dropped("v"), "op(): v: expected a tensor, got nothing"),
    "no tensor": (TypeError, lambda: inputs() | {"k": [1.0]}, "op(): k: expected a tensor, got list"),
    "none": (TypeError, lambda: inputs() | {"beta": None}, "op(): beta: expected a tensor, got NoneType"),
    "rank": (
        ValueError,
        lambda: inputs() | {"q": torch.randn(B, T, K)},
        "op(): q: expected shape [B, T, H, d_k] (4 axes), got [2, 5, 4]",
    ),
    "gate with a dim": (
        ValueError,
        lambda: inputs() | {"beta": torch.rand(B, T, H, 1)},
        "op(): beta: expected shape [B, T, H] (3 axes), got [2, 5, 3, 1]",
    ),
    "other d_k": (
        ValueError,
        lambda: inputs() | {"k": torch.randn(B, T, H, 7)},
        "op(): k: expected shape [B, T, H, d_k] with d_k = 4 (as in q), got [2, 5, 3, 7]",
    ),
    "other T": (
        ValueError,
        lambda: inputs() | {"v": torch.randn(B, T + 1, H, V)},
        "op(): v: expected shape [B, T, H, d_v] with T = 5 (as in q), got [2, 6, 3, 6]",
    ),
    "other B": (
        ValueError,
        lambda: inputs() | {"log_alpha": -torch.rand(1, T, H)},
        "op(): log_alpha: expected shape [B, T, H] with B = 2 (as in q), got [1, 5, 3]",
    ),
    "empty dim": (
        ValueError,
        lambda: inputs() | {"v": torch.randn(B, T, H, 0)},
        "op(): v: expected shape [B, T, H, d_v] with d_v of at least 1, got [2, 5, 3, 0]",
    ),
    "integers": (
        TypeError,
        lambda: inputs() | {"beta": torch.ones(B, T, H, dtype=torch.int64)},
        "op(): beta: expected dtype float32, float64, bfloat16 or float16, got torch.int64",
    ),
    "mixed dtypes": (
        TypeError,
        lambda: inputs() | {"v": torch.randn(B, T, H, V, dtype=torch.float64)},
        "op(): v: expected dtype torch.float32 (as q), got torch.float64",
    ),
    "device": (
        ValueError,
        lambda: inputs() | {"v": torch.empty(B, T, H, V, device="meta")},
        "op(): v: expected device cpu (as q), got meta",
    ),
    "log of a decay above 0": (
        ValueError,
        lambda: inputs() | {"log_alpha": torch.full((B, T, H), 0.9)},
        "op(): log_alpha: expected the logarithm of a decay, at most 0, got a maximum of 0.9",
    ),
    "no such backend": (
        ValueError,
        lambda: inputs() | {"backend": "tirton"},
        "op(): backend: expected 'triton'? One of auto, triton",
    ),
    "backend of another type": (
        ValueError,
        lambda: inputs() | {"backend": None},
        "op(): backend: expected one of auto",
    ),
    "state of another type": (
        TypeError,
        lambda: inputs() | {"initial_state": torch.zeros(1)},
        "op(): initial_state: expected a dict of tensors (S), got Tensor",
    ),
    "state of another layer": (
        ValueError,
        lambda: with_state(W1=torch.zeros(B, H, V, K)),
        "op(): initial_state: 'W1': the state of another layer? Expected one of S",
    ),
    "state's shape": (
        ValueError,
        lambda: with_state(S=torch.zeros(B, H, K, V)),
        "op(): initial_state: S: expected shape [N, H, d_v, d_k] with d_v = 6 (as in v), got [2, 3, 4, 6]",
    ),
    "state's rank": (
        ValueError,
        lambda: with_state(S=torch.zeros(H, V, K)),
        "op(): initial_state: S: expected shape [N, H, d_v, d_k] (4 axes), got [3, 6, 4]",
    ),
    "state's number": (
        ValueError,
        lambda: with_state(S=torch.zeros(3, H, V, K)),
        "op(): initial_state: S: expected shape [N, H, d_v, d_k] with N = 2 (as B, or 1), got [3, 3, 6, 4]",
    ),
    "state's dtype": (
        TypeError,
        lambda: with_state(S=torch.zeros(B, H, V, K, dtype=torch.int32)),
        "op(): initial_state: S: expected a floating dtype, got torch.int32",
    ),
    "state's device": (
        ValueError,
        lambda: with_state(S=torch.zeros(B, H, V, K, device="meta")),
        "op(): initial_state: S: expected device cpu (as the inputs), got meta",
    ),
    "bounds of another type": (
        TypeError,
        lambda: packed((0, 5)),
        "op(): cu_seqlens: expected a tensor of int32 or int64, got tuple",
    ),
    "bounds' dtype": (
        TypeError,
        lambda: packed([0.0, 5.0]),
        "op(): cu_seqlens: expected dtype int32 or int64, got torch.float32",
    ),
    "bounds' shape": (
        ValueError,
        lambda: packed([[0, 5]]),
        "op(): cu_seqlens: expected shape [N + 1] with N of at least 1, got [1, 2]",
    ),
    "bounds that start late": (ValueError, lambda: packed([1, 5]), "op(): cu_seqlens: expected to start at 0, got 1"),
    "bounds that end early": (
        ValueError,
        lambda: packed([0, 2, 4]),
        "op(): cu_seqlens: expected to end at T = 5, got 4",
    ),
    "bounds that go back": (
        ValueError,
        lambda: packed([0, 4, 2, 5]),
        "op(): cu_seqlens: expected non-decreasing values, got 4 then 2 at index 2",
    ),
    "bounds' device": (
        ValueError,
        lambda: packed(torch.tensor([0, T], device="meta")),
        "op(): cu_seqlens: expected device cpu (as the inputs), got meta",
    ),
    "bounds with a batch": (
        ValueError,
        lambda: inputs() | {"cu_seqlens": torch.tensor([0, T])},
        "op(): cu_seqlens: expected B = 1 (sequences are packed along T), got B = 2",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_named(layer: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a backend ran")

    for backend in ("_reference", "_torch"):
        monkeypatch.setattr(layer, backend, never)
    error, arguments, message = BAD[kind]
    with pytest.raises(error, match=re.escape(message)):
        layer.op(**arguments())


def test_positional_arguments_are_refused(layer: ModuleType) -> None:
    with pytest.raises(TypeError, match=re.escape("op(): expected keywords only (q, k, v, log_alpha, beta, initial")):
        layer.op(torch.zeros(1))


def test_triton_needs_a_gpu_or_the_interpreter(layer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_INTERPRET", False)
    with pytest.raises(
        ValueError, match=r"op\(\): backend: expected tensors on a GPU for 'triton', .* got tensors on cpu"
    ):
        layer.op(**inputs(), backend="triton")


def test_triton_takes_no_float64(layer: ModuleType) -> None:
    doubles = {key: t.double() for key, t in inputs().items()}
    with pytest.raises(TypeError, match=r"op\(\): q: expected float32, .*'torch' takes float64.*, got torch.float64"):
        layer.op(**doubles, backend="triton")


def test_step_names_its_own_axes(layer: ModuleType) -> None:
    token = {key: t[:, 0] for key, t in inputs().items()}
    with pytest.raises(ValueError, match=re.escape("step(): q: expected shape [B, H, d_k] (3 axes), got [2, 5, 3, 4]")):
        layer.step(**token | {"q": inputs()["q"]})
    with pytest.raises(TypeError, match=re.escape("step(): cu_seqlens: no such argument")):
        layer.step(**token, cu_seqlens=None)


def test_a_size_that_nothing_tells_is_asked_for() -> None:
    deep = ttmdsl.compile(
        """
        layer Deep {
          dim d, h
          input q[d], k[d], v[d]
          memory W1[d, h], W2[h, d]
          bias 1/2 * |W1 @ tanh(W2 @ k) - v|^2
          read W1 @ tanh(W2 @ q)
        }
        """
    )
    x = {name: torch.randn(B, T, H, K) for name in "qkv"}
    with pytest.raises(
        ValueError, match=re.escape("initial_state: W1: expected shape [N, H, d, h] (no other argument tells h)")
    ):
        deep.op(**x)
    with pytest.raises(
        ValueError, match=re.escape("W2: expected shape [N, H, h, d] with h = 8 (as in W1), got [1, 3, 9, 4]")
    ):
        deep.op(**x, initial_state={"W1": torch.zeros(1, H, K, 8), "W2": torch.zeros(1, H, 9, K)})


def test_orthonormal_columns_have_to_fit() -> None:
    lattice = ttmdsl.load("lattice_dec")
    x = {"q": torch.randn(B, T, H, 8), "k": torch.randn(B, T, H, 8), "v": torch.randn(B, T, H, 4)}
    gates = {"gamma": torch.rand(B, T, H), "log_mu": -torch.rand(B, T, H)}
    expected = (
        "initial_state: S: expected shape [N, H, d, m] (its default, orthonormal columns, needs m <= d), got nothing"
    )
    with pytest.raises(ValueError, match=re.escape(expected) + " with m = 8 and d = 4"):
        lattice.op(**x, **gates)
    y, _ = lattice.op(**x, **gates, initial_state={"S": torch.randn(1, H, 4, 8)})
    assert y.shape == (B, T, H, 4)


def test_a_position_comes_with_its_point() -> None:
    titans = ttmdsl.load("titans_linear", b=4)
    x = {"q": torch.randn(1, T, H, K), "k": torch.randn(1, T, H, K), "v": torch.randn(1, T, H, V)}
    gates = {"log_alpha": -torch.rand(1, T, H), "log_theta": -torch.rand(1, T, H), "eta": torch.rand(1, T, H)}
    position = torch.tensor([1])
    with pytest.raises(
        ValueError, match=re.escape("initial_state: expected 'S_point' along with 'position', got position")
    ):
        titans.op(**x, **gates, initial_state={"position": position})
    with pytest.raises(
        TypeError, match=re.escape("initial_state: position: expected dtype torch.int64, got torch.int32")
    ):
        titans.op(**x, **gates, initial_state={"position": position.int()})
    with pytest.raises(ValueError, match=re.escape("initial_state: position: expected shape [N] with N = 1")):
        titans.op(**x, **gates, initial_state={"position": torch.tensor([1, 2])})
