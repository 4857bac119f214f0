"""Options shared by the tests: `--update-golden` rewrites the files of expected output instead of comparing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


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
