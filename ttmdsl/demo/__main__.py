"""`python -m ttmdsl.demo`: from three specs to three trained language models, on a CPU.

Input: command-line arguments. Output: a report on stdout, `demo/loss.png`, and exit status 1 if a backend misses its
reference or a model does not clearly beat the bigram model. Each step is done elsewhere; this is their order.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

# Before torch and a generated module are imported: the kernels are checked without a GPU, and a thread that waits for
# the other leaves its core to whoever else needs it.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

import ttmdsl
from ttmdsl.demo import report, text
from ttmdsl.demo.model import ByteModel
from ttmdsl.demo.train import Curve, Settings, train
from ttmdsl.explain import explain
from ttmdsl.loader import read
from ttmdsl.options import Options
from ttmdsl.parity import SHAPES, parity, table
from ttmdsl.pipeline import Job, compile_source, run

CLEARLY = 0.9  # of the bigram model's bits per byte, at most


@dataclass(frozen=True)
class Entry:
    """A layer of the demonstration, and the sizes of its memory where the head size is not what it should have."""

    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)


LAYERS = (
    Entry("linear_attention"),
    Entry("gated_delta_net"),
    Entry("lattice_dec", sizes={"m": 16}),  # 16 slots a head; exact, its declared default: a new gradient every token
)
DERIVED = "lattice_dec"
QUICK = Settings(steps=80, batch=16, length=64, hidden=64, blocks=1, every=40, rate=1e-2, warmup=10)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = _parser().parse_args(argv)
    settings = QUICK if arguments.quick else Settings()
    settings = replace(settings, seed=arguments.seed, steps=arguments.steps or settings.steps, budget=arguments.budget)
    warnings.filterwarnings("ignore", module=r"triton\.runtime\.interpreter")  # numpy's, about padding
    console = Console()
    start = time.perf_counter()

    console.rule("[bold]1. Compile three specs")
    modules = {entry.name: _compile(entry.name, console) for entry in LAYERS}

    console.rule(f"[bold]2. What was derived for {DERIVED}")
    console.print(_derivation(DERIVED), highlight=False, markup=False, soft_wrap=True)

    console.rule("[bold]3. Every backend against the reference")
    console.print(
        "The reference runs the declared loss through autograd, token by token, in float64. Triton runs in its "
        "interpreter.",
        style="dim",
    )
    misses = sum(_check(name, module, console, quick=arguments.quick) for name, module in modules.items())

    console.rule("[bold]4. Train three byte-level language models")
    corpus = text.load()
    bigram = text.bigram_bits(corpus)
    console.print(
        f"{len(corpus.train):,} bytes of English text to train on, the last {len(corpus.heldout):,} held out; "
        f"the bigram model needs {bigram:.3f} bits per byte there"
    )
    models = {entry.name: _model(modules[entry.name], entry.sizes, settings) for entry in LAYERS}
    curves = _train(models, corpus, settings, console)

    results = [_result(name, models[name], curve, arguments.quick) for name, curve in curves.items()]
    console.rule("[bold]5. Results")
    console.print(report.table(results, bigram))
    path = arguments.out / "loss.png"
    report.figure(results, bigram, settings, path)
    console.print(f"loss curves: [bold]{path}[/]")

    console.rule("[bold]6. Text written one byte at a time, through step")
    for result in results:
        console.print(f"[bold]{result.name}[/]\n{escape(result.sample)}\n", highlight=False)

    weak = [result.name for result in results if not result.curve.final < CLEARLY * bigram]
    if weak:
        console.print(f"[bold red]not clearly better than the bigram model: {', '.join(weak)}")
    elif not misses:
        console.print("every backend agrees with its reference; every model clearly beats the bigram model")
    console.print(f"{time.perf_counter() - start:.0f} s", style="dim")
    return 1 if weak or misses else 0


def _compile(name: str, console: Console) -> ModuleType:
    """Compiled here for the time that it takes; imported from the cache, as `load` always does."""
    spec, filename = read(name)
    start = time.perf_counter()
    source = compile_source(spec, filename, {}, Options.from_environment())
    seconds = time.perf_counter() - start
    module = ttmdsl.load(name)
    lines = len(spec.splitlines()), len(source.splitlines())
    console.print(f"[bold]{name}[/]: a spec of {lines[0]} lines, a module of {lines[1]:,}, in {seconds:.2f} s")
    console.print(f"  {module.__file__}", style="dim", soft_wrap=True, highlight=False)
    return module


def _derivation(name: str) -> str:
    job = _job(name)
    return explain(job.done["derive"], job.done["lower"].title)


def _job(name: str) -> Job:
    spec, filename = read(name)
    return run(spec, filename, {}, Options.from_environment(), after="lower")


def _check(name: str, module: ModuleType, console: Console, *, quick: bool) -> int:
    """Prints the table; returns the number of misses."""
    rows = []
    shapes = SHAPES[:2] if quick else SHAPES
    for number, shape in enumerate(track(shapes, f"checking {name}", console=console, transient=True)):
        rows += parity(module, shapes=[shape], device="cpu", seed=number)
    misses = sum(not row.ok for row in rows)
    console.print(table(rows, name))
    console.print(f"{misses} of {len(rows)} comparisons miss" if misses else f"all {len(rows)} comparisons hold")
    return misses


def _model(module: ModuleType, sizes: Mapping[str, int], settings: Settings) -> ByteModel:
    torch.manual_seed(settings.seed)
    return ByteModel(module, hidden=settings.hidden, heads=settings.heads, blocks=settings.blocks, sizes=sizes)


def _train(
    models: Mapping[str, ByteModel], corpus: text.Text, settings: Settings, console: Console
) -> dict[str, Curve]:
    """All models in turn, a bar for each."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=settings.steps, loss="") for name in models}

        def report(name: str, curve: Curve) -> None:
            steps = len(curve.train)
            heldout = f", held out {curve.heldout[-1][1]:.2f}" if curve.heldout else ""
            progress.update(tasks[name], completed=steps, loss=f"{curve.train[-1]:.2f} bits/byte{heldout}")
            if not console.is_terminal and curve.heldout and curve.heldout[-1][0] == steps:  # where no bar moves
                console.print(f"{name}: step {steps}{heldout}")

        curves = train(models, corpus, settings, report)
        for name, task in tasks.items():
            progress.update(task, total=len(curves[name].train))
    steps = {len(curve.train) for curve in curves.values()}
    if steps != {settings.steps}:
        console.print(f"{max(steps)} steps instead of {settings.steps} in the {settings.budget:.0f} s that there were")
    return curves


def _result(name: str, model: ByteModel, curve: Curve, quick: bool) -> report.Result:
    count = 40 if quick else 300
    prompt = b"The "
    start = time.perf_counter()
    sample = prompt + bytes(model.generate(prompt, count))
    return report.Result(
        name=name,
        recurrence=_job(name).done["lower"].recurrence,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        curve=curve,
        decoding=len(sample) / (time.perf_counter() - start),
        sample=text.decode(list(sample)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ttmdsl.demo", description="Three specs to three language models.")
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="FOLDER", help="where loss.png goes (demo)")
    parser.add_argument("--steps", type=int, metavar="N", help=f"training steps of each model ({Settings().steps})")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    budget = Settings().budget
    parser.add_argument(
        "--budget",
        type=float,
        default=budget,
        metavar="SECONDS",
        help=f"of training; fewer steps beyond ({budget:.0f})",
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, a few steps: does it run at all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
