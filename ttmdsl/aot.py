"""Kernels compiled ahead of time, for a GPU that need not be there: failures and spills show before anything runs.

Input: variants of layers such as "trellis:b=1", head sizes, targets such as "sm_90". Output: one `Resources` for each
kernel: registers, stack (spilled bytes) and shared memory, or the compiler's error. Runs nothing on a GPU and times no
kernel. What was compiled before, from the same source by the same Triton, comes from Triton's own cache.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Literal

from ttmdsl.errors import LoadError
from ttmdsl.machine_code import mixed_up, resource_usage

if TYPE_CHECKING:
    from rich.table import Table

# Shared memory that one block may have, in KiB, by compute capability.
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
AROUND = "_(layer|past)_"  # what the names begin with of kernels around `op`
OF_OP = f"(?!{AROUND})"
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


@dataclass(frozen=True, slots=True)
class Job:
    """All kernels of one variant of a layer, also those around `op` in `Layer`, or those alone whose names match the
    pattern `named`; at one head size, an inner dim of memories four times as wide, for one target. `lengths`: not only
    as sequences of whole chunks start them, but also as others and calls of few tokens do."""

    variant: str
    head: int
    target: str
    dtype: str
    consts: tuple[tuple[str, float], ...] = ()
    named: str = ""
    lengths: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes. `stack` in bytes: above 0, registers were spilled. `waits`: tensors that a walk over
    chunks loads when it comes to a chunk, and not ahead. `error` is empty if it compiled, and its code mixes up no
    values."""

    variant: str
    kernel: str
    target: str
    head: int
    dtype: str
    warps: int = 0
    registers: int = 0
    stack: int = 0
    shared: int = 0
    seconds: float = 0.0
    error: str = ""
    waits: int = 0


def parse_variant(variant: str) -> tuple[str, dict[str, float]]:
    """The layer's name or path, and the constants that follow it, as in "lattice_dec:b=16:project=0"."""
    name, *settings = variant.split(":")
    consts: dict[str, float] = {}
    for setting in settings:
        const, equals, value = setting.partition("=")
        try:
            consts[const] = float(value)
        except ValueError:
            equals = ""
        if not equals or not const.isidentifier():
            raise LoadError(f"{variant!r}: expected constants such as b=16 after the colons, got {setting!r}")
    return name, consts


def capability(target: str) -> int:
    """The compute capability of a target such as "sm_90"."""
    known = {f"sm_{number}": number for number in SHARED_KIB}
    if target not in known:
        raise LoadError(f"target {target!r}: expected one of {', '.join(known)}")
    return known[target]


# ---- many kernels -------------------------------------------------------------------------------------------


def compile_all(
    variants: Iterable[str],
    heads: Iterable[int] = (64,),
    targets: Iterable[str] = ("sm_90",),
    dtype: str = "bfloat16",
    consts: Mapping[str, float] | None = None,
    processes: int = 1,
    done: Callable[[int, int], None] = lambda finished, total: None,
    around: bool = True,
    lengths: bool = False,
) -> list[Resources]:
    """Compiles every kernel of every variant, head size and target, if asked for those `around` `op` in `Layer`, too,
    and as calls of other `lengths` start them; `done` hears of the progress."""
    variants, targets = list(variants), list(targets)
    for variant in variants:
        parse_variant(variant)
    for target in targets:
        capability(target)
    given = tuple(sorted((consts or {}).items()))
    largest_first = sorted(heads, reverse=True)  # they take longest
    named = "" if around else OF_OP
    jobs = [Job(v, h, t, dtype, given, named, lengths) for h in largest_first for v in variants for t in targets]
    found: dict[Job, list[Resources]] = {}
    for job, rows in _in_processes(jobs, processes):
        found[job] = rows
        done(len(found), len(jobs))
    order = sorted(jobs, key=lambda j: (variants.index(j.variant), j.head, targets.index(j.target)))
    return [row for job in order for row in found[job]]


def _in_processes(jobs: list[Job], processes: int) -> Iterator[tuple[Job, list[Resources]]]:
    """Each job's result as it comes. Processes of their own: Triton is to be imported there as a compiler, whatever it
    is here, and may take its process down; who was at work then has another try, alone."""
    left = dict.fromkeys(jobs)
    try:
        with _pool(processes) as pool:
            futures: dict[Future[list[Resources]], Job] = {pool.submit(compile_kernels, job): job for job in jobs}
            for future in as_completed(futures):
                rows = future.result()
                del left[futures[future]]
                yield futures[future], rows
    except BrokenProcessPool:
        for job in list(left):
            with _pool(1) as pool:
                try:
                    rows = pool.submit(compile_kernels, job).result()
                except BrokenProcessPool:
                    lost = Resources(job.variant, "(some kernel)", job.target, job.head, job.dtype)
                    rows = [replace(lost, error="the compiler took its process down")]
            yield job, rows


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, get_context("spawn"), _as_compiler)


def _as_compiler() -> None:
    """Triton reads this when kernels are defined, which then compile instead of being interpreted."""
    os.environ.pop("TRITON_INTERPRET", None)


# ---- one kernel ---------------------------------------------------------------------------------------------


def compile_kernels(job: Job) -> list[Resources]:
    """Compiles every kernel of the job, in this process."""
    importlib.import_module("triton")  # before the module, which defines kernels only where Triton is in use

    from ttmdsl.drawing import dims_at, kernels_hold, sizes_of
    from ttmdsl.loader import load

    name, consts = parse_variant(job.variant)
    module = load(name, **(dict(job.consts) | consts))
    sizes = sizes_of(module, dims_at(module, job.head))
    found = (value for value in vars(module).values() if isinstance(value, module._Kernel))
    kernels = [k for k in found if k.name.endswith("_kernel") and re.match(job.named, k.name)]
    if not kernels_hold(module, sizes):
        return [Resources(job.variant, "(none: torch takes so many features)", job.target, job.head, job.dtype)]
    starts = [*module.STEP_POINTERS]  # the last for a step of one token, the first for more
    if not _by_tokens(job, module, sizes):
        kernels = [k for k in kernels if not k.name.startswith("_token_") or k.name in starts[-1:]]
    rows = [_compile(job, module, kernel, sizes) for kernel in kernels if kernel.name not in starts[1:]]
    shared = [k for k in kernels if k.name in getattr(module, "_SHARED", {})]
    few = [k for k in shared if next(_launches(job, module, k.name, sizes, "few"))[0]["SHARES"] > 1]
    rows += [_compile(job, module, kernel, sizes, "few") for kernel in few]
    rows += [_compile(job, module, k, sizes, "step") for k in kernels if k.name in starts[-1:]]
    if job.lengths:
        chunked = [k for k in kernels if "EVEN" in k.jit.arg_names and "_token_" not in k.name]
        rows += [_compile(job, module, kernel, sizes, "masked") for kernel in chunked]
        passing = [k for k in chunked if "passed" in module.KERNEL_POINTERS[k.name].values()]
        light = [k for k in passing if _passed(job, module, k.name, sizes) != "float32"]
        rows += [_compile(job, module, kernel, sizes, "light") for kernel in light]
    return rows


def _by_tokens(job: Job, module: Any, sizes: dict[str, int]) -> bool:
    """Whether few tokens with gradients start kernels that hold states whole: not where features are walked over that
    make these larger than what such a call has room for."""
    import torch

    if not hasattr(module, "_one_by_one") or not module.FEATURES:
        return True
    states = {k: torch.empty(1, 1, *(sizes[d] for d in dims), device="meta") for k, dims in module.MEMORY.items()}
    return bool(module._one_by_one(1, getattr(torch, job.dtype), states))


Case = Literal["", "step", "few", "masked", "light"]
# how a kernel's name goes on in a row, and what `kernel_launches` is asked for
_CASES: dict[Case, tuple[str, dict[str, bool]]] = {
    "": ("", {}),
    "step": (", a step", {"step": True}),
    "few": (", few heads", {"few": True}),
    "masked": (", masked tokens", {"whole": False}),
    "light": (", few tokens", {"whole": False, "light": True}),
}


def _launches(
    job: Job, module: Any, name: str, sizes: dict[str, int], case: Case
) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Constants and options that a kernel's launch tries in such a case, best first."""
    import torch

    _, how = _CASES[case]
    return iter(module.kernel_launches(name, sizes, getattr(torch, job.dtype), capability(job.target), **how))


def _compile(job: Job, module: Any, of: Any, sizes: dict[str, int], case: Case = "") -> Resources:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, kernel, gpu = of.name, of.jit, capability(job.target)
    if hasattr(of, "ahead"):  # it says so itself
        pointers, *launch = of.ahead(job.head)
        launches, passed = iter([launch]), job.dtype
    else:
        pointers = module.KERNEL_POINTERS[name]
        launches = _launches(job, module, name, sizes, case)
        passed = "float32" if case == "light" else _passed(job, module, name, sizes)
    lacking = dict.fromkeys(module.STEP_POINTERS.get(name, {}).get("more" if case == "step" else "step", ()))
    spot = Resources(job.variant, name + _CASES[case][0], job.target, job.head, job.dtype)
    limit = SHARED_KIB[gpu] * 1024
    began = time.perf_counter()
    for given, options in launches:
        constants = {k: v for k, v in {**given, **lacking}.items() if k in kernel.arg_names}
        signature = {
            argument: "constexpr" if argument in constants else _pointer(pointers.get(argument), job.dtype, passed)
            for argument in kernel.arg_names
        }
        # as a launch with torch's tensors would find: their addresses are multiples of 16
        aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if signature[a][0] == "*"}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        *ways, most = module._if_it_spills(options)
        spot = replace(spot, warps=ways[0]["num_warps"])
        try:
            binary, taken = _built(source, GPUTarget("cuda", gpu, 32), ways, limit, most)
        except Exception as error:  # whatever the compiler raises is a result
            lines = str(error).strip().splitlines() or [""]
            return replace(spot, error=f"{type(error).__name__}: {lines[-1][:300]}")
        if taken["shared"] <= limit:
            break
    copies = (constants.get("STAGES") or 1) > 1
    failure = f"{taken['shared']} bytes of shared memory, {job.target} has {limit}" if taken["shared"] > limit else ""
    # it takes half a second, and what was seen lost was spilled, or taken by a walk over blocks from before it
    *_, inner = getattr(module, "_KERNELS", {}).get(name, ("",))
    walks = inner and constants[f"P_{inner}"] < constants[f"N_{inner}"]
    if (taken["stack"] or walks) and (wrong := mixed_up(binary.asm["cubin"])):
        failure = f"ptxas mixes up {len(wrong)} values, the first {wrong[0]}"
    return replace(
        spot,
        **taken,
        waits=loads_in_loops(binary.asm["ttgir"]) if copies and "_token_" not in name else 0,
        seconds=round(time.perf_counter() - began, 2),
        error=failure,
    )


def _built(source: Any, target: Any, ways: list[dict[str, Any]], limit: int, most: float) -> tuple[Any, dict[str, Any]]:
    """A kernel's binary by the first of these options, or by the next where it finds room, up to a `limit`, and spills
    more than `most` bytes; and what it takes, by `Resources`' names."""
    import triton

    for options in ways:
        binary = triton.compile(source, target=target, options=options)
        registers, stack = resource_usage(binary.asm["cubin"])
        shared = binary.metadata.shared
        if shared > limit or stack <= most:
            break
    return binary, {"warps": options["num_warps"], "registers": registers, "stack": stack, "shared": shared}


def _passed(job: Job, module: Any, name: str, sizes: dict[str, int]) -> str:
    """The dtype in which kernels of this one's form pass values to one another, if they pass any."""
    import torch

    if "passed" not in module.KERNEL_POINTERS[name].values():
        return job.dtype
    return str(module._computing(sizes, name.split("_")[1], getattr(torch, job.dtype))).removeprefix("torch.")


def _pointer(held: str | None, dtype: str, passed: str) -> str:
    """An argument's type in a kernel's signature: by what the module says it holds, else a tensor of the schedule. For
    inputs of a `dtype`, and values `passed` on in another."""
    known = {"float64": "*fp64", "int64": "*i64", "int32": "*i32", "count": "i32", "number": "fp32"}
    known |= {
        "input": POINTERS[dtype],
        "passed": POINTERS[passed],
        "half": POINTERS["float32" if dtype == "float32" else "float16"],
    }
    return known.get(held or "int64", POINTERS["float32"])


def loads_in_loops(ttgir: str) -> int:
    """How many loads Triton left in a kernel's loops, by its own text: all others it copies to shared memory ahead."""
    found = 0
    margins: list[str] = []  # of the loops that a line is in
    for line in ttgir.splitlines():
        margin = line[: len(line) - len(line.lstrip())]
        if margins and line.startswith(margins[-1] + "}"):
            margins.pop()
        elif "scf.for" in line:
            margins.append(margin)
        found += bool(margins) and "tt.load" in line
    return found


# ---- reports ------------------------------------------------------------------------------------------------


def to_json(rows: Iterable[Resources]) -> str:
    """One object for each kernel, a line each."""
    return "[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]"


def table(rows: Iterable[Resources]) -> Table:
    """A line for each kernel."""
    from rich.table import Table

    result = Table("layer", "kernel", "target", box=None, pad_edge=False)
    for title in ("head", "warps", "registers", "stack", "shared", "waits", "seconds"):
        result.add_column(title, justify="right")
    result.add_column("")
    for row in rows:
        numbers = (row.head, row.warps, row.registers, row.stack, row.shared, row.waits, row.seconds)
        style = "red" if row.error else "yellow" if row.stack else ""
        result.add_row(row.variant, row.kernel, row.target, *map(str, numbers), row.error, style=style)
    return result
