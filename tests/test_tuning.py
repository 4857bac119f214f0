"""Tuned tables: files, nearest places, what a module carries and launches with, and the key of the cache."""

from __future__ import annotations

import ast
import json
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ttmdsl
from ttmdsl import cache
from ttmdsl.aot import Job, compile_kernels
from ttmdsl.builder import Builder
from ttmdsl.errors import LoadError
from ttmdsl.options import SHIPPED, Options
from ttmdsl.pipeline import run
from ttmdsl.tuning import (
    EVERYWHERE,
    Entry,
    Table,
    Tables,
    digest,
    files,
    in_step,
    read,
    read_all,
    signature,
    tuned_table,
    without_gradients,
)

SCAN = "_chunk_forward_scan_kernel"


def signatures(layer: str, **consts: float) -> dict[str, Any]:
    """`KERNEL_SIGNATURES` and `FORM_SIGNATURES` of a layer's module, read from its text."""
    source = Path(ttmdsl.load(layer, **consts).__file__).read_text(encoding="utf-8")
    found = re.findall(
        r"^ *(\w+_SIGNATURES) = (\{.*?\})$", source, re.MULTILINE | re.DOTALL
    )  # all would take Python long
    return {name: ast.literal_eval(text) for name, text in found}


def write(folder: Path, table: Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{table.target}.json").write_text(table.to_json(), encoding="utf-8")


def entry(kernel: str, tiles: tuple[int, ...] = (64, 64, 64), lanes: int = 128, **config: int) -> Entry:
    return Entry(kernel, tiles, 2, lanes, config)


# ---- files --------------------------------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    wrong = Entry("a", (64,), 2, 128, {"block": 32}, triton="3.6.0", why="wrong by 1.8")
    table = Table("sm_90", [entry("a", num_warps=8)], [entry("f", chunk=32)], [wrong])
    write(tmp_path, table)
    assert read(tmp_path / "sm_90.json") == table
    assert json.loads((tmp_path / "sm_90.json").read_text())["kernels"][0]["config"] == {"num_warps": 8}


def test_the_users_table_counts_before_the_shipped_one(tmp_path: Path) -> None:
    write(tmp_path / "a", Table("sm_90", [entry("k", num_warps=4), entry("l", num_warps=4)]))
    write(tmp_path / "b", Table("sm_90", [entry("k", num_warps=8)], excluded=[entry("k", num_warps=2)]))
    tables = read_all([tmp_path / "a", tmp_path / "nowhere", tmp_path / "b"])
    assert {e.kernel: e.config["num_warps"] for e in tables.by_capability[90].kernels} == {"k": 8, "l": 4}
    assert len(tables.by_capability[90].excluded) == 1


PLACE = '"kernel": "k", "tiles": [1], "bytes": 2, "lanes": 1'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ('{"target": "h100"}', "expected a GPU such as sm_90, got 'h100'"),
        ('{"kernels": []}', "'target' is missing"),
        (f'{{"target": "sm_90", "kernels": [{{{PLACE.replace("1", "0")}, "config": {{}}}}]}}', "positive"),
        (f'{{"target": "sm_90", "kernels": [{{{PLACE}, "config": {{"x": 1}}}}]}}', "expected one of"),
        (f'{{"target": "sm_90", "kernels": [{{{PLACE}, "config": {{"num_warps": 3}}}}]}}', "(1, 2, 4, 8) for"),
        ('{"target": "sm_90", "kernels": [{"kernel": "k"}]}', "'tiles' is missing"),
    ],
)
def test_a_damaged_table_says_where(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sm_90.json").write_text(text)
    with pytest.raises(LoadError, match=r"sm_90\.json: not a table of launch configurations") as caught:
        read_all([tmp_path])
    assert message in str(caught.value)


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "sm_90.json").mkdir()
    with pytest.raises(LoadError, match="cannot read the table"):
        digest([tmp_path])


def test_the_shipped_tables_hold() -> None:
    read_all([SHIPPED])
    assert all(path.name == f"{read(path).target}.json" for path in files([SHIPPED]))


MEASURED = (
    "linear_attention retnet mamba2 gla delta_net gated_delta_net rwkv7 dplr gsa abc hgrn2 swla ttt_mlp omega_net dla"
    " omega_linear delta_product trellis titans_linear ttt_linear ttt_norm moneta yaad"
    " attention swa deep_transformer swdt dot".split()
)
IN_GROUPS = "trellis titans_linear omega_linear titans ttt_linear ttt_norm moneta yaad".split()
TOKEN_BY_TOKEN = ("lattice_dec", "lattice_sim")


def test_every_entry_of_the_shipped_tables_is_for_some_kernel() -> None:
    """A change to a plan may send kernels back to the rules unseen: then measure them again, or undo it."""
    found = [signatures(layer) for layer in MEASURED] + [signatures(layer, b=64) for layer in IN_GROUPS]
    found += [signatures("omega_linear", b=16), signatures("lattice_dec", b=16, project=0)]
    found += [signatures(f"lattice_{way}", b=64, project=0) for way in ("dec", "enc", "sim")]
    found += map(signatures, TOKEN_BY_TOKEN)
    known = {signature for names in found for signature in names["KERNEL_SIGNATURES"].values()}
    entries = [entry for path in files([SHIPPED]) for entry in read(path).kernels]
    assert {entry.kernel for entry in entries} <= known


# ---- signatures ---------------------------------------------------------------------------------------------


def test_a_signature_knows_no_names() -> None:
    spec = (
        "layer A { dim d_k, d_v\n input q[d_k], k[d_k], v[d_v]\n memory S[d_v, d_k]\n bias -<S @ k, v>\n read S @ q }"
    )
    other = (
        spec.replace("d_k", "left").replace("d_v", "right").replace("S", "M").replace("q", "w").replace("A {", "Z {")
    )
    kernels = [ttmdsl_signatures(text) for text in (spec, other, spec.replace("-<", "-2 * <"))]
    assert kernels[0] == kernels[1] != kernels[2]
    shipped = signatures("linear_attention")["KERNEL_SIGNATURES"]
    assert kernels[0] == shipped


def test_what_is_rounded_or_wide_makes_another_kernel() -> None:
    b = Builder(("i", "j"))
    S = b.leaf("carry", "S", ("i", "j"))
    read = b.contract(S, b.leaf("token", "q", ("t", "j")), {"j"})
    assert len({signature("scan", [read], **how) for how in ({}, {"rounded": {S}}, {"wide": {read}})}) == 3


def ttmdsl_signatures(text: str) -> dict[str, str]:
    from ttmdsl.emit_triton import write_forms

    lowered = run(text, "", {}, Options(cache=Path()), after="lower").done["lower"]
    return {
        name: known for form in write_forms(lowered) for k in form.kernels() for name, known in k.signatures.items()
    }


def test_kernels_of_a_layer_have_signatures_of_their_own() -> None:
    for layer in ("gated_delta_net", "titans_linear", "swa", "dot"):
        found = signatures(layer)["KERNEL_SIGNATURES"]
        own = {k: v for k, v in found.items() if not k.startswith("_resumed")}  # may be those of the other chunk form
        assert len(set(own.values())) == len(own) > 2
    assert signatures("gated_delta_net") == signatures("gated_delta_net")
    assert set(signatures("titans_linear")["FORM_SIGNATURES"]) == {"chunk", "resumed"}


# ---- in a module --------------------------------------------------------------------------------------------


def lookup(tables: Tables, names: dict[str, str]) -> Any:
    """The module's own `_measured`, over what the module would carry."""
    from ttmdsl.templates import render

    found: dict[str, Any] = {}
    text = render("triton_tuned.py.j2", tuned=tables.kernels(names), tuned_table=tuned_table, everywhere=EVERYWHERE)
    exec("import functools, math\ntorch = __import__('torch')\n" + text, found)
    found["triton"] = SimpleNamespace(__version__="3.6.0")
    return lambda *place, **how: found["_measured"](found["_TUNED"], *place, **how)


def test_the_nearest_place_counts() -> None:
    sm_90 = Table(
        "sm_90",
        [
            entry("k", (64, 64, 64), num_warps=1),
            entry("k", (64, 128, 128), num_warps=2),
            entry("k", (64, 128, 128), lanes=16, num_warps=4),
        ],
    )
    tables = Tables({90: sm_90, 80: Table("sm_80", [entry("k", (64, 64, 64), num_warps=8)])})
    at = lookup(tables, {"a_kernel": "k"})
    assert at("a_kernel", (64, 64, 64), 2, 128, 90) == {"num_warps": 1}
    assert at("a_kernel", (64, 128, 128), 2, 256, 90) == {"num_warps": 2}
    assert at("a_kernel", (64, 128, 128), 2, 20, 90) == {"num_warps": 4}  # few heads
    assert at("a_kernel", (64, 64, 64), 2, 128, 89) == {"num_warps": 8}  # the same generation
    assert at("a_kernel", (64, 64, 64), 2, 128, 100) == {"num_warps": 1}
    assert at("a_kernel", (64, 64, 32), 2, 128, 90) == {"num_warps": 1}  # one tile of half the size
    assert at("a_kernel", (64, 32, 32), 2, 128, 90) == {}  # too far: the rules
    assert at("a_kernel", (64, 64, 64), 4, 128, 90) == {}  # float32
    assert at("b_kernel", (64, 64, 64), 2, 128, 90) == {}


def test_a_narrow_block_counts_where_it_was_measured_alone() -> None:
    narrow = {"num_stages": 3, "block": 32}
    table = Table(
        "sm_90", [replace(entry("k", **narrow), triton="3.6.0"), replace(entry("l", **narrow), triton="3.5.0")]
    )
    at = lookup(Tables({90: table}), {"a_kernel": "k", "b_kernel": "l"})
    assert at("a_kernel", (64, 64, 64), 2, 16, 90) == narrow
    assert at("a_kernel", (64, 64, 128), 2, 128, 90) == {}
    assert at("a_kernel", (64, 64, 64), 2, 128, 80) == {}
    assert at("b_kernel", (64, 64, 64), 2, 128, 90) == {}  # another Triton


def test_few_registers_count_where_they_were_measured_alone() -> None:
    few, enough = {"num_warps": 4, "maxnreg": 128}, {"num_warps": 4, "maxnreg": 168}
    both = [replace(entry("k", **config), triton="3.6.0") for config in (few, enough)]
    at = lookup(Tables({90: Table("sm_90", both)}), {"a_kernel": "k"})
    assert at("a_kernel", (64, 64, 64), 2, 128, 90) == few
    assert at("a_kernel", (64, 64, 64), 2, 128, 80) == enough
    assert at("a_kernel", (64, 64, 64), 2, 128, 100) == enough
    assert at("a_kernel", (64, 64, 128), 2, 128, 90) == {}


def test_fewer_registers_count_for_tiles_of_the_same_sizes() -> None:
    fewer = {"num_warps": 4, "maxnreg": 168}
    at = lookup(Tables({90: Table("sm_90", [entry("k", **fewer)])}), {"a_kernel": "k"})
    assert at("a_kernel", (64, 64, 64), 2, 16, 80) == fewer
    assert at("a_kernel", (64, 64, 128), 2, 128, 90) == {}


def test_where_a_narrow_block_does_not_count_a_wider_one_does() -> None:
    narrow, wide = {"num_stages": 3, "block": 32}, {"num_stages": 1, "block": 64}
    both = [replace(entry("k", **config), triton="3.6.0") for config in (wide, narrow)]
    at = lookup(Tables({90: Table("sm_90", both)}), {"a_kernel": "k"})
    assert at("a_kernel", (64, 64, 64), 2, 128, 90) == narrow
    assert at("a_kernel", (64, 64, 64), 2, 128, 90, narrow=False) == wide
    assert at("a_kernel", (64, 64, 128), 2, 128, 90) == wide
    assert at("a_kernel", (64, 64, 64), 2, 128, 80) == wide


def test_what_was_measured_with_as_many_programs_for_each_head_counts_first() -> None:
    narrow = replace(entry("k", lanes=16, block=32, shares=4), triton="3.6.0")
    wide = entry("k", lanes=16, block=64, shares=4), entry("k", lanes=1024, block=128)
    at = lookup(Tables({90: Table("sm_90", [narrow, *wide])}), {"a_kernel": "k"})
    assert at("a_kernel", (64, 64, 64), 2, 32, 90, shares=4) == narrow.config
    assert at("a_kernel", (64, 64, 64), 2, 33, 90) == {"block": 128}
    assert at("a_kernel", (64, 64, 64), 2, 33, 90, shares=2) == wide[0].config  # the nearest one


def test_a_place_is_measured_anew_with_all_its_entries() -> None:
    old = [entry("k", block=32), entry("k", block=64), entry("l", block=32)]
    new = [entry("k", block=64, num_stages=2)]
    assert Table("sm_90", old).merge(Table("sm_90", new)).kernels == [old[2], *new]
    assert Table("sm_90", new).merge(Table("sm_90", old)).kernels == old
    shared = [entry("k", shares=2)]  # on another GPU a program may have a head by itself there
    assert Table("sm_90", old).merge(Table("sm_90", shared)).kernels == [*old, *shared]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TTM_TUNED_DIR", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


def test_a_table_is_part_of_the_key(tuned: Path) -> None:
    before = ttmdsl.load("delta_net")
    write(tuned, Table("sm_90", [entry(signatures("delta_net")["KERNEL_SIGNATURES"][SCAN], num_warps=8)]))
    after = ttmdsl.load("delta_net")
    assert before is not after
    assert after is ttmdsl.load("delta_net")
    text = Path(str(after.__file__)).read_text(encoding="utf-8")
    assert '(64, 64, 64), 2, 128, {"num_warps": 8}' in text
    assert '"num_warps": 8}' not in Path(str(before.__file__)).read_text(encoding="utf-8")
    assert cache.key("a", {}, digest([tuned])) != cache.key("a", {}, digest([]))


def steer(folder: Path, layer: str, **config: int) -> None:
    """A table that sends every kernel of a layer to one configuration, in float32 and bfloat16."""
    found = signatures(layer)
    chunk = {"chunk": config.pop("chunk")} if "chunk" in config else {}
    kernels, chunks = [], []
    for bytes_ in (2, 4):
        for n in (16, 32, 64):
            for tokens in (16, 32, 64, 128):
                tiles = (tokens, n, n)
                places = [(s, tiles, bytes_, 1) for s in found["KERNEL_SIGNATURES"].values()]
                kernels += [Entry(*place, config, triton=version("triton")) for place in places]
            chunks += [Entry(s, (n, n), bytes_, 1, chunk) for s in found.get("FORM_SIGNATURES", {}).values() if chunk]
    write(folder, Table("sm_0", kernels, chunks))  # what an interpreted kernel runs on


def compared(layer: str, folder: str) -> tuple[list[str], dict[str, Any]]:
    """In the process that interprets kernels: what misses, and what was launched."""
    import os

    from ttmdsl.drawing import Shape
    from ttmdsl.parity import parity

    os.environ["TTM_TUNED_DIR"] = folder
    try:
        module = ttmdsl.load(layer)
        shapes = [Shape("T=70", tokens=70, dims=(32, 32), state=False), Shape("T=64", tokens=64, dims=(32,))]
        rows = parity(module, dtypes=(torch.float32,), shapes=shapes, backends=("triton",))
        assert rows
        constants, options = next(module.kernel_launches(SCAN, {"d_k": 32, "d_v": 32}, torch.float32, 0))
        masked, _ = next(module.kernel_launches(SCAN, {"d_k": 20, "d_v": 20}, torch.float32, 0))
        assert masked["P_d_v"] == 32  # a narrow block was measured without masks
        assert {key[-8] for key in module._fitting} == {constants["BT"]}
        found = {name: constants[name] for name in ("LEN", "P_d_v")}
        return [f"{r.shape}: {r.quantity} {r.error:.1e}" for r in rows if not r.ok], found | options
    finally:
        del os.environ["TTM_TUNED_DIR"]


def test_launches_take_what_the_table_says(tuned: Path, interpreter: ProcessPoolExecutor) -> None:
    for config in ({"chunk": 32, "block": 16, "num_warps": 2}, {"chunk": 128, "num_stages": 1}):
        steer(tuned, "gated_delta_net", **config)
        misses, found = interpreter.submit(compared, "gated_delta_net", str(tuned)).result()
        assert misses == []
        assert found["LEN"] == config["chunk"]
        assert found["P_d_v"] == config.get("block", 32)
        assert found["num_warps"] == config.get("num_warps", 4)
        assert found["num_stages"] == config.get("num_stages", 3)


def warps(folder: str, layer: str, launches: list[tuple[Any, ...]]) -> list[int]:
    """In the process that interprets kernels: what `_choices` of a layer's module has first, with a folder's tables."""
    import os

    os.environ["TTM_TUNED_DIR"] = folder
    try:
        choices = ttmdsl.load(layer)._choices
        return [next(choices(*launch))[1]["num_warps"] for launch in launches]
    finally:
        del os.environ["TTM_TUNED_DIR"]


def test_a_scan_that_stores_no_states_has_entries_of_its_own(tuned: Path, interpreter: ProcessPoolExecutor) -> None:
    known = signatures("gated_delta_net")["KERNEL_SIGNATURES"]
    assert without_gradients("_chunk_forward_free_kernel") not in known  # it stores the same

    def wide(name: str, num_warps: int) -> Entry:
        return replace(entry(known[name], num_warps=num_warps), bytes=4)

    place = {"d_k": 64, "d_v": 64}, "chunk", torch.float32, 64, 128, 90  # for which no table is shipped
    launches = [(name, *place, keep) for name in (SCAN, "_chunk_forward_free_kernel") for keep in (True, False)]
    with_them = [wide(SCAN, 8), wide("_chunk_forward_free_kernel", 8)]
    write(tuned, Table("sm_90", with_them))
    assert interpreter.submit(warps, str(tuned), "gated_delta_net", launches).result() == [8, 8, 8, 8]
    write(tuned, Table("sm_90", [*with_them, wide(without_gradients(SCAN), 2)]))
    assert interpreter.submit(warps, str(tuned), "gated_delta_net", launches).result() == [8, 2, 8, 8]


def test_a_step_has_entries_of_its_own(tuned: Path, interpreter: ProcessPoolExecutor) -> None:
    known = signatures("mesa")["KERNEL_SIGNATURES"]

    def wide(name: str, num_warps: int) -> Entry:
        return replace(entry(known[name], (16, 64, 64), 1024, num_warps=num_warps), bytes=4)

    place = "_token_forward_kernel", {"d_k": 64, "d_v": 64}, "token", torch.float32, 16
    ways = (1024, False), (1024, True), (16, True)  # sequences times heads, and whether it is a step
    launches = [(*place, lanes, 90, False, step) for lanes, step in ways]
    walks = [wide("_token_forward_kernel", 8), wide(without_gradients("_token_forward_kernel"), 8)]
    write(tuned, Table("sm_90", walks))
    assert interpreter.submit(warps, str(tuned), "mesa", launches).result() == [8, 2, 4]  # a step's by the rules
    write(tuned, Table("sm_90", [*walks, wide(in_step("_token_forward_kernel"), 1)]))
    assert interpreter.submit(warps, str(tuned), "mesa", launches).result() == [8, 1, 4]  # measured with many heads


def test_kernels_ahead_of_time_take_what_the_table_says(tuned: Path) -> None:
    kernel = signatures("linear_attention")["KERNEL_SIGNATURES"][SCAN]
    write(tuned, Table("sm_90", [entry(kernel, num_warps=8, num_stages=2, block=64)]))
    job = Job("linear_attention", 64, "sm_90", "bfloat16", named="_chunk_")
    rows = {row.kernel: row for row in compile_kernels(job)}
    assert not any(row.error for row in rows.values())
    assert rows[SCAN].warps == 8
    assert {row.warps for name, row in rows.items() if name != SCAN} == {4}


def test_what_finds_no_room_gives_way_to_the_rules(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(launches_on_a_small_device).result() == [
        ("measured", 3, 3),
        ("measured", 3, None),  # with fewer stages a narrow block may be wrong
        ("rules", 3, 3),
        ("rules", 3, None),
        ("rules", 2, 2),
    ]


def launches_on_a_small_device() -> list[tuple[str, int, int | None]]:
    """In the process that interprets kernels: the launches of a kernel that has room for no block of 32. Stages of a
    launch, and how far ahead its loop copies all tensors."""
    import triton

    module = ttmdsl.load("linear_attention")
    tried: list[tuple[str, int, int | None]] = []

    def start(grid: Any, *pointers: Any, **options: Any) -> None:
        assert grid == ((64 // options["P_d_v"]), 2)
        measured = options["P_d_v"] == 32
        tried.append(("measured" if measured else "rules", options["num_stages"], options["STAGES"]))
        if measured or options["num_stages"] > 2:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")

    kernel = SimpleNamespace(name=SCAN, start=start)
    original = module._measured
    module._measured = lambda *_, **__: {"block": 32, "num_stages": 3}
    try:
        schedule = module._schedule(
            "chunk", (0, 64), (0,), 2, (("d_k", 64), ("d_v", 64)), torch.float32, torch.device("cpu")
        )
        schedule.launch(kernel, ())
        schedule.launch(kernel, ())
    finally:
        module._measured = original
        module._fitting.clear()
        module._schedule.cache_clear()
    assert tried.pop() == ("rules", 2, 2)  # the second launch knows what fits
    return tried
