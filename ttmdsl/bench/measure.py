"""The rows of a benchmark: every layer at every shape, by this package and by its peers; nothing wrong is timed.

Input: `Case`s and what to measure. Output: `Row`s, each as soon as it is measured. Before any time of a layer counts,
its outputs and all gradients are compared with float64 at short lengths and the same head size; a layer that misses has
a row that says so. Prints nothing; chooses nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ttmdsl.bench.clock import Clock
from ttmdsl.bench.subjects import DECODED, Case, Subject, initial_state, others, own, tensors

Key = tuple[str, tuple[int, ...], str, str]  # layer, shape, dtype, who

APART = 5e-2  # a relative difference beyond what two ways of rounding to bfloat16 explain
STEP = "decode step:"  # how a failure begins that leaves the other times as they are


@dataclass(frozen=True, slots=True)
class Row:
    """What one subject takes at one case, in milliseconds and MiB; None was not measured or does not exist.

    `graph_*` are of a replayed CUDA graph. `floor_*` is the time in which the tensors that must move are moved once, at
    the device's measured rate of copying. `first_*` are the seconds of the first forward and backward in a process of
    its own: cold with no cache, warm with what the cold one left on disk. `error` is the worst relative error against
    float64, for a peer that of its y against ours. `failed` says why there are no times, or none that count.
    """

    layer: str
    shape: tuple[int, int, int, int]
    dtype: str
    who: str
    forward: float | None = None
    both: float | None = None
    graph_forward: float | None = None
    graph_both: float | None = None
    step: float | None = None
    graph_step: float | None = None
    peak: float | None = None
    floor_forward: float | None = None
    floor_both: float | None = None
    floor_step: float | None = None
    first_cold: float | None = None
    first_warm: float | None = None
    error: float | None = None
    failed: str = ""
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.layer, tuple(self.shape), self.dtype, self.who


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is measured beside forward, and forward and backward."""

    peers: bool = True
    check: bool = True
    compiled: bool = False
    cold: bool = False
    step: bool = True
    kernels: bool = False


def moved(module: Any, case: Case) -> tuple[int, int, int]:
    """Bytes that forward must move, inputs and y, and that forward and backward must: the inputs and the cotangent once
    more, and the gradients; for q, k, v and y alike eleven tensors. Memories stay on the chip. Third, the bytes of a
    step's states, read and written."""
    small = replace(case, shape=(1, 1, *case.shape[2:]), device="cpu")
    x, state = tensors(module, small), initial_state(module, small)
    with torch.no_grad():
        y, final = module.op(**x, initial_state=state, output_final_state=True, backend="torch")
    tokens = case.shape[0] * case.shape[1]
    read = sum(t.nbytes * (1 if name in module.PARAMS else tokens) for name, t in x.items())
    return (
        read + tokens * y.nbytes,
        3 * read + 2 * tokens * y.nbytes,
        2 * DECODED * sum(t.nbytes for t in final.values()),
    )


def resolved(case: Case) -> str:
    """The backend that "auto" stands for."""
    return ("triton" if case.device == "cuda" else "torch") if case.backend == "auto" else case.backend


def verdict(module: Any, case: Case, kept: Path | None = None) -> tuple[float, str]:
    """The worst relative error of outputs, final states and gradients, and what misses, if anything does.

    At lengths of whole units, whose kernels need no masks, with states that are given and asked for and, with decays in
    float32, as what is timed has them, without; at others; and for one token from a state, as in decoding. Without
    gradients the outputs must be the same. The oracle is the reference where the torch backend is what is timed, else
    that backend in float64, which the tests hold to the reference; what it finds is kept in a folder, if one is given.
    """
    from ttmdsl.drawing import Shape, dims_at
    from ttmdsl.parity import parity, steady, step_errors

    backend, (_, _, H, D) = resolved(case), case.shape
    lengths = (33,) if backend == "torch" else (128, 67)
    alike = Shape("", heads=H, dims=dims_at(module, D))  # kernels know the number of heads
    shapes = [replace(alike, label=f"T={T}", tokens=T, state=lengths[0] == T) for T in lengths]
    shapes.append(replace(alike, label="y alone", tokens=lengths[0], state=False, final=False, exact=True))
    shapes.append(replace(alike, label="a step", batch=2))
    oracle = "reference" if backend == "torch" else "torch"
    how: dict[str, Any] = {"dtypes": [case.torch_dtype], "device": case.device, "oracle": oracle, "kept": kept}
    try:
        rows = parity(module, shapes=shapes, backends=[backend], **how)
        plain = own(replace(case, shape=(1, lengths[0], H, D)), module, backend)
        alone, trained = plain.only_forward()(), plain.forward().detach()
        drawn, *_ = steady(module, shapes[-1], case.torch_dtype, case.device, oracle, len(shapes) - 1, kept)
        apart = step_errors(module, drawn, backend, case.device)
    except Exception as error:  # a backend that cannot run, or no memory for the oracle
        return float("nan"), f"check: {error}"[:300]
    if not rows:
        return float("nan"), f"check: {backend} does not take this layer at D = {D}"
    misses = [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok]
    if not torch.allclose(alone, trained, rtol=1e-2, atol=1e-2, equal_nan=True):  # type: ignore[arg-type]
        misses.append("y without gradients")
    misses += [f"{name} of a step without gradients" for name, error in apart.items() if error > 1e-2]
    return max(row.error for row in rows), f"check: {', '.join(misses)}"[:300] if misses else ""


def bench(cases: Iterable[Case], clock: Clock, wanted: Wanted, done: Container[Key] = ()) -> Iterator[Row]:
    """Rows as they come; those `done` before are left out."""
    rate = functools.cache(clock.copy_rate)
    verdicts: dict[tuple[object, ...], tuple[float, str]] = {}
    for case in cases:
        who = f"ttmdsl {resolved(case)}"
        mine = Row(case.layer, case.shape, case.dtype, who)
        module = case.load()
        if mine.key not in done:
            about = (case.layer, case.shape[2:], case.dtype)
            if wanted.check and about not in verdicts:
                verdicts[about] = verdict(module, case)
            error, failed = verdicts.get(about, (None, ""))
            mine = replace(mine, error=error, failed=failed)
            if not failed:
                floor = [1000 * count / rate() for count in moved(module, case)]
                mine = replace(mine, floor_forward=floor[0], floor_both=floor[1], floor_step=floor[2])
                mine = timed(mine, lambda c=case, m=module: own(c, m, resolved(c)), clock, wanted)  # type: ignore[misc]
                if wanted.cold:
                    mine = first(mine, case)
            yield mine
        yield from _others(case, module, clock, wanted, done, trusted=not mine.failed)


def _others(
    case: Case, module: Any, clock: Clock, wanted: Wanted, done: Container[Key], trusted: bool
) -> Iterator[Row]:
    """The peers' rows; their y is compared with ours where that is `trusted`."""

    @functools.cache
    def expected() -> Any:
        return own(case, module, resolved(case)).only_forward()()

    def compare(subject: Subject) -> float | None:
        return apart(subject.only_forward()(), expected()) if subject.same else None  # type: ignore[arg-type]

    for who, make in others(case, module, wanted.peers, wanted.compiled):
        row = Row(case.layer, case.shape, case.dtype, who)
        if row.key not in done:
            row = timed(row, make, clock, wanted, compare if trusted else None)
            if not row.failed and row.error is not None and row.error > APART:
                row = replace(row, failed=f"its y is apart from ours by {row.error:.1e}: not the same function")
            yield row


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative RMS difference."""
    from ttmdsl.parity import relative_error

    return relative_error(got.detach().double(), expected.detach().double())


def timed(
    row: Row,
    make: Callable[[], Subject],
    clock: Clock,
    wanted: Wanted,
    compare: Callable[[Subject], float | None] | None = None,
) -> Row:
    """The row with the subject's times, and its error as `compare` finds it; what came before a failure stays."""
    try:
        subject = make()
        forward, both = subject.only_forward(), subject.both()
        forward(), both()  # what is compiled at a first call is no part of any time
        row = replace(row, forward=clock.ms(forward), both=clock.ms(both), peak=clock.peak_mib(both))
        row = replace(row, graph_forward=clock.graph_ms(forward), graph_both=clock.graph_ms(both))
        if wanted.kernels:
            row = replace(row, kernels=clock.kernels(both))
        if compare:
            row = replace(row, error=compare(subject))
    except Exception as error:  # whatever a peer or a kernel raises is a result
        return replace(row, failed=f"{type(error).__name__}: {error}"[:300])
    try:
        if wanted.step and subject.step:
            step = subject.step()
            row = replace(row, step=clock.ms(step), graph_step=clock.graph_ms(step))
    except Exception as error:
        return replace(row, failed=f"{STEP} {type(error).__name__}: {error}"[:300])
    return row


def first(row: Row, case: Case) -> Row:
    """The row with the seconds of first calls."""
    from ttmdsl.bench.first import cold_and_warm

    try:
        cold, warm = cold_and_warm(case)
    except (RuntimeError, OSError) as error:
        return replace(row, failed=f"first call: {error}"[:300])
    return replace(row, first_cold=cold, first_warm=warm)
