"""The GPU at hand, for tune.py: trials are checked side by side and timed one at a time, in processes of their own.

Input: `Trial`s. Output: what is wrong with each, and microseconds of its kernels. A launch that reads where it should
not, or a compiler that crashes, takes only its own process down; that is then what is wrong with the trial.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any

import torch

from ttmdsl.bench.clock import CudaClock
from ttmdsl.bench.measure import verdict
from ttmdsl.bench.subjects import Case, dims_at, own
from ttmdsl.bench.tune import Facts, Times, Trial
from ttmdsl.drawing import sizes_of
from ttmdsl.tuning import CONFIG, Entry

PATIENCE = 120.0  # seconds that a trial may take, compilation included


class GpuLab:
    """`jobs` processes that check; one of them measures while the others wait."""

    def __init__(self, jobs: int) -> None:
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._workers = [Worker() for _ in range(jobs)]
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> GpuLab:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    def facts(self, trial: Trial) -> Facts:
        return self._workers[0].ask(facts, trial)  # type: ignore[no-any-return]

    def times(self, trial: Trial) -> Times:
        return self._workers[0].ask(times, trial)  # type: ignore[no-any-return]

    def check(self, trials: Sequence[Trial]) -> list[str]:
        def one(trial: Trial) -> str:
            worker = self._free.get()
            try:
                return str(worker.ask(check, trial))
            except RuntimeError as error:
                return str(error)
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
            failed, answer = self._pipe.recv()
        except (EOFError, OSError):
            self.stop()
            raise RuntimeError("it took its process down") from None
        if not _usable(str(answer)):  # a check tells of the errors that it met, and goes on
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


def _usable(message: str) -> bool:
    """Whether a process may go on after an error: not after one of the device, which lasts."""
    return "CUDA error" not in message and "illegal" not in message and "misaligned" not in message


def _serve(pipe: Any) -> None:
    """Answers until nobody asks."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, trial = pipe.recv()
            try:
                answer = False, function(trial)
            except Exception as error:  # whatever it is, it is the trial's
                text = str(error).strip()
                answer = True, f"{type(error).__name__}: {text[-160:]}"
            pipe.send(answer)


# ---- in such a process --------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(trial: Trial) -> Iterator[tuple[Any, dict[str, tuple[tuple[int, ...], int, int]]]]:
    """The case's module, launching as the trial says; and the places that its launches ask the table for."""
    module = trial.case.load()
    seen: dict[str, tuple[tuple[int, ...], int, int]] = {}

    def measured(
        table: object, name: str, tiles: tuple[int, ...], width: int, lanes: int, gpu: int, **_: object
    ) -> dict[str, int]:
        seen[name] = (tiles, width, lanes)
        return dict(trial.forced.get(name, {}))

    original = module._measured
    module._measured = measured
    _forget(module)
    try:
        yield module, seen
    finally:
        module._measured = original
        _forget(module)


def _forget(module: Any) -> None:
    """Drops what the module knows of earlier launches."""
    for name in ("_fitting", "_too_large"):
        getattr(module, name, set()).clear()
    if hasattr(module, "_schedule"):
        module._schedule.cache_clear()


@functools.lru_cache(maxsize=1)
def _work(case: Case) -> Callable[[], object]:
    return own(case, case.load(), "triton").both()


def check(trial: Trial) -> str:
    """What is wrong with the trial's outputs and gradients."""
    with launched(trial) as (module, _):
        return verdict(module, trial.case)[1] or refused(module, trial)


def refused(module: Any, trial: Trial) -> str:
    """Which of the configurations that the trial asks for found no room, so that others were launched."""
    fitted = {key[0]: options for key, (_, options) in getattr(module, "_fitting", {}).items()}
    lacking = [
        name
        for name, config in trial.forced.items()
        if any(fitted.get(name, config).get(key, value) != value for key, value in config.items())
    ]
    return f"no room on the device: {', '.join(lacking)}" if lacking else ""


def times(trial: Trial) -> Times:
    """Microseconds of the module's own kernels."""
    with launched(trial) as (module, _):
        found = CudaClock().kernels(_work(trial.case))
        return {name: us for name, us in found.items() if name in module.KERNEL_SIGNATURES}


def facts(trial: Trial) -> Facts:
    """What the trial launches."""
    import triton

    case = trial.case
    with launched(trial) as (module, seen):
        own(case, module, "triton").both()()
        places = dict(seen)
        sizes = sizes_of(module, dims_at(module, case.shape[3]))
        gpu = module._capability(torch.device(case.device))

        def entry(name: str, signature: str, config: dict[str, int]) -> Entry:
            tiles, width, lanes = places[name]
            return Entry(signature, tuple(tiles), width, lanes, config, triton=triton.__version__)

        kernels, forms = {}, {}
        for name, signature in module.KERNEL_SIGNATURES.items():
            if name in places:
                constants, options = module.kernel_constants(name, sizes, case.torch_dtype, gpu)
                # the rules let a thread have all registers that there are, as does a configuration that says nothing
                config = {key: int(value) for key, value in options.items() if key in CONFIG and key != "maxnreg"}
                if name in module.KERNEL_BLOCKS:
                    config["block"] = int(constants[module.KERNEL_BLOCKS[name]])
                kernels[name] = entry(name, signature, config)
        for name, signature in module.FORM_SIGNATURES.items():
            if name in places:
                length, _, _ = module._lengths(name, sizes, case.torch_dtype, places[name][2], gpu)
                forms[name] = entry(name, signature, {"chunk": length})
        return Facts(kernels, forms)
