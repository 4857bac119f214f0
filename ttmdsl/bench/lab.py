"""The GPU at hand, for tune.py: trials are checked side by side and timed one at a time, in processes of their own.

Input: `Trial`s. Output: what is wrong with each, and microseconds of its kernels. A launch that reads where it should
not, or a compiler that crashes, takes only its own process down; that is then what is wrong with the trial.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from ttmdsl.bench.clock import CudaClock, clock_for
from ttmdsl.bench.measure import APART, verdict
from ttmdsl.bench.subjects import Case, own
from ttmdsl.bench.tune import Facts, Times, Trial, Verdict
from ttmdsl.drawing import dims_at, sizes_of
from ttmdsl.parity import family_errors
from ttmdsl.tuning import CONFIG, Entry, in_step, without_gradients

_Of = TypeVar("_Of")
_UNSAID = {"copied": 1, "in_shared": 0}  # what a launch has that says nothing of it; all else is as asked for then
PATIENCE = 240.0  # seconds that a trial may take: the first ones of a deep memory do take 120, side by side


class GpuLab:
    """`jobs` processes that check; one of them measures while the others wait."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._kept = TemporaryDirectory(prefix="ttmdsl-")  # what the oracle finds, for all trials
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._workers = [Worker() for _ in range(jobs)]
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> GpuLab:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        self._kept.cleanup()

    def facts(self, trial: Trial) -> Facts:
        return self._workers[0].ask(facts, trial)  # type: ignore[no-any-return]

    def times(self, trial: Trial) -> Times:
        return self._workers[0].ask(times, trial)  # type: ignore[no-any-return]

    def check(self, trials: Sequence[Trial]) -> list[Verdict]:
        def one(trial: Trial) -> Verdict:
            worker = self._free.get()
            try:
                answer: Verdict = worker.ask(functools.partial(check, kept=Path(self._kept.name)), trial)
                return answer
            except RuntimeError as error:
                return Verdict(str(error))
            finally:
                self._free.put(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(one, trials))


class Worker:
    """A process that answers, and is started anew where it was lost."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._process: Any = None
        self._pipe: Any = None

    def ask(self, function: Callable[[Trial], Any], trial: Trial) -> Any:
        """What the function makes of the trial, there. RuntimeError where it fails or is lost."""
        if self._process is None:
            context = get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send((function, trial))
            if not self._pipe.poll(self.patience):
                self.stop()
                raise RuntimeError(f"no answer within {self.patience:.0f} s")
            failed, answer, usable = self._pipe.recv()
        except (EOFError, OSError):
            self.stop()
            raise RuntimeError("it took its process down") from None
        if not usable:
            self.stop()
        if failed:
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(pipe: Any) -> None:
    """Answers until nobody asks; each time also whether the device still does, since some errors of it last."""
    os.environ["TTM_ORDERS"] = "all"  # trials may ask for each
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, trial = pipe.recv()
            try:
                answer = False, function(trial)
            except Exception as error:  # whatever it is, it is the trial's
                answer = True, f"{type(error).__name__}: {_short(str(error).strip())}"
            pipe.send((*answer, clock_for(torch.device(trial.case.device)).usable()))


def _short(text: str) -> str:
    """Its beginning and its end: what the device says stands first, what a compiler says last."""
    return text if len(text) <= 160 else f"{text[:80]} ... {text[-75:]}"


# ---- in such a process --------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(trial: Trial) -> Iterator[tuple[Any, dict[str, tuple[tuple[int, ...], int, int]]]]:
    """The case's module, launching as the trial says; and the places that its launches ask the table for. Few tokens
    are launched as many would be: light calls have other kernels, to which not all that is measured here goes."""
    module = trial.case.load()
    seen: dict[str, tuple[tuple[int, ...], int, int]] = {}

    def measured(
        table: object, name: str, tiles: tuple[int, ...], width: int, lanes: int, gpu: int, **_: object
    ) -> dict[str, int]:
        seen[name] = (tiles, width, lanes)
        return dict(trial.forced.get(name, {}))

    mine = {"_measured": measured} | ({"_LIGHT": 0} if hasattr(module, "_LIGHT") else {})
    original = {name: getattr(module, name) for name in mine}
    vars(module).update(mine)
    _forget(module)
    try:
        yield module, seen
    finally:
        vars(module).update(original)
        _forget(module)


def _forget(module: Any) -> None:
    """Drops what the module knows of earlier launches."""
    for name in ("_fitting", "_too_large"):
        getattr(module, name, set()).clear()
    if hasattr(module, "_schedule"):
        module._schedule.cache_clear()


@functools.lru_cache(maxsize=1)
def _works(case: Case) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward and backward pass, and a forward pass that none may follow."""
    subject = own(case, case.load(), "triton")
    return subject.both(), subject.only_forward()


def _results(case: Case) -> list[dict[str, torch.Tensor]]:
    """y, and all gradients, by their numbers."""
    both, forward = _works(case)
    gradients = {str(i): d.float() for i, d in enumerate(both()) if d is not None}
    return [{"y": forward().float()}, gradients]


@functools.lru_cache(maxsize=1)
def _by_the_rules(case: Case) -> list[dict[str, torch.Tensor]]:
    """Those that are finite: gradients that grow from token to token may overflow."""
    with launched(Trial(case)):
        return [{k: t for k, t in family.items() if bool(t.isfinite().all())} for family in _results(case)]


def strayed(trial: Trial) -> str:
    """How far results of all tokens, of which `check` has a few, are from those by the rules, if too far."""
    case = trial.case
    expected = _by_the_rules(case)
    with launched(trial):
        errors = [
            error
            for found, wanted in zip(_results(case), expected, strict=True)
            for error in family_errors({k: found[k] for k in wanted}, wanted, case.torch_dtype).values()
        ]
    worst = max((math.inf if math.isnan(error) else error for error in errors), default=0.0)
    return "" if worst <= APART else f"{case.shape[1]} tokens: {worst:.1e} from what it is by the rules"


def check(trial: Trial, kept: Path | None = None) -> Verdict:
    """What is wrong with the trial's outputs and gradients. `kept`: a folder for what they should be."""
    with launched(trial) as (module, _):
        wrong = verdict(module, trial.case, kept)[1]
        return Verdict(wrong) if wrong else refused(module, trial)


def refused(module: Any, trial: Trial) -> Verdict:
    """Which of the configurations that the trial asks for found no room, so that others were launched."""
    fitted = {alone if alone in trial.forced else name: _config(*how) for name, alone, *how in _fitted(module)}
    lacking = tuple(
        name
        for name, config in trial.forced.items()
        if name in fitted and not {**_UNSAID, **config}.items() <= {**config, **_UNSAID, **fitted[name]}.items()
    )
    return Verdict("no room on the device", lacking) if lacking else Verdict()


def _fitted(module: Any) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Of each launch the kernel's name, that of what it was launched as, and the tiles and options that found room."""
    for (name, _, _, keep, *_), (tiles, options) in getattr(module, "_fitting", {}).items():
        yield name, name if keep else without_gradients(name), tiles, options


def _config(tiles: dict[str, Any], options: dict[str, Any]) -> dict[str, int]:
    """What a launch may be told of itself. A thread may have all registers that there are by the rules, as by a
    configuration that says nothing; and all tensors are copied ahead, where these find room."""
    config = {key: int(value) for key, value in options.items() if key in CONFIG and key != "maxnreg"}
    fewer = config.get("num_stages", 1) > 1 and tiles.get("STAGES", 0) is None
    shares = tiles.get("SHARES", 1)
    more = {key: tiles.get(key.upper()) for key in ("dims_first", "in_shared")}
    more["shares"] = shares if shares > 1 else 0
    return config | {key: int(value) for key, value in more.items() if value} | ({"copied": 0} if fewer else {})


def times(trial: Trial) -> Times:
    """Microseconds of the module's own kernels. RuntimeError where it goes astray."""
    clock, wrong = CudaClock(), strayed(trial)
    if wrong:
        raise RuntimeError(wrong)
    with launched(trial) as (module, _):
        found, forward = map(clock.kernels, _works(trial.case))
        found |= {without_gradients(name): us for name, us in forward.items()}
        return {name: us for name, us in found.items() if name in module.KERNEL_SIGNATURES}


def facts(trial: Trial) -> Facts:
    """What the trial launches."""
    import triton

    case = trial.case
    with launched(trial) as (module, seen):
        for work in _works(case):
            work()
        places = dict(seen)
        fitted = {alone: (tiles, options) for _, alone, tiles, options in _fitted(module)}
        sizes = sizes_of(module, dims_at(module, case.shape[3]))
        gpu = module._capability(torch.device(case.device))

        def entry(name: str, signature: str, config: dict[str, int]) -> Entry:
            tiles, width, lanes = places[name]
            return Entry(signature, tuple(tiles), width, lanes, config, triton=triton.__version__)

        kernels, forms = {}, {}
        for name, signature in module.KERNEL_SIGNATURES.items():
            if name in places:
                kernel = next(k for k in module.KERNEL_POINTERS if name in (k, without_gradients(k), in_step(k)))
                chosen = fitted.get(name) or next(module.kernel_launches(kernel, sizes, case.torch_dtype, gpu))
                constants, options = chosen
                config = _config(constants, module._if_it_spills(options)[0])
                if kernel in module.KERNEL_BLOCKS:
                    config["block"] = int(constants[module.KERNEL_BLOCKS[kernel]])
                kernels[name] = entry(name, signature, config)
        for name, signature in module.FORM_SIGNATURES.items():
            if name in places:
                dtype = module._computing(sizes, name, case.torch_dtype)
                length, _, _ = module._lengths(name, sizes, dtype, places[name][2], gpu)
                forms[name] = entry(name, signature, {"chunk": length})
        orders = getattr(module, "_ORDERED", {})
        dims = {name: module.KERNEL_BLOCKS[name].removeprefix("P_") for name in getattr(module, "_IN_SHARED", ())}
        walked = {name: sizes[dim] for name, dim in dims.items()}
        return Facts(kernels, forms, _either_way(orders), _either_way(walked))


def _either_way(found: Mapping[str, _Of]) -> dict[str, _Of]:
    """What is known of kernels, also by the names that they have where no gradients may follow."""
    return {k: of for name, of in found.items() for k in (name, without_gradients(name))}
