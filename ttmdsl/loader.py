"""From a layer's name, a `.ttm` file or a spec's text to an imported module.

Input: what a user calls `ttmdsl.load` or `ttmdsl.compile` with. Output: the module, the same object for the same call.
Compiles nothing itself: that is `pipeline`, which is imported only where the cache has no file. Loads no torch; the
generated module does.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib.util
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from ttmdsl import cache, tuning
from ttmdsl.errors import LoadError
from ttmdsl.names import snake_case
from ttmdsl.options import Options
from ttmdsl.resources import folder

_lock = threading.Lock()


def layers() -> list[str]:
    """The names of the shipped layers."""
    return sorted(path.stem for path in folder("layers").glob("*.ttm"))


def load(name_or_path: str | os.PathLike[str], **consts: float) -> ModuleType:
    """The compiled module of a shipped layer, by name, or of a `.ttm` file, by path; constants by keyword."""
    text, filename = read(name_or_path)
    return _module(text, filename, consts)


def compile(text: str, **consts: float) -> ModuleType:
    """The compiled module of a spec given as text; constants of the spec by keyword."""
    if not isinstance(text, str):
        raise LoadError(f"compile(): text: expected the text of a spec, got {type(text).__name__}")
    return _module(text, "<spec>", consts)


def read(name_or_path: str | os.PathLike[str]) -> tuple[str, str]:
    """A spec's text, and the filename that its errors are shown with."""
    if not isinstance(name_or_path, str | os.PathLike):
        raise LoadError(f"expected a layer's name or the path of a .ttm file, got {type(name_or_path).__name__}")
    given = os.fspath(name_or_path)
    path = Path(given)
    if not isinstance(name_or_path, os.PathLike) and path.suffix != ".ttm" and path.name == given:
        shipped = layers()
        if given not in shipped:
            near = difflib.get_close_matches(given.lower(), shipped, 1)
            hint = f"did you mean {near[0]!r}? Shipped layers: " if near else "shipped layers: "
            raise LoadError(
                f"no layer is called {given!r}; {hint}{', '.join(shipped)}; or give the path of a .ttm file"
            )
        path = folder("layers") / f"{given}.ttm"
    try:
        return path.read_bytes().decode(), str(path)
    except UnicodeDecodeError as error:
        raise LoadError(
            f"{path}: expected text in UTF-8, got byte {error.object[error.start]:#04x} at {error.start}"
        ) from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{given!r}: cannot read the spec ({getattr(error, 'strerror', None) or error})") from None


def constants(consts: Mapping[str, float]) -> dict[str, float]:
    """Overriding constants as plain numbers, whole ones as int, so that b=16 and b=16.0 are one thing."""
    plain: dict[str, float] = {}
    for name, value in consts.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise LoadError(f"constant {name!r}: expected a finite number, got {value!r}")
        plain[name] = int(value) if float(value).is_integer() else float(value)
    return plain


def _module(text: str, filename: str, consts: Mapping[str, float]) -> ModuleType:
    consts = constants(consts)
    options = Options.from_environment()
    key = cache.key(text, consts, tuning.digest(options.tuned) + " all orders" * options.all_orders)
    name = f"ttmdsl_generated.{key}"
    with _lock:
        if name not in sys.modules:

            def build() -> str:
                with _uncollected():
                    from ttmdsl.pipeline import compile_source

                    return compile_source(text, filename, consts, options)

            named = re.search(r"^\s*layer\s+([A-Za-z]\w*)", text, re.MULTILINE | re.ASCII)
            path = cache.fetch(options.cache, snake_case(named[1]) if named else "layer", key, build)
            _import(name, path)
        return sys.modules[name]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without looks for garbage: a compilation, and the import of sympy, make much and let go of little."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _import(name: str, path: Path) -> None:
    """A real file and a real import: Triton reads its kernels' source from files."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
