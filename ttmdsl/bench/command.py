"""The commands `ttmdsl bench` and `ttmdsl tune`: from their arguments to cases, and from rows to what is shown.

Input: parsed arguments. Output: text on stdout, files, and an exit status: 1 where a layer misses or fails. Measures
nothing itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch
from rich.console import Console

from ttmdsl import tuning
from ttmdsl.aot import parse_variant
from ttmdsl.bench import report
from ttmdsl.bench.clock import clock_for
from ttmdsl.bench.measure import Row, Wanted, bench
from ttmdsl.bench.subjects import Case
from ttmdsl.errors import LoadError
from ttmdsl.loader import layers, read

LOST = 3  # exit status of a benchmark whose device is unusable; with --resume it goes on after the row that failed
SHAPES = {"cuda": (8, 2048, 16, 64), "cpu": (1, 256, 2, 64)}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def cases(arguments: argparse.Namespace, device: str, backend: str = "auto") -> Iterator[Case]:
    """Every layer at every shape; a spec that cannot be read is an error before anything is measured."""
    variants = [
        name for given in (arguments.spec, *arguments.more) for name in (layers() if given == "all" else [given])
    ]
    consts = "".join(f":{name}={value:g}" for name, value in arguments.set)
    shapes = list(arguments.shape) or [SHAPES[device]]
    for length in getattr(arguments, "lengths", None) or ():
        shapes.append((shapes[0][0], length, *shapes[0][2:]))
    variants = [variant + consts for variant in variants]
    for variant in variants:
        read(parse_variant(variant)[0])
    dtype = arguments.dtype or DTYPES[device]
    for variant in variants:
        yield from (Case(variant, shape, dtype, device, backend) for shape in dict.fromkeys(shapes))


def bench_command(arguments: argparse.Namespace) -> int:
    """Measures, prints every row as it comes and a table at the end."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise LoadError("--device cuda: there is none here")
    if arguments.png:
        report.require_matplotlib()
    if arguments.resume and not arguments.json:
        raise LoadError("--resume: of which file? Give --json FILE, too")
    wanted = Wanted(**{field.name: getattr(arguments, field.name) for field in fields(Wanted)})
    chosen = list(cases(arguments, device, arguments.backend))
    if wanted.peers and device == "cuda":
        from ttmdsl.bench import peers

        if arguments.brief:
            peers.tune_briefly()
        if arguments.insist:
            peers.insist()
    rows: list[Row] = report.saved(arguments.json) if arguments.resume else []
    about = report.machine(device)
    new: list[Row] = []
    clock = clock_for(torch.device(device))
    for row in bench(chosen, clock, wanted, {row.key for row in rows}):
        new.append(row)
        print(report.line(row), flush=True)
        if arguments.json:
            report.save(arguments.json, about, [*rows, *new])
        if row.failed and not clock.usable():  # a kernel has read where it should not: the rest is for another process
            return LOST
    Console(width=None if sys.stdout.isatty() else 170).print(report.table([*rows, *new]))
    if arguments.png:
        report.draw([*rows, *new], arguments.png)
    return int(any(row.failed for row in new if row.who.startswith("ttmdsl")))


def _known(target: str, tables: tuning.Tables, path: Path) -> tuning.Table:
    """All tables of this GPU together, that of the path last."""
    found = tables.by_capability.get(int(target.removeprefix("sm_")), tuning.Table(target))
    return found.merge(tuning.read(path)) if path.exists() else found


def tune_command(arguments: argparse.Namespace) -> int:
    """Measures candidates on this GPU and extends a table."""
    from ttmdsl.bench.lab import GpuLab
    from ttmdsl.bench.tune import Settings, tune
    from ttmdsl.options import Options

    if not torch.cuda.is_available():
        raise LoadError("tune: launch configurations can only be measured on a GPU, and there is none here")
    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}"
    folders = Options.from_environment().tuned
    path = arguments.output or folders[-1] / f"{target}.json"
    chosen = [replace(case, backend="triton") for case in cases(arguments, "cuda")]
    with GpuLab(arguments.jobs) as lab:
        asks = arguments.orders or arguments.missing or arguments.only
        tables = tuning.read_all(folders)
        known = _known(target, tables, path) if asks else None
        measured = [entry for table in tables.by_capability.values() for entry in table.kernels]
        settings = Settings(
            arguments.budget, known=known, missing=arguments.missing, only=arguments.only, measured=measured
        )
        found = tune(chosen, target, path, settings, lab, lambda text: print(text, flush=True))
    print(f"{path}: {len(found.kernels)} kernels, {len(found.chunks)} forms, {len(found.excluded)} excluded")
    return 0
