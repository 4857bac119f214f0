"""Programs of a kernel side by side in Triton's interpreter, which runs one after the other: some wait for others."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock


class _Program(threading.Thread):
    """One program of a grid, which goes on when it is told to, until it comes to an atomic operation or its end."""

    def __init__(self, place: tuple[int, ...], run: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.place, self.work, self.done = place, run, False
        self.failure: BaseException | None = None
        self.goes, self.stands = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self.goes.acquire()
        try:
            self.work()
        except BaseException as error:
            self.failure = error
        self.done = True
        self.stands.release()

    def wait(self) -> None:
        """Lets the others go on, in the program's own thread."""
        self.stands.release()
        self.goes.acquire()


def _together(builder: Any, programs: list[_Program]) -> None:
    """Runs all of them, by turns."""
    for program in programs:
        program.start()
    while programs:
        for program in programs:
            builder.grid_idx = program.place
            program.goes.release()
            program.stands.acquire()
            if program.failure:
                raise program.failure
        programs = [program for program in programs if not program.done]


@contextlib.contextmanager
def side_by_side(waits: str) -> Iterator[list[tuple[int, ...]]]:
    """Programs of kernels that take an argument of this name run so meanwhile; the grids that there were."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

    call, atomic = GridExecutor.__call__, InterpreterBuilder.create_atomic_rmw
    grids: list[tuple[int, ...]] = []

    def run(self: Any, *arguments: Any, **options: Any) -> None:
        grid = (*self.grid, 1, 1)[:3]
        if waits in self.arg_names:
            grids.append(grid)
            self.fn = all_at_once(self.fn, math.prod(grid))
        call(self, *arguments, **options)

    def all_at_once(fn: Any, count: int) -> Any:
        programs: list[_Program] = []

        def note(given: dict[str, Any]) -> None:
            programs.append(_Program(interpreter_builder.grid_idx, lambda: fn(**given)))
            if len(programs) == count:
                _together(interpreter_builder, programs)

        def noted(**given: Any) -> None:
            note(given)

        # Triton looks at a function's globals and its arguments
        found: Any = FunctionType(noted.__code__, fn.__globals__, fn.__name__, None, noted.__closure__)
        found.__signature__ = inspect.signature(fn)
        return found

    def wait(self: Any, *arguments: Any) -> Any:
        found = atomic(self, *arguments)
        program = threading.current_thread()
        if isinstance(program, _Program):
            program.wait()
        return found

    with (
        mock.patch.object(GridExecutor, "__call__", run),
        mock.patch.object(InterpreterBuilder, "create_atomic_rmw", wait),
    ):
        yield grids
