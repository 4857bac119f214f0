"""A small language model around any layer, and one of bytes around any generated layer.

Input: modules with the surface of a generated `Layer`. Output: logits for a whole sequence (`forward`) or for one token
after another (`step`). Neither trains nor reads text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ttmdsl.demo.text import VOCABULARY

Past = list[dict[str, Any]]  # what each block's layer keeps of the tokens so far


class Block(nn.Module):
    """A layer and an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, layer: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.layer = layer
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(self.norm(x))[0]
        return self._mix(x)

    def step(self, x: Tensor, past: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        """One token: `[B, hidden]`."""
        y, past = self.layer.step(self.norm(x), past)  # type: ignore[operator]
        assert past is not None
        return self._mix(x + y), past

    def _mix(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class LanguageModel(nn.Module):
    """Tokens in, logits of the next one out. `layer` makes the layer of a block."""

    def __init__(self, layer: Callable[[], nn.Module], *, hidden: int, blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(layer(), hidden) for _ in range(blocks))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, T]` to logits `[B, T, vocabulary]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def step(self, token: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        """One token of each sequence, `[B]`: logits `[B, vocabulary]`, and the past of the next call."""
        x, after = self.embed(token), []
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x, kept = block.step(x, past[number] if past else None)
            after.append(kept)
        return self.head(self.norm(x)), after


class ByteModel(LanguageModel):
    """Two models differ in nothing but the module that their layer is from."""

    def __init__(
        self, module: ModuleType, *, hidden: int, heads: int, blocks: int, sizes: Mapping[str, int] | None = None
    ) -> None:
        def layer() -> nn.Module:
            made: nn.Module = module.Layer(hidden, heads, **(sizes or {}))
            return made

        super().__init__(layer, hidden=hidden, blocks=blocks, vocabulary=VOCABULARY)

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
