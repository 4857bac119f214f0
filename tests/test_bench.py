"""`ttmdsl bench`: nothing wrong is timed, rows survive, peers are called with the right tensors. All of it on a CPU."""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ttmdsl
from ttmdsl.bench import report
from ttmdsl.bench.clock import CpuClock, Work
from ttmdsl.bench.first import cold_and_warm
from ttmdsl.bench.measure import Row, Wanted, bench, moved, timed, verdict
from ttmdsl.bench.peers import PEERS, Block, Peer, peers_of
from ttmdsl.bench.subjects import Case, Subject, block, initial_state, others, own, peer, tensors
from ttmdsl.cli import main

SMALL = (2, 20, 2, 16)


def case(layer: str = "delta_net", shape: tuple[int, int, int, int] = SMALL, dtype: str = "float32") -> Case:
    return Case(layer, shape, dtype, "cpu")


class FakeClock(CpuClock):
    """Counts what it is given instead of measuring it."""

    def __init__(self) -> None:
        self.works = 0

    def ms(self, work: Work) -> float:
        work()
        self.works += 1
        return float(self.works)

    def peak_mib(self, work: Work) -> float | None:
        return 7.0

    def copy_rate(self) -> float:
        return 1e9


# ---- rows ---------------------------------------------------------------------------------------------------


def test_a_row_for_us_and_one_for_the_reference() -> None:
    clock = FakeClock()
    mine, other = bench([case()], clock, Wanted())
    assert (mine.who, other.who) == ("ttmdsl torch", "ttmdsl reference")
    assert (mine.forward, mine.both, mine.step, other.forward) == (1, 2, 3, 4)
    assert (mine.peak, mine.failed, other.failed) == (7, "", "")
    assert 0 < (mine.error or 0) < 1e-5
    assert 0 < (other.error or 0) < 1e-5
    assert other.floor_forward is None
    (alone,) = bench([case()], clock, Wanted(peers=False, step=False, check=False))
    assert alone.step is alone.error is None


def test_torch_compile_has_a_row_without_peers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = mock.Mock(side_effect=lambda forward: forward)
    monkeypatch.setattr(torch, "compile", compiled)
    mine, other = bench([case()], FakeClock(), Wanted(peers=False, step=False, compiled=True))
    assert (mine.who, other.who) == ("ttmdsl torch", "torch.compile")
    assert compiled.called
    assert other.error is not None
    assert other.error < 1e-5


def test_the_floor_is_eleven_tensors() -> None:
    one = 2 * 20 * 2 * 16 * 4
    assert moved(ttmdsl.load("linear_attention"), case("linear_attention"))[:2] == (4 * one, 11 * one)
    beta = 2 * 20 * 2 * 4
    assert moved(ttmdsl.load("delta_net"), case())[:2] == (4 * one + beta, 11 * one + 3 * beta)
    param = 2 * 4
    assert moved(ttmdsl.load("retnet"), case("retnet"))[:2] == (4 * one + param, 11 * one + 3 * param)
    (row,) = bench([case()], FakeClock(), Wanted(peers=False))
    assert row.floor_forward == pytest.approx(1000 * (4 * one + beta) / 1e9)
    state = 2 * 16 * 16 * 4
    assert row.floor_step == pytest.approx(1000 * 2 * 64 * state / 1e9)  # read and written


def test_inputs_are_what_models_pass() -> None:
    x = tensors(ttmdsl.load("gated_delta_net"), case(dtype="bfloat16"))
    assert {name: t.dtype for name, t in x.items()} == dict.fromkeys("qkv", torch.bfloat16) | {
        "log_alpha": torch.float32,
        "beta": torch.bfloat16,
    }
    assert tensors(ttmdsl.load("gla"), case(dtype="bfloat16"))["log_alpha"].dtype == torch.bfloat16
    assert (x["log_alpha"] < 0).all()
    torch.testing.assert_close(x["k"].float().norm(dim=-1), torch.ones(2, 20, 2), atol=1e-2, rtol=0)


@pytest.mark.parametrize("layer", ["omega_net", "titans:b=64", "ttt_mlp:b=64", "dla"])
def test_deep_memories_do_not_diverge(layer: str) -> None:
    subject = own(case(layer, (1, 512, 1, 16)), case(layer).load(), "torch")
    found: Any = subject.both()()
    assert all(d is None or bool(d.isfinite().all()) for d in (subject.forward(), *found))


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ttmdsl.load("delta_net")
    right = module._torch
    monkeypatch.setattr(module, "_torch", lambda x, state: (right(x, state)[0] * 1.001, right(x, state)[1]))
    clock = FakeClock()
    (row,) = bench([case()], clock, Wanted(peers=False))
    assert row.failed.startswith("check: y 1.0e-03")
    assert row.forward is None
    assert clock.works == 0
    monkeypatch.setattr(module, "_torch", lambda x, state: 1 / 0)
    assert "ZeroDivisionError" in verdict(module, case())[1]


def test_what_differs_without_gradients_or_in_a_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ttmdsl.load("delta_net")
    right = module._torch

    def only_with_gradients(x: dict[str, Tensor], state: dict[str, Tensor]) -> Any:
        y, final = right(x, state)
        return (y if torch.is_grad_enabled() else 1.1 * y), final

    monkeypatch.setattr(module, "_torch", only_with_gradients)
    assert verdict(module, case())[1] == "check: y without gradients"

    def only_sequences(x: dict[str, Tensor], state: dict[str, Tensor]) -> Any:
        y, final = right(x, state)
        return (y if y.shape[1] > 1 else 1.1 * y), final

    monkeypatch.setattr(module, "_torch", only_sequences)
    assert verdict(module, case())[1].startswith("check: y 1.0e-01, grad")

    def only_steps_with_gradients(x: dict[str, Tensor], state: dict[str, Tensor]) -> Any:
        y, final = right(x, state)
        recorded = any(t.requires_grad for t in x.values())
        return (y if recorded or y.shape[1] > 1 else 1.1 * y), final

    monkeypatch.setattr(module, "_torch", only_steps_with_gradients)
    assert verdict(module, case())[1] == "check: y of a step without gradients"


def test_a_peer_that_computes_something_else_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ttmdsl.load("delta_net")
    right = module._reference
    monkeypatch.setattr(module, "_reference", lambda x, state: (right(x, state)[0] * 1.1, right(x, state)[1]))
    mine, other = bench([case()], FakeClock(), Wanted(check=False))
    assert mine.failed == ""
    assert other.failed == "its y is apart from ours by 1.0e-01: not the same function"
    assert other.forward


def test_a_subject_that_fails_has_a_row() -> None:
    def no_backward() -> Tensor:
        return torch.ones(3)

    row = timed(Row("x", SMALL, "float32", "y"), lambda: Subject("y", no_backward, []), FakeClock(), Wanted())
    assert row.failed.startswith(("RuntimeError: ", "ValueError: "))

    def nothing() -> Subject:
        raise ImportError("no such package")

    assert timed(row, nothing, FakeClock(), Wanted()).failed == "ImportError: no such package"


def test_a_step_that_fails_leaves_the_other_times() -> None:
    def step() -> Work:
        raise ValueError("no state")

    x = torch.ones(3, requires_grad=True)
    subject = Subject("y", lambda: 2 * x, [x], step)
    row = timed(Row("x", SMALL, "float32", "y"), lambda: subject, FakeClock(), Wanted())
    assert row.failed == "decode step: ValueError: no state"
    assert (row.forward, row.both, row.step) == (1, 2, None)


def test_peers_are_not_held_against_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ttmdsl.load("delta_net")
    monkeypatch.setattr(module, "_torch", lambda x, state: 1 / 0)
    mine, other = bench([case()], FakeClock(), Wanted(step=False))
    assert "ZeroDivisionError" in mine.failed
    assert (other.failed, other.error) == ("", None)
    assert other.forward


def test_rows_that_are_done_stay() -> None:
    clock = FakeClock()
    rows = list(bench([case()], clock, Wanted()))
    works = clock.works
    assert list(bench([case()], clock, Wanted(), {row.key for row in rows})) == []
    assert clock.works == works
    (again,) = bench([case()], clock, Wanted(), {rows[0].key})
    assert again.who == "ttmdsl reference"


@pytest.mark.parametrize("layer", ["titans:b=4", "ttt_mlp:b=4", "omega_net:b=4", "lattice_dec", "swa:c=5", "retnet"])
def test_every_kind_of_layer_can_be_timed(layer: str) -> None:
    small = case(layer, (1, 8, 1, 8))
    module = small.load()
    x = tensors(module, small)
    for name, axes in module.GATES.items():
        assert x[name].shape[3:] == tuple(int(module.CONSTS.get(axis, 8)) for axis in axes)
    if "W1" in module.MEMORY:  # an MLP's inner size is four times the head's, as Layer makes it
        state = initial_state(module, small)
        assert state is not None
        assert state["W1"].shape == (1, 1, 8, 32)
        assert module.Layer(hidden_size=8, num_heads=1).sizes["h"] == 32
    row = timed(Row(layer, small.shape, "float32", ""), lambda: own(small, module, "torch"), FakeClock(), Wanted())
    assert row.failed == ""
    assert row.step


def test_a_block_is_timed_with_its_parameters() -> None:
    module = ttmdsl.load("delta_net")
    subject = block(case(), "ttmdsl Layer", lambda: module.Layer(hidden_size=32, num_heads=2))
    assert subject.forward().shape == (2, 20, 32)
    assert len(subject.leaves) > 5
    assert not subject.same


def test_a_layer_is_timed_once_beside_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = [Block(who, "math", lambda *_: None) for who in ("one", "another")]
    monkeypatch.setattr("ttmdsl.bench.subjects.peers_of", lambda layer: beside)
    on_a_gpu = Case("delta_net", SMALL)
    found = others(on_a_gpu, on_a_gpu.load(), with_peers=True, with_compiled=False)
    assert [who for who, _ in found] == ["ttmdsl Layer", "one", "another"]


def test_first_calls() -> None:
    cold, warm = cold_and_warm(case())
    assert 0 < warm < cold < 60
    with pytest.raises(RuntimeError, match="no layer is called"):
        cold_and_warm(case("delta_nett"))


def test_the_processor_s_clock() -> None:
    calls: list[int] = []
    clock = CpuClock()
    assert 0 <= clock.ms(lambda: calls.append(1)) < 10
    assert len(calls) >= 4
    assert clock.graph_ms(lambda: None) is None
    assert clock.copy_rate() > 1e8


# ---- peers --------------------------------------------------------------------------------------------------


def recurrence(
    q: Tensor, keep: Callable[[Tensor, int], Tensor], write: Callable[[int], Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """A state [B, H, K, V] that is kept, written and then read, token by token, as fla's naive versions do it."""
    state, ys = torch.zeros_like(write(0)), []
    for t in range(q.shape[1]):
        state = keep(state, t) + write(t)
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, state))
    return torch.stack(ys, 1), state


def outer(k: Tensor, v: Tensor) -> Callable[[int], Tensor]:
    return lambda t: k[:, t, :, :, None] * v[:, t, :, None, :]


def linear(q: Tensor, k: Tensor, v: Tensor, scale: float, normalize: bool) -> tuple[Tensor, Tensor]:
    assert not normalize
    return recurrence(q, lambda s, t: s, outer(k, v), scale)


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, scale: float, g: Tensor | None = None, g_gamma: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    decay = (
        g.exp()[..., None, None] if g is not None else g_gamma.exp()[None, None, :, None, None].expand(1, 99, -1, 1, 1)
    )
    return recurrence(q, lambda s, t: decay[:, t] * s, outer(k, v), scale)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return recurrence(q, lambda s, t: g[:, t].exp()[..., None] * s, outer(k, v), scale)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    def keep(s: Tensor, t: int) -> Tensor:
        s = g[:, t].exp()[..., None, None] * s
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], s)
        return s - (beta[:, t, :, None] * k[:, t])[..., None] * read[..., None, :]

    return recurrence(q, keep, outer(k * beta[..., None], v), scale)


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return gated_delta(q, k, v, torch.zeros_like(beta), beta, scale)


def dplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    def keep(s: Tensor, t: int) -> Tensor:
        read = (s * a[:, t, :, :, None]).sum(-2, keepdim=True)
        return gk[:, t].exp()[..., None] * s + b[:, t, :, :, None] * read

    return recurrence(q, keep, outer(k, v), scale)


def gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    found, state = recurrence(q, lambda x, t: g[:, t].exp()[..., None, :] * x, outer(k, s), scale)
    return recurrence(found.softmax(-1), lambda x, t: g[:, t].exp()[..., None] * x, outer(s, v), 1.0)[0], state


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for fla: what its functions compute, token by token."""
    package, ops = ModuleType("fla"), ModuleType("fla.ops")
    package.__spec__ = ModuleSpec("fla", None)
    functions: dict[str, Callable[..., Any]] = {
        "linear_attn": linear,
        "simple_gla": simple_gla,
        "gla": gla,
        "delta_rule": delta,
        "gated_delta_rule": gated_delta,
        "dplr_delta_rule": dplr,
        "gsa": gsa,
    }
    for name, function in functions.items():
        setattr(ops, f"chunk_{name}", function)
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.ops", ops)


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("layer", [name for name, found in PEERS.items() if isinstance(found[0], Peer)])
def test_a_peer_computes_what_the_layer_does(layer: str) -> None:
    (found,) = peers_of(layer)
    assert isinstance(found, Peer)
    small = case(layer, (2, 9, 2, 8))
    module = ttmdsl.load(layer)
    expected = own(small, module, "reference").forward()
    subject = peer(small, module, found)
    torch.testing.assert_close(subject.forward(), expected, rtol=1e-4, atol=1e-5)
    gradients = subject.both()()
    missing = [name for name, g in zip(tensors(module, small), gradients, strict=True) if g is None]
    assert missing == (["log_alpha"] if layer == "retnet" else [])  # fla's decay of a head is no parameter


def test_a_decode_step_of_a_peer_goes_on_from_a_state() -> None:
    calls: list[dict[str, Any]] = []
    ops = ModuleType("a_peer")
    ops.step = lambda **given: (calls.append(given), (torch.ones(1), "the state"))[1]
    sys.modules["a_peer"] = ops
    try:
        Peer("p", "a_peer", "whole", "step", lambda x: {"q": x["q"], "g": x["g"]}, {"g": "gk"}).token(
            {"q": torch.ones(1), "g": torch.zeros(1)}
        )()
    finally:
        del sys.modules["a_peer"]
    assert [set(given) for given in calls] == [
        {"q", "gk", "output_final_state"},
        {"q", "gk", "output_final_state", "initial_state"},
    ]
    assert calls[1]["initial_state"] == "the state"


def test_a_block_of_a_peer_has_our_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, dict[str, Any]] = {}
    layers = ModuleType("fla.layers")
    for name in ("DeltaNet", "GatedDeltaNet", "GatedLinearAttention"):
        setattr(layers, name, lambda _name=name, **given: built.setdefault(_name, given))
    monkeypatch.setitem(sys.modules, "fla.layers", layers)
    blocks = [p for layer in ("delta_net", "gated_delta_net", "gla") for p in PEERS[layer] if isinstance(p, Block)]
    for found in blocks:
        found.build(4, 64, 1)
    assert len(built) == 3
    assert all(given.items() >= {"hidden_size": 256, "num_heads": 4, "expand_v": 1}.items() for given in built.values())


def test_peers_that_are_not_installed() -> None:
    assert set(PEERS) <= set(ttmdsl.layers())
    assert peers_of("titans") == []
    assert peers_of("no_layer_at_all") == []


# ---- reports ------------------------------------------------------------------------------------------------

MINE = Row("mamba2", (8, 2048, 16, 64), "bfloat16", "ttmdsl triton", 0.1, 0.8, 0.09, 0.4, peak=300, floor_forward=0.03)
THEIRS = Row("mamba2", (8, 2048, 16, 64), "bfloat16", "fla", 0.2, 1.2, kernels={"chunk_kernel": 12.5})
BROKEN = Row("gla", (8, 512, 16, 64), "bfloat16", "ttmdsl triton", failed="check: y 1.0e-01")


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert report.saved(path) == []
    report.save(path, {"device": "H200"}, [MINE, THEIRS, BROKEN])
    assert report.saved(path) == [MINE, THEIRS, BROKEN]
    assert json.loads(path.read_text())["machine"] == {"device": "H200"}
    path.write_text("{}")
    with pytest.raises(ttmdsl.LoadError, match="not the results of a benchmark"):
        report.saved(path)
    with pytest.raises(ttmdsl.LoadError, match="cannot write"):
        report.save(tmp_path / "no" / "rows.json", {}, [])


def test_the_table_says_what_is_known() -> None:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(report.table([MINE, THEIRS, BROKEN]))
    text = console.export_text()
    assert "3.0×" in text  # 0.09 over 0.03
    assert "2.00×, 1.50×" in text
    assert "check: y 1.0e-01" in text
    assert "step" not in text
    assert report.line(THEIRS).splitlines()[1].split() == ["12.5", "us", "chunk_kernel"]
    assert "FAILED check" in report.line(BROKEN)


def test_the_plot(tmp_path: Path) -> None:
    report.draw([MINE, THEIRS, BROKEN], tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    faster = replace(THEIRS, who="the fastest")
    report.draw_ratios([MINE, THEIRS, BROKEN, faster], [THEIRS.who, faster.who], tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_whole_blocks_are_not_held_against_a_function() -> None:
    blocks = [replace(MINE, who="ttmdsl Layer"), replace(THEIRS, who="fla Layer")]
    lost = replace(MINE, shape=(8, 512, 16, 64), failed="check")
    rows = [*blocks, MINE, THEIRS, BROKEN, lost, replace(THEIRS, shape=lost.shape)]
    assert report.beside(rows, THEIRS.who) == [(MINE, THEIRS)]


def test_every_figure_of_the_whole_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmarks = Path(__file__).parent.parent / "benchmarks"
    script = runpy.run_path(str(benchmarks / "run.py"))
    assert MINE.forward
    report.save(tmp_path / "other.json", {}, [replace(THEIRS, forward=MINE.forward / 2, both=1e3)])
    script["print_report"](script["with_fastest"]([MINE, THEIRS], [tmp_path / "other.json"]))
    out = capsys.readouterr().out
    assert "fla / ours, forward, geometric mean" in out
    (line,) = [line for line in out.splitlines() if line.startswith("fla / ours, forward, mamba2")]
    assert line.split()[-5:] == ["2.00", "met", "(at", "least", "1.1)"]
    (line,) = [line for line in out.splitlines() if line.startswith("fla's fastest run / ours, forward, worst")]
    assert line.split()[-5:] == ["0.50", "MISSED", "(at", "least", "1.1)"]
    (line,) = [
        line for line in out.splitlines() if line.startswith("fla's fastest run / ours, forward + backward, worst")
    ]
    assert line.split()[-5:] == ["1.50", "met", "(at", "least", "1.2)"]
    assert "not measured" in out
    part = script["PARTS"][0]
    left = script["missing"](part, "mamba2", [MINE])
    assert len(left) == 9
    assert (MINE.shape, "fla") in left


def test_the_whole_table_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "run.py"))
    names, path = script["measure"].__globals__, tmp_path / "rows.json"
    commands: list[list[str]] = []

    def finished(command: list[str], timeout: float, cwd: Path) -> Any:
        """First it dies without a word, then it takes too long, then it measures what is left."""
        commands.append(command)
        if len(commands) == 2:
            raise subprocess.TimeoutExpired(command, timeout)
        if len(commands) == 3:
            rows = report.saved(path)
            left = names["missing"](part, "mamba2", rows)
            report.save(path, {}, [*rows, *(Row("mamba2", shape, "bfloat16", who, 1.0) for shape, who in left)])
        return SimpleNamespace(returncode=-11 if len(commands) == 1 else 0)

    part = replace(script["PARTS"][0], shapes=script["SHAPES"][:2])
    monkeypatch.setitem(names, "subprocess", SimpleNamespace(run=finished, TimeoutExpired=subprocess.TimeoutExpired))
    names["measure"](part, "mamba2", path, time.monotonic() + 1000)
    first, second, *rest = report.saved(path)
    assert (first.failed, first.who) == ("the process ended with -11", "ttmdsl triton")
    assert (second.failed, second.who) == ("no result within 300 s", "fla")
    assert [row.failed for row in rest] == ["", ""]
    assert [command.count("--shape") for command in commands] == [2, 2, 1]
    names["measure"](part, "mamba2", path, time.monotonic() + 1000)
    assert len(commands) == 3


# ---- the command --------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, png = tmp_path / "rows.json", tmp_path / "times.png"
    command = ["bench", "linear_attention", "lattice_dec:b=4", "-s", "project=0", "--shape", "1,16,2,8"]
    assert main(["bench", "delta_net", "--shape", "1,16,2,8", "--no-peers", "--json", str(json_path)]) == 0
    capsys.readouterr()
    found = main(
        [*command[:2], "--shape", "1,16,2,8", "--lengths", "8,16", "--json", str(json_path), "--png", str(png)]
    )
    assert found == 0
    rows = report.saved(json_path)
    assert [(row.shape[1], row.who) for row in rows] == [
        (16, "ttmdsl torch"),
        (16, "ttmdsl reference"),
        (8, "ttmdsl torch"),
        (8, "ttmdsl reference"),
    ]
    assert png.exists()
    first = capsys.readouterr().out
    assert first.count("linear_attention 1,16,2,8 ttmdsl torch: forward ") == 1
    again = [*command, "--json", str(json_path), "--resume"]
    assert main([*again[:2], *again[5:]]) == 0
    assert report.saved(json_path) == rows
    assert main(["bench", "lattice_dec", "-s", "b=4", "-s", "project=0", "--shape", "1,8,1,8", "--no-peers"]) == 0
    assert "lattice_dec:b=4:project=0" in capsys.readouterr().out


def test_a_layer_that_misses_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ttmdsl.load("delta_net")
    right = module._torch
    monkeypatch.setattr(module, "_torch", lambda x, state: (right(x, state)[0] * 2, right(x, state)[1]))
    assert main(["bench", "delta_net", "--shape", "1,8,1,8", "--no-peers"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "delta_nett"], "did you mean 'delta_net'?"),
        (["bench", "delta_net", "--resume"], "--resume: of which file?"),
        (["bench", "delta_net", "trellis:b"], "expected constants"),
        (["tune", "delta_net"], "there is none here"),
        (["bench", "delta_net", "--device", "cuda"], "there is none here"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_what_cannot_be_measured(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_shapes_have_four_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "delta_net", "--shape", "1,2,3"])
    assert "such as 8,2048,16,64" in capsys.readouterr().err
