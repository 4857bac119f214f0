"""A small byte-level language model around any generated layer.

Input: a generated module, through its `Layer` alone. Output: logits for a whole sequence (`forward`) or for one byte
after another (`step`). Neither trains nor reads text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ttmdsl.demo.text import VOCABULARY

Past = list[dict[str, Any]]  # what each block's layer keeps of the bytes so far


class Block(nn.Module):
    """A generated layer and an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, module: ModuleType, hidden: int, heads: int, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.layer = module.Layer(hidden, heads, **sizes)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(self.norm(x))[0]
        return self._mix(x)

    def step(self, x: Tensor, past: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        """One byte: `[B, hidden]`."""
        y, past = self.layer.step(self.norm(x), past)
        assert past is not None
        return self._mix(x + y), past

    def _mix(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class ByteModel(nn.Module):
    """Bytes in, logits of the next byte out. Two models differ in nothing but the module that their layer is from."""

    def __init__(
        self, module: ModuleType, *, hidden: int, heads: int, blocks: int, sizes: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(module, hidden, heads, sizes or {}) for _ in range(blocks))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, T]` to logits `[B, T, 256]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def step(self, token: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        """One byte of each sequence, `[B]`: logits `[B, 256]`, and the past of the next call."""
        x, after = self.embed(token), []
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x, kept = block.step(x, past[number] if past else None)
            after.append(kept)
        return self.head(self.norm(x)), after

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], count: int, temperature: float = 0.6, seed: int = 0) -> Iterator[int]:
        """`count` bytes after the prompt, drawn one by one: the memory is all that is kept, whatever the length."""
        generator = torch.Generator().manual_seed(seed)
        past: Past | None = None
        for byte in prompt:
            logits, past = self.step(torch.tensor([byte]), past)
        for _ in range(count):
            byte = int(torch.multinomial(torch.softmax(logits[0] / temperature, -1), 1, generator=generator))
            yield byte
            logits, past = self.step(torch.tensor([byte]), past)
