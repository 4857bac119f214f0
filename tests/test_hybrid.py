"""MAG and MAL around any layer: pieces equal the whole, the window is the window, and they learn."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from mixers import padding_changes_nothing
from torch import Tensor, nn

import ttmdsl
from ttmdsl.demo.recall import Settings, Task, train
from ttmdsl.hybrid import MAG, MAL, SlidingWindowAttention

HIDDEN, HEADS, WINDOW = 12, 3, 4
LAYERS = ("gated_delta_net", "titans", "attention")
MAKE: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: SlidingWindowAttention(HIDDEN, HEADS, WINDOW),
    **{f"mag-{n}": lambda n=n: MAG(ttmdsl.load(n).Layer(HIDDEN, HEADS), window=WINDOW) for n in LAYERS},
    **{f"mal-{n}": lambda n=n: MAL(ttmdsl.load(n).Layer(HIDDEN, HEADS), window=WINDOW) for n in LAYERS},
}


@pytest.fixture(params=MAKE)
def mixer(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MAKE[request.param]().double()


def hidden(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_attention_is_softmax_over_the_window(window: int) -> None:
    torch.manual_seed(0)
    attention = SlidingWindowAttention(HIDDEN, HEADS, window, rope_base=100.0).double()
    x = hidden(2, 11)
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k = (torch.view_as_complex(torch.stack(y.chunk(2, -1), -1)) for y in (q, k))
    place = torch.arange(11, dtype=torch.float64)
    turn = torch.exp(1j * place[:, None] * torch.tensor([1.0, 100.0**-0.5]))[:, None]
    scores = torch.einsum("bthd,bshd->bhts", q * turn, (k * turn).conj()).real / (HIDDEN // HEADS) ** 0.5
    far = place[:, None] - place
    weights = scores.masked_fill((far < 0) | (far >= window), -torch.inf).softmax(-1)
    close(attention(x)[0], attention.out(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)))


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 9, 10])
def test_a_sequence_cut_anywhere_equals_the_whole(mixer: nn.Module, cut: int) -> None:
    x = hidden(2, 10)
    whole, nothing, past = mixer(x, use_cache=True)
    assert nothing is None
    first, _, between = mixer(x[:, :cut], use_cache=True)
    second, _, after = mixer(x[:, cut:], past_key_values=between, use_cache=True)
    close(torch.cat([first, second], 1), whole)
    more = hidden(2, 1)[:, 0]
    close(mixer.step(more, after)[0], mixer.step(more, past)[0])
    assert mixer(x)[2] is None


def test_tokens_one_at_a_time_equal_the_full_pass(mixer: nn.Module) -> None:
    x, state = hidden(2, 10), None
    ys = []
    for t in range(10):
        y, state = mixer.step(x[:, t], state)
        ys.append(y)
    close(torch.stack(ys, 1), mixer(x)[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(mixer: nn.Module, side: str) -> None:
    x, more = padding_changes_nothing(mixer, hidden(3, 7), side, close)
    close(more[2], mixer(x[2:, :2])[0][0])


def test_packed_sequences_do_not_meet(mixer: nn.Module) -> None:
    parts = [hidden(1, n) for n in (3, 9, 0, 1)]
    bounds = torch.tensor([0, 3, 12, 12, 13], dtype=torch.int32)
    out, _, past = mixer(torch.cat(parts, 1), cu_seqlens=bounds, use_cache=True)
    close(out, torch.cat([mixer(part)[0] for part in parts], 1))
    more = [hidden(1, n) for n in (2, 1, 5, 2)]
    out, _, _ = mixer(torch.cat(more, 1), past_key_values=past, cu_seqlens=torch.tensor([0, 2, 3, 8, 10]))
    wholes = [mixer(torch.cat(pair, 1))[0] for pair in zip(parts, more, strict=True)]
    close(out, torch.cat([whole[:, -part.shape[1] :] for whole, part in zip(wholes, more, strict=True)], 1))


class Token(nn.Module):
    """In place of a memory: every token as it is."""

    hidden_size, num_heads = HIDDEN, HEADS

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None, None]:
        return hidden_states, None, None


@pytest.mark.parametrize("hybrid", [MAG, MAL])
def test_beyond_the_window_the_memory_alone_sees(hybrid: type[nn.Module]) -> None:
    torch.manual_seed(0)
    gated_delta_net = ttmdsl.load("gated_delta_net").Layer(HIDDEN, HEADS)
    for layer, remembers in ((Token(), False), (gated_delta_net, True)):
        mixer = hybrid(layer, window=WINDOW).double()
        x = hidden(1, 12).requires_grad_()
        (grad,) = torch.autograd.grad(mixer(x)[0][0, -1].sum(), x)
        seen = grad[0].abs().sum(-1) > 0
        assert seen[-WINDOW:].all()
        assert seen[:-WINDOW].all() == remembers
        assert seen[:-WINDOW].any() == remembers


def test_every_parameter_learns(mixer: nn.Module) -> None:
    mixer(hidden(2, 6))[0].square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("hybrid", [MAG, MAL])
def test_recall_from_beyond_the_window(hybrid: type[nn.Module]) -> None:
    """Attention reaches no pair from the last queries, so that the memory has to."""
    task, settings = Task(pairs=6, keys=12, values=8), Settings(steps=300, enough=0.4)
    module = ttmdsl.load("gated_delta_net")
    outcome = train(lambda: hybrid(module.Layer(settings.hidden, settings.heads), window=4), task, settings)
    assert outcome.loss < settings.enough * task.chance, outcome.losses[::20]


def test_half_precision_and_autocast() -> None:
    for hybrid in (MAG, MAL):
        mixer = hybrid(ttmdsl.load("delta_net").Layer(HIDDEN, HEADS), window=WINDOW)
        x = torch.randn(2, 9, HIDDEN)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = mixer(x)[0]
        torch.testing.assert_close(mixed.float(), mixer(x)[0], rtol=0.2, atol=0.2)
        half = mixer.bfloat16()
        out, _, past = half(x.bfloat16(), use_cache=True)
        assert out.dtype == torch.bfloat16
        assert half.step(x[:, 0].bfloat16(), past)[0].dtype == torch.bfloat16


def test_bad_input() -> None:
    mixer, x = MAG(ttmdsl.load("delta_net").Layer(HIDDEN, HEADS), window=WINDOW), torch.randn(2, 5, HIDDEN)
    for arguments, message in (
        ({"hidden_states": x[0]}, "MAG: hidden_states: expected shape [B, T, 12], got [5, 12]"),
        (
            {"hidden_states": x, "attention_mask": torch.ones(2, 4)},
            "MAG: attention_mask: expected shape [B, T] = [2, 5]",
        ),
        ({"hidden_states": x, "cu_seqlens": torch.tensor([0, 5])}, "MAG: cu_seqlens: expected B = 1"),
        ({"hidden_states": x[:1], "cu_seqlens": torch.tensor([0, 4])}, "from 0 to T = 5, got [0, 4]"),
        (
            {"hidden_states": x, "past_key_values": mixer(x[:1], use_cache=True)[2]},
            "SlidingWindowAttention: past_key_values: expected 2 sequences and a window of 4, got 1 and 4",
        ),
        (
            {"hidden_states": x, "past_key_values": mixer.layer(x, use_cache=True)[2]},
            "MAG: past_key_values: expected entries attention, layer, got conv, memory",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            mixer(**arguments)
    with pytest.raises(TypeError, match=re.escape("MAG: cu_seqlens: expected dtype int32 or int64, got torch.float32")):
        mixer(x[:1], cu_seqlens=torch.tensor([0.0, 5.0]))
    with pytest.raises(ValueError, match="expected heads of an even size, got hidden_size=12, num_heads=4"):
        SlidingWindowAttention(12, 4, 3)
    with pytest.raises(ValueError, match="expected sizes of at least 1, got hidden_size=12, num_heads=3, window=0"):
        SlidingWindowAttention(12, 3, 0)
