"""Training and evaluation of one model.

Input: a model, the text, and `Settings`. Output: a `Curve`: losses in bits per byte, and the speed. The same settings
draw the same windows in the same order for every model. Prints nothing; a caller shows progress through `report`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ttmdsl.demo.model import ByteModel
from ttmdsl.demo.text import VOCABULARY, Text


@dataclass(frozen=True)
class Settings:
    """The same for every model."""

    steps: int = 300
    batch: int = 8
    length: int = 256
    hidden: int = 128
    heads: int = 4
    blocks: int = 2
    rate: float = 5e-3
    warmup: int = 20
    every: int = 30  # steps between two looks at the held-out text
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
    model: ByteModel, text: Text, settings: Settings, report: Callable[[int, Curve], None] = lambda step, curve: None
) -> Curve:
    """AdamW, a linear warm-up and a cosine to a tenth."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, settings))
    curve = Curve()
    for step in range(1, settings.steps + 1):
        start = time.perf_counter()
        loss = _step(model, optimizer, _draw(text.train, settings, generator))
        scheduler.step()
        curve.seconds += time.perf_counter() - start
        curve.tokens += settings.batch * settings.length
        curve.train.append(loss)
        if step % settings.every == 0 or step == settings.steps:
            curve.heldout.append((step, evaluate(model, text.heldout, settings)))
        report(step, curve)
    return curve


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


def seconds_per_step(model: ByteModel, text: Text, settings: Settings, steps: int = 2) -> float:
    """What a step takes here, tried on a copy: the model stays as it is."""
    trial = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trial.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(settings.seed)
    times = []
    for _ in range(steps + 1):  # the first one also pays for what is set up once
        start = time.perf_counter()
        _step(trial, optimizer, _draw(text.train, settings, generator))
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _step(model: ByteModel, optimizer: torch.optim.Optimizer, window: Tensor) -> float:
    loss = _nats(model(window[:, :-1]), window[:, 1:])
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() / math.log(2)


def _draw(tokens: Tensor, settings: Settings, generator: torch.Generator) -> Tensor:
    """`[batch, length + 1]`, windows from anywhere."""
    starts = torch.randint(len(tokens) - settings.length, (settings.batch, 1), generator=generator)
    return tokens[starts + torch.arange(settings.length + 1)]


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def _schedule(step: int, settings: Settings) -> float:
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
