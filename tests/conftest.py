"""Shared by the tests: `--update-golden` rewrites the files of expected output; a process with Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

# whoever runs the tests may have tables of launch configurations of their own
os.environ["TTM_TUNED_DIR"] = os.devnull
# hypothesis looks for constants to draw in all modules that are loaded from elsewhere than tests: in those that are
# generated, which are long, that takes a minute in all
os.environ["TTM_CACHE_DIR"] = str(Path(__file__).parent / ".cache")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is found as what is expected")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares text with a file, exactly."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.read_text(encoding="utf-8") == text

    return compare


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets its kernels: it reads TRITON_INTERPRET where they are defined."""
    from ttmdsl.interpreted import fill_what_is_empty, lighten

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=fill_what_is_empty) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(lighten).result()  # the process starts with the environment of this moment
        yield pool


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The kernels that spill registers, as test_aot found them: bytes of stack by head size."""
    found: dict[str, dict[int, int]] = {}
    for report in [r for reports in terminalreporter.stats.values() for r in reports]:
        for name, row in getattr(report, "user_properties", ()):
            if name == "spill":
                kernel = f"{row['variant']} {row['kernel']}, Triton {row['triton']}, {row['target']}"
                found.setdefault(kernel, {})[row["head"]] = row["stack"]
    if found:
        terminalreporter.section("kernels that spill registers: bytes of stack by head size")
        for kernel, stacks in found.items():
            terminalreporter.line(f"{kernel}: " + ", ".join(f"{head}: {n}" for head, n in sorted(stacks.items())))
