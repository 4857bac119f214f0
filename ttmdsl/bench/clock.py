"""What a function costs on a device: median times, as a replayed CUDA graph, memory, and each kernel's share.

Input: functions without arguments that do the same work at every call. Output: milliseconds, MiB, microseconds, and
bytes per second; None where a device has no such figure. Knows no layer. What it measures is warm: the first call of
every function is thrown away, unless that call alone takes long.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

Work = Callable[[], object]
_LONG = 1.0  # seconds after which one call is enough


class Clock(Protocol):
    """A device's means of measuring."""

    def ms(self, work: Work) -> float:
        """The median time of a call."""

    def graph_ms(self, work: Work) -> float | None:
        """The median time of a replay as a CUDA graph; None where the work cannot be captured."""

    def peak_mib(self, work: Work) -> float | None:
        """The most memory that a call holds beyond what was held before it."""

    def kernels(self, work: Work) -> dict[str, float]:
        """Microseconds that every kernel takes in a call."""

    def copy_rate(self) -> float:
        """Bytes read and written per second by a plain copy: the measure of the memory floor."""

    def usable(self) -> bool:
        """Whether the device still answers."""


class CpuClock:
    """Wall time on the processor."""

    def ms(self, work: Work) -> float:
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 4 or (time.perf_counter() - began < 0.2 and len(times) < 100):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
            if times[-1] > _LONG:
                return 1000 * times[-1]
        return 1000 * statistics.median(times[1:])

    def graph_ms(self, work: Work) -> float | None:
        return None

    def peak_mib(self, work: Work) -> float | None:
        return None

    def kernels(self, work: Work) -> dict[str, float]:
        return {}

    def copy_rate(self) -> float:
        source = torch.ones(1 << 24)
        target = torch.empty_like(source)
        return 2 * source.nbytes / (self.ms(lambda: target.copy_(source)) / 1000)

    def usable(self) -> bool:
        return True


class CudaClock:
    """Time on the GPU, its caches flushed between calls as Triton's do_bench does it."""

    def ms(self, work: Work) -> float:
        from triton.testing import do_bench

        return float(do_bench(work, warmup=15, rep=60, return_mode="median"))

    def graph_ms(self, work: Work) -> float | None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    work()
            torch.cuda.synchronize()
            with _no_garbage_collected(), torch.cuda.graph(graph):
                work()
        except Exception:  # whatever forbids a capture, such as a value read back from the device
            torch.cuda.synchronize()
            _draw_outside_graphs()
            return None
        return self.ms(graph.replay)

    def peak_mib(self, work: Work) -> float | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = work()
        torch.cuda.synchronize()
        del kept
        return float(torch.cuda.max_memory_allocated() - before) / 2**20

    def kernels(self, work: Work) -> dict[str, float]:
        calls = 5
        work()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                work()
            torch.cuda.synchronize()
        found = {event.key: event.self_device_time_total / calls for event in profile.key_averages()}
        return {name: us for name, us in sorted(found.items(), key=lambda item: -item[1]) if us > 0}

    def copy_rate(self) -> float:
        source = torch.ones(1 << 29, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.nbytes / (self.ms(lambda: target.copy_(source)) / 1000)

    def usable(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """What Python would free meanwhile, such as an older graph, may forbid a capture."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _draw_outside_graphs() -> None:
    """A capture that failed leaves torch's generator of random numbers as if it went on: it gets a state of its own."""
    generator, fresh = torch.cuda.default_generators[torch.cuda.current_device()], torch.Generator("cuda")
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
