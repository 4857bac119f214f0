"""Errors that a user can act on: each names its culprit by source line and says what was expected.

Input: spans and messages from any stage. Output: exceptions whose text holds the line, a caret and a hint.
Does not decide what is wrong; every stage does that for itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of source text: 1-based line and column, and the length in characters (at least 1)."""

    line: int
    column: int
    length: int = 1


NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One thing that is wrong: where, what, and how it might be mended."""

    span: Span
    message: str
    hint: str = ""

    def render(self, source: str, filename: str = "<spec>") -> str:
        """The message with its source line, a caret under the culprit and the hint."""
        lines = source.splitlines()
        if not 1 <= self.span.line <= len(lines):
            text = f"{filename}: {self.message}"
        else:
            line = lines[self.span.line - 1]
            start = max(self.span.column - 1, 0)
            margin = "".join("\t" if c == "\t" else " " for c in line[:start])
            caret = "^" * max(1, min(self.span.length, len(line) - start))
            number = f"{self.span.line:>4} | "
            text = (
                f"{filename}:{self.span.line}:{self.span.column}: {self.message}\n"
                f"{number}{line}\n{' ' * (len(number) - 2)}| {margin}{caret}"
            )
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class TtmError(Exception):
    """Root of every error that a spec or a call can cause."""


class SpecError(TtmError):
    """A spec that cannot be compiled: all its diagnostics, rendered with their source lines.

    One subclass for each stage of the pipeline that reads a spec.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...], source: str, filename: str = "<spec>") -> None:
        self.diagnostics = diagnostics
        self.source = source
        self.filename = filename
        super().__init__("\n".join(d.render(source, filename) for d in diagnostics))

    def __reduce__(self) -> tuple[type[SpecError], tuple[object, ...]]:
        """How it crosses from one process to another."""
        return type(self), (self.diagnostics, self.source, self.filename)


class ParseError(SpecError):
    """The text is no spec: a token where none of its kind may stand, or a limit on size or nesting passed."""


class CheckError(SpecError):
    """The text parses, but a name, shape, range or clause in it is wrong."""


class DeriveError(SpecError):
    """The spec is well formed, but its loss has no gradient that can be derived."""


class LoadError(TtmError):
    """No such layer or file, an unknown constant, or a constant outside its range."""
