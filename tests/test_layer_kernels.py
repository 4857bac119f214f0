"""What is around `op` in a `Layer` by Triton's kernels: equal to torch in float64, gradients included."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttmdsl

BOUND = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative RMS errors."""
    return {name: float((found[name].double() - t).norm() / t.norm().clamp(min=1e-30)) for name, t in exact.items()}


def gradients(y: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    same = torch.sin(0.37 * torch.arange(y.numel())).bfloat16()  # the same number in every dtype
    cotangent = same.reshape(y.shape).to(y.dtype)
    return {"y": y.detach(), **dict(zip(given, torch.autograd.grad(y, list(given.values()), cotangent), strict=True))}


def drawn(dtype: torch.dtype, **shapes: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same numbers in a dtype and in float64."""
    torch.manual_seed(0)
    given = {name: (2 * torch.randn(shape)).to(dtype) for name, shape in shapes.items()}
    return tuple({k: t.to(d).requires_grad_() for k, t in given.items()} for d in (dtype, torch.float64))  # type: ignore[return-value]


def any_module() -> ModuleType:
    return ttmdsl.load("linear_attention")


def shaped(case: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of a projection by kernels, and by torch's operations in the same dtype."""
    from ttmdsl.interpreted import rounded

    module, dtype, taps = any_module(), case["dtype"], case["taps"]
    channels = case["vectors"] * case["size"]
    lengths = case["lengths"]
    packed = module._packed(torch.tensor([0, *accumulate(lengths)]), sum(lengths)) if case["packed"] else None
    lead = (1, sum(lengths)) if case["packed"] else (len(lengths), max(lengths))
    shapes = {"x": (*lead, channels), **({"weight": (taps, channels)} if taps else {})}
    given, exact = drawn(dtype, **shapes)
    past = torch.randn(len(lengths), taps - 1, channels).to(dtype) if case["past"] and taps else None
    found = []
    for kernels, x in ((True, given), (False, given), (False, exact)):
        around = module._around(x["x"].device, *lead) if kernels else None
        how = module._How(around, case["activation"], case["size"] if case["unit"] else 0, x["x"].dtype)
        with rounded():
            y = module._shaped(x["x"], how, x.get("weight"), past if past is None else past.to(x["x"].dtype), packed)
            found.append(gradients(y, x))
    ours, torchs, right = found
    return errors(ours, right), errors(torchs, right)


@settings(max_examples=40, deadline=None)
@given(
    case=st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
            "taps": st.sampled_from([0, 1, 2, 4, 5]),
            "vectors": st.integers(1, 3),
            "size": st.sampled_from([1, 3, 16, 60, 130]),
            "lengths": st.lists(st.sampled_from([1, 2, 3, 17, 40]), min_size=1, max_size=3),
            "packed": st.booleans(),
            "past": st.booleans(),
            "activation": st.sampled_from(["", "silu", "sigmoid", "logsigmoid", "softplus"]),
            "unit": st.booleans(),
        }
    )
)
def test_a_projection(case: dict[str, Any], interpreter: ProcessPoolExecutor) -> None:
    # the length of one number is its size: its gradient is next to nothing, and all rounding
    case["unit"] &= case["size"] > 2 and case["activation"] in ("", "silu")
    # of three numbers the error is that of one rounding, enlarged where taps cancel; the bound is for a mean
    assume(case["dtype"] == torch.float32 or sum(case["lengths"]) * case["vectors"] * case["size"] >= 16)
    found, torchs = interpreter.submit(shaped, case).result()
    # unit length of a short vector enlarges what float32 rounds away, whoever computes it: by as much as torch shows
    lost = torchs if case["dtype"] == torch.float32 else dict.fromkeys(found, 0.0)
    assert all(error < max(BOUND[case["dtype"]], 1.5 * lost[name]) for name, error in found.items()), (found, torchs)


def test_a_sequence_of_no_tokens_keeps_its_past() -> None:
    module = any_module()
    conv = module._ShortConv(3, 4)
    past, x = torch.randn(3, 3, 3), torch.randn(1, 5, 3)
    last = conv.last(x, past, module._packed(torch.tensor([0, 2, 2, 5]), 5))
    torch.testing.assert_close(last[1], past[1])
    torch.testing.assert_close(last[0], torch.cat([past[0, 2:], x[0, :2]]))
    torch.testing.assert_close(last[2], x[0, 2:])


def gated(dtype: torch.dtype, rows: int, heads: int, size: int) -> dict[str, float]:
    from ttmdsl.interpreted import rounded

    module, found = any_module(), []
    ours, exact = drawn(dtype, y=(1, rows, heads, size), gate=(1, rows, heads * size), weight=(size,))
    for kernels, x in ((True, ours), (False, exact)):
        with rounded():
            around = module._around(x["y"].device, 1, rows) if kernels else None
            found.append(gradients(module._gated(x["y"], x["gate"], x["weight"], 1e-5, around), x))
    return errors(*found)


@settings(max_examples=15, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.sampled_from([1, 5, 40]),
    heads=st.integers(1, 3),
    size=st.sampled_from([2, 16, 60, 130]),
)
def test_the_gated_norm(dtype: torch.dtype, rows: int, heads: int, size: int, interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(gated, dtype, rows, heads, size).result()
    assert max(found.values()) < BOUND[dtype], found


def whole(name: str) -> dict[str, float]:
    """Errors of a layer by kernels, in three pieces and of packed sequences, beside it by torch in float64."""
    module, found = ttmdsl.load(name), []
    torch.manual_seed(0)
    by_kernels, exact = module.Layer(12, 2, backend="triton"), module.Layer(12, 2, backend="torch").double()
    with torch.no_grad():
        for parameter in by_kernels.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    exact.load_state_dict(by_kernels.state_dict())
    x = torch.randn(2, 7, 12)
    for layer in (by_kernels, exact):
        hidden = x.to(layer.out.weight.dtype).requires_grad_()
        packed, _, past = layer(hidden.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 3, 3, 14]), use_cache=True)
        pieces, state = [], None
        for piece in hidden.split([3, 1, 3], dim=1):
            y, _, state = layer(piece, past_key_values=state, use_cache=True)
            state = {kind: {key: t.detach() for key, t in some.items()} for kind, some in state.items()}
            pieces.append(y)
        y = torch.cat([packed.reshape(x.shape), *pieces], dim=1)
        leaves = {"hidden": hidden, **dict(layer.named_parameters())}
        kept = {f"{when} {k}": t for when, s in (("packed", past), ("last", state)) for k, t in s["conv"].items()}
        found.append(gradients(y, leaves) | {k: t.detach() for k, t in kept.items()})
    return errors(*found)


# between them every role of a tensor: key, score, unit, plain, selector, gate, param
@pytest.mark.parametrize("name", ["gated_delta_net", "gsa", "hgrn2", "lattice_enc", "lattice_l1"])
def test_a_whole_layer(name: str, interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(whole, name).result()
    assert max(found.values()) < 2e-5, found
