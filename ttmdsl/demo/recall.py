"""Multi-query associative recall, the task that tells memories apart (Arora et al. 2023, arXiv 2312.04927).

Input: what makes a layer, as a generated module's `Layer`. Output: how well a small model around it learns the task,
and, as a command, the table of it for all shipped layers:

    python -m ttmdsl.demo.recall docs/recall.md

A sequence is pairs of a key and a value, then each of its keys once more in another order; asked is the value that the
key came with. Every batch is new, so nothing but the layer's memory can hold the answer.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

import ttmdsl
from ttmdsl.demo.model import LanguageModel
from ttmdsl.demo.train import descend
from ttmdsl.loader import read
from ttmdsl.options import Options
from ttmdsl.pipeline import run

COMMAND = "python -m ttmdsl.demo.recall docs/recall.md"


@dataclass(frozen=True)
class Task:
    """`pairs` different ones of `keys` keys, each with any of `values` values: sequences of 3 * pairs tokens.

    Raises ValueError for more pairs than keys.
    """

    pairs: int = 8
    keys: int = 16
    values: int = 16

    def __post_init__(self) -> None:
        if self.pairs > self.keys:
            raise ValueError(f"Task(): expected at most {self.keys} pairs (as many as keys), got {self.pairs}")

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
    """A model of `layer`s learns the task by AdamW, from new sequences at every step; two runs give the same numbers.

    `report` is called after every step with the losses so far.
    """
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
        losses.append(descend(model, optimizer, loss))
        schedule.step()
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
    right: Tensor = (found == answers).float().mean()
    return right.item()


# ---- the table ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A layer of the table."""

    name: str
    recurrence: str
    steps: int
    loss: float
    accuracy: float
    seconds: float


def row(name: str, task: Task, settings: Settings) -> Row:
    """Train one layer, by the name of a shipped one or the path of a spec, on one core."""
    torch.set_num_threads(1)
    module = ttmdsl.load(name)
    outcome = train(lambda: module.Layer(settings.hidden, settings.heads), task, settings)
    recurrence = run(*read(name), {}, Options.from_environment(), after="lower").done["lower"].recurrence
    return Row(name, recurrence, len(outcome.losses), outcome.loss, outcome.accuracy, outcome.seconds)


def rows(names: Sequence[str], task: Task, settings: Settings, processes: int) -> list[Row]:
    """A row for each name, in their order; a bar shows how many are done."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = [pool.submit(row, name, task, settings) for name in names]
        for _ in track(as_completed(futures), "training", total=len(futures)):
            pass
    return [future.result() for future in futures]


def document(found: Sequence[Row], task: Task, settings: Settings) -> str:
    """The table as Markdown, with the task, the command and the versions."""
    about = [
        "Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): a sequence is "
        f"{task.pairs} pairs of a key and a value, then the same keys in another order; the model is to name each "
        f"key's value. There are {task.keys} keys and {task.values} values, and every batch is new. A model that "
        f"knows nothing of its sequence has a loss of log {task.values} = {task.chance:.2f}, chance, and is right in "
        f"{100 / task.values:.0f} % of the queries; for one that knows which values came, but not with which keys, the "
        f"loss is about log {task.pairs} = {math.log(task.pairs):.2f}.",
        f"The model is an embedding, {settings.blocks} block of the generated `Layer` (hidden size {settings.hidden}, "
        f"{settings.heads} heads, all else as it comes) and an MLP, and a head. It takes at most {settings.steps} "
        f"steps of {settings.batch} new sequences, and fewer where the loss falls below {settings.enough:g} of chance. "
        "Loss: mean of the last ten steps. Recall: the queries of new sequences that were answered.",
        "An exponential kernel that is not normalised stays somewhat behind at `scale = 1`: keys of length 1 differ in "
        "weight by a factor of e^2 at most, so that the values of the other keys are never far from the sum. With "
        "`scale = 3` it recalls like the rest.",
    ]
    lines = [f"<!-- {COMMAND} writes this page -->", "", "# Recall", ""]
    for text in about:
        lines += [*textwrap.wrap(text, 120), ""]
    lines += [
        "| layer | recurrence | steps | loss | chance | recall | seconds |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in found:
        figures = f"{r.steps} | {r.loss:.3f} | {task.chance:.2f} | {100 * r.accuracy:.1f} % | {r.seconds:.0f}"
        lines.append(f"| `{r.name}` | {r.recurrence} | {figures} |")
    versions = f"ttmdsl {ttmdsl.__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    made = f"Made by `{COMMAND}`: {versions}, backend `torch`, one CPU core to a layer, seed {settings.seed}."
    lines += ["", *textwrap.wrap(made, 120), ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Train every layer on the recall task, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m ttmdsl.demo.recall", description=main.__doc__)
    parser.add_argument("file", type=Path, help="the Markdown file to write")
    parser.add_argument("--layer", action="append", metavar="SPEC", help="this one alone: a name or a path; repeatable")
    parser.add_argument("--steps", type=int, default=Settings().steps, metavar="N", help="at most (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="layers side by side (%(default)s)")
    arguments = parser.parse_args(argv)
    task, settings = Task(), Settings(steps=arguments.steps)
    found = rows(arguments.layer or ttmdsl.layers(), task, settings, arguments.processes)
    arguments.file.write_text(document(found, task, settings), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
