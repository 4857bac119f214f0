"""Settings of the compiler, as one frozen record; the only place that reads the environment.

Input: the environment. Output: `Options`. Changes nothing of what a spec means: no option reaches the emitted text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """`cache`: folder of compiled modules (TTM_CACHE_DIR). `dump`: folder for the print of every stage (TTM_DUMP)."""

    cache: Path
    dump: Path | None = None

    @classmethod
    def from_environment(cls) -> Options:
        cache, dump = os.environ.get("TTM_CACHE_DIR"), os.environ.get("TTM_DUMP")
        return cls(
            cache=Path(cache).expanduser() if cache else _user_cache(),
            dump=Path(dump).expanduser() if dump else None,
        )


def _user_cache() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("ttmdsl", appauthor=False)
