"""Every kernel of the ten layers, compiled ahead of time by two versions of Triton, without a GPU.

What is covered in bfloat16, forward and backward, but of what is like lattice_dec: all kernels of each form by Triton
3.6 at head size 64 for sm_90, or by the newest, of the forms for tokens from the start of a group on, since the others'
kernels differ in little, at 64 for sm_80; thoroughly by both, and four layers that are unlike each other by the newest
at 128 for sm_90. The rest of the matrix (both versions, three head sizes, two targets) takes a quarter of an hour on
two cores: `python tests/aot_matrix.py` compiles it and writes docs/aot.md. A kernel fails that does not compile, or
that wants more shared memory than its target has. Spilled registers are no failure: they are listed after the tests.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aot_matrix import OLD, VARIANTS, triton_36
from tiers import beyond, mostly_beyond, thorough

from ttmdsl.aot import (
    AROUND,
    OF_OP,
    Job,
    Resources,
    capability,
    compile_all,
    compile_kernels,
    loads_in_loops,
    parse_variant,
    table,
    to_json,
)
from ttmdsl.cli import main
from ttmdsl.drawing import dims_at
from ttmdsl.errors import CheckError, LoadError
from ttmdsl.machine_code import Either, MixUp

BY_NEWEST = ["mamba2", "gated_delta_net", "lattice_dec:b=16", "lattice_dec:b=16:project=0", "trellis:b=1"]
UNLIKE = [v for v in VARIANTS if not v.startswith(("lattice_enc", "lattice_sim"))]  # these are like lattice_dec
FROM_A_START = "_(chunk|token)_"  # what kernels' names begin with that take whole groups of tokens
WIDE = "_chunk_|_token_forward_"
WIDE_HEADS = ["mamba2", "gated_delta_net", "titans_linear", "lattice_dec:b=16:project=0"]
CACHE = Path(__file__).parent.parent / ".triton"
MUON = """layer Muon {
  dim d
  input q[d], k[d], v[d]
  gate theta: decay, eta: unit
  memory S[d, d]
  bias 1/2 * |S @ k - v|^2
  retention S
  optimizer muon(momentum = theta, rate = eta)
  read S @ q
}"""


class Compiler:
    """A process in which one Triton compiles, job after job: to start one takes as long as many a job."""

    def __init__(self, packages: Path | None) -> None:
        self.packages = packages
        self.pool = self.start()

    def start(self) -> ProcessPoolExecutor:
        before = () if self.packages is None else (str(self.packages),)
        return ProcessPoolExecutor(1, get_context("spawn"), as_compiler, before)

    def version(self) -> str:
        return self.pool.submit(triton_version).result()

    def judge(self, job: Job, record_property: Any) -> None:
        """Compiles all kernels of the job: none may fail, and what spills is listed."""
        try:
            rows = self.pool.submit(compile_kernels, job).result()
        except BrokenProcessPool:
            self.pool = self.start()
            pytest.fail("the compiler took its process down")
        for row in rows:
            if row.stack:
                record_property("spill", {"triton": "newest" if self.packages is None else OLD, **asdict(row)})
        failures = [f"{r.kernel} D={r.head} {r.target}: {r.error}" for r in rows if r.error]
        assert not failures, "\n".join(failures)
        assert "_token_forward_kernel" in {r.kernel for r in rows}
        assert any("_backward_" in r.kernel for r in rows)
        assert all(r.registers > 0 for r in rows)


def as_compiler(*packages: str) -> None:
    """Begins such a process: the Triton in `packages` comes before the environment's own."""
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = packages


def triton_version() -> str:
    return str(importlib.import_module("triton").__version__)


@pytest.fixture(scope="session")
def newest() -> Iterator[Compiler]:
    compiler = Compiler(None)
    yield compiler
    compiler.pool.shutdown()


@pytest.fixture(scope="session")
def old() -> Iterator[Compiler]:
    compiler = Compiler(triton_36())
    yield compiler
    compiler.pool.shutdown()


@pytest.mark.parametrize("variant", mostly_beyond(UNLIKE, *BY_NEWEST))
def test_newest_triton(variant: str, newest: Compiler, record_property: Any) -> None:
    newest.judge(Job(variant, 64, "sm_80", "bfloat16", named=FROM_A_START), record_property)


@pytest.mark.parametrize("variant", mostly_beyond(WIDE_HEADS, "mamba2"))
def test_wide_heads(variant: str, newest: Compiler, record_property: Any) -> None:
    newest.judge(Job(variant, 128, "sm_90", "bfloat16", named=WIDE), record_property)


@pytest.mark.parametrize("variant", beyond(UNLIKE, *BY_NEWEST, "trellis:b=16"))
def test_triton_36(variant: str, old: Compiler, record_property: Any) -> None:
    old.judge(Job(variant, 64, "sm_90", "bfloat16", named=OF_OP), record_property)


@thorough
def test_what_masks_have_spilled(old: Compiler) -> None:
    """By four warps ptxas 12.8 gets this kernel wrong, in heads of 60, and not of 64 (benchmarks/NOTES.md)."""
    found = {}
    for head in (60, 64):
        job = Job("dplr", head, "sm_90", "bfloat16", named="_chunk_backward_1_3", lengths=head == 60)
        for row in old.pool.submit(compile_kernels, job).result():
            found[head, row.kernel.partition(", ")[2]] = row.warps, row.stack < 600, row.error
    light = found.pop((60, "few tokens"))
    assert found == {(60, ""): (8, True, ""), (60, "masked tokens"): (8, True, ""), (64, ""): (4, True, "")}
    assert light[2] == ""


def test_other_lengths_start_other_kernels() -> None:
    job = Job("linear_attention", 32, "sm_90", "bfloat16", named="_chunk_forward_scan|_token_forward", lengths=True)
    rows = {row.kernel: row for row in compile_kernels(job)}
    scan = "_chunk_forward_scan_kernel"
    assert set(rows) == {
        scan,
        f"{scan}, masked tokens",
        f"{scan}, few tokens",
        "_token_forward_kernel",
        "_token_forward_kernel, a step",
    }
    assert not any(row.error for row in rows.values())
    assert len({(row.registers, row.shared) for kernel, row in rows.items() if kernel.startswith(scan)}) == 3
    small = compile_kernels(replace(job, head=16, named="_chunk_forward_scan"))  # computed in float32 in any case
    assert [row.kernel for row in small] == [scan, f"{scan}, masked tokens"]


def read_alone(source: Any, target: Any, *rest: Any) -> tuple[Any, dict[str, Any]]:
    """In place of a binary: Triton's language alone, in which shapes must agree, which the interpreter does not ask."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(rest[0][0])
    ir.load_dialects(context)
    backend.load_dialects(context)
    found = {"target": target, "options": options, "context": context}
    found |= {"codegen_fns": backend.get_codegen_implementation(options), "module_map": backend.get_module_map()}
    source.make_ir(**{name: found[name] for name in inspect.signature(source.make_ir).parameters})
    return SimpleNamespace(asm={"ttgir": "", "cubin": b""}), {"warps": 4, "registers": 1, "stack": 0, "shared": 0}


@pytest.mark.parametrize("variant", ["omega_linear:b=64", "swla:c=9", "gsa", "delta_product", "dot:c=3:b=4", "titans"])
def test_heads_whose_dims_are_not_alike(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlike(module: Any, head: int) -> tuple[int, ...]:
        return tuple(2 * n >> i % 3 for i, n in enumerate(dims_at(module, head)))

    monkeypatch.setattr("ttmdsl.aot.mixed_up", lambda cubin: [])
    monkeypatch.setattr("ttmdsl.aot._built", read_alone)
    monkeypatch.setattr("ttmdsl.drawing.dims_at", unlike)
    rows = compile_kernels(Job(variant, 64, "sm_90", "bfloat16"))
    assert [(row.kernel, row.error) for row in rows if row.error] == []
    assert len(rows) >= 5


def test_mixed_up_values_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = MixUp("FADD R4, R5, R6", "LDS R7, [R4]", "FMUL R8, R4, R4")
    for stack, error in ((8, f"ptxas mixes up 1 values, the first {mixed}"), (0, "")):
        monkeypatch.setattr("ttmdsl.aot.resource_usage", lambda cubin, stack=stack: (64, stack))
        monkeypatch.setattr("ttmdsl.aot.mixed_up", lambda cubin: [mixed])
        rows = compile_kernels(Job("mamba2", 16, "sm_90", "bfloat16", named="_chunk_carry"))
        assert [row.error for row in rows] == [error]


def test_operands_of_walks_that_are_either_of_two_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is spilled; not where one block is all, which has no next one to read what was mixed up."""
    either = Either("HGMMA R72, R176", "F2FP R176, R59, R58", "LDSM R176, [R3]")
    monkeypatch.setattr("ttmdsl.aot.resource_usage", lambda cubin: (64, 0))
    monkeypatch.setattr("ttmdsl.aot.mixed_up", lambda cubin: [either])
    for head, error in ((128, f"ptxas mixes up 1 values, the first {either}"), (64, "")):
        job = Job("gated_delta_net", head, "sm_90", "bfloat16", named="_chunk_backward_1_kernel")
        assert [row.error for row in compile_kernels(job)] == [error]


@pytest.mark.parametrize("variant", ["gated_delta_net", "delta_net", "titans_linear"])
def test_units_of_a_scan_wait_for_no_load(variant: str, old: Compiler) -> None:
    """All that a unit loads is copied ahead, gates too, which would not be as tensors hold them, in bfloat16."""
    scans = old.pool.submit(compile_kernels, Job(variant, 64, "sm_90", "bfloat16", named=".*_scan_")).result()
    assert len(scans) >= 2
    assert not any(row.waits for row in scans)


@pytest.mark.parametrize(
    ("variant", "head", "kernel"),
    [
        ("titans:b=64", 64, "_chunk_forward_scan"),
        pytest.param("ttt_norm:b=64", 128, "_chunk_backward_scan", marks=thorough),
    ],
)
def test_programs_that_share_a_heads_blocks(variant: str, head: int, kernel: str, newest: Compiler) -> None:
    job = Job(variant, head, "sm_80", "bfloat16", named=kernel)
    alone, shared = newest.pool.submit(compile_kernels, job).result()
    assert (alone.error, shared.error) == ("", "")
    assert shared.kernel == f"{alone.kernel}, few heads"


@thorough
def test_what_is_around_op_has_room(newest: Compiler, old: Compiler) -> None:
    """The same in every layer, so of one alone."""
    for compiler, target in ((newest, "sm_80"), (old, "sm_90")):
        sizes = {"linear_attention": 60, "omega_linear:p=2": 8}
        jobs = [Job(layer, head, target, "bfloat16", named=AROUND) for layer, head in sizes.items()]
        around = [row for job in jobs for row in compiler.pool.submit(compile_kernels, job).result()]
        assert len(around) == 5 + 5 + 1
        assert not any(row.error or row.stack > 64 for row in around)


def test_the_old_triton_is_the_one_that_compiles(newest: Compiler, old: Compiler) -> None:
    assert old.version() == OLD
    assert newest.version() == importlib.metadata.version("triton")


@thorough
def test_newton_schulz_finds_room_for_wide_tiles(tmp_path: Path, newest: Compiler, record_property: Any) -> None:
    (tmp_path / "muon.ttm").write_text(MUON)
    job = Job(str(tmp_path / "muon.ttm"), 128, "sm_80", "bfloat16", named=FROM_A_START)  # which has less
    newest.judge(job, record_property)


# ---- the command --------------------------------------------------------------------------------------------


def test_too_much_shared_memory_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tuple(
        Resources("x", kernel, "sm_90", 64, "bfloat16", 4, 100, stack, 1024, 0.1, error)
        for kernel, stack, error in (("_a_kernel", 0, ""), ("_b_kernel", 8, ""), ("_c_kernel", 0, "too large"))
    )
    monkeypatch.setattr("ttmdsl.aot.compile_all", lambda *args, **kwargs: list(small))
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["aot", "mamba2"]) == 1
    out = capsys.readouterr().out
    assert "3 kernels: 1 failed, 1 spill registers" in out
    assert "too large" in out
    monkeypatch.setattr("ttmdsl.aot.compile_all", lambda *args, **kwargs: list(small[:2]))
    assert main(["aot", "mamba2", "--json"]) == 0
    assert [row["kernel"] for row in json.loads(capsys.readouterr().out)] == ["_a_kernel", "_b_kernel"]


def test_processes_cache_and_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # does not reach the processes that compile
    heard = []
    first = compile_all(
        ["linear_attention"], [32], ["sm_90"], processes=2, done=lambda n, total: heard.append((n, total))
    )
    again = compile_all(["linear_attention"], [32], ["sm_90"])
    assert heard == [(1, 1)]
    assert [r.kernel for r in first] == [r.kernel for r in again]
    assert not any(r.error for r in first)
    assert sum(r.seconds for r in again) < 0.3 * sum(r.seconds for r in first)
    with pytest.raises(LoadError, match="no layer is called"):
        compile_all(["linear_attentoin"])


def test_a_bad_spec_is_told_from_another_process(tmp_path: Path) -> None:
    spec = tmp_path / "bad.ttm"
    spec.write_text("layer Bad { dim d\n input q[d]\n memory S[d, d]\n bias -<S @ k, q>\n read S @ q }")
    with pytest.raises(CheckError, match="unknown name `k`") as caught:
        compile_all([str(spec)])
    assert caught.value.diagnostics[0].span.line == 4


@pytest.mark.parametrize("variant", ["mamba2:b", "mamba2:b=x", "mamba2:=3", "mamba2:b-1=3"])
def test_bad_variants(variant: str) -> None:
    with pytest.raises(LoadError, match="expected constants"):
        parse_variant(variant)


def test_variants_and_targets() -> None:
    assert parse_variant("lattice_dec:b=16:project=0") == ("lattice_dec", {"b": 16, "project": 0})
    assert capability("sm_80") == 80
    for target in ("sm_7", "90", "sm_x"):
        with pytest.raises(LoadError, match="expected one of sm_80"):
            capability(target)


def test_loads_in_loops() -> None:
    text = """
  %a = tt.load %p : !tt.ptr<i64>
  %b = scf.for %i = %c0 to %n step %c1 iter_args(%s = %z) -> (f32) {
    %c = tt.load %q : tensor<64x!tt.ptr<f32>, #blocked>
    scf.if %d {
      tt.store %r, %c
    }
    %e = ttg.async_copy_global_to_local %t, %u
    %f = tt.load %v : !tt.ptr<f32>
    scf.yield %f : f32
  }
  %g = tt.load %w : !tt.ptr<f32>"""
    assert loads_in_loops(text) == 2


def test_reports() -> None:
    row = Resources("mamba2", "_a_kernel", "sm_90", 64, "bfloat16", 4, 255, 1888, 65536, 2.5)
    assert json.loads(to_json([row]))[0]["stack"] == 1888
    assert table([row]).row_count == 1
