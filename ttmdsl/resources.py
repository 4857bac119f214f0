"""Where the data folders are: beside the modules in a wheel, beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).parent


def folder(name: Literal["grammar", "codegen", "layers"]) -> Path:
    """The folder of grammar (Lark), code templates (Jinja) or shipped layers (`.ttm`)."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
