"""The README: its snippets run, and what it quotes is what the package says today.

`pytest tests/test_readme.py --update-golden` writes the quoted parts anew: the table of layers, files and output.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttmdsl
from ttmdsl.cli import main
from ttmdsl.loader import read
from ttmdsl.options import Options
from ttmdsl.pipeline import run

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
KINDS = ("input", "gate", "param")


def test_snippets_run_from_top_to_bottom() -> None:
    text = README.read_text(encoding="utf-8")
    snippets = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(snippets) >= 5
    names: dict[str, object] = {}
    for snippet in snippets:
        line = text.count("\n", 0, snippet.start(1))
        exec(compile("\n" * line + snippet[1], str(README), "exec"), names)


def test_quotes_are_up_to_date(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")

    def quoted(found: re.Match[str]) -> str:
        kind, what = found[1], found[2]
        if kind == "file":
            body = (ROOT / what).read_text(encoding="utf-8")
        else:
            assert main(shlex.split(what)[1:]) == 0
            body = capsys.readouterr().out
        return f"<!-- {kind}: {what} -->\n```\n{body.rstrip()}\n```\n"

    fresh = re.sub(r"^<!-- (file|output): (.*?) -->\n```\n.*?^```\n", quoted, text, flags=re.MULTILINE | re.DOTALL)
    table = "<!-- layers -->\n" + "".join(f"{line}\n" for line in layer_table()) + "\n"
    fresh = re.sub(r"^<!-- layers -->\n(\|.*\n)*\n", lambda _: table, fresh, flags=re.MULTILINE)
    if request.config.getoption("--update-golden"):
        README.write_text(fresh, encoding="utf-8", newline="\n")
    assert README.read_text(encoding="utf-8") == fresh, "run pytest tests/test_readme.py --update-golden"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def layer_table() -> Iterator[str]:
    """A row for each shipped layer."""
    yield "| layer | what it is | `op` takes | constants | recurrence |"
    yield "|---|---|---|---|---|"
    for name in ttmdsl.layers():
        text, filename = read(name)
        job = run(text, filename, {}, Options.from_environment(), after="lower")
        spec = job.done["check"]
        what = spec.source.splitlines()[0].removeprefix("#").strip().rstrip(".")
        takes = " ".join(
            tensor.keyword + (f"[{','.join(tensor.shape)}]" if tensor.shape and tensor.kind != "input" else "")
            for kind in KINDS
            for tensor in spec.tensors
            if tensor.kind == kind
        )
        consts = " ".join(f"{const}={value:g}" for const, value in spec.consts.items())
        cells = (f"`{name}`", what, f"`{takes}`", consts and f"`{consts}`", job.done["lower"].recurrence)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
