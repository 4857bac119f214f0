"""Specs that cannot be compiled: `bad/NAME.ttm`, and the whole message beside it in `NAME.txt`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ttmdsl.check import check
from ttmdsl.errors import NOWHERE, SpecError
from ttmdsl.parse import parse

BAD = sorted((Path(__file__).parent / "bad").glob("*.ttm"))


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_message(path: Path, golden: Callable[[Path, str], None]) -> None:
    text = path.read_text(encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        check(parse(text, path.name), text, path.name)
    golden(path.with_suffix(".txt"), f"{caught.value}\n")
    for found in caught.value.diagnostics:
        assert found.span == NOWHERE or 1 <= found.span.line <= text.count("\n") + 1


def test_several_errors_in_one_run() -> None:
    text = (Path(__file__).parent / "bad" / "many.ttm").read_text(encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        check(parse(text), text)
    assert len(caught.value.diagnostics) >= 8
