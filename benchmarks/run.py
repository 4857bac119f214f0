"""The whole table of times on a GPU: `ttmdsl bench` for every row, and each figure against its bar.

Usage: python benchmarks/run.py OUT.json [--seconds 560] [--only fla,own,...] [--layers mamba2,...] [--jobs 14]
                                         [--archive FILE.tgz]
       python benchmarks/run.py OUT.json --report [--png FILE] [--ratios FILE] [--runs FILE.json ...]
Rows that OUT.json has are kept, so a run that was cut short goes on where it stopped. First everything that is still to
be measured is compiled, in `--jobs` processes side by side; then each layer is measured in a process of its own.
`--archive` unpacks what fla's autotuner chose before into Triton's cache, which saves an hour (peers_autotune.tgz).
What fla takes depends on what its autotuner has chosen: `--runs` names results of other runs, whose fastest of fla's
times are held against ours, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from ttmdsl.bench import report
from ttmdsl.bench.command import LOST
from ttmdsl.bench.measure import STEP, Row
from ttmdsl.bench.subjects import Case

ROOT = Path(__file__).parent.parent
Shape: TypeAlias = tuple[int, int, int, int]
Rows: TypeAlias = dict[tuple[str, Shape, str], Row]  # by layer, shape and who computes it

FIRST, LARGE, LONG = (8, 2048, 16, 64), (4, 8192, 16, 128), (1, 32768, 16, 128)
SHAPES: tuple[Shape, ...] = (FIRST, LARGE, LONG, (32, 512, 8, 64), (2, 4096, 32, 64))
TIMES = ("forward", "both", "graph_forward", "graph_both")
SHORT = (64, 256, 16, 64)  # as many tokens as FIRST, in sequences whose units torch.compile unrolls in time
LENGTHS: tuple[Shape, ...] = ((8, 512, 16, 64), (8, 1024, 16, 64), (8, 4096, 16, 64), (8, 8192, 16, 64))
PEERED = "linear_attention retnet mamba2 gla delta_net gated_delta_net rwkv7 dplr gsa".split()
BLOCKS = "delta_net gated_delta_net gla".split()
EXACT = "lattice_dec"
FASTEST = "fla's fastest run"
OWN = [
    "lattice_dec:b=64",
    "lattice_dec:b=64:project=0",
    "trellis:b=64",
    "titans_linear:b=64",
    "omega_linear:b=64",
    EXACT,
]
DEEP = ["ttt_mlp", "omega_net", "atlas"]


@dataclass(frozen=True)
class Part:
    """Rows that are measured alike; `options` are further arguments of `ttmdsl bench`."""

    name: str
    layers: Sequence[str]
    shapes: Sequence[Shape]
    options: Sequence[str] = ()
    who: Sequence[str] = ("ttmdsl triton",)
    limit: float = 300  # seconds that a layer may take


PARTS = (
    Part("fla", PEERED, SHAPES, ["--insist", "--brief"], ("ttmdsl triton", "fla")),
    Part("own", OWN, (FIRST, LARGE), ["--no-peers"]),
    Part("deep", DEEP, (SHORT,), ["--no-peers", "--compiled"], ("ttmdsl triton", "torch.compile"), 200),
    Part(
        "titans",
        ["titans:b=64"],
        (FIRST, LARGE),
        (),
        ("ttmdsl triton", "ttmdsl Layer", "titans-pytorch", "titans-pytorch by groups"),
    ),
    Part("blocks", BLOCKS, (FIRST, LARGE), ["--insist", "--brief"], ("ttmdsl Layer", "fla Layer")),
    Part("lengths", ["mamba2", "gated_delta_net"], LENGTHS, ["--insist", "--brief"], ("ttmdsl triton", "fla")),
    # where the time goes, kernel by kernel: asked for by name, into a file of its own
    Part("kernels", [*PEERED, *OWN], (FIRST, LARGE), ["--no-peers", "--no-step", "--kernels"]),
    # times of a shape of their own, so that they are no rows of the other parts
    Part("cold", ["mamba2", "gated_delta_net", "titans_linear:b=64"], ((8, 2048, 16, 128),), ["--no-peers", "--cold"]),
)


# ---- figures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A figure, and what it should be: `better` says in which direction. None: no bar, the figure alone."""

    title: str
    value: Callable[[Rows], float | None]
    bar: float | None = None
    better: str = "above"


def against_fla(
    what: str, layers: Iterable[str] = PEERED, worst: bool = False, who: str = "fla"
) -> Callable[[Rows], float | None]:
    """Geometric mean, or the worst, of fla's time over ours, over all layers and shapes where both were measured."""

    def value(rows: Rows) -> float | None:
        ratios = [
            report.over(getattr(rows[layer, shape, who], what), getattr(rows[layer, shape, "ttmdsl triton"], what))
            for layer in layers
            for shape in SHAPES
            if (layer, shape, who) in rows and (layer, shape, "ttmdsl triton") in rows
        ]
        found = [ratio for ratio in ratios if ratio is not None]
        if not found:
            return None
        return min(found) if worst else math.exp(sum(map(math.log, found)) / len(found))

    return value


def ratio(
    of: tuple[str, Shape, str, str], to: tuple[str, Shape, str, str] | None = None
) -> Callable[[Rows], float | None]:
    """One row's figure over another's, each as layer, shape, who, field; or the figure alone."""

    def figure(rows: Rows, place: tuple[str, Shape, str, str]) -> float | None:
        row = rows.get(place[:3])
        return None if row is None else getattr(row, place[3])

    return lambda rows: figure(rows, of) if to is None else report.over(figure(rows, of), figure(rows, to))


def bars() -> Iterator[Bar]:
    """Every figure and the bar that it has to pass; None where only the figure is of interest."""
    triton = "ttmdsl triton"
    for what, title, worst in (
        ("forward", "forward", 1.1),
        ("both", "forward + backward", 1.2),
        ("graph_forward", "forward, graph", 1.1),
        ("graph_both", "forward + backward, graph", 1.2),
    ):
        yield Bar(f"fla / ours, {title}, geometric mean", against_fla(what), 2.0)
        for layer in PEERED:
            yield Bar(f"fla / ours, {title}, {layer}, worst shape", against_fla(what, [layer], worst=True), worst)
        yield Bar(f"{FASTEST} / ours, {title}, geometric mean", against_fla(what, who=FASTEST), 2.0)
        yield Bar(f"{FASTEST} / ours, {title}, worst", against_fla(what, worst=True, who=FASTEST), worst)
    floors = {("mamba2", "forward"): 2.5, ("gated_delta_net", "forward"): 4.0, ("gated_delta_net", "both"): 7.0}
    for (layer, what), most in floors.items():
        for shape in (FIRST, LARGE):
            place = (layer, shape, triton)
            title = f"{layer} {shape} {what}, graph, over the floor"
            yield Bar(title, ratio((*place, f"graph_{what}"), (*place, f"floor_{what}")), most, "below")
    for layer in OWN:
        for shape in (FIRST, LARGE):
            for what in ("graph_forward", "graph_both"):
                place = (layer, shape, triton, what)
                if layer != EXACT:
                    title = f"{layer} {shape} {what}, over our gated_delta_net"
                    most = 1.5 if what == "graph_both" else None
                    yield Bar(title, ratio(place, ("gated_delta_net", shape, triton, what)), most, "below")
                elif shape == FIRST:
                    most = {"graph_forward": 2.0, "graph_both": 8.0}[what]
                    yield Bar(f"{layer} {shape} {what}, ms", ratio(place), most, "below")
    for layer in DEEP:
        for what, least in (("forward", None), ("both", 3.0)):
            place = ((layer, SHORT, "torch.compile", what), (layer, SHORT, triton, what))
            yield Bar(f"torch.compile / ours, {layer} {what}", ratio(*place), least)
    for shape in (FIRST, LARGE):
        for what in ("forward", "both"):
            for who in ("titans-pytorch", "titans-pytorch by groups"):
                place = (("titans:b=64", shape, who, what), ("titans:b=64", shape, "ttmdsl Layer", what))
                yield Bar(f"{who} / ours, {shape} {what}", ratio(*place), 10.0)
    for layer in BLOCKS:
        for shape in (FIRST, LARGE):
            for what in ("forward", "both", "graph_forward", "graph_both"):
                place = ((layer, shape, "fla Layer", what), (layer, shape, "ttmdsl Layer", what))
                yield Bar(f"fla Layer / ours, {layer} {shape} {what}", ratio(*place))
    for layer in [*PEERED, *OWN, *DEEP]:
        place = (layer, SHORT if layer in DEEP else FIRST, triton)
        title = f"{layer}, decode step of 64 sequences, graph, over the floor"
        yield Bar(title, ratio((*place, "graph_step"), (*place, "floor_step")), 2.0, "below")
    for layer in PEERED:
        place = (layer, FIRST, triton)
        yield Bar(
            f"ours / fla, peak memory, {layer}", ratio((*place, "peak"), (layer, FIRST, "fla", "peak")), 1.0, "below"
        )
    for part in PARTS:
        if part.name == "cold":
            for layer in part.layers:
                for what, most in (("first_cold", 10.0), ("first_warm", 0.5)):
                    title = f"{layer}, seconds of the {what.removeprefix('first_')} first call"
                    yield Bar(title, ratio((layer, part.shapes[0], triton, what)), most, "below")


def with_fastest(rows: Sequence[Row], runs: Iterable[Path]) -> list[Row]:
    """The rows, and for each of fla's one with the least of its times there and in other runs."""

    def of_fla(rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if row.who == "fla" and not row.failed]

    theirs = of_fla([*rows, *(row for run in runs for row in report.saved(run))])

    def least(of: Row, what: str) -> float | None:
        times = (getattr(row, what) for row in theirs if (row.layer, row.shape) == (of.layer, of.shape))
        return min(filter(None, times), default=None)

    return [*rows, *(replace(row, who=FASTEST, **{what: least(row, what) for what in TIMES}) for row in of_fla(rows))]


def print_report(rows: Sequence[Row]) -> None:
    """The table of rows, and every figure with its bar."""
    from rich.console import Console

    Console(width=170).print(report.table([row for row in rows if row.who != FASTEST]))
    known = {(row.layer, row.shape, row.who): row for row in rows if not row.failed or row.failed.startswith(STEP)}
    print()
    for bar in bars():
        value = bar.value(known)
        if value is None:
            verdict = "not measured"
        elif bar.bar is None:
            verdict = ""
        else:
            met = value >= bar.bar if bar.better == "above" else value <= bar.bar
            verdict = f"{'met' if met else 'MISSED'} ({'at least' if bar.better == 'above' else 'at most'} {bar.bar:g})"
        print(f"{bar.title:70} {'' if value is None else f'{value:8.2f}'}  {verdict}")


# ---- running ------------------------------------------------------------------------------------------------


def missing(part: Part, layer: str, rows: Sequence[Row]) -> list[tuple[Shape, str]]:
    """What a layer has no row for yet: shapes, and who computes them."""
    have = {(row.shape, row.who) for row in rows if row.layer == layer}
    return [(shape, who) for shape in part.shapes for who in part.who if (shape, who) not in have]


def compile_first(cases: Sequence[Case], jobs: int, end: float) -> None:
    """Every kernel of the cases, ours and the peers', each case in a process of its own."""

    def one(case: Case) -> None:
        left = end - time.monotonic()
        if left > 5:
            command = [sys.executable, __file__, "--compile", json.dumps(asdict(case))]
            try:
                subprocess.run(command, timeout=left, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            except subprocess.TimeoutExpired:
                print(f"not compiled in time: {case.layer} {case.shape}", flush=True)

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(one, cases))


def compile_case(case: Case) -> None:
    """Runs all that a benchmark will run, once."""
    from ttmdsl.bench import peers
    from ttmdsl.bench.measure import verdict
    from ttmdsl.bench.subjects import others, own

    peers.insist()
    peers.compile_only()
    module = case.load()
    verdict(module, case)
    peers_of_it = others(case, module, with_peers=True, with_compiled=False)
    for _, make in (("", lambda: own(case, module, "triton")), *peers_of_it):
        with contextlib.suppress(Exception):  # what fails will fail when it is measured, and say why
            subject = make()
            for work in (subject.only_forward, subject.both, *([subject.step] if subject.step else [])):
                work()()


def measure(part: Part, layer: str, out: Path, end: float) -> None:
    """One layer, in as many processes as it takes down. What a peer that is not installed lacks stays missing."""
    while (left := end - time.monotonic()) > 10:
        before = missing(part, layer, report.saved(out))
        if not before:
            return
        command = [sys.executable, "-m", "ttmdsl", "bench", layer, "--json", str(out), "--resume", *part.options]
        for shape in dict.fromkeys(shape for shape, _ in before):
            command += ["--shape", ",".join(map(str, shape))]
        try:
            status = subprocess.run(command, timeout=min(left, part.limit), cwd=ROOT).returncode
            if status in (0, 1):
                return
            why = f"the process ended with {status}"
        except subprocess.TimeoutExpired:
            if left < part.limit:
                print(f"{layer}: no time left", flush=True)
                return
            status, why = LOST - 1, f"no result within {part.limit:.0f} s"
        rows = report.saved(out)
        if status != LOST and (still := missing(part, layer, rows)):  # it has not said itself what failed
            row = Row(layer, still[0][0], "bfloat16", still[0][1], failed=why)
            report.save(out, report.machine("cuda"), [*rows, row])


def main() -> None:
    """Measures what is missing, then reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--only", default=",".join(part.name for part in PARTS if part.name != "kernels"))
    parser.add_argument("--layers", default="", help="of these parts, those layers alone")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--png", type=Path, help="with --report: the times over T")
    parser.add_argument("--ratios", type=Path, help="with --report: fla's times over ours, as in the README")
    parser.add_argument(
        "--runs", type=Path, nargs="*", default=[], help="with --report: results with other times of fla"
    )
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        fields = json.loads(args.compile)
        compile_case(Case(**{**fields, "shape": tuple(fields["shape"])}))
        return
    if args.report:
        rows = with_fastest(report.saved(args.out), args.runs)
        print_report(rows)
        if args.png:
            over_lengths = {FIRST, *LENGTHS}
            layers = next(part.layers for part in PARTS if part.name == "lengths")
            report.draw([r for r in rows if r.shape in over_lengths and r.layer in layers], args.png)
        if args.ratios:
            peers = ["fla", FASTEST] if args.runs else ["fla"]
            report.draw_ratios([r for r in rows if r.layer in PEERED], peers, args.ratios)
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    end = time.monotonic() + args.seconds
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    if args.archive:
        with tarfile.open(args.archive) as archive:
            archive.extractall(os.environ["TRITON_CACHE_DIR"], filter="data")
    only = args.layers.split(",")
    chosen = [
        replace(part, layers=[layer for layer in part.layers if not args.layers or layer in only])
        for part in PARTS
        if part.name in args.only.split(",")
    ]
    rows = report.saved(args.out)
    cases = [Case(layer, shape) for part in chosen for layer in part.layers for shape, _ in missing(part, layer, rows)]
    # kernels know heads and head sizes, not how many tokens there are
    small = dict.fromkeys(replace(case, shape=(1, 128, *case.shape[2:])) for case in cases)
    compile_first(list(small), args.jobs, time.monotonic() + 0.45 * args.seconds)
    print(f"compiled after {args.seconds - (end - time.monotonic()):.0f} s", flush=True)
    for part in chosen:
        for layer in part.layers:
            measure(part, layer, args.out, end)
    print_report(report.saved(args.out))


if __name__ == "__main__":
    main()
