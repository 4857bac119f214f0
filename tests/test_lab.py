"""The laboratory of `ttmdsl tune`, on a CPU: its processes, and what it finds out about a trial."""

from __future__ import annotations

import contextlib
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttmdsl.bench import lab
from ttmdsl.bench.clock import CpuClock
from ttmdsl.bench.lab import GpuLab, Worker
from ttmdsl.bench.subjects import Case
from ttmdsl.bench.tune import Trial, Verdict
from ttmdsl.tuning import without_gradients

CASE = Case("delta_net", (8, 2048, 16, 64))


def crash(trial: Trial) -> None:
    os._exit(11)


def hang(trial: Trial) -> None:
    time.sleep(60)


def process(trial: Trial) -> int:
    return os.getpid()


def refuse(trial: Trial) -> None:
    raise ValueError("too large")


def _lost(*_: object) -> bool:
    return False


def lose_the_device(trial: Trial) -> None:
    CpuClock.usable = _lost  # type: ignore[method-assign]
    raise ValueError(f"an illegal memory access was encountered\n{'For debugging consider ' * 20}")


def tell_of_a_lost_device(trial: Trial) -> str:
    CpuClock.usable = _lost  # type: ignore[method-assign]
    return "check: T=67: illegal memory access"


def test_a_lost_process_is_what_is_wrong_with_a_trial() -> None:
    worker, trial = Worker(patience=20), Trial(replace(CASE, device="cpu"))
    try:
        first = worker.ask(process, trial)
        with pytest.raises(RuntimeError, match="ValueError: too large"):
            worker.ask(refuse, trial)
        assert worker.ask(process, trial) == first
        with pytest.raises(RuntimeError, match="took its process down"):
            worker.ask(crash, trial)
        second = worker.ask(process, trial)
        with pytest.raises(RuntimeError, match="illegal memory access") as failed:
            worker.ask(lose_the_device, trial)
        assert len(str(failed.value)) < 240
        third = worker.ask(process, trial)
        assert "illegal" in worker.ask(tell_of_a_lost_device, trial)
        assert len({first, second, third, worker.ask(process, trial)}) == 4
        worker.patience = 0.2
        with pytest.raises(RuntimeError, match="no answer within 0 s"):
            worker.ask(hang, trial)
    finally:
        worker.stop()


def test_a_laboratory_without_a_gpu_says_so_for_every_trial() -> None:
    trials = [Trial(replace(CASE, device="cpu", backend="triton"), {"scan": {"num_warps": n}}) for n in (2, 4, 8)]
    with GpuLab(2) as found:
        verdicts = found.check(trials)
        assert len(verdicts) == 3
        assert all("no attribute" in verdict.wrong for verdict in verdicts)  # where Triton runs
        with pytest.raises(RuntimeError, match="no attribute"):
            found.facts(trials[0])
        with pytest.raises(RuntimeError, match="no attribute"):
            found.times(trials[0])
        processes = [worker._process for worker in found._workers]
    assert not any(process.is_alive() for process in processes)


def interpreted(layer: str, forced: dict[str, dict[str, int]]) -> tuple[Any, str, list[str], bool]:
    """In the process that interprets kernels: facts of a trial, what is wrong with it, where y is doubled also how far
    it goes astray, and whether the module is left as it was."""
    trial = Trial(Case(layer, (1, 130, 1, 16), "float32", "cpu", "triton"), forced)
    module = trial.case.load()
    before = module._measured
    found = lab.facts(trial), lab.check(trial).wrong + lab.strayed(trial)
    right = module._triton
    module._triton = lambda *args: (lambda y, state: (2 * y, state))(*right(*args))
    try:
        wrong = [lab.check(trial).wrong, lab.strayed(trial)]
    finally:
        module._triton = right
    return *found, wrong, module._measured is before and not getattr(module, "_fitting", {})


def test_what_overflows_by_the_rules_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(Case("delta_net", (1, 131, 1, 16), "float32", "cpu", "torch"))
    found = [{"y": torch.ones(2)}, {"0": torch.ones(2), "1": torch.tensor([1.0, math.inf])}]
    monkeypatch.setattr(lab, "launched", lambda trial: contextlib.nullcontext())
    monkeypatch.setattr(lab, "_results", lambda case: found)
    assert lab.strayed(trial) == ""
    found[1]["1"][0] = math.nan
    assert lab.strayed(trial) == ""
    found = [{"y": torch.ones(2)}, {"0": 2 * torch.ones(2), "1": found[1]["1"]}]
    assert lab.strayed(trial) == "131 tokens: 1.0e+00 from what it is by the rules"


def test_facts_and_checks_of_a_trial(interpreter: ProcessPoolExecutor) -> None:
    forced = {"chunk": {"chunk": 32}, "_chunk_forward_scan_kernel": {"num_warps": 1, "block": 16}}
    facts, right, wrong, clean = interpreter.submit(interpreted, "delta_net", forced).result()
    assert (right, clean) == ("", True)
    assert wrong[0].startswith("check: y 1.0e+00")
    assert wrong[1] == "130 tokens: 1.0e+00 from what it is by the rules"
    assert set(facts.forms) == {"chunk"}
    assert facts.forms["chunk"].config == {"chunk": 32}
    scan = facts.kernels["_chunk_forward_scan_kernel"]
    assert scan.kernel.startswith("chunk scan 5 products ")
    assert (scan.tiles, scan.bytes, scan.lanes) == ((32, 16, 16), 4, 1)
    assert scan.config == {"num_warps": 1, "num_stages": 3, "block": 16}
    assert not any(name.startswith("_token") for name in facts.kernels)  # it did not run
    alone = facts.kernels[without_gradients("_chunk_forward_scan_kernel")]
    assert alone.kernel == without_gradients(scan.kernel)
    assert alone.config == scan.config  # as long as nothing else is asked for


def test_a_configuration_that_found_no_room_is_said_to() -> None:
    launches = {("_a_kernel", 1, 90, True, True): ({"P_d": 64}, {"num_warps": 8, "num_stages": 2})}
    module = SimpleNamespace(_fitting=launches)
    asked = {"_a_kernel": {"num_warps": 8, "num_stages": 3, "block": 64}, "_b_kernel": {"num_warps": 4}}
    assert lab.refused(module, Trial(CASE, asked)) == Verdict("no room on the device", ("_a_kernel",))
    asked["_a_kernel"] = {"num_warps": 8, "num_stages": 2, "block": 64}
    assert lab.refused(module, Trial(CASE, asked)) == Verdict()
    fewer = {"_a_kernel": asked["_a_kernel"] | {"copied": 0}}
    launches["_a_kernel", 1, 90, True, True] = {"P_d": 64, "STAGES": None}, {"num_warps": 8, "num_stages": 2}
    assert lab.refused(module, Trial(CASE, asked)) == Verdict("no room on the device", ("_a_kernel",))
    assert lab.refused(module, Trial(CASE, fewer)) == Verdict()  # some tensors are to be copied ahead, not all
    launches["_a_kernel", 1, 90, True, True] = {"P_d": 64, "STAGES": 2}, {"num_warps": 8, "num_stages": 2}
    assert lab.refused(module, Trial(CASE, asked)) == Verdict()
    lying = {"_a_kernel": asked["_a_kernel"] | {"in_shared": 1}}
    assert lab.refused(module, Trial(CASE, lying)) == Verdict("no room on the device", ("_a_kernel",))
    launches["_a_kernel", 1, 90, True, True][0]["IN_SHARED"] = True
    assert lab.refused(module, Trial(CASE, lying)) == Verdict()
    del launches["_a_kernel", 1, 90, True, True][0]["IN_SHARED"]
    launches["_a_kernel", 1, 90, False, True] = {"P_d": 64}, {"num_warps": 4, "num_stages": 1}
    asked[without_gradients("_a_kernel")] = {"num_warps": 4, "num_stages": 2}
    assert lab.refused(module, Trial(CASE, asked)) == Verdict("no room on the device", ("_a_kernel without gradients",))


def light(layer: str) -> tuple[bool, bool]:
    """In the process that interprets kernels: whether a few tokens are a light call, in a trial and outside."""
    from ttmdsl.drawing import dims_at, sizes_of

    trial = Trial(Case(layer, (1, 130, 1, 32), "bfloat16", "cpu", "triton"))
    module = trial.case.load()

    def call() -> bool:
        sizes, device = sizes_of(module, dims_at(module, 32)), torch.device("cpu")
        return bool(module._Schedule("chunk", [0, 130], [0], 1, sizes, torch.bfloat16, device).light)

    with lab.launched(trial):
        within = call()
    return within, call()


def test_few_tokens_of_a_trial_stand_for_many(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(light, "gated_delta_net").result() == (False, True)


def crowded(layer: str) -> tuple[dict[str, int], dict[str, int]]:
    """In the process that interprets kernels: how a scan is launched where there is room for two stages, by what the
    laboratory finds and by the rules."""
    trial = Trial(Case(layer, (1, 70, 1, 16), "float32", "cpu", "triton"))
    module, name = trial.case.load(), "_chunk_forward_scan_kernel"
    start = module._Schedule.start

    def full(self: Any, known: Any, kernel: Any, *rest: Any) -> None:
        if rest[-1]["num_stages"] > 2:
            raise module.triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        start(self, known, kernel, *rest)

    module._Schedule.start = full
    try:
        found = lab.facts(trial).kernels[name].config
    finally:
        module._Schedule.start = start
    return found, lab.facts(trial).kernels[name].config


def walking() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """In the process that interprets kernels: what walks, and how a walk was launched as a trial forces it."""
    trial = Trial(Case("lattice_dec:b=64:project=0", (1, 70, 1, 24), "float32", "cpu", "triton"))
    name = "_chunk_backward_2_kernel"
    forced = {"num_warps": 4, "num_stages": 1, "block": 16}
    found = [lab.facts(Trial(trial.case, {name: forced | more})) for more in ({}, {"in_shared": 1})]
    return dict(found[0].in_shared), found[0].kernels[name].config, found[1].kernels[name].config


def test_facts_of_a_walk(interpreter: ProcessPoolExecutor) -> None:
    walks, in_registers, in_shared = interpreter.submit(walking).result()
    assert {*walks.values()} == {24}
    assert {"_chunk_forward_read_kernel", "_chunk_forward_read_kernel without gradients"} <= walks.keys()
    assert in_shared == {**in_registers, "in_shared": 1}
    assert in_registers["block"] == 16


def test_facts_are_of_what_found_room(interpreter: ProcessPoolExecutor) -> None:
    found, rules = interpreter.submit(crowded, "gated_delta_net").result()
    assert (found["num_stages"], rules["num_stages"]) == (2, 3)


def test_facts_of_a_layer_in_kernel_form(interpreter: ProcessPoolExecutor) -> None:
    facts, right, _, clean = interpreter.submit(interpreted, "swa", {"_read_kernel": {"block": 32}}).result()
    assert (right, clean) == ("", True)
    assert facts.forms == {}
    assert facts.kernels["_read_kernel"].config == {"num_warps": 4, "num_stages": 2, "block": 32}
    assert facts.kernels["_rows_kernel"].config["block"] == 64
    assert facts.kernels["_read_kernel"].kernel == "pairs read: averages weighs evicts"
