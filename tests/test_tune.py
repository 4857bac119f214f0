"""`ttmdsl tune`: what is chosen, by a laboratory that makes its numbers up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ttmdsl.bench.subjects import Case
from ttmdsl.bench.tune import Facts, Settings, Trial, Verdict, candidates, tune
from ttmdsl.errors import LoadError
from ttmdsl.orders import ORDERS, PLACED
from ttmdsl.tuning import Entry, Table, read

CASE = Case("delta_net", (8, 2048, 16, 64))
SCAN = Entry(
    "chunk scan 4 products 0", (64, 64, 64), 2, 128, {"num_warps": 4, "num_stages": 3, "block": 64}, triton="3.6"
)
MAP = Entry("chunk map 2 products 1", (64, 64, 64), 2, 128, {"num_warps": 4, "num_stages": 1}, triton="3.6")
FORM = Entry("chunk 6 products 2", (64, 64), 2, 128, {"chunk": 64}, triton="3.6")


class FakeLab:
    """A GPU on which the scan takes 100 us, the map 50 us, and a negligible kernel 1 us, whatever their units, unless
    `faster` says so; what `wrong` names is wrong, what `broken` names cannot be launched at all; what `crowded` names
    finds no room, so that the rules' own is launched."""

    jobs = 4

    def __init__(self, forms: Mapping[str, Entry] | None = None) -> None:
        self.kernels = {"scan": SCAN, "map": MAP, "small": replace(MAP, kernel="chunk map 0 products 3")}
        self.forms = forms or {}
        self.unordered: set[str] = set()
        self.more_orders: list[int] = []
        self.faster: dict[tuple[str, tuple[tuple[str, int], ...]], float] = {}
        self.wrong: list[dict[str, int]] = []
        self.broken: list[dict[str, int]] = []
        self.crowded: list[dict[str, int]] = []
        self.asked: list[Trial] = []
        self.checked: list[Trial] = []
        self.timed: list[Trial] = []

    def facts(self, trial: Trial) -> Facts:
        chunk = trial.forced.get("chunk", {}).get("chunk", 64)
        kernels = {name: replace(e, tiles=(chunk, *e.tiles[1:])) for name, e in self.kernels.items()}
        orders = [*range(1, ORDERS + 1), *self.more_orders]
        return Facts(kernels, self.forms, dict.fromkeys(kernels.keys() - self.unordered, orders))

    def check(self, trials: Sequence[Trial]) -> list[Verdict]:
        self.asked += trials
        return [self.verdict(trial) for trial in trials]

    def verdict(self, trial: Trial) -> Verdict:
        self.checked.append(trial)
        if any(config in self.wrong for config in trial.forced.values()):
            return Verdict("check: y 1.8e+00")
        lacking = tuple(name for name, config in trial.forced.items() if config in self.crowded)
        # the others were launched, and were right
        self.checked.append(replace(trial, forced={k: v for k, v in trial.forced.items() if k not in lacking}))
        return Verdict("no room on the device", lacking) if lacking else Verdict()

    def times(self, trial: Trial) -> Mapping[str, float]:
        assert trial in self.checked, "timed before it was checked"
        self.timed.append(trial)
        if any(config in self.broken for config in trial.forced.values()):
            raise RuntimeError("OutOfResources: shared memory")
        times = {"scan": 100.0, "map": 50.0, "small": 1.0}
        for name, config in trial.forced.items():
            us = self.faster.get((name, tuple(sorted(config.items()))))
            if us is not None:
                times["scan" if name == "chunk" else name] = us
        return times


def quick(name: str, us: float, **config: int) -> dict[tuple[str, tuple[tuple[str, int], ...]], float]:
    return {(name, tuple(sorted(config.items()))): us}


def tuned(fake: FakeLab, path: Path, **settings: Any) -> tuple[Table, list[str]]:
    said: list[str] = []
    table = tune([CASE], "sm_90", path, Settings(**settings), fake, said.append)
    assert read(path) == table
    return table, said


def test_the_fastest_right_configuration_is_chosen(tmp_path: Path) -> None:
    fake = FakeLab()
    best, faster = {"num_warps": 8, "num_stages": 2, "block": 64}, {"num_warps": 8, "num_stages": 1, "block": 32}
    fake.faster = (
        quick("scan", 60, **best) | quick("scan", 20, **faster) | quick("map", 49.5, num_warps=8, num_stages=1)
    )
    fake.wrong = [faster]
    fake.broken = [{"num_warps": 4, "num_stages": 4, "block": 64}]
    table, said = tuned(fake, tmp_path / "new" / "sm_90.json")
    scan, kept = table.kernels
    assert (scan.config, scan.us, scan.default_us, scan.triton) == (best, 60, 100, "3.6")
    assert scan.place == SCAN.place
    assert kept.config == MAP.config  # one percent is no gain
    assert {e.why for e in table.excluded} == {"check: y 1.8e+00", "OutOfResources: shared memory"}
    assert [e.config for e in table.excluded] == [faster, fake.broken[0]] or len(table.excluded) == 2
    assert said[0].endswith("scan: num_warps=8 num_stages=2 block=64: 60 us, by the rules 100 us")
    assert len(said) == 2  # the negligible kernel stays as it is
    assert all(trial.forced.get("scan") != faster for trial in fake.timed)


def test_the_order_of_values_is_chosen_at_the_fastest_configuration(tmp_path: Path) -> None:
    fake = FakeLab()
    narrow, wide = {"num_warps": 4, "num_stages": 2, "block": 32}, {"num_warps": 8, "num_stages": 2, "block": 64}
    fake.faster = quick("scan", 60, **narrow) | quick("scan", 70, **wide) | quick("map", 20, **MAP.config, order=2)
    for order, us in ((3, 55), (4, 40), (5, 10)):
        fake.faster |= quick("scan", us, **narrow, order=order)
    fake.wrong, fake.broken = [{**narrow, "order": 5}], [{**MAP.config, "order": 7}]
    table, said = tuned(fake, tmp_path / "sm_90.json")
    scan, beside, map_ = sorted(table.kernels, key=lambda e: (e.kernel != SCAN.kernel, not e.narrow))
    assert (scan.config, scan.us, scan.default_us) == ({**narrow, "order": 4}, 40, 100)
    assert (beside.config, beside.us) == (wide, 70)  # where narrow blocks do not count
    assert (map_.config, map_.us, map_.default_us) == ({**MAP.config, "order": 2}, 20, 50)
    assert {(e.kernel, e.config["order"]) for e in table.excluded} == {(SCAN.kernel, 5), (MAP.kernel, 7)}
    assert said[-2].endswith("scan: num_warps=4 num_stages=2 block=32 order=4: 40 us, by the rules 100 us")


def test_then_where_the_fastest_order_has_its_products(tmp_path: Path) -> None:
    fake = FakeLab()
    config = SCAN.config
    fake.faster = quick("scan", 60, **config, order=3) | quick("scan", 50, **config, order=3 + 2 * PLACED)
    fake.faster |= quick("scan", 40, **config, order=4 + PLACED)  # of an order that is slower by itself
    fake.faster |= quick("map", 40, **MAP.config, order=PLACED)  # its own
    fake.more_orders = [3 + PLACED, 3 + 2 * PLACED, 4 + PLACED, PLACED]
    table, said = tuned(fake, tmp_path / "sm_90.json")
    assert [(e.config["order"], e.us, e.default_us) for e in table.kernels] == [(35, 50, 100), (16, 40, 50)]
    assert said[-2].endswith("order=35: 50 us, by the rules 100 us")
    tried = {trial.forced.get("scan", {}).get("order", 0) for trial in fake.timed}
    assert {n for n in tried if n >= PLACED} == {PLACED, 3 + PLACED, 3 + 2 * PLACED}


def test_an_order_that_helps_no_more_is_left(tmp_path: Path) -> None:
    fake, path = FakeLab(), tmp_path / "sm_90.json"
    stale = {**SCAN.config, "order": 2}
    path.write_text(Table("sm_90", [replace(SCAN, config=stale, us=50)]).to_json())
    fake.faster = quick("scan", 120, **stale)
    table, _ = tuned(fake, path, known=read(path))
    assert [(e.config, e.us) for e in table.kernels] == [(SCAN.config, 100)]


def test_what_has_one_order_is_asked_for_no_other(tmp_path: Path) -> None:
    fake = FakeLab()
    fake.unordered = {"scan"}
    tuned(fake, tmp_path / "sm_90.json")
    asked = {name for trial in fake.asked for name, config in trial.forced.items() if "order" in config}
    assert asked == {"map"}


def test_orders_alone_are_those_of_kernels_as_tables_have_them(tmp_path: Path) -> None:
    fake, path = FakeLab(), tmp_path / "sm_90.json"
    narrow, wide = {"num_warps": 4, "num_stages": 2, "block": 32}, {"num_warps": 8, "num_stages": 3, "block": 64}
    known = Table("sm_90", [replace(SCAN, config=wide, us=120), replace(SCAN, config=narrow, us=100)])
    path.write_text(known.to_json())
    fake.faster = quick("scan", 70, **narrow, order=3) | quick("scan", 10, num_warps=8) | quick("map", 20, num_warps=8)
    table, said = tuned(fake, path, known=known)
    assert [e.config for e in table.kernels] == [{**narrow, "order": 3}, wide]
    assert [e.us for e in table.kernels] == [70, 120]
    assert len(said) == 1
    tried = {config.get("order") for trial in fake.timed for config in trial.forced.values()}
    assert tried == {None, *range(1, ORDERS + 1)}


def test_what_tables_lack_is_measured_beside_what_they_have(tmp_path: Path) -> None:
    fake, path = FakeLab(), tmp_path / "sm_90.json"
    known = Table("sm_90", [replace(SCAN, config={"num_warps": 4, "num_stages": 2, "block": 32}, us=100)])
    path.write_text(known.to_json())
    fake.faster = quick("scan", 10, num_warps=8) | quick("map", 20, num_warps=8, num_stages=1)
    table, said = tuned(fake, path, known=known, missing=True)
    assert [(e.kernel, e.us) for e in table.kernels] == [(SCAN.kernel, 100), (MAP.kernel, 20)]
    assert len(said) == 1
    assert {tuple(trial.forced["scan"].items()) for trial in fake.timed} == {tuple(known.kernels[0].config.items())}
    _, said = tuned(fake, path, known=table, missing=True)
    assert [line.partition(": ")[2] for line in said] == [
        "tables have all kernels here that take long enough to be measured"
    ]
    elsewhere = replace(table, kernels=[replace(e, triton="3.5") for e in table.kernels])  # narrow blocks do not count
    _, said = tuned(fake, path, known=elsewhere, missing=True)
    assert [line.split()[2] for line in said] == ["scan:"]


def test_what_configurations_say_since_is_measured_beside_what_tables_have(tmp_path: Path) -> None:
    """By narrow blocks, which count where they were measured alone, it is an entry beside what it was."""
    fake, path = FakeLab(), tmp_path / "sm_90.json"
    before = replace(SCAN, config={"num_warps": 4, "num_stages": 2, "block": 64}, us=100, default_us=120)
    known = Table("sm_90", [before])
    path.write_text(known.to_json())
    narrow = {"num_warps": 4, "num_stages": 3, "block": 32, "copied": 0}
    fake.faster = quick("scan", 10, **narrow) | quick("scan", 20, **{**narrow, "block": 64})
    table, said = tuned(fake, path, known=known, only="copied")
    assert [(e.config, e.us, e.default_us) for e in table.kernels] == [
        (narrow, 10, 120),
        ({**narrow, "block": 64}, 20, 120),  # where narrow blocks do not count
    ]
    assert all("copied" in trial.forced["scan"] for trial in fake.timed[1:])
    assert len(said) == 1
    fake.faster |= quick("scan", 5, **{**narrow, "block": 64, "num_warps": 8})
    table, _ = tuned(fake, path, known=table, only="copied")
    assert [e.us for e in table.kernels] == [5]  # it is for everywhere
    assert tuned(fake, path, known=table, only="copied") == (table, [])  # none is faster
    _, said = tuned(fake, path, known=known, only="in_shared")
    assert said == ["delta_net 8,2048,16,64: no kernel here that takes long has a configuration with in_shared"]


def test_orders_alone_of_what_finds_no_room_are_by_the_rules(tmp_path: Path) -> None:
    fake, path = FakeLab(), tmp_path / "sm_90.json"
    wide = {"num_warps": 8, "num_stages": 4, "block": 64}
    fake.crowded = [wide]
    fake.faster = quick("scan", 70, **SCAN.config, order=3) | quick("scan", 10, **wide, order=3)
    table, _ = tuned(fake, path, known=Table("sm_90", [replace(SCAN, config=wide, us=80)]))
    assert [e.config for e in table.kernels] == [{**SCAN.config, "order": 3}]
    assert wide not in [config for trial in fake.timed for config in trial.forced.values()]


def test_kernels_side_by_side_are_left_to_the_rules(tmp_path: Path) -> None:
    fake = FakeLab()
    fake.kernels["map"] = replace(SCAN, kernel="token segment again 0 products 4", config={"num_warps": 4})
    fake.faster = quick("scan", 60, num_warps=8, num_stages=2, block=64)
    table, said = tuned(fake, tmp_path / "sm_90.json")
    assert [e.us for e in table.kernels] == [60]
    assert len(said) == 1
    assert not any("map" in trial.forced for trial in fake.asked)


def test_what_finds_no_room_says_nothing_about_the_kernels_beside_it(tmp_path: Path) -> None:
    fake = FakeLab()
    large, fast = {"num_warps": 4, "num_stages": 1, "block": 32}, {"num_warps": 2, "num_stages": 1}
    fake.crowded = [large]
    fake.faster = quick("scan", 10, **large) | quick("map", 30, **fast)
    table, _ = tuned(fake, tmp_path / "sm_90.json")
    assert [(e.config, e.why) for e in table.excluded] == [(large, "no room on the device")]
    assert [e.us for e in table.kernels] == [100, 30]
    assert Trial(CASE, {"scan": large, "map": fast}) in fake.asked
    assert Trial(CASE, {"map": fast}) not in fake.asked


def test_beside_a_narrow_block_is_the_fastest_of_the_others(tmp_path: Path) -> None:
    fake = FakeLab()
    narrow, wide = {"num_warps": 4, "num_stages": 2, "block": 32}, {"num_warps": 8, "num_stages": 2, "block": 64}
    fake.faster = quick("scan", 50, **narrow) | quick("scan", 70, **wide) | quick("map", 30, num_warps=8, num_stages=1)
    table, _ = tuned(fake, tmp_path / "sm_90.json")
    assert [(e.config, e.us) for e in table.kernels[:2]] == [(narrow, 50), (wide, 70)]
    assert [e.us for e in table.kernels[2:]] == [30]


def test_units_of_another_length_are_tuned_where_they_are_faster(tmp_path: Path) -> None:
    fake = FakeLab({"chunk": FORM})
    fake.faster = quick("chunk", 10, chunk=32)
    table, said = tuned(fake, tmp_path / "sm_90.json")
    assert [e.config for e in table.chunks] == [{"chunk": 32}]
    assert sorted(e.tiles[0] for e in table.kernels) == [32, 32, 64, 64]
    assert [line.split()[2] for line in said] == ["scan:", "map:", "chunk:", "map:", "scan:"]
    assert all(trial.forced["chunk"] == {"chunk": 32} for trial in fake.timed[-4:])


def test_units_of_another_length_have_to_beat_kernels_as_tuned(tmp_path: Path) -> None:
    fake = FakeLab({"chunk": FORM})
    fast = {"num_warps": 8, "num_stages": 2, "block": 64}
    fake.faster = quick("scan", 40, **fast) | quick("chunk", 60, chunk=32)  # by the rules 100 in units of 64
    table, _ = tuned(fake, tmp_path / "sm_90.json")
    assert [(e.config, e.us) for e in table.chunks] == [({"chunk": 64}, 91)]
    assert {e.tiles[0] for e in table.kernels} == {64}


def test_kernels_that_fail_together_are_said_to(tmp_path: Path) -> None:
    class Quarrelling(FakeLab):
        def check(self, trials: Sequence[Trial]) -> list[Verdict]:
            super().check(trials)
            return [Verdict("check: y 1.0e+00" if len(trial.forced) > 1 else "") for trial in trials]

    table, said = tuned(Quarrelling({"chunk": FORM}), tmp_path / "sm_90.json")
    assert not table.chunks
    assert said[-1].endswith("its kernels as tuned, together: check: y 1.0e+00")


def test_a_table_is_extended(tmp_path: Path) -> None:
    path = tmp_path / "sm_90.json"
    old = Table("sm_90", [replace(SCAN, config={"num_warps": 1}), replace(SCAN, kernel="another")], [FORM])
    path.write_text(old.to_json())
    table, _ = tuned(FakeLab(), path)
    assert {e.kernel for e in table.kernels} == {"another", SCAN.kernel, MAP.kernel}
    assert next(e for e in table.kernels if e.kernel == SCAN.kernel).config == SCAN.config
    assert table.chunks == [FORM]
    with pytest.raises(LoadError, match="a table for sm_90, and this GPU is sm_80"):
        tune([CASE], "sm_80", path, Settings(), FakeLab())


def test_what_is_shared_out_is_measured_so() -> None:
    shared = replace(SCAN, config={**SCAN.config, "shares": 2})
    assert candidates(shared) == [{**config, "shares": 2} for config in candidates(SCAN)]


def test_the_budget_ends_it_and_what_was_found_is_kept(tmp_path: Path) -> None:
    fake, said, path = FakeLab(), list[str](), tmp_path / "sm_90.json"
    early, late = candidates(SCAN)[1], candidates(SCAN)[-1]
    fake.faster = quick("scan", 60, **early) | quick("scan", 10, **late)
    table = tune([CASE, CASE], "sm_90", path, Settings(10), fake, said.append, lambda: 2.0 * len(fake.timed))
    assert [(e.kernel, e.us) for e in table.kernels] == [(SCAN.kernel, 60), (MAP.kernel, 50)]
    assert said[2:] == ["delta_net 8,2048,16,64: no time left"] * 2
    assert read(path) == table


def test_what_was_found_is_kept_where_it_is_interrupted(tmp_path: Path) -> None:
    class Interrupted(FakeLab):
        def check(self, trials: Sequence[Trial]) -> list[Verdict]:
            if len(self.timed) > self.jobs:  # by the rules, and a round
                raise KeyboardInterrupt
            return super().check(trials)

    fake, path, said = Interrupted(), tmp_path / "sm_90.json", list[str]()
    first = candidates(SCAN)[0]
    fake.faster = quick("scan", 60, **first)
    with pytest.raises(KeyboardInterrupt):
        tune([CASE], "sm_90", path, Settings(), fake, said.append)
    assert next(e.config for e in read(path).kernels if e.kernel == SCAN.kernel) == first
    assert said == []  # what may change yet


def test_what_is_right_is_timed_before_more_is_compiled(tmp_path: Path) -> None:
    """Where compilation takes all the time, one batch is compiled, no second begun, and the first one's best kept."""
    fake, path = FakeLab(), tmp_path / "sm_90.json"
    fake.faster = quick("scan", 60, **candidates(SCAN)[1]) | quick("scan", 10, **candidates(SCAN)[-1])
    table = tune([CASE], "sm_90", path, Settings(fake.jobs), fake, lambda _: None, lambda: len(fake.asked))
    assert len(fake.asked) == 1 + fake.jobs < len(candidates(SCAN))
    assert table.kernels[0].us == 60


def test_what_was_best_for_kernels_that_run_alike_is_tried_first(tmp_path: Path) -> None:
    """In whatever order of values; not what was for others."""
    fake, last, other = FakeLab(), candidates(SCAN)[-1], candidates(SCAN)[-2]
    alike = replace(SCAN, kernel="chunk scan 7 products 9", config={**last, "order": 3})
    measured = [alike, replace(alike, config=other, kernel="chunk reverse 4 products 8")]
    measured += [replace(alike, config=other, tiles=(64, 128, 128)), replace(alike, config=other, tiles=(16, 64, 64))]
    tuned(fake, tmp_path / "a.json", measured=measured)
    asked = [trial.forced["scan"] for trial in fake.asked if "scan" in trial.forced]
    assert asked[0] == last
    assert asked[1 : len(candidates(SCAN)) - 1] == [c for c in candidates(SCAN)[:-1] if c != SCAN.config]


def test_what_was_not_measured_is_left_to_the_rules(tmp_path: Path) -> None:
    fake, said = FakeLab(), list[str]()
    moments = iter([0.0, 1.0, 11.0, 12.0, 13.0])
    table = tune([CASE], "sm_90", tmp_path / "a.json", Settings(10), fake, said.append, lambda: next(moments))
    assert table == Table("sm_90")
    assert said == ["delta_net 8,2048,16,64: no time left"]


def test_kernels_are_measured_together_and_apart_where_that_goes_wrong(tmp_path: Path) -> None:
    fake = FakeLab()
    tuned(fake, tmp_path / "a.json")
    rounds = max(len(candidates(e)) for e in (SCAN, MAP)) - 1
    assert len(fake.timed) == 1 + rounds + ORDERS  # by the rules, and a round for each of the others
    assert any(len(trial.forced) == 2 for trial in fake.timed)
    fake = FakeLab()
    fake.faster = quick("map", 20, **candidates(MAP)[0])
    fake.wrong, fake.broken = [dict(candidates(SCAN)[0])], [dict(candidates(SCAN)[1])]
    table, _ = tuned(fake, tmp_path / "b.json")
    assert [(e.kernel, e.us) for e in table.kernels] == [(SCAN.kernel, 100), (MAP.kernel, 20)]
    assert [(e.kernel, e.config) for e in table.excluded] == [
        (SCAN.kernel, candidates(SCAN)[0]),
        (SCAN.kernel, candidates(SCAN)[1]),
    ]


def test_what_the_rules_get_wrong_is_said(tmp_path: Path) -> None:
    fake = FakeLab()
    fake.check = lambda trials: [Verdict("check: grad k 3.0e-01")] * len(trials)  # type: ignore[method-assign]
    said: list[str] = []
    table = tune([CASE], "sm_90", tmp_path / "sm_90.json", Settings(), fake, said.append)
    assert said == ["delta_net 8,2048,16,64: by the rules: check: grad k 3.0e-01"]
    assert table == Table("sm_90")
    assert not (tmp_path / "sm_90.json").exists()


def test_candidates_are_what_a_kernel_can_make_use_of() -> None:
    scans = candidates(SCAN)
    assert len(scans) == 2 * (4 + 3) * 2  # with more stages than one, what is copied ahead may be less than all
    assert {c["num_stages"] for c in scans if "copied" in c} == {2, 3, 4}
    for kernel in ("token scan 0 products 5", "chunk scan in rounds 3 products 5", "pairs read: weighs"):
        assert not any("copied" in c for c in candidates(replace(SCAN, kernel=kernel)))
    assert {c["block"] for c in scans} == {32, 64}
    wide = candidates(replace(SCAN, tiles=(64, 128, 128)))
    assert {c["block"] for c in wide} == {32, 64, 128}
    assert {c["num_warps"] for c in wide if "dims_first" in c} == {8}
    for other in (SCAN, replace(SCAN, tiles=(32, 128, 128)), replace(SCAN, tiles=(64, 128, 128), bytes=4)):
        assert not any("dims_first" in c for c in candidates(other))
    assert [(c["num_warps"], c.get("maxnreg")) for c in candidates(MAP)] == [(2, None), (4, None), (8, None), (4, 168)]
    assert not any("maxnreg" in c for c in scans)
    assert all("block" not in c and c["num_stages"] == 1 for c in candidates(MAP))
    walks = candidates(replace(MAP, config={**MAP.config, "block": 64}))
    assert {(c["num_stages"], c["block"]) for c in walks} == {(s, n) for s in (1, 2, 3) for n in (32, 64)}
    assert not any("in_shared" in c for c in walks)
    lying = [c for c in candidates(replace(MAP, config={**MAP.config, "block": 64}), walked=64) if "in_shared" in c]
    assert {c["block"] for c in lying} == {32}  # of one block there is nothing from before a walk
    assert {**lying[0], "in_shared": 0} in [{**c, "in_shared": 0} for c in walks]
    assert {c["num_warps"] for c in candidates(replace(SCAN, kernel="token scan 0 products 5"))} == {1, 2, 4, 8}
    pairs = candidates(replace(SCAN, kernel="pairs read: weighs"))
    assert {c["block"] for c in pairs} == {32, 64, 128}  # of tokens, however narrow heads are
