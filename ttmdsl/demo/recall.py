"""Multi-query associative recall, the task that tells memories apart (Arora et al. 2023, arXiv 2312.04927).

Input: generated modules. Output: how well a small model around each one's `Layer` learns the task, and, as a command, the
table of it for all shipped layers:

    python -m ttmdsl.demo.recall docs/recall.md

A sequence is pairs of a key and a value, then each of its keys once more in another order; asked is the value that the
key came with. No two sequences are alike, so nothing but the layer's memory can hold the answer.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

import ttmdsl
from ttmdsl.demo.model import LanguageModel
from ttmdsl.loader import read
from ttmdsl.options import Options
from ttmdsl.pipeline import run

COMMAND = "python -m ttmdsl.demo.recall docs/recall.md"


@dataclass(frozen=True)
class Task:
    """`pairs` different ones of `keys` keys, each with any of `values` values: sequences of 3 * pairs tokens."""

    pairs: int = 8
    keys: int = 16
    values: int = 16

    @property
    def vocabulary(self) -> int:
        return self.keys + self.values

    @property
    def chance(self) -> float:
        """The loss of a model that knows nothing of a sequence, in nats."""
        return math.log(self.values)

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens `[batch, 3 * pairs]`, and the answers at the last `pairs` of them, `[batch, pairs]`."""
        keys = torch.rand(batch, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(self.keys, self.vocabulary, (batch, self.pairs), generator=generator)
        order = torch.rand(batch, self.pairs, generator=generator).argsort(1)
        pairs = torch.stack([keys, values], 2).flatten(1)
        return torch.cat([pairs, keys.gather(1, order)], 1), values.gather(1, order)


@dataclass(frozen=True)
class Settings:
    """The same for every layer. `enough`: training ends where the loss is below this part of chance."""

    steps: int = 400
    batch: int = 32
    hidden: int = 32
    heads: int = 2
    blocks: int = 1
    rate: float = 1e-2
    warmup: int = 20
    enough: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """Losses of all steps in nats, the part of the queries of new sequences that were answered, seconds of training."""

    losses: list[float] = field(repr=False)
    accuracy: float
    seconds: float

    @property
    def loss(self) -> float:
        """At the end: the mean of the last steps."""
        return recent(self.losses)


def recent(losses: Sequence[float], count: int = 10) -> float:
    """The mean of the last `count` losses."""
    last = losses[-count:]
    return sum(last) / len(last)


def train(
    layer: Callable[[], nn.Module],
    task: Task,
    settings: Settings,
    report: Callable[[list[float]], None] = lambda losses: None,
) -> Outcome:
    """A model of `layer`s learns the task by AdamW, from new sequences at every step; two runs give the same numbers."""
    torch.manual_seed(settings.seed)
    model = LanguageModel(layer, hidden=settings.hidden, blocks=settings.blocks, vocabulary=task.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warmup))
    generator = torch.Generator().manual_seed(settings.seed)
    losses: list[float] = []
    start = time.perf_counter()
    while len(losses) < settings.steps:
        tokens, answers = task.draw(settings.batch, generator)
        loss = F.cross_entropy(model(tokens)[:, -task.pairs :].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        report(losses)
        if len(losses) >= 10 and recent(losses) < settings.enough * task.chance:
            break
    seconds = time.perf_counter() - start
    return Outcome(losses, evaluate(model, task, generator), seconds)


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, generator: torch.Generator, sequences: int = 256) -> float:
    """The part of the queries that are answered, on sequences that the model has not seen."""
    tokens, answers = task.draw(sequences, generator)
    found = model(tokens)[:, -task.pairs :].argmax(-1)
    return (found == answers).float().mean().item()
