"""Compiled modules on disk: one file for each spec, constants and state of the compiler.

Input: a key and a function that compiles. Output: the path of a file that holds the module's source, whole and
unaltered. Does not import what it stores. Needs no locks: a file is written beside its place under a name of its own
and moved there at once, so any number of processes may do the same; a file that was cut or altered fails its checksum
and is made anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from ttmdsl.resources import folder

_SEAL = "# sha256 of the text above: "


def key(text: str, consts: Mapping[str, float], tables: str = "") -> str:
    """A hash over all that decides the emitted text; `tables` is the digest of the launch configurations."""
    content = json.dumps([_compiler(), text, sorted(consts.items()), tables])
    return hashlib.sha256(content.encode()).hexdigest()


@functools.cache
def _compiler() -> str:
    """A hash over the compiler's own modules, templates and grammar."""
    digest = hashlib.sha256()
    for place in (Path(__file__).parent, folder("codegen"), folder("grammar")):
        for path in sorted(p for p in place.iterdir() if p.suffix in (".py", ".j2", ".lark")):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def fetch(place: Path, stem: str, key: str, compile: Callable[[], str]) -> Path:
    """The file for `key` in the folder `place`; made by `compile` where it is missing or damaged."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", stem)[:60] + f"_{key[:20]}.py"
    path = place / name
    if not _intact(path):
        sealed = _seal(compile())
        try:
            place.mkdir(parents=True, exist_ok=True)
            write_atomically(path, sealed)
        except OSError as error:
            path = _private_folder() / name
            if not _intact(path):
                warnings.warn(f"ttmdsl: cannot write to the cache {place} ({error}); using {path.parent}", stacklevel=2)
                write_atomically(path, sealed)
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at once: a reader finds the old text or the new one, whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@functools.cache
def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@functools.cache
def _private_folder() -> Path:
    """A folder of this process, which lasts as long: Triton reads a kernel's source when it compiles it."""
    return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ttmdsl_")


def _seal(text: str) -> str:
    return f"{text}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _intact(path: Path) -> bool:
    """Whether the file is there and its last line is the checksum of the others."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    text, seal, checksum = content.rpartition(_SEAL.encode())
    return bool(seal) and checksum.strip() == hashlib.sha256(text).hexdigest().encode()
