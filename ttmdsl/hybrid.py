"""Hybrids of a memory and attention: "memory as gate" and "memory as layer" of Titans (arXiv 2501.00663, 4.2 and 4.3).

Input: any generated `Layer`. Output: an `nn.Module` of the same surface, its past included, with attention over a
sliding window beside the layer or after it:

    MAG(layer, window=64)    y = norm(attention(x)) * sigmoid(norm(layer(x)))
    MAL(layer, window=64)    y = attention(layer(x))

The paper says of MAG's product that both sides are normalised with learned weights and go through a non-linearity; here
the memory's side is the gate. Its persistent tokens are not part of this.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Past: TypeAlias = dict[str, Any]
Mixed: TypeAlias = tuple[Tensor, "Past | None"]


class _Mixer(nn.Module):
    """The surface of a generated `Layer`, around `_mix`, which sees sequences without padding.

    `kept` names the entries of the past.
    """

    kept: tuple[str, ...]

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    @abstractmethod
    def _mix(self, hidden: Tensor, past: Past, use_cache: bool, cu_seqlens: Tensor | None) -> Mixed: ...

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Past | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Past | None]:
        """Hidden states `[B, T, hidden_size]` to the same shape; the past, if `use_cache`, continues in the next call.

        attention_mask  [B, T], 1 for tokens and 0 for padding, on either side; its output is 0 and it changes no state
        cu_seqlens      [N + 1], sequences packed along T, B = 1

        Raises ValueError and TypeError for shapes and dtypes other than these.
        """
        name = type(self).__name__
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.hidden_size:
            expected = f"[B, T, {self.hidden_size}]"
            raise ValueError(f"{name}: hidden_states: expected shape {expected}, got {list(hidden_states.shape)}")
        if cu_seqlens is not None:
            if attention_mask is not None:
                raise ValueError(f"{name}: attention_mask: expected None along with cu_seqlens, got a mask")
            _check_bounds(name, cu_seqlens, hidden_states)
        past = past_key_values or {}
        if past and set(past) != set(self.kept):
            expected = ", ".join(self.kept)
            raise ValueError(f"{name}: past_key_values: expected entries {expected}, got {', '.join(past)}")
        tokens = None if attention_mask is None else _tokens(name, attention_mask, hidden_states)
        if tokens is None or tokens.all():
            out, past_out = self._mix(hidden_states, past, use_cache, cu_seqlens)
            return out, None, past_out
        bounds = F.pad(tokens.sum(1).cumsum(0), (1, 0))
        packed, past_out = self._mix(hidden_states[tokens].unsqueeze(0), past, use_cache, bounds)
        zeros = packed.new_zeros(*tokens.shape, self.hidden_size)
        return zeros.masked_scatter(tokens.unsqueeze(-1), packed), None, past_out

    def step(self, hidden: Tensor, state: Past | None = None) -> tuple[Tensor, Past]:
        """One token, `[B, hidden_size]`, and the past that the previous one left: the output and the new past."""
        out, _, past = self(hidden.unsqueeze(1), past_key_values=state, use_cache=True)
        return out.squeeze(1), past


class SlidingWindowAttention(_Mixer):
    """Softmax attention of every token to itself and the `window - 1` tokens before it, with rotary positions.

    Raises ValueError for sizes below 1, and for heads that do not divide `hidden_size` into even parts.
    """

    kept = ("k", "v", "tokens")

    def __init__(self, hidden_size: int, num_heads: int, window: int, *, rope_base: float = 10000.0) -> None:
        super().__init__(hidden_size)
        given = f"{hidden_size=}, {num_heads=}, {window=}"
        if min(hidden_size, num_heads, window) < 1:
            raise ValueError(f"SlidingWindowAttention(): expected sizes of at least 1, got {given}")
        if hidden_size % (2 * num_heads):
            raise ValueError(f"SlidingWindowAttention(): expected heads of an even size, got {given}")
        self.num_heads, self.window, self.rope_base = num_heads, window, rope_base
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def _mix(self, hidden: Tensor, past: Past, use_cache: bool, cu_seqlens: Tensor | None) -> Mixed:
        """The past: the keys and values of the last `window - 1` tokens, and how many of them there have been."""
        q, k, v = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        if cu_seqlens is None:
            lengths = torch.full((len(hidden),), hidden.shape[1], device=hidden.device)
        else:
            lengths = cu_seqlens.diff().long()
            present = torch.arange(int(lengths.max()), device=hidden.device) < lengths[:, None]
            q, k, v = (_unpacked(x[0], present) for x in (q, k, v))
        number, held = len(lengths), self.window - 1
        if not past:
            past = {"k": k.new_zeros(number, held, k.shape[2]), "v": v.new_zeros(number, held, v.shape[2])}
            past["tokens"] = lengths.new_zeros(number)
        elif past["k"].shape[:2] != (number, held):
            expected, found = f"{number} sequences and a window of {self.window}", past["k"].shape
            got = f"{found[0]} and {found[1] + 1}"
            raise ValueError(f"{type(self).__name__}: past_key_values: expected {expected}, got {got}")
        k, v = torch.cat([past["k"].to(k.dtype), k], 1), torch.cat([past["v"].to(v.dtype), v], 1)
        y = self._attend(q, k, v, past["tokens"]) if q.shape[1] else q
        y = self.out(y if cu_seqlens is None else y[present].unsqueeze(0))
        if not use_cache:
            return y, None
        last = (lengths[:, None] + torch.arange(held, device=hidden.device)).unsqueeze(-1).expand(-1, -1, k.shape[2])
        return y, {"k": k.gather(1, last), "v": v.gather(1, last), "tokens": (past["tokens"] + lengths).clamp(max=held)}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
        """Queries `[N, T, size]`; keys and values `[N, window - 1 + T, size]`, whose pasts hold `tokens` [N] tokens.

        A block of at most `window` queries sees the keys of two blocks: linear in T.
        """
        length, before = q.shape[1], self.window - 1
        block = min(length, self.window)
        more = -length % block
        heads = (self.num_heads, self.hidden_size // self.num_heads)
        # [N * blocks, H, tokens, size of a head]
        q = F.pad(q, (0, 0, 0, more)).reshape(-1, block, *heads).transpose(1, 2)
        k, v = (F.pad(x, (0, 0, 0, more)).unfold(1, block + before, block) for x in (k, v))
        k, v = (x.reshape(-1, *heads, block + before).mT for x in (k, v))
        place = torch.arange(block + before, device=q.device)
        distance = place[before:, None] - place
        start = torch.arange(0, length, block, device=q.device)
        real = (start[:, None] + place >= before - tokens[:, None, None]).flatten(0, 1)  # [N * blocks, keys]
        mask = (distance >= 0) & (distance < self.window) & real[:, None, None]
        y = F.scaled_dot_product_attention(self._rotated(q, place[before:]), self._rotated(k, place), v, attn_mask=mask)
        return y.transpose(1, 2).reshape(len(tokens), -1, self.hidden_size)[:, :length]

    def _rotated(self, x: Tensor, place: Tensor) -> Tensor:
        """Rotary positions, counted from the block's first key: only distances matter. x `[..., T, size]`."""
        half = x.shape[-1] // 2
        wide = torch.promote_types(x.dtype, torch.float32)
        angle = place[:, None] * self.rope_base ** (-torch.arange(half, dtype=wide, device=x.device) / half)
        a, b = x.to(wide).chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class _Hybrid(_Mixer):
    """A layer and attention; the past holds what each of them keeps."""

    kept = ("attention", "layer")

    def __init__(self, layer: nn.Module, *, window: int, num_heads: int | None = None) -> None:
        super().__init__(int(layer.hidden_size))  # type: ignore[arg-type]
        self.layer = layer
        heads = int(layer.num_heads) if num_heads is None else num_heads  # type: ignore[arg-type]
        self.attention = SlidingWindowAttention(self.hidden_size, heads, window)


class MAG(_Hybrid):
    """Memory as gate (Titans 4.2): attention over a window, times a gate that the layer makes of the same tokens.

    layer      a generated `Layer`
    window     tokens that attention sees, the current one included
    num_heads  of attention; the layer's own number unless given
    """

    def __init__(self, layer: nn.Module, *, window: int, num_heads: int | None = None) -> None:
        super().__init__(layer, window=window, num_heads=num_heads)
        self.attention_norm, self.layer_norm = nn.RMSNorm(self.hidden_size), nn.RMSNorm(self.hidden_size)

    def _mix(self, hidden: Tensor, past: Past, use_cache: bool, cu_seqlens: Tensor | None) -> Mixed:
        rest = {"use_cache": use_cache, "cu_seqlens": cu_seqlens}
        near, _, window = self.attention(hidden, past_key_values=past.get("attention"), **rest)
        far, _, memory = self.layer(hidden, past_key_values=past.get("layer"), **rest)
        y = self.attention_norm(near) * torch.sigmoid(self.layer_norm(far))
        return y, {"attention": window, "layer": memory} if use_cache else None


class MAL(_Hybrid):
    """Memory as layer (Titans 4.3): attention over a window of what the layer makes of the tokens.

    The arguments are those of `MAG`.
    """

    def _mix(self, hidden: Tensor, past: Past, use_cache: bool, cu_seqlens: Tensor | None) -> Mixed:
        rest = {"use_cache": use_cache, "cu_seqlens": cu_seqlens}
        far, _, memory = self.layer(hidden, past_key_values=past.get("layer"), **rest)
        y, _, window = self.attention(far, past_key_values=past.get("attention"), **rest)
        return y, {"attention": window, "layer": memory} if use_cache else None


# ---- checks and packing -------------------------------------------------------------------------------------


def _check_bounds(name: str, bounds: Tensor, hidden: Tensor) -> None:
    """cu_seqlens: the first token of each packed sequence, and the end of the last one."""
    if bounds.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: cu_seqlens: expected dtype int32 or int64, got {bounds.dtype}")
    if bounds.dim() != 1 or len(bounds) < 2:
        raise ValueError(f"{name}: cu_seqlens: expected shape [N + 1] with N of at least 1, got {list(bounds.shape)}")
    if len(hidden) != 1:
        raise ValueError(f"{name}: cu_seqlens: expected B = 1 (sequences are packed along T), got B = {len(hidden)}")
    if bounds[0] != 0 or bounds[-1] != hidden.shape[1] or (bounds.diff() < 0).any():
        expected = f"non-decreasing values from 0 to T = {hidden.shape[1]}"
        raise ValueError(f"{name}: cu_seqlens: expected {expected}, got {bounds.tolist()}")


def _tokens(name: str, mask: Tensor, hidden: Tensor) -> Tensor:
    """Which places hold tokens, `[B, T]`; a longer mask covers the past, too."""
    batch, length, _ = hidden.shape
    if mask.dim() != 2 or len(mask) != batch or mask.shape[1] < length:
        expected = f"[B, T] = {[batch, length]}"
        raise ValueError(f"{name}: attention_mask: expected shape {expected}, got {list(mask.shape)}")
    return mask[:, mask.shape[1] - length :].bool()


def _unpacked(x: Tensor, present: Tensor) -> Tensor:
    """Tokens `[T, size]` to `[N, longest, size]`, zeros after the end of a sequence."""
    zeros = x.new_zeros(*present.shape, x.shape[1])
    return zeros.masked_scatter(present.unsqueeze(-1), x)
