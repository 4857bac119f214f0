"""The examples run, each as a user would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")


@pytest.mark.parametrize(
    ("name", "says"),
    [("invent_a_layer", "recalled: "), ("inspect_stages", "return y = "), ("property_test", " passed")],
)
def test_example(name: str, says: str) -> None:
    path = EXAMPLES / f"{name}.py"
    command = [sys.executable, *(PYTEST if name == "property_test" else ()), str(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"invent_a_layer", "inspect_stages", "property_test"}
