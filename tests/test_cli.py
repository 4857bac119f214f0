"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import ttmdsl
from ttmdsl import parity
from ttmdsl.cli import main
from ttmdsl.loader import read
from ttmdsl.pipeline import STAGES


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


IDLE = """layer Idle {
  dim d_k, d_v
  input q[d_k], k[d_k], v[d_v], z[d_k]
  gate alpha: decay, beta: unit, mu: unit
  param w[d_k]
  const a = 2, c = 2, n = 2
  let twice = 2 * beta
  fn f(x) = a * x
  fn g(x) = x / 2
  memory S[d_v, d_k]
  bias f(1/2) * |S @ k - v|^2
  retention alpha * S
  optimizer gd(rate = beta, steps = n)
  read S @ q
}
"""


def test_build_writes_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "titans.py"
    assert main(["build", "titans_linear", "--set", "b=4", "-o", str(path)]) == 0
    found = importlib.util.spec_from_file_location("titans", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.CONSTS == {"b": 4}
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ""] == ["titans.py"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "titans.py: " in err


def test_build_without_a_file_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "delta_net"]) == 0
    ast.parse(capsys.readouterr().out)


def test_build_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "delta_net", "-o", str(tmp_path / "no" / "a.py")]) == 2
    assert "cannot write the module (No such file or directory)" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ttmdsl.layers())
    assert "inputs q[d_k], k[d_k], v[d_v]; gates log_alpha, log_theta, eta; constants b=16" in out


def test_a_bad_spec_is_shown_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.ttm"
    path.write_text("layer Bad {\n  dim d\n  input q[d], k[d]\n  memory S[d, d]\n  bias |S @ kk|^2\n  read S @ q\n}\n")
    for command in (["build"], ["check"], ["explain"], ["show", "--after", "check"]):
        assert main([*command, str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{path}:5:" in err
        assert "^^" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "delta_nett"], "did you mean 'delta_net'?"),
        (["build", "titans_linear", "--set", "bb=4"], "no constant `bb`"),
        (["build", "nowhere.ttm"], "cannot read the spec"),
    ],
)
def test_what_cannot_be_loaded(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["b", "b=", "b=x", "=3", "a b=3"])
def test_a_setting_is_a_name_and_a_number(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["build", "delta_net", "--set", setting])
    assert caught.value.code == 2
    assert "such as b=16" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_show_prints_every_stage(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "lattice_dec", "--after", stage, "--set", "b=4"]) == 0
    assert len(capsys.readouterr().out) > 100


def test_every_stage_can_be_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTM_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("TTM_CACHE_DIR", str(tmp_path / "cache"))
    ttmdsl.compile("# dumped\n" + read("delta_net")[0])
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == [f"DeltaNet.{number}_{stage.name}.txt" for number, stage in enumerate(STAGES)]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "lattice_dec"]) == 0
    plain = capsys.readouterr().out
    assert main(["explain", "lattice_dec", "--latex"]) == 0
    assert capsys.readouterr().out != plain


def test_check_of_a_layer_that_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(parity, "SHAPES", parity.SHAPES[:2])
    assert main(["check", "titans_linear", "--set", "b=4"]) == 0
    out = capsys.readouterr().out
    assert "titans_linear b=4" in out
    assert "grad log_alpha" in out
    assert "comparisons hold" in out


def test_check_tells_what_nothing_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And holds: it is no error. What a shape, a setting or a function's body takes is used."""
    monkeypatch.setattr(parity, "SHAPES", parity.SHAPES[:1])
    path = tmp_path / "idle.ttm"
    path.write_text(IDLE)
    assert main(["check", str(path)]) == 0
    err = capsys.readouterr().err
    told = [line.partition("nothing uses the ")[2] for line in err.splitlines() if "nothing uses" in line]
    assert told == ["input `z`", "gate `mu`", "param `w`", "constant `c`", "let `twice`", "function `g`"]
    assert f"{path}:3:33: nothing uses the input `z`" in err
    assert main(["check", "delta_product"]) == 0
    assert "nothing uses" not in capsys.readouterr().err


def test_check_of_a_layer_that_misses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ttmdsl.load("delta_net")
    right = module._torch
    monkeypatch.setattr(parity, "SHAPES", parity.SHAPES[:2])
    monkeypatch.setattr(module, "_torch", lambda x, state: (right(x, state)[0] * 1.001, right(x, state)[1]))
    assert main(["check", "delta_net"]) == 1
    assert "MISS" in capsys.readouterr().out

    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(module, "_torch", broken)
    assert main(["check", "delta_net"]) == 1
    assert "torch, torch.float64, T=1: RuntimeError: out of order" in capsys.readouterr().err


def test_as_a_program() -> None:
    found = subprocess.run([sys.executable, "-m", "ttmdsl", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("ttmdsl ")
    found = subprocess.run([sys.executable, "-m", "ttmdsl"], capture_output=True, text=True)
    assert found.returncode == 2
