"""What every sequence mixer must do, a `Layer` and a hybrid alike; used by their tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def padding_changes_nothing(
    mixer: nn.Module, x: Tensor, side: str, close: Callable[[Tensor, Tensor], None]
) -> tuple[Tensor, Tensor]:
    """Three sequences of 7, 4 and 0 of x's 7 tokens, padded on one side: the same as each alone, then and two tokens
    later. Gives x and the outputs of these two tokens, of which those of the third sequence are not compared."""
    lengths = (7, 4, 0)
    mask = torch.tensor([[int(t < n) for t in range(7)] for n in lengths])
    mask = mask.flip(1) if side == "left" else mask
    out, _, past = mixer(x, attention_mask=mask, use_cache=True)
    assert (out[mask == 0] == 0).all()
    more, _, _ = mixer(x[:, :2], attention_mask=torch.ones(3, 9), past_key_values=past, use_cache=True)
    for n in range(2):
        alone, _, state = mixer(x[n : n + 1, mask[n].bool()], use_cache=True)
        close(out[n, mask[n].bool()], alone[0])
        close(more[n], mixer(x[n : n + 1, :2], past_key_values=state)[0][0])
    return x, more
