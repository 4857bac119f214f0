"""`Layer`: decoding equals the full pass, padding changes nothing, every parameter learns."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
from mixers import padding_changes_nothing
from torch import Tensor

import ttmdsl

HIDDEN, HEADS = 12, 3
# Groups that end inside of the sequences below.
GROUPED = [
    ("atlas", {"b": 4}),
    ("lattice_dec", {"b": 3}),
    ("titans", {"b": 4}),
    ("titans_linear", {"b": 4}),
    ("trellis", {"b": 4}),
    ("ttt_mlp", {"b": 4}),
]
LAYERS = [(name, {}) for name in ttmdsl.layers()] + GROUPED
DEEP = """
layer Deep {
  dim d, h
  input q[d], k[d], v[d]
  gate alpha: decay, eta: positive
  param lam[d]: positive, rho: decay, w
  memory W1[d, h], W2[h, d]
  bias 1/2 * |w * (W1 @ tanh(W2 @ k)) - lam * v|^2
  retention alpha * rho * W1, alpha * W2
  optimizer gd(rate = eta)
  read W1 @ tanh(W2 @ q)
}
"""


@pytest.fixture(scope="module", params=LAYERS, ids=lambda p: "-".join([p[0], *(f"{k}{v}" for k, v in p[1].items())]))
def module(request: pytest.FixtureRequest) -> ModuleType:
    name, consts = request.param
    return ttmdsl.load(name, **consts)


@pytest.fixture
def layer(module: ModuleType) -> torch.nn.Module:
    torch.manual_seed(0)
    return module.Layer(HIDDEN, HEADS).double()


def hidden(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_tokens_one_at_a_time_equal_the_full_pass(layer: torch.nn.Module) -> None:
    x = hidden(2, 9)
    whole, nothing, past = layer(x, use_cache=True)
    assert nothing is None
    ys, state = [], None
    for t in range(9):
        y, state = layer.step(x[:, t], state)
        ys.append(y)
    close(torch.stack(ys, 1), whole)
    for part in past:
        for key in past[part]:
            close(state[part][key], past[part][key])


def test_pieces_equal_the_whole(layer: torch.nn.Module) -> None:
    x = hidden(1, 9)
    first, _, past = layer(x[:, :2], use_cache=True)
    second, _, past = layer(x[:, 2:], past_key_values=past, use_cache=True)
    close(torch.cat([first, second], 1), layer(x)[0])
    assert layer(x)[2] is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(layer: torch.nn.Module, side: str) -> None:
    padding_changes_nothing(layer, hidden(3, 7), side, close)


def test_packed_sequences_do_not_meet(layer: torch.nn.Module) -> None:
    a, b = hidden(1, 3), hidden(1, 5)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    out, _, past = layer(torch.cat([a, b], 1), cu_seqlens=bounds, use_cache=True)
    close(out, torch.cat([layer(a)[0], layer(b)[0]], 1))
    token = hidden(2, 1)[:, 0]
    alone, _ = layer.step(token[1:], layer(b, use_cache=True)[2])
    close(layer.step(token, past)[0][1:], alone)


def test_every_parameter_learns(layer: torch.nn.Module) -> None:
    layer(hidden(2, 6))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_and_autocast(module: ModuleType, dtype: torch.dtype) -> None:
    layer = module.Layer(HIDDEN, HEADS).to(dtype)
    x = hidden(2, 5).to(dtype)
    out, _, past = layer(x, use_cache=True)
    assert out.dtype == dtype
    assert all(t.dtype in (torch.float32, torch.int64) for t in past["memory"].values())
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            mixed = layer(x)[0]
        assert mixed.dtype == torch.bfloat16
        torch.testing.assert_close(mixed.float(), out, rtol=0.2, atol=0.2)
        with torch.inference_mode():
            close(layer(x)[0], out)


def test_a_long_sequence_stays_finite(module: ModuleType) -> None:
    torch.manual_seed(1)
    out, _, _ = module.Layer(64, 4)(torch.randn(1, 200, 64))
    assert out.isfinite().all()


def test_sizes_of_its_own() -> None:
    module = ttmdsl.load("trellis", b=4)
    layer = module.Layer(16, 2, d_k=5, d_v=6, m=7, conv_size=1)
    assert layer.q_proj.weight.shape == (10, 16)
    assert layer(torch.randn(1, 4, 16))[0].shape == (1, 4, 16)
    lattice = ttmdsl.load("lattice_dec").Layer(16, 2, d=4, m=6)  # more columns than rows
    assert lattice(torch.randn(1, 4, 16))[0].isfinite().all()


def test_a_deep_memory_learns_its_initial_weights() -> None:
    torch.manual_seed(0)
    layer = ttmdsl.compile(DEEP).Layer(HIDDEN, HEADS).double()
    assert layer.W1_initial.shape == (HEADS, 4, 16)
    layer(hidden(2, 6))[0].square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layer.parameters())


def test_gates_start_in_their_ranges() -> None:
    module = ttmdsl.load("titans_linear")
    layer = module.Layer(HIDDEN, HEADS)
    x, _ = layer._arguments(torch.randn(1, 5, HIDDEN), {}, None)
    assert (x["log_alpha"] < 0).all()
    assert ((x["eta"] > 0) & (x["eta"] < 1)).all()
    torch.testing.assert_close(x["q"].norm(dim=-1), torch.ones(1, 5, HEADS), rtol=1e-3, atol=1e-3)


def test_what_a_memory_is_multiplied_by_has_length_1() -> None:
    """A step along the gradient is stable for a rate below 2 / |k|^2; other inputs keep their length."""
    for name, of_length_1, others in (
        ("dplr", "q k a b", "v"),
        ("lattice_enc", "q k v", ""),
        ("titans", "q k", "v"),
        ("trellis", "q k v", "a"),
        ("gsa", "", "q k v"),  # the read is an average over the slots
    ):
        layer = ttmdsl.load(name).Layer(32, 2)
        x, _ = layer._arguments(torch.randn(1, 50, 32), {}, None)
        lengths = {key: x[key].norm(dim=-1) for key in (of_length_1 + " " + others).split()}
        for key, found in lengths.items():
            assert (found.std() < 1e-2) == (key in of_length_1.split()), (name, key)
            assert key in others.split() or abs(found.mean() - 1) < 1e-2, (name, key)


def test_a_gate_that_selects_is_convolved() -> None:
    """The gate is the key: one of a value's token alone could not bind the value to the token before."""
    layer = ttmdsl.load("hgrn2").Layer(HIDDEN, HEADS)
    x = hidden(1, 6).float()
    start, _ = layer._arguments(x, {}, None)
    plain = torch.nn.functional.logsigmoid(layer.log_alpha_proj(x))
    torch.testing.assert_close(start["log_alpha"].flatten(2), plain)
    torch.nn.init.normal_(layer.log_alpha_conv.weight)
    changed, _ = layer._arguments(torch.cat([x[:, :2] + 1, x[:, 2:]], 1), {}, None)
    now, _ = layer._arguments(x, {}, None)
    reached = (changed["log_alpha"] != now["log_alpha"]).flatten(2).any(-1)[0]
    assert reached.tolist() == [True] * 5 + [False]


def test_a_threshold_starts_small() -> None:
    x, _ = ttmdsl.load("lattice_l1").Layer(HIDDEN, HEADS)._arguments(torch.randn(1, 5, HIDDEN), {}, None)
    torch.testing.assert_close(x["lam"], torch.full((HEADS,), 0.01), rtol=0.1, atol=0)
    ridge, _ = ttmdsl.load("mesa").Layer(HIDDEN, HEADS)._arguments(torch.randn(1, 5, HIDDEN), {}, None)
    torch.testing.assert_close(ridge["lam"], torch.ones(HEADS), rtol=0.1, atol=0)


def test_bad_input() -> None:
    layer = ttmdsl.load("delta_net").Layer(HIDDEN, HEADS)
    x = torch.randn(2, 5, HIDDEN)
    for arguments, message in (
        ({"hidden_states": x[0]}, "Layer: hidden_states: expected shape [B, T, 12], got [5, 12]"),
        (
            {"hidden_states": x, "attention_mask": torch.ones(2, 4)},
            "attention_mask: expected shape [B, T] = [2, 5], got",
        ),
        ({"hidden_states": x, "cu_seqlens": torch.tensor([0, 5])}, "Layer(): cu_seqlens: expected B = 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer(**arguments)
    with pytest.raises(ValueError, match="expected sizes of at least 1, got hidden_size=2, num_heads=3"):
        ttmdsl.load("delta_net").Layer(2, 3)
