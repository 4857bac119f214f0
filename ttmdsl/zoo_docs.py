"""The pages of the zoo: what every shipped layer is, as the compiler derives it.

Input: the shipped layers, and a folder with `notes.ini`: for each layer the paper's equation and, where the printed one
differs from the derived one, what differs. Output: `docs/zoo/<layer>.md` and an index. Derives nothing itself.

    python -m ttmdsl.zoo_docs docs/zoo          # writes the pages
    python -m ttmdsl.zoo_docs docs/zoo --check  # says which are out of date
"""

from __future__ import annotations

import argparse
import configparser
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttmdsl.errors import LoadError

NOTES = "notes.ini"
COMMAND = "python -m ttmdsl.zoo_docs docs/zoo"


@dataclass(frozen=True)
class Note:
    """What the papers print: where, the equation, and how it differs from what is derived."""

    source: str
    printed: str
    differs: str


def notes(folder: Path) -> dict[str, Note]:
    """The notes by layer."""
    parser = configparser.ConfigParser(interpolation=None)
    path = folder / NOTES
    if not parser.read(path, encoding="utf-8"):
        raise LoadError(f"{path}: expected the notes on the papers, found no such file")
    return {
        name: Note(*(" ".join(section.get(key, "").split()) for key in ("source", "printed", "differs")))
        for name, section in parser.items()
        if name != parser.default_section
    }


def page(layer: str, note: Note | None) -> str:
    """One layer's page."""
    from ttmdsl.cost import per_token
    from ttmdsl.explain import explain
    from ttmdsl.loader import read
    from ttmdsl.options import Options
    from ttmdsl.pipeline import run

    text, filename = read(layer)
    done = run(text, filename, {}, Options.from_environment(), after="lower").done
    rule, lowered = done["derive"], done["lower"]
    title = text.splitlines()[0].removeprefix("#").strip()
    parts = [
        f"<!-- {COMMAND} writes this page: edit the layer, or {NOTES} -->",
        f"# {layer}",
        title,
        "## Spec",
        f"```\n{text.rstrip()}\n```",
        "## Derived",
        f"```text\n{explain(rule)}\n```",
        "As LaTeX (amsmath):",
        f"```latex\n{explain(rule, latex=True)}\n```",
        "## Recurrence",
        f"{lowered.title[0].upper()}{lowered.title[1:]}.",
        "## Cost per token and head",
        "\n".join(f"- {line}" for line in per_token(rule.spec, lowered)),
        "## In the papers",
    ]
    if note is None:
        parts.append("No note.")
    else:
        parts += [f"{note.source}: `{note.printed}`" if note.printed else note.source]
        parts.append(f"**What differs.** {note.differs}" if note.differs else "The derived update is the printed one.")
    return "\n\n".join(parts) + "\n"


def pages(folder: Path) -> dict[str, str]:
    """Every file of the folder by name, as it should be."""
    from ttmdsl.loader import layers, read

    known = notes(folder)
    found = {f"{layer}.md": page(layer, known.get(layer)) for layer in layers()}
    lines = [f"- [{n}]({n}.md): {read(n)[0].splitlines()[0].removeprefix('#').strip()}" for n in layers()]
    found["README.md"] = "\n".join([f"<!-- {COMMAND} writes this page -->", "", "# The zoo", "", *lines, ""])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages of the zoo, or say which are out of date."""
    parser = argparse.ArgumentParser(prog="python -m ttmdsl.zoo_docs", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; the exit status says whether all are right"
    )
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    expected = pages(folder)
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    stale = sorted(n for n in {*expected, *present} if expected.get(n) != present.get(n))
    for name in stale:
        if arguments.check:
            print(f"{folder / name}: out of date")
        elif name in expected:
            (folder / name).write_text(expected[name], encoding="utf-8", newline="\n")
        else:
            (folder / name).unlink()
    if arguments.check and stale:
        print(f"to bring them up to date: {COMMAND}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
