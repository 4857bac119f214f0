"""The command line: build, check, explain, show, aot, bench, tune and list.

Input: arguments, without the program's name. Output: text or a table on stdout, and an exit status: 0, 1 for a failed
check, 2 for a spec or an argument that is wrong. Computes nothing itself; a command imports what it needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttmdsl.errors import LoadError, TtmError
from ttmdsl.tuning import CONFIG
from ttmdsl.version import VERSION

if TYPE_CHECKING:
    from ttmdsl.pipeline import Job
    from ttmdsl.spec import LayerSpec


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except TtmError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


# ---- commands -----------------------------------------------------------------------------------------------


def _build(arguments: argparse.Namespace) -> int:
    from ttmdsl.cache import write_atomically

    text = _run(arguments).done["emit"]
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    try:
        write_atomically(arguments.output, text)
    except OSError as error:
        raise LoadError(f"{arguments.output}: cannot write the module ({error.strerror})") from None
    print(f"{arguments.output}: {len(text.splitlines())} lines", file=sys.stderr)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it where the kernels are defined, at import
        from ttmdsl.interpreted import lighten

        lighten()
    from rich.console import Console
    from rich.progress import track

    from ttmdsl.check import unused
    from ttmdsl.loader import load
    from ttmdsl.parity import SHAPES, Row, parity, table

    module = load(arguments.spec, **dict(arguments.set))
    job = _run(arguments, after="parse")
    for note in unused(job.done["parse"]):
        print(note.render(job.text, job.filename), file=sys.stderr)
    rows: list[Row] = []
    errors = Console(stderr=True)
    for number, shape in enumerate(track(SHAPES, "comparing with the reference", console=errors, transient=True)):
        try:
            rows += parity(module, shapes=[shape], seed=number)
        except RuntimeError as error:  # a backend that cannot run is a miss of its own
            print(error, file=sys.stderr)
            return 1
    Console().print(table(rows, _title(arguments)))
    misses = sum(not row.ok for row in rows)
    verdict = f"{misses} of {len(rows)} comparisons miss" if misses else f"all {len(rows)} comparisons hold"
    print(f"{verdict} ({', '.join(shape.label for shape in SHAPES)})")
    return 1 if misses else 0


def _explain(arguments: argparse.Namespace) -> int:
    from ttmdsl.explain import explain

    job = _run(arguments, after="lower")
    print(explain(job.done["derive"], job.done["lower"].title, arguments.latex))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ttmdsl.pipeline import show

    sys.stdout.write(show(_run(arguments, after=arguments.after), arguments.after))
    return 0


def _aot(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from ttmdsl.aot import compile_all, table, to_json

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("compiling kernels")
        rows = compile_all(
            [arguments.spec, *arguments.more],
            arguments.heads,
            arguments.targets,
            arguments.dtype,
            dict(arguments.set),
            arguments.jobs,
            lambda finished, total: progress.update(bar, completed=finished, total=total),
            not arguments.op_only,
            arguments.lengths,
        )
    failed, spilled = sum(bool(row.error) for row in rows), sum(row.stack > 0 for row in rows)
    if arguments.json:
        print(to_json(rows))
    else:
        Console().print(table(rows))
        print(f"{len(rows)} kernels: {failed} failed, {spilled} spill registers")
    return 1 if failed else 0


def _bench(arguments: argparse.Namespace) -> int:
    from ttmdsl.bench.command import bench_command

    return bench_command(arguments)


def _tune(arguments: argparse.Namespace) -> int:
    from ttmdsl.bench.command import tune_command

    return tune_command(arguments)


def _list(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ttmdsl.loader import layers

    table = Table(box=None, pad_edge=False, show_header=False)
    for name in layers():
        arguments.spec = name
        spec = _run(arguments, after="check").done["check"]
        parts = [f"{kind}s {_declared(spec, kind)}" for kind in ("input", "gate", "param") if _declared(spec, kind)]
        if spec.consts:
            parts.append("constants " + ", ".join(f"{const}={value:g}" for const, value in spec.consts.items()))
        what = Text(spec.source.splitlines()[0].removeprefix("#").strip() + "\n").append("; ".join(parts), style="dim")
        table.add_row(Text(name, style="bold", no_wrap=True), what)
    Console().print(table)
    return 0


def _declared(spec: LayerSpec, kind: str) -> str:
    """The keywords of one kind with their dims."""
    tensors = [t for t in spec.tensors if t.kind == kind]
    return ", ".join(t.keyword + (f"[{', '.join(t.shape)}]" if t.shape else "") for t in tensors)


# ---- arguments ----------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace, after: str = "emit") -> Job:
    from ttmdsl.loader import constants, read
    from ttmdsl.options import Options
    from ttmdsl.pipeline import run

    text, filename = read(arguments.spec)
    return run(text, filename, constants(dict(arguments.set)), Options.from_environment(), after)


def _title(arguments: argparse.Namespace) -> str:
    return " ".join([arguments.spec, *(f"{name}={value:g}" for name, value in arguments.set)])


def _setting(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if not equals or not name.isidentifier():
            raise ValueError
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a constant and its value, such as b=16, got {text!r}") from None


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers such as 64,128, got {text!r}")
    return [int(word) for word in words]


def _shape(text: str) -> tuple[int, ...]:
    numbers = _numbers(text)
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"expected B,T,H,D such as 8,2048,16,64, got {text!r}")
    return tuple(numbers)


def _parser() -> argparse.ArgumentParser:
    from ttmdsl.pipeline import STAGES

    parser = argparse.ArgumentParser(prog="ttmdsl", description="A compiler for test-time-memory layers.")
    parser.add_argument("--version", action="version", version=f"ttmdsl {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable[[argparse.Namespace], int], name: str, title: str) -> Any:
        added = commands.add_parser(name, help=title, description=title)
        added.set_defaults(run=run, set=[])
        if run is not _list:
            added.add_argument("spec", metavar="SPEC", help="a shipped layer's name, or the path of a .ttm file")
            added.add_argument(
                *("--set", "-s"),
                action="append",
                type=_setting,
                default=[],
                metavar="NAME=VALUE",
                help="a constant of the spec; may be given several times",
            )
        return added

    build = command(_build, "build", "write the generated module")
    build.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to; stdout without it")
    check = command(_check, "check", "compare every backend that can run here with the reference")
    check.add_argument("--interpret", action="store_true", help="run the Triton kernels in Triton's interpreter")
    explain = command(_explain, "explain", "print the derivation: loss, gradient, update, readout, class of recurrence")
    explain.add_argument("--latex", action="store_true", help="as LaTeX")
    show = command(_show, "show", "print what a stage of the compiler made")
    stages = [stage.name for stage in STAGES]
    show.add_argument("--after", required=True, choices=stages, metavar="STAGE", help="one of " + ", ".join(stages))
    aot = command(_aot, "aot", "compile all kernels ahead of time, without a GPU: registers, spills, shared memory")
    aot.add_argument("more", nargs="*", metavar="SPEC", help="more layers; constants may follow one, as in trellis:b=1")
    aot.add_argument(
        "--heads", type=_numbers, default="64", metavar="N,N", help="head sizes (default 64), inner dims 4x"
    )
    aot.add_argument("--targets", type=_words, default="sm_90", metavar="SM,SM", help="GPUs (default sm_90)")
    aot.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the inputs")
    aot.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at work (default 1)")
    aot.add_argument("--op-only", action="store_true", help="without what is around `op` in `Layer`")
    aot.add_argument("--lengths", action="store_true", help="also as odd lengths and calls of few tokens start them")
    aot.add_argument("--json", action="store_true", help="print JSON instead of a table")
    bench = command(_bench, "bench", "time layers beside their peers, checked first; a table, JSON and a plot over T")
    tune = command(
        _tune, "tune", "measure launch configurations on this GPU; what is compiled afterwards takes the best"
    )
    for timed in (bench, tune):
        timed.add_argument(
            "more", nargs="*", metavar="SPEC", help="more layers, as trellis:b=64; or all, for every one"
        )
        what = "a batch; may be given several times (default 8,2048,16,64 on a GPU, else 1,256,2,64)"
        timed.add_argument("--shape", action="append", type=_shape, default=[], metavar="B,T,H,D", help=what)
        timed.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of the inputs")
    bench.add_argument("--lengths", type=_numbers, metavar="T,T", help="the first shape at these lengths too")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="(default cuda, if there is one)")
    bench.add_argument("--backend", default="auto", choices=("auto", "triton", "torch"), help="(default auto)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every row as soon as it is measured")
    bench.add_argument("--resume", action="store_true", help="keep the rows of that file, and measure what it lacks")
    bench.add_argument("--png", type=Path, metavar="FILE", help="draw times over T")
    for name, default, what in (
        ("peers", True, "the layer's peers that are installed; on a CPU the reference"),
        ("check", True, "outputs and gradients against float64 first; what misses is not timed"),
        ("step", True, "decode steps of 64 sequences"),
        ("cold", False, "first calls in processes of their own, with and without caches"),
        ("compiled", False, "the torch backend under torch.compile"),
        ("kernels", False, "each kernel's share"),
        ("brief", False, "shorten the autotuning of peers, which takes many minutes"),
        ("insist", False, "have peers run what they refuse to for being wrong here: for times only"),
    ):
        option = argparse.BooleanOptionalAction
        bench.add_argument(f"--{name}", action=option, default=default, help=what)
    tune.add_argument(
        "--budget", type=float, default=540, metavar="SECONDS", help="no new candidate after (default 540)"
    )
    some = tune.add_mutually_exclusive_group()
    told = "the orders in which kernels compute their values alone, launched as tables have them"
    some.add_argument("--orders", action="store_true", help=told)
    told = "those kernels alone that tables have nothing of at this shape, beside the others as they have them"
    some.add_argument("--missing", action="store_true", help=told)
    told = "configurations alone that say this, as what tables from before know nothing of, beside what these have"
    some.add_argument("--only", default="", choices=sorted(CONFIG), metavar="KEY", help=told)
    jobs = max(2, min(12, os.cpu_count() or 4))  # Triton compiles on one core a process, or little more
    told = f"processes that compile and check (default {jobs} here: the cores, 12 at most)"
    tune.add_argument("--jobs", type=int, default=jobs, metavar="N", help=told)
    tune.add_argument("-o", "--output", type=Path, metavar="FILE", help="the table to extend (default: the user's own)")
    command(_list, "list", "list the shipped layers")
    return parser
