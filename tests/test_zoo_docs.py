"""The pages under docs/zoo: up to date, and complete."""

from __future__ import annotations

from pathlib import Path

import pytest

import ttmdsl
from ttmdsl.zoo_docs import COMMAND, main, notes, pages

FOLDER = Path(__file__).parent.parent / "docs" / "zoo"


def test_the_pages_are_up_to_date() -> None:
    expected = pages(FOLDER)
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert [n for n in sorted({*expected, *present}) if expected.get(n) != present.get(n)] == [], f"run {COMMAND}"


def test_every_layer_has_a_note_and_every_note_a_layer() -> None:
    assert set(ttmdsl.layers()) <= set(notes(FOLDER))
    assert all(note.source for note in notes(FOLDER).values())


def test_a_page_says_what_the_layer_is() -> None:
    text = pages(FOLDER)["gated_delta_net.md"]
    assert "optimizer gd(rate = beta, at = retained)" in text
    assert r"\begin{align*}" in text
    assert "triangular inverse" in text
    assert "state: d_k d_v numbers" in text
    assert "What differs" in text


def test_stale_pages_are_found_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.ini").write_text("[gla]\nsource = here\nprinted =\ndiffers =\n")
    (tmp_path / "gone.md").write_text("a layer that is no more")
    assert main([str(tmp_path), "--check"]) == 1
    assert "gone.md: out of date" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 0
    assert not (tmp_path / "gone.md").exists()
    assert main([str(tmp_path), "--check"]) == 0
    assert "The derived update is the printed one." in (tmp_path / "gla.md").read_text()
