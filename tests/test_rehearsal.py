"""Kernels of a first call are compiled side by side: those that it starts, with the same constants."""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import ttmdsl
from ttmdsl.drawing import Shape, draw

SHAPES = [Shape("", tokens=150, heads=2, state=False), Shape("", tokens=1, state=True), Shape("", lengths=(70, 0, 5))]


def _what(known: Any, kernel: Any, grid: Any, pointers: Any, place: Any, meta: Any, options: Any) -> tuple[Any, ...]:
    kinds = [None if t is None else (t.dtype, t.shape, t.stride()) for t in (*pointers, *place)]
    return known, (kernel.fn.__name__, grid, kinds, meta, options)


def launches(name: str, shape: Shape, train: bool, processors: int = 0) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What is compiled ahead of a call and its backward pass, and what these start; nothing runs."""
    module = ttmdsl.load(name)
    if not hasattr(module, "_Rehearsal"):
        return {}, {}  # the kernel form has a few kernels, started by other code
    drawn = draw(module, shape)
    packed = {"cu_seqlens": torch.tensor(drawn.bounds)} if drawn.bounds else {}
    compiled: dict[Any, Any] = {}
    started: dict[Any, Any] = {}

    def rehearse(_: Any, *about: Any) -> None:
        compiled.setdefault(*_what(*about))

    def start(_: Any, *about: Any) -> None:
        started.setdefault(*_what(*about))

    def tensors(given: Any) -> dict[str, torch.Tensor]:
        floats = {key: t.float() if t.is_floating_point() else t for key, t in (given or {}).items()}
        return {key: t.requires_grad_(train and t.is_floating_point()) for key, t in floats.items()}

    with (
        mock.patch.object(module._Schedule, "start", start),
        mock.patch.object(module._Rehearsal, "start", rehearse),
        mock.patch.multiple(module, _COMPILES=True, _rehearsed=set(), _fitting={}),
        mock.patch.object(module, "_processors", create=True, return_value=processors),
    ):
        module._schedule.cache_clear()
        y, _ = module.op(**tensors(drawn.x), initial_state=tensors(drawn.state) or None, backend="triton", **packed)
        if train:
            y.sum().backward()
        module._schedule.cache_clear()
    return compiled, started


@pytest.mark.parametrize("name", ttmdsl.layers())
def test_all_that_is_started_was_compiled(name: str, interpreter: ProcessPoolExecutor) -> None:
    for shape in SHAPES:
        for train in (False, True):
            compiled, started = interpreter.submit(launches, name, shape, train).result()
            assert compiled == started


@pytest.mark.parametrize("name", ["gated_delta_net", "gla", "mamba2", "gsa"])
@pytest.mark.parametrize("shape", [Shape("", tokens=6500), Shape("", lengths=(6200, 70, 7000))])
def test_sequences_in_parts(name: str, shape: Shape, interpreter: ProcessPoolExecutor) -> None:
    compiled, started = interpreter.submit(launches, name, shape, True, 132).result()
    assert compiled == started
    assert any("transfer" in known[0] for known in started)


def waits() -> list[str]:
    """What happens, in order, where a kernel is started while it is being compiled."""
    module = ttmdsl.load("mamba2")
    happened: list[str] = []

    class Slow(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            happened.append("compiled")
            return ValueError("which the start will raise, too")

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *pointers, **constants: happened.append("started")

    sizes = (("d_k", 16), ("d_v", 16))
    schedule = module._Schedule("chunk", (0, 64), (0,), 2, sizes, torch.float32, torch.device("cpu"))
    schedule.compiling = {("this",): Slow()}
    schedule.start(("this",), Kernel(), (1, 1), (), (), {}, {})
    schedule.start(("this",), Kernel(), (1, 1), (), (), {}, {})
    return happened


def test_a_start_waits_for_what_is_being_compiled(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(waits).result() == ["compiled", "started", "started"]
