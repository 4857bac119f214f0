"""Training and evaluation of several models side by side.

Input: models by name, the text, and `Settings`. Output: a `Curve` for each: losses in bits per byte, and the speed. All
take the same windows in the same order, and the same number of steps. Prints nothing; a caller shows progress through
`report`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ttmdsl.demo.model import ByteModel
from ttmdsl.demo.text import VOCABULARY, Text


@dataclass(frozen=True)
class Settings:
    """The same for every model. `budget`: seconds for all of them, looks at the held-out text included."""

    steps: int = 300
    batch: int = 8
    length: int = 256
    hidden: int = 128
    heads: int = 4
    blocks: int = 2
    rate: float = 5e-3
    warmup: int = 20
    every: int = 30  # steps between two looks at the held-out text
    budget: float = 240.0
    seed: int = 0


@dataclass
class Curve:
    """Bits per byte: of every step's batch, and of the whole held-out text at some of the steps."""

    train: list[float] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0  # of training alone
    tokens: int = 0

    @property
    def final(self) -> float:
        """Held out, after the last step."""
        return self.heldout[-1][1]

    @property
    def speed(self) -> float:
        """Tokens per second of training: forward, backward and the optimizer."""
        return self.tokens / self.seconds


def train(
    models: Mapping[str, ByteModel],
    text: Text,
    settings: Settings,
    report: Callable[[str, Curve], None] = lambda name, curve: None,
) -> dict[str, Curve]:
    """AdamW on all models in turn, a linear warm-up and a cosine to a tenth.

    The cosine ends after all steps, or with the budget on a machine too slow for them: fewer steps then, the same for
    all. While there is time, the clock changes nothing, and two runs give the same numbers.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.05)
        for name, model in models.items()
    }
    curves = {name: Curve() for name in models}
    start = time.perf_counter()
    step, done = 0, 0.0
    while done < 1:
        window = _draw(text.train, settings, generator)
        rate = settings.rate * min((step + 1) / settings.warmup, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
        step += 1
        done = max(step / settings.steps, _late(time.perf_counter() - start, settings.budget))
        for name, model in models.items():
            curve = curves[name]
            began = time.perf_counter()
            curve.train.append(_step(model, optimizers[name], window, rate))
            curve.seconds += time.perf_counter() - began
            curve.tokens += settings.batch * settings.length
            if step % settings.every == 0 or done >= 1:
                curve.heldout.append((step, evaluate(model, text.heldout, settings)))
            report(name, curve)
    return curves


def _late(elapsed: float, budget: float) -> float:
    """How much of the budget is gone, not counting its first fifth: a slow start is forgiven."""
    grace = budget / 5
    return (elapsed - grace) / (budget - grace)


@torch.no_grad()
def evaluate(model: ByteModel, tokens: Tensor, settings: Settings) -> float:
    """Bits per byte over windows of the training length, side by side, each from an empty past."""
    length = settings.length
    count = (len(tokens) - 1) // length
    x, y = tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)
    nats = 0.0
    for start in range(0, count, 32):
        part = slice(start, start + 32)
        nats += _nats(model(x[part]), y[part]).item() * len(x[part])
    return nats / count / math.log(2)


def _step(model: ByteModel, optimizer: torch.optim.Optimizer, window: Tensor, rate: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    return descend(model, optimizer, _nats(model(window[:, :-1]), window[:, 1:])) / math.log(2)


def descend(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One step of the optimizer, gradients clipped to a norm of 1; gives the loss before it."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _draw(tokens: Tensor, settings: Settings, generator: torch.Generator) -> Tensor:
    """`[batch, length + 1]`, windows from anywhere."""
    starts = torch.randint(len(tokens) - settings.length, (settings.batch, 1), generator=generator)
    return tokens[starts + torch.arange(settings.length + 1)]


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
