"""Rendering of the code templates: strict about holes, silent about whitespace."""

from __future__ import annotations

import math
from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ttmdsl.resources import folder


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(folder("codegen")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = literal
    return environment


def render(name: str, **holes: object) -> str:
    """The template's text with its holes filled; a hole without a value is an error."""
    return _environment().get_template(name).render(**holes)


def _quoted(text: str) -> str:
    """A Python string literal, in double quotes where that needs no more escapes."""
    quoted = repr(text)
    return f'"{quoted[1:-1]}"' if '"' not in quoted and "'" not in quoted[1:-1] else quoted


def literal(value: object) -> str:
    """Strings, numbers, and lists, tuples and dicts of them, as Python source."""
    match value:
        case str():
            return _quoted(value)
        case tuple():
            return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
        case int():
            return repr(int(value))
        case float():
            assert math.isfinite(value), value
            return repr(int(value) if value.is_integer() and abs(value) < 2**53 else value)
    raise TypeError(f"no literal for {value!r}")
