"""Rendering of the code templates: strict about holes, silent about whitespace."""

from __future__ import annotations

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
    environment.filters["repr"] = repr
    return environment


def render(name: str, **holes: object) -> str:
    """The template's text with its holes filled; a hole without a value is an error."""
    return _environment().get_template(name).render(**holes)
