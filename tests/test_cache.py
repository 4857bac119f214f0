"""The cache on disk, and what loading costs: many processes at once, damaged files, places that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ttmdsl
from ttmdsl import cache
from ttmdsl.loader import constants, read

TESTS = Path(__file__).parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def python(script: str, **environment: str) -> subprocess.Popen[str]:
    # bytecode is kept between runs, whatever the machine says of it
    own = {"PYTHONPATH": str(TESTS), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **own, **environment}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], env=variables, text=True, **streams)


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def modules(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.name != "__pycache__")


# ---- loading ------------------------------------------------------------------------------------------------


def test_the_same_call_gives_the_same_module(place: Path) -> None:
    module = ttmdsl.load("titans_linear")
    assert ttmdsl.load("titans_linear") is module
    assert ttmdsl.load("titans_linear", b=4) is ttmdsl.load("titans_linear", b=4.0) is not module
    path = Path(read("titans_linear")[1])
    assert ttmdsl.load(path) is ttmdsl.load(str(path)) is ttmdsl.compile(path.read_text()) is module


def test_files_are_named_after_their_layer(place: Path) -> None:
    text = "# another one\n" + read("delta_net")[0]
    module = ttmdsl.compile(text)
    (path,) = modules(place)
    assert path.name.startswith("delta_net_")
    assert module.__file__ == str(path)
    assert sys.modules[module.__name__] is module


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated_deltanet", "no layer is called 'gated_deltanet'; did you mean 'gated_delta_net'?"),
        ("zzz", "no layer is called 'zzz'; shipped layers: abc, "),
        ("nowhere/zzz.ttm", "'nowhere/zzz.ttm': cannot read the spec (No such file or directory)"),
        ("", "no layer is called ''"),
        ("a\0.ttm", "cannot read the spec"),
        (3, "expected a layer's name or the path of a .ttm file, got int"),
    ],
)
def test_what_cannot_be_loaded(name: str, message: str) -> None:
    with pytest.raises(ttmdsl.LoadError) as caught:
        ttmdsl.load(name)
    assert message in str(caught.value)


def test_text_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bad.ttm").write_bytes(b"layer \xff")
    with pytest.raises(ttmdsl.LoadError, match=r"expected text in UTF-8, got byte 0xff at 6"):
        ttmdsl.load(tmp_path / "bad.ttm")
    with pytest.raises(ttmdsl.TtmError):
        ttmdsl.compile("# \ud800")
    with pytest.raises(ttmdsl.LoadError, match="expected the text of a spec, got int"):
        ttmdsl.compile(3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "16", None, [1]])
def test_constants_are_finite_numbers(value: float) -> None:
    with pytest.raises(ttmdsl.LoadError, match="constant 'b': expected a finite number, got"):
        ttmdsl.load("titans_linear", b=value)


def test_constants_the_spec_does_not_have() -> None:
    with pytest.raises(ttmdsl.LoadError, match="no constant `c`"):
        ttmdsl.load("titans_linear", c=2)
    with pytest.raises(ttmdsl.TtmError):
        ttmdsl.load("titans_linear", b=0)
    assert constants({"b": 16.0, "p": 2.5}) == {"b": 16, "p": 2.5}


# ---- the cache ----------------------------------------------------------------------------------------------


def test_the_key_covers_all_that_decides_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache.key("a", {}), cache.key("b", {}), cache.key("a", {"b": 1}), cache.key("a", {"b": 2})}
    monkeypatch.setattr(cache, "_compiler", lambda: "another compiler")
    assert len(keys | {cache.key("a", {})}) == 5


def test_nothing_is_compiled_twice(tmp_path: Path) -> None:
    made: list[int] = []

    def build() -> str:
        made.append(1)
        return "x = 1\n"

    first = cache.fetch(tmp_path, "a/../b", "0" * 64, build)
    assert cache.fetch(tmp_path, "a/../b", "0" * 64, build) == first
    assert first.parent == tmp_path
    assert made == [1]


@pytest.mark.parametrize("damage", ["", "x = 1\n", "half", "flipped"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = cache.fetch(tmp_path, "a", "0" * 64, lambda: "x = 1\n")
    whole = path.read_text()
    path.write_text({"half": whole[: len(whole) // 2], "flipped": whole.replace("1", "2", 1)}.get(damage, damage))
    assert cache.fetch(tmp_path, "a", "0" * 64, lambda: "x = 1\n").read_text() == whole


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        cache.write_atomically(tmp_path / "a.py", "\ud800")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="cannot write to the cache"):
        path = cache.fetch(tmp_path / "file" / "cache", "a", "1" * 64, lambda: "x = 1\n")
    assert path.read_text().startswith("x = 1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert cache.fetch(tmp_path / "file" / "cache", "a", "1" * 64, lambda: "x = 1\n") == path


def test_four_processes_at_once(tmp_path: Path) -> None:
    script = "import ttmdsl; m = ttmdsl.load('gated_delta_net'); print(len(m.SPEC), m.__file__)"
    processes = [python(script, TTM_CACHE_DIR=str(tmp_path)) for _ in range(4)]
    (line,) = {output(process) for process in processes}
    length, path = line.split()
    assert int(length) == len(read("gated_delta_net")[0])
    assert modules(tmp_path) == [Path(path)]  # and no temporary file stayed
    assert cache._intact(Path(path))


# ---- what it costs ------------------------------------------------------------------------------------------


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "triton", "sympy", "lark", "jinja2", "rich")
    script = f"import sys, ttmdsl; print([m for m in {heavy} if m in sys.modules])"
    assert output(python(script)) == "[]\n"


LOAD = "import ttmdsl; ttmdsl.load('trellis')"


def seconds(script: str, **environment: str) -> float:
    """Beyond importing torch; the processor's time, since other tests may run beside this one."""
    timed = f"import time, torch; start = time.process_time(); {script}; print(time.process_time() - start)"
    return float(output(python(timed, **environment)))


def test_a_cached_load_is_quick(place: Path) -> None:
    output(python(LOAD))
    script = f"{LOAD}; import sys; assert 'sympy' not in sys.modules"
    seconds(script)  # the bytecode
    assert any(seconds(script) < 0.15 for _ in range(3))


def test_a_cold_compile_is_quick(tmp_path: Path) -> None:
    """Two seconds; on a machine that takes long for sympy alone, sixteen times as long as that."""
    sympy = min(seconds("import sympy") for _ in range(3))
    assert any(seconds(LOAD, TTM_CACHE_DIR=str(tmp_path / str(n))) < max(2, 16 * sympy) for n in range(4))
