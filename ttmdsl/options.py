"""Settings of the compiler, as one frozen record; the only place that reads the environment.

Input: the environment. Output: `Options`. Changes nothing of what a spec means: all that reaches the emitted text are
measured launch configurations, under which a module gives the same numbers up to rounding.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SHIPPED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class Options:
    """`cache`: folder of compiled modules (TTM_CACHE_DIR). `dump`: folder for the print of every stage (TTM_DUMP).

    `tuned`: folders of tables of launch configurations: the package's own, then the user's (TTM_TUNED_DIR).
    `all_orders`: kernels in all the orders that their values may be computed in (TTM_ORDERS=all), to measure them.
    """

    cache: Path
    dump: Path | None = None
    tuned: tuple[Path, ...] = ()
    all_orders: bool = False

    @classmethod
    def from_environment(cls) -> Options:
        cache, dump, tuned = (os.environ.get(f"TTM_{name}") for name in ("CACHE_DIR", "DUMP", "TUNED_DIR"))
        return cls(
            cache=Path(cache).expanduser() if cache else _user_cache(),
            dump=Path(dump).expanduser() if dump else None,
            tuned=(SHIPPED, Path(tuned).expanduser() if tuned else _user_tables()),
            all_orders=os.environ.get("TTM_ORDERS") == "all",
        )


def _user_cache() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("ttmdsl", appauthor=False)


def _user_tables() -> Path:
    import platformdirs

    return platformdirs.user_config_path("ttmdsl", appauthor=False) / "tuned"
