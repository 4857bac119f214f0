"""Feature maps: their values by hand, the dims they make, and what they cost where they are too large."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch

import ttmdsl
from ttmdsl.aot import Job, compile_kernels
from ttmdsl.drawing import Shape, draw
from ttmdsl.parity import parity, step_errors

BACKENDS = ("reference", "torch")

SPEC = """
layer Mapped {
  dim    d_k, d_v
  input  q[d_k], k[d_k], v[d_v]
  gate   eta: unit
  const  p = 2, n = 2
  let    f = power(k / |k|, p)
  memory S[d_v, d_k^p], W[d_v, taylor(d_k, n)]
  bias   1/2 * |S @ f + W @ taylor(k, n) - v|^2
  optimizer gd(rate = eta / size(f))
  read   S @ power(q, p) + W @ taylor(q, n)
}
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_polynomial_attention_is_a_power_of_the_inner_product(backend: str, p: int) -> None:
    module = ttmdsl.load("polynomial_attention", p=p)
    x = draw(module, Shape("", batch=2, tokens=5, heads=2, dims=(3, 4), state=False)).x
    y, final = module.op(**x, output_final_state=True, backend=backend)
    scores = torch.einsum("bthd,bshd->bhts", x["q"], x["k"]).tril() ** p
    torch.testing.assert_close(y, torch.einsum("bhts,bshd->bthd", scores, x["v"]), rtol=1e-10, atol=1e-12)
    assert final["S"].shape == (2, 2, 4, 3**p)


def test_components_are_flattened_with_the_first_factor_slowest() -> None:
    module = ttmdsl.load("polynomial_attention", p=3)
    x = {key: torch.randn(1, 1, 1, 3, dtype=torch.float64) for key in ("q", "k")}
    x["v"] = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = x["k"][0, 0, 0]
    wanted = torch.stack([k[a] * k[b] * k[c] for a, b, c in itertools.product(range(3), repeat=3)])
    for backend in BACKENDS:
        _, final = module.op(**x, output_final_state=True, backend=backend)
        torch.testing.assert_close(final["S"][0, 0, 0], wanted)


def test_taylor_features_give_the_exponential_s_series() -> None:
    text = """
    layer Series {
      dim    d, e
      input  q[d], k[d], v[e]
      memory S[e, taylor(d, 3)]
      bias   -<S @ taylor(k, 3), v>
      read   S @ taylor(q, 3)
    }"""
    module = ttmdsl.compile(text)
    assert module.FEATURES == {"d_taylor_3": ("d", "taylor", 3)}
    x = draw(module, Shape("", tokens=4, dims=(3, 2), state=False)).x
    inner = torch.einsum("bthd,bshd->bhts", x["q"], x["k"])
    scores = sum(inner**i / math.factorial(i) for i in range(4)).tril()  # type: ignore[union-attr]
    for backend in BACKENDS:
        y, _ = module.op(**x, backend=backend)
        torch.testing.assert_close(y, torch.einsum("bhts,bshd->bthd", scores, x["v"]), rtol=1e-10, atol=1e-12)


def test_the_made_dims_show() -> None:
    module = ttmdsl.compile(SPEC)
    assert module.MEMORY == {"S": ("d_v", "d_k_pow_2"), "W": ("d_v", "d_k_taylor_2")}
    assert module.FEATURES == {"d_k_pow_2": ("d_k", "power", 2), "d_k_taylor_2": ("d_k", "taylor", 2)}
    first = ttmdsl.compile(SPEC, p=1)
    assert first.MEMORY["S"] == ("d_v", "d_k")


@pytest.mark.parametrize("p", [1, 2])
def test_backends_agree(p: int) -> None:
    shapes = (Shape("", batch=2, tokens=9, heads=2, dims=(3, 4), cuts=(4,)), Shape("", dims=(4, 2), lengths=(3, 0, 6)))
    rows = parity(ttmdsl.compile(SPEC, p=p), dtypes=(torch.float64,), shapes=shapes, backends=("torch",))
    assert [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok] == []


def test_a_residual_is_left_out_where_the_dims_differ() -> None:
    assert "x" in ttmdsl.load("dla").SPEC
    one, two = (ttmdsl.load("dla", p=p) for p in (1, 2))
    assert one.MEMORY["W2"] == ("h", "d")
    assert two.MEMORY["W2"] == ("h", "d_pow_2")
    zeros = {"W1": torch.zeros(1, 1, 3, 4).double(), "W2": torch.zeros(1, 1, 4, 3).double()}
    x = draw(one, Shape("", tokens=1, dims=(3,)), seed=2).x
    x["eta"] = torch.zeros_like(x["eta"])
    torch.testing.assert_close(one.op(**x, initial_state=zeros)[0], x["q"])
    zeros["W2"] = torch.zeros(1, 1, 4, 9).double()
    assert not two.op(**x, initial_state=zeros)[0].any()


def test_a_state_of_another_power_is_refused() -> None:
    module = ttmdsl.load("polynomial_attention")
    x = draw(module, Shape("", tokens=1, dims=(3, 4), state=False)).x
    with pytest.raises(ValueError, match=r"with d_k_pow_2 = 9 \(d_k \*\* 2\), got \[1, 1, 4, 3\]"):
        module.op(**x, initial_state={"S": torch.zeros(1, 1, 4, 3)})


def test_too_many_features_for_a_kernel() -> None:
    """Beyond the tile that a multiprocessor can hold, "auto" is torch, and "triton" says so."""
    module = ttmdsl.load("dla", p=2)  # whose kernels walk over the inner dim
    small, large = ({"d": d, "h": 4 * d, "d_pow_2": d * d} for d in (16, 64))
    assert module._check_features("op", "auto", "triton", small) == "triton"
    assert module._check_features("op", "auto", "triton", large) == "torch"
    assert module._check_features("op", "torch", "torch", large) == "torch"
    with pytest.raises(ValueError, match="at most 256 features for 'triton', got d_pow_2 = 4096"):
        module._check_features("op", "triton", "triton", large)


WALKED: list[tuple[str, dict[str, float]]]
WALKED = [("polynomial_attention", {}), ("omega_linear", {"p": 2}), ("omega_linear", {"p": 2, "b": 4})]


def walking(name: str, consts: dict[str, float]) -> list[str]:
    """What kernels miss that walk over three blocks of features, the last one narrow; by steps, too."""
    torch.set_num_threads(1)
    module = ttmdsl.load(name, **consts)
    shapes = (Shape("", batch=2, tokens=70, dims=(12, 5), cuts=(1, 30)), Shape("", dims=(5, 12), lengths=(9, 0, 1)))
    rows = parity(module, dtypes=(torch.float32,), shapes=shapes, backends=("triton",))
    given = draw(module, replace(shapes[0], tokens=6, cuts=()), dtype=torch.float32)
    steps = step_errors(module, given, "triton")
    return [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok] + [k for k, e in steps.items() if e > 1e-5]


@pytest.mark.parametrize(("name", "consts"), WALKED)
def test_kernels_walk_over_features(name: str, consts: dict[str, float], interpreter: ProcessPoolExecutor) -> None:
    assert not hasattr(ttmdsl.load(name, **consts), "_HELD")
    assert interpreter.submit(walking, name, consts).result() == []


def test_kernels_that_hold_all_features_are_compiled_for_few_alone() -> None:
    for head, whole in ((16, True), (64, False)):
        job = Job("polynomial_attention", head, "sm_90", "bfloat16", named="_token_.*")
        names = [row.kernel for row in compile_kernels(job)]
        assert ("_token_forward_kernel" in names) == whole
        assert "_token_step_kernel, a step" in names
