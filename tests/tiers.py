"""What is beyond `make test`: more layers, sizes and versions of what is tested there; `make thorough` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def beyond(values: Iterable[Any], *apart: Any) -> list[Any]:
    """Values to parametrize a test by, tuples of several parameters, of which those `apart` are thorough alone."""
    values = list(values)
    unknown = [value for value in apart if value not in values]
    assert not unknown, unknown
    each = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*parameters, marks=thorough) if value in apart else value for value, parameters in each]


def mostly_beyond(values: Iterable[Any], *first: Any) -> list[Any]:
    """The same, of which those are thorough alone that are not among the `first`."""
    values = list(values)
    assert all(value in values for value in first), first
    return beyond(values, *(value for value in values if value not in first))
