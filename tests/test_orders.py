"""The orders in which a kernel may compute its values: all give the same, and a table says which one is used."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import beyond

from ttmdsl import tuning
from ttmdsl.builder import Builder
from ttmdsl.ir import TOKEN_AXES, Node, is_matmul, reachable
from ttmdsl.lower import Lowered
from ttmdsl.options import SHIPPED, Options
from ttmdsl.orders import ELSEWHERE, ORDERS, PLACED, Loads, Products
from ttmdsl.pipeline import run
from ttmdsl.printer import strip
from ttmdsl.schedule import RISE, WAY, drawn_out, order_by, peak, wide_last, with_early_loads, with_loads
from ttmdsl.tuning import CONFIG, Entry, Table, Tables, without_gradients
from ttmdsl.write_kernel import _when_used

LAYERS = Path(__file__).parent.parent / "layers"


def test_tables_know_the_orders_that_there_are() -> None:
    assert ELSEWHERE == ORDERS + 1
    assert PLACED == 2 * ELSEWHERE
    assert CONFIG["order"] == tuple(range(1, len(Products) * PLACED))


@st.composite
def values(draw: st.DrawFn) -> tuple[list[Node], list[Node]]:
    """Leaves, and values of them and of one another, operands first."""
    b = Builder(("i", "j"))
    leaves = [b.leaf("token", name, ("t", "i")) for name in "qkv"]
    made: list[Node] = []
    for _ in range(draw(st.integers(1, 12))):
        known = leaves + made
        first, second = (draw(st.sampled_from(known)) for _ in range(2))
        made += [n for n in [draw(st.sampled_from([b.add, b.mul, b.sub]))(first, second)] if n not in known and n.args]
    return leaves, sorted(made, key=lambda n: n.id)  # a difference may have made what a later draw is


# a draw takes no time, but for that of other processes
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values(), st.integers(0, ORDERS))
def test_every_order_has_each_value_once_and_after_what_it_takes(drawn: tuple[list[Node], list[Node]], n: int) -> None:
    leaves, made = drawn
    found = order_by(n, made, (), lambda node: node.args, lambda node: 1.0, lambda node: node in leaves)
    assert sorted(found, key=id) == sorted(made, key=id)
    place = {node: i for i, node in enumerate(found)}
    assert all(place[a] < place[node] for node in found for a in node.args if a in place)


def lowered(layer: str) -> Lowered:
    text = (LAYERS / f"{layer}.ttm").read_text(encoding="utf-8")
    found: Lowered = run(text, layer, {}, Options(cache=Path()), after="lower").done["lower"]
    return found


def source(layer: str, tables: Tables) -> str:
    """The text of the Triton backend, with what these tables say."""
    from ttmdsl.emit_triton import emit_triton

    return emit_triton(lowered(layer), tables)


def entry(kernel: str, **config: int) -> Entry:
    return Entry(kernel, (64, 64, 64), 2, 128, config, triton="3.6.0")


@st.composite
def products(draw: st.DrawFn) -> list[Node]:
    """Products of tokens by tokens, of tokens by a dim and of states, of one another, operands first."""
    b = Builder(("i", "j"))
    state = b.leaf("carry", "S", ("i", "j"))
    wide = [b.leaf("token", name, ("t", "i")) for name in "qk"]
    square: list[Node] = [b.leaf("saved", "w", ("t", "s"))]
    made: list[Node] = []
    for _ in range(draw(st.integers(1, 12))):
        x, y = (draw(st.sampled_from(wide)) for _ in range(2))
        match draw(st.sampled_from(["square", "wide", "state", "sum"])):
            case "square" if x.axes == y.axes:
                square.append(b.contract(x, b.rename(y, "t", "s"), {x.axes[1]}))
                made.append(square[-1])
            case "wide":
                wide.append(b.contract(draw(st.sampled_from(square)), b.rename(x, "t", "s"), {"s"}))
                made.append(wide[-1])
            case "state" if x.axes[1] == "i":
                wide.append(b.contract(x, state, {"i"}))
                made.append(wide[-1])
            case "sum" if x.axes == y.axes:
                wide.append(b.add(x, y))
                made.append(wide[-1])
    return [n for n in reachable(made) if n.op not in ("leaf", "const")]


@settings(deadline=None, max_examples=200)
@given(products())
def test_a_product_of_tokens_by_a_dim_is_the_last_if_it_can_be(nodes: list[Node]) -> None:
    found = wide_last(nodes, lambda n: n.args)
    assert sorted(n.id for n in found) == sorted(n.id for n in nodes)
    place = {n: i for i, n in enumerate(found)}
    assert all(place[a] < i for n, i in place.items() for a in n.args if a in place)
    rows = [n for n in found if is_matmul(n) and n.axes[0] in TOKEN_AXES]
    square = [n for n in rows if n.axes[1] in TOKEN_AXES]
    if rows and rows[-1] in square:
        assert all(any(n in reachable([s]) for s in square) for n in rows if n not in square)


def drawn(b: Builder, x: Node, count: int, y: Node) -> Node:
    """So many tiles, each of the one before it."""
    for i in range(count):
        x = b.map("tanh", x) if i % 2 else b.mul(x, y)
    return x


def test_a_product_lays_out_no_long_way_that_leads_to_it() -> None:
    b = Builder(("i", "j", "k"))
    x, y, state = b.leaf("token", "x", ("t", "i")), b.leaf("token", "y", ("t", "i")), b.leaf("carry", "S", ("i", "j"))
    long, short = drawn(b, x, WAY, y), drawn(b, x, WAY - 1, y)
    products = [b.contract(n, state, {"i"}) for n in (long, short)]
    nodes = reachable(products)
    assert drawn_out(nodes, (), (), True) == {products[0]: long}
    # of more rows warps share those, and each takes all that they are multiplied by
    assert not drawn_out(nodes, (), (), False)
    assert drawn_out(nodes, (), products, False) == {products[0]: long}
    # what is given ends a way, as a product does
    assert not drawn_out(nodes, {drawn(b, x, 2, y)}, (), True)
    later = drawn(b, products[0], WAY - 1, b.rename(y, "i", "j"))
    last = b.contract(later, b.rename(state, "i", "k"), {"j"})
    assert drawn_out(reachable([last]), (), (), True) == {products[0]: long}


@pytest.mark.parametrize("tokens", [16, 64])
def test_ways_are_apart_from_products_that_warps_hold_as_a_whole(tokens: int) -> None:
    """The few rows of a product; of others the other operand, where they do not read it from shared memory."""
    text = (LAYERS / "trellis.ttm").read_text(encoding="utf-8")
    done = str(run(text, "trellis", {"b": tokens}, Options(cache=Path())).done["emit"])
    bodies = [k for k in re.split(r"(?m)^ +@_Kernel\n", done)[1:] if "def _chunk_" in k]
    apart = [re.findall(r"_dot\(.*_apart\(.*", k) for k in bodies]
    assert any(apart)
    assert not any(found for k, found in zip(bodies, apart, strict=True) if "_scan_" in k.partition("(")[0])
    rows = [line for found in apart for line in found if re.search(r"_dot\(_apart\(.*, True\), ", line)]
    assert bool(rows) == (tokens == 16)
    assert all(line in rows or ", BY_WARP), DOT" in line for found in apart for line in found)


def test_a_kernel_has_the_orders_that_tables_name_and_no_others() -> None:
    mine = [entry("k", num_warps=4, order=5), entry(without_gradients("k"), num_warps=4, order=2), entry("l", order=7)]
    tables = Tables({90: Table("sm_90", mine), 80: Table("sm_80", [entry("k", order=5), entry("k", num_warps=8)])})
    assert tables.orders("k") == (2, 5)
    assert tables.orders("l") == (7,)
    assert tables.orders("m") == ()
    assert replace(tables, all_orders=True).orders("m") == CONFIG["order"]


def test_the_text_of_a_kernel_has_its_values_in_each_order() -> None:
    plain = source("gated_delta_net", tuning.NOTHING)
    assert "ORDER" not in plain.replace("_ORDERED", "").replace('"ORDER"', "")
    assert re.search(r"_ORDERED = {\s*}", plain)
    every = source("gated_delta_net", Tables(all_orders=True))
    body = every.split("def _chunk_backward_1_kernel(")[1].split("\n\n\n")[0]
    first, *others = body.split("ORDER == ")
    assert len(others) > 3
    assert "ORDER: tl.constexpr" in first
    counts = {part.count("_tile_dot(") for part in (*others[:-1], *others[-1].split("else:\n"))}
    assert len(counts) == 1  # each computes the same
    assert len({part.split(":\n", 1)[-1] for part in others}) == len(others)  # none twice


@pytest.mark.parametrize(("layer", "few"), [("dla", True), ("gated_delta_net", False)])
def test_units_of_few_tokens_end_with_a_wide_product(layer: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = source(layer, tuning.NOTHING)
    monkeypatch.setattr("ttmdsl.print_triton.wide_last", lambda order, operands: order)
    assert (source(layer, tuning.NOTHING) != text) is few


def test_an_order_is_the_same_whichever_others_tables_name() -> None:
    from ttmdsl.emit_triton import write_forms

    programs = lowered("dplr")
    chunk, *_ = write_forms(programs, Tables(all_orders=True))
    alike = 0
    for number in range(1, ORDERS + 1):
        alone = [entry(k.signature, order=number) for k in chunk.kernels()]
        found, *_ = write_forms(programs, Tables({90: Table("sm_90", alone)}))
        for mine, every in zip(found.kernels(), chunk.kernels(), strict=True):
            text = mine.others.get(number)
            again = number not in every.others and text is not None
            assert text in every.others.values() if again else text == every.others.get(number)
            alike += again
    assert alike  # some orders give the same text: among all of them it is there once


def errors_in_each_order(layer: str, orders: Sequence[int]) -> dict[int, list[str]]:
    """What parity says of a layer whose kernels over chunks use one order; in a process with all of them."""
    from ttmdsl.bench.lab import launched
    from ttmdsl.bench.subjects import Case
    from ttmdsl.bench.tune import Trial
    from ttmdsl.drawing import Shape, dims_at
    from ttmdsl.parity import parity

    found: dict[int, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TTM_ORDERS", "all")
        case = Case(layer, (1, 64, 1, 16), "float32", "cpu", "triton")
        module = case.load()
        shape = Shape("drawn", heads=1, dims=dims_at(module, 12), tokens=21, state=True)
        for order in orders:
            with launched(Trial(case, {name: {"order": order} for name in module._ORDERED})):
                rows = parity(module, dtypes=[torch.float32], shapes=[shape], backends=["triton"])
            found[order] = [str(r) for r in rows if not r.ok] + ["nothing was compared"] * (not rows)
    return found


@pytest.mark.parametrize("layer", beyond(["gated_delta_net", "titans_linear"], "titans_linear"))
def test_every_order_gives_the_same(layer: str, interpreter: ProcessPoolExecutor) -> None:
    # loads are moved in one alike, products in two
    orders = [*range(1, ELSEWHERE + 1), ELSEWHERE + 3, PLACED + 2, 2 * PLACED + ELSEWHERE + 4]
    found = interpreter.submit(errors_in_each_order, layer, orders).result()
    assert found == {order: [] for order in orders}


def by_order(layer: str, kernel: str) -> dict[int, str]:
    """A kernel's text in each of its orders but its own."""
    text = source(layer, Tables(all_orders=True)).split(f"def {kernel}(")[1].split("@_Kernel")[0]
    ways = re.findall(r"^( *)\w+ ORDER == (\d+):\n((?:\1    .*\n)+)", text, re.MULTILINE)
    return {int(number): textwrap.dedent(body) for _, number, body in ways}


def test_late_loads_are_those_of_the_same_order_where_they_are_used() -> None:
    bodies = by_order("titans_linear", "_chunk_backward_scan_kernel")
    late = {n: body.splitlines() for n, body in bodies.items() if ELSEWHERE < n < PLACED and n - ELSEWHERE in bodies}
    assert late
    for n, found in late.items():
        early = bodies[n - ELSEWHERE].splitlines()
        assert sorted(found) == sorted(early)
        loads = [line for line in early if re.match(r"\w+ = tl\.load", line)]
        assert [line for line in found if line not in loads] == [line for line in early if line not in loads]
        for line in loads:
            after = (other for other in found[found.index(line) + 1 :] if other not in loads)
            assert re.search(rf"\b{line.split(' ')[0]}\b", next(after))


def test_maps_load_tiles_some_products_before_they_use_them() -> None:
    bodies = {n: body.splitlines() for n, body in by_order("titans_linear", "_chunk_backward_1_kernel").items()}
    moved = [(lines, bodies[n - ELSEWHERE]) for n, lines in bodies.items() if n < PLACED and n - ELSEWHERE in bodies]
    assert moved

    def products_before(lines: list[str]) -> dict[str, int]:
        found, products = {}, 0
        for line in lines:
            products += line.count("_tile_dot(")
            if tile := re.search(r"tl\.load\(\((\w+_ptr).*\[:, None\]", line):
                found[tile[1]] = products
        return found

    for early, late in moved:
        assert len(early) == len(late)
        first, then = products_before(early), products_before(late)
        assert first.keys() == then.keys()
        assert sum(then.values()) > sum(first.values())


def test_a_tile_is_loaded_no_earlier_than_there_are_products() -> None:
    b = Builder(("i", "j"))
    x, y, z = (b.leaf("carry", name, ("i", "j")) for name in "xyz")
    tokens = [b.leaf("token", name, ("t", "i")) for name in "abc"]
    products = [b.contract(t, x, ("i",)) for t in tokens]
    last = b.add(b.contract(tokens[0], y, ("i",)), b.contract(tokens[0], z, ("i",)))
    half = b.mul(products[0], b.const(0.5))
    order = [*products, half, *last.args, last]

    def places(early: int) -> list[int]:
        found = with_loads(order, lambda n: n.args, lambda n: n in (x, y, z), early)
        assert [n for n in found if n in order] == order
        return [found.index(n) for n in (x, y, z)]

    assert places(0) == [0, 5, 7]
    assert places(1) == [0, 3, 5]
    assert places(9) == [2, 1, 0]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values(), st.integers(0, 3))
def test_what_is_loaded_early_is_loaded_once_and_in_time(drawn: tuple[list[Node], list[Node]], early: int) -> None:
    leaves, made = drawn
    found = with_loads(made, lambda node: node.args, lambda node: node in leaves, early)
    assert [n for n in found if n in made] == made
    taken = {a for n in made for a in n.args if a in leaves}
    assert sorted(map(id, found)) == sorted(map(id, [*taken, *made]))
    place = {node: i for i, node in enumerate(found)}
    assert all(place[a] < place[n] for n in made for a in n.args if a in place)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values(), st.sampled_from([0.25, 0.5, 1.0]))
def test_tiles_are_loaded_early_where_that_takes_little_room(
    drawn: tuple[list[Node], list[Node]], weight: float
) -> None:
    leaves, made = drawn

    def placed(loads: Loads) -> list[Node]:
        return with_early_loads(made, (), operands, lambda n: weight, lambda n: n in leaves, loads)

    def most(order: list[Node]) -> float:
        return peak(order, (), operands, lambda n: weight)

    def operands(node: Node) -> tuple[Node, ...]:
        return node.args

    late, early, fitting, crowded = map(placed, (Loads.LATE, Loads.EARLY, Loads.FITTING, Loads.CROWDED))
    assert placed(Loads.AHEAD) == late == with_loads(made, operands, lambda n: n in leaves)
    assert [fitting, crowded] in ([late, early], [early, late])
    assert most(fitting) - most(late) <= RISE
    assert fitting == early or most(early) - most(late) > RISE


def test_numbers_say_where_loads_are() -> None:
    ways = [[Loads.of(number, scan) for number in (0, 3, ELSEWHERE, ELSEWHERE + 3)] for scan in (True, False)]
    assert ways[0] == [Loads.AHEAD, Loads.AHEAD, Loads.LATE, Loads.LATE]
    assert ways[1] == [Loads.FITTING, Loads.LATE, Loads.CROWDED, Loads.EARLY]


def test_numbers_say_where_products_are() -> None:
    bodies = by_order("gated_delta_net", "_chunk_backward_1_kernel")
    assert len(set(bodies.values())) == len(bodies)  # no text twice
    products = {n: text.count("_tile_dot(") + text.count("_wide_dot(") for n, text in bodies.items()}
    alone = {n: sum(map(is_a_product, text.splitlines())) for n, text in bodies.items()}
    by_place: dict[Products, set[int]] = {}
    for n in bodies:
        assert Products.of(n) is [Products.SHORT, Products.TAKEN, Products.ORDERED][n // PLACED]
        by_place.setdefault(Products.of(n), set()).add(alone[n])
    (all_of_them,) = {*products.values()}
    assert by_place[Products.ORDERED] == {all_of_them}
    assert max(by_place[Products.TAKEN]) < min(by_place[Products.SHORT]) <= max(by_place[Products.SHORT]) < all_of_them


def is_a_product(line: str) -> bool:
    """Whether a line computes a product of tiles and nothing else."""
    found = re.fullmatch(r" *\w+ = (?:_tile_dot|_wide_dot)(\(.*)", line)
    return found is not None and strip(found[1]) != found[1]


def test_loads_come_before_the_statement_that_uses_them_first() -> None:
    loads = ["p = tl.zeros([P], tl.float32)", "if p_ptr is not None:", "    p = tl.load(p_ptr)"]
    loads += ["a = tl.load(a_ptr)", "b = tl.load(b_ptr)", "c = tl.load(c_ptr)", "d = tl.load(d_ptr)"]
    kept = ["if KEEP:", "    tl.store(y_ptr, b * x)", "else:", "    tl.store(y_ptr, x)"]
    lines = ["x = p + 1", *kept, "z = c - b", "w = ab + a"]
    assert _when_used(loads, lines) == [
        *loads[:3], "x = p + 1", loads[4], *kept, loads[5], "z = c - b", loads[3], "w = ab + a", loads[6],
    ]  # fmt: skip


def test_shipped_orders_are_of_kernels_that_have_them() -> None:
    """An order that gives the same text as the one of least peak would be none."""
    entries = [e for path in tuning.files([SHIPPED]) for e in tuning.read(path).kernels if "order" in e.config]
    assert entries
    text = source("gated_delta_net", tuning.read_all([SHIPPED]))
    assert "_chunk_backward_1_kernel" in text.split("_ORDERED = ")[1].split("}")[0]
