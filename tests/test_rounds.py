"""Walks over the blocks of a dim: what each round finds, when, and that kernels of several blocks are the reference."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from side_by_side import side_by_side
from test_differentiate import forms
from tiers import mostly_beyond, thorough

import ttmdsl
from ttmdsl.builder import Builder
from ttmdsl.drawing import Shape, draw
from ttmdsl.ir import Node, reachable
from ttmdsl.kernels import Kernel
from ttmdsl.parity import parity
from ttmdsl.plan import Plan, again, plan
from ttmdsl.rounds import rounds
from ttmdsl.schedule import weights
from ttmdsl.staging import AGAIN, ROOM, WALKING, alive

DEEP = [("ttt_mlp", {}), ("titans", {}), ("titans", {"b": 64}), ("omega_net", {}), ("dla", {}), ("dla", {"b": 64})]


def planned(name: str, consts: dict[str, float], kind: str = "chunk") -> Plan:
    return plan(kind, forms(name, consts)[kind], int(consts.get("b", 16)))


def in_rounds(p: Plan) -> list[Kernel]:
    return [k for k in p.kernels() if k.inner]


# ---- which kernels walk, and what passes through memory ----------------------------------------------------------


@pytest.mark.parametrize(("name", "consts"), DEEP)
def test_whatever_has_the_inner_dim_walks_over_it_or_is_split_by_the_grid(name: str, consts: dict[str, float]) -> None:
    found = planned(name, consts)
    for k in found.kernels():
        assert k.program.inner == "h"
        assert (k.inner == "h" or k.blocked == "h") == any("h" in n.axes for n in k.nodes)


WIDE = [
    *[("gated_delta_net", {}), ("gsa", {}), ("dplr", {})],
    *[("trellis", {"b": 64}), ("lattice_dec", {"b": 64, "project": 0})],
]


@pytest.mark.parametrize(("name", "consts"), WIDE)
def test_a_dim_that_tensors_have_is_walked_over_where_wide_heads_find_no_room_else(
    name: str, consts: dict[str, float]
) -> None:
    form = forms(name, consts)["chunk"]
    found = plan("chunk", form)
    assert form.forward.inner == ""
    walking = in_rounds(found)
    assert walking
    for k in walking:
        assert k.kind == "map"
        ways = (replace(k, inner=""), k, replace(k, searched=True))
        plain, walked, searched = (alive(way, weights(64, 128, way.inner)) for way in ways)
        assert plain > ROOM
        left = plain * (2 / 3 if len(rounds(k.roots, k.given, k.inner)) == 1 else 1 / 2)
        assert walked <= (plain if k.searched else min(plain, WALKING)) or searched <= left
        assert again(k) <= AGAIN


@pytest.mark.parametrize(
    ("name", "consts", "apart"),
    [
        ("ttt_mlp", {}, False),
        ("titans", {"b": 64}, True),
        ("omega_net", {}, False),  # so has its, since weights of windows take no product
        ("dla", {"b": 64}, False),  # its scan has room for its readout
    ],
)
def test_what_is_read_is_apart_where_the_scan_would_spill(name: str, consts: dict[str, float], apart: bool) -> None:
    found = planned(name, consts)
    scans = [i for i, k in enumerate(found.forward) if k.kind == "scan"]
    (reader,) = (i for i, k in enumerate(found.forward) if any(output == "y" for output, _ in k.outputs))
    assert (reader > scans[-1]) == apart
    if apart:  # the states that y is read of are there, whether a backward pass follows or not
        later = found.forward[scans[-1] + 1 :]
        left = set().union(*(k.across for k in found.forward))
        states = {n for k in later for n in k.states()}
        assert states <= left
        assert {n.name for n in states} <= {name for i in scans for name in found.forward[i].keeps}
        assert {
            n for k in later for n in k.given if n.id in {s.id for i in scans for s in found.forward[i].saves}
        } <= left


# ---- rounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chunk", "resumed"])
@pytest.mark.parametrize(("name", "consts"), DEEP)
def test_every_value_is_there_when_a_round_takes_it(name: str, consts: dict[str, float], kind: str) -> None:
    for k in in_rounds(planned(name, consts, kind)):
        found = rounds(k.roots, k.given, "h")
        known: set[Node] = set(k.given) | {n for n in k.nodes if n.op == "leaf"}
        stored: list[Node] = []
        for r in found:
            before = reachable(r.before, known)
            assert not any("h" in n.axes for n in before if n not in known)
            known |= set(before)
            inside = [n for n in reachable([*r.sums, *r.ends], known) if n not in known]
            # what is computed in a round has the dim, or is summed over it there, or is as good as a constant
            assert all("h" in n.axes or n in r.sums or not _tensors(n) or n.op == "neg" for n in inside)
            assert all("h" not in n.axes and any("h" in a.axes for a in n.args) for n in r.sums)
            known |= set(r.sums)
            stored += [n for n in (*r.ends, *r.before, *r.sums) if n in k.roots]
        assert sorted(n.id for n in stored) == sorted({n.id for n in k.roots})


def _tensors(node: Node) -> bool:
    return any(n.op == "leaf" for n in reachable([node]))


def test_a_sum_over_the_dim_ends_a_round() -> None:
    b = Builder(("d", "h"))
    W, x = b.leaf("carry", "W", {"d", "h"}), b.leaf("token", "x", {"t", "d"})
    hidden = b.map("tanh", b.contract(x, W, {"d"}))
    read = b.contract(hidden, W, {"h"})
    again = b.mul(hidden, b.contract(b.map("tanh", read), W, {"d"}))
    first, second = rounds([again, read], (), "h")
    assert (first.sums, first.ends) == ((read,), ())
    assert (second.sums, second.ends) == ((), (again,))
    assert x in first.before
    assert [n.op for n in second.before] == ["tanh"]


def test_what_a_later_round_computes_anyway_is_stored_there() -> None:
    b = Builder(("d", "h"))
    W, x = b.leaf("carry", "W", {"d", "h"}), b.leaf("token", "x", {"t", "d"})
    hidden = b.contract(x, W, {"d"})
    read = b.contract(hidden, W, {"h"})
    later = b.contract(b.map("tanh", b.mul(hidden, b.sum(b.map("tanh", read), {"d"}))), W, {"h"})
    first, second = rounds([hidden, later], (), "h")[:2]
    assert first.ends == ()
    assert second.ends == (hidden,)
    assert second.sums == (later,)


@pytest.mark.parametrize("op", ["amax", "cumsum", "rename"])
def test_what_needs_the_whole_dim_at_once_keeps_the_kernel_whole(op: str) -> None:
    b = Builder(("d", "h"))
    hidden = b.contract(b.leaf("token", "x", {"t", "d"}), b.leaf("carry", "W", {"d", "h"}), {"d"})
    value = {
        "amax": lambda: b.amax(hidden, {"h"}),
        "cumsum": lambda: b.make("cumsum", (hidden,), hidden.axes, "h", False),
        "rename": lambda: b.rename(hidden, "h", "h'"),
    }[op]()
    assert rounds([b.map("tanh", value)], (), "h") == ()


# ---- kernels of several blocks, in Triton's interpreter ----------------------------------------------------------


def worst(name: str, consts: dict[str, float], shapes: list[Shape]) -> list[str]:
    module = ttmdsl.load(name, **consts)
    rows = parity(module, dtypes=[torch.float32], shapes=shapes, backends=["triton"])
    assert any("h" in (blocked, inner) for *_, blocked, inner in module._KERNELS.values())
    assert len(rows) > 20
    return [f"{row.quantity} {row.error:.1e} at {row.shape}" for row in rows if not row.ok]


def worst_in_blocks(name: str, consts: dict[str, float], in_shared: int = 1) -> tuple[int, list[str]]:
    """How many kernels walk, and what misses, in blocks of 16 columns: one and three of a dim, the last half empty."""
    module = ttmdsl.load(name, **consts)
    shape = Shape("state", tokens=70, heads=2, dims=(40, 16, 40, 24), state=True)
    config = {"block": 16, "in_shared": in_shared}
    with mock.patch.multiple(module, _BLOCK=16, _measured=lambda *_, **__: config):
        rows = parity(module, dtypes=[torch.float32], shapes=[shape], backends=["triton"], oracle="torch")
    module._schedule.cache_clear()
    module._fitting.clear()
    misses = [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok]
    return sum(bool(inner) for *_, inner in module._KERNELS.values()), misses


@pytest.mark.parametrize(
    ("name", "consts"),
    [
        *WIDE,
        ("titans_linear", {"b": 64}),
        *[(name, {}) for name in ("linear_attention", "mamba2", "gla", "delta_product", "rwkv7", "abc")],
        ("omega_linear", {"b": 64}),
    ],
)
def test_walks_over_the_blocks_of_a_head_are_the_reference(
    interpreter: ProcessPoolExecutor, name: str, consts: dict[str, float]
) -> None:
    walking, misses = interpreter.submit(worst_in_blocks, name, consts).result()
    assert walking
    assert misses == []


def test_what_a_walk_takes_from_before_it_may_lie_anywhere(interpreter: ProcessPoolExecutor) -> None:
    for in_shared in (0, 1):
        walking, misses = interpreter.submit(worst_in_blocks, "delta_net", {}, in_shared).result()
        assert (walking, misses) == (1, [])


def lying(chosen: dict[str, int], gpu: int = 90, size: int = 128) -> list[object]:
    """Where launches of delta_product's walk try to have what its products take from before it, as it was measured in
    heads of 128 by this Triton."""
    module = ttmdsl.load("delta_product")
    (name,) = module._IN_SHARED
    entry = (64, 128, 128), 2, 128, {"num_warps": 4, "num_stages": 2, **chosen}, module.triton.__version__
    with mock.patch.object(module, "_TUNED", {90: {name: [entry]}} if chosen else {}):
        launches = module.kernel_launches(name, {"d_k": size, "d_v": size}, torch.bfloat16, gpu)
        return list(dict.fromkeys(constants["IN_SHARED"] for constants, _ in launches))


def test_where_ptxas_may_mix_it_up_a_walk_takes_it_from_shared_memory(interpreter: ProcessPoolExecutor) -> None:
    def found(*arguments: object, **more: object) -> list[object]:
        return interpreter.submit(lying, *arguments, **more).result()  # type: ignore[arg-type]

    in_registers, in_shared = {"block": 64}, {"block": 64, "in_shared": 1}
    assert found(in_registers)[0] is False  # as it was measured, by way of the rules' if there is no room
    assert found(in_shared)[0] is True
    for elsewhere in ({"gpu": 80}, {"size": 96}):  # masked dims are another text
        assert found(in_registers, **elsewhere)[0] is True
    assert found({"block": 128})[0] is False  # one block is no walk
    assert found({}) == [True, False]  # by the rules, and of all columns at once where that finds no room
    assert found({}, size=64) == found({}, gpu=80) == [False]


def walked(name: str, tuned: bool) -> list[tuple[object, ...]]:
    """Columns, warps, stages, and whether dims come first, of a layer's gradient kernel that walks over a tensor's dim,
    in heads of 64 and 128, as tables have it or by the rules."""
    module = ttmdsl.load(name)
    kernel = next(k for k, (way, *_, inner) in module._KERNELS.items() if inner and way == "map")
    found = []
    with mock.patch.object(module, "_TUNED", module._TUNED if tuned else {}):
        for size in (64, 128):
            constants, options = next(module.kernel_launches(kernel, {"d_k": size, "d_v": size}, torch.bfloat16, 90))
            columns = constants[module.KERNEL_BLOCKS[kernel]]
            found.append((columns, options["num_warps"], options["num_stages"], constants["DIMS_FIRST"]))
    return found


def test_a_walk_over_a_wide_head_is_in_blocks(interpreter: ProcessPoolExecutor) -> None:
    def found(*arguments: object) -> list[tuple[object, ...]]:
        return interpreter.submit(walked, *arguments).result()  # type: ignore[arg-type]

    assert [columns for columns, *_ in found("gated_delta_net", True)] == [64, 64]
    assert found("gated_delta_net", False) == [(64, (4, 8, 800), 1, False), (64, 8, 2, True)]  # of many tiles
    assert found("hgrn2", False) == [(64, (4, 8, 800), 1, False), (64, (4, 8, 600), 1, False)]  # of fewer


@pytest.fixture(scope="session")
def beside(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("specs") / "beside.ttm"
    path.write_text(BESIDE)
    return str(path)


def worst_of_shares(
    name: str, consts: dict[str, float], processors: int, dims: tuple[int, int]
) -> tuple[set[int], list[str]]:
    """Among how many programs a head's blocks of 16 columns are shared out, and what misses; the last one has fewer."""
    module = ttmdsl.load(name, **consts)
    shapes = [
        Shape("a state, cut", tokens=100, heads=2, dims=dims, cuts=(30,), state=True),
        Shape("packed", heads=1, dims=dims, lengths=(5, 0, 70), state=False),
    ]
    module._schedule.cache_clear()
    patched = mock.patch.multiple(module, _BLOCK=16, _processors=lambda device: processors, _fitting={})
    with patched, side_by_side("arrived_ptr") as grids:
        rows = parity(module, dtypes=[torch.float32], shapes=shapes, backends=["triton"], oracle="torch")
    module._schedule.cache_clear()
    return {shares for shares, *_ in grids}, [f"{row.quantity} {row.error:.1e}" for row in rows if not row.ok]


@pytest.mark.parametrize(
    ("name", "consts", "processors", "dims", "shares"),
    [
        pytest.param("ttt_mlp", {}, 10**6, (12, 70), {5}, marks=thorough),
        pytest.param("titans", {"b": 64}, 7, (12, 70), {3, 2}, marks=thorough),
        pytest.param("omega_net", {"b": 32}, 5, (12, 70), {2, 1}, marks=thorough),
        ("lattice_dec", {"b": 64, "project": 0}, 10**6, (70, 36), {3}),
        ("trellis", {"b": 64}, 7, (20, 36), {3, 2}),
        ("ttt_norm", {"b": 64}, 7, (36, 40), {3, 2}),
    ],
)
def test_programs_that_share_a_heads_blocks_are_the_reference(
    interpreter: ProcessPoolExecutor,
    name: str,
    consts: dict[str, float],
    processors: int,
    dims: tuple[int, int],
    shares: set[int],
) -> None:
    assert interpreter.submit(worst_of_shares, name, consts, processors, dims).result() == (shares, [])


DEEP: list[tuple[str, dict[str, float]]]
DEEP = [("ttt_mlp", {"b": 8}), ("titans", {"b": 64}), ("omega_net", {}), ("dla", {"b": 64})]


@pytest.mark.parametrize(("name", "consts"), mostly_beyond(DEEP, *DEEP[1::2]))
def test_kernels_of_several_blocks_are_the_reference(
    interpreter: ProcessPoolExecutor, name: str, consts: dict[str, float]
) -> None:
    """A hidden dim of 70: a whole block, and one of six columns."""
    shapes = [
        Shape("a state, cut", batch=2, tokens=37, heads=2, dims=(12, 70), cuts=(13, 30), state=True),
        Shape("packed", heads=1, dims=(12, 70), lengths=(5, 1, 20), state=False),
        Shape("y alone", tokens=67, dims=(12, 70), state=False, final=False),
    ]
    assert interpreter.submit(worst, name, consts, shapes).result() == []


# a memory that has the hidden dim, and one that has not, with momentum: what is read of both waits in memory
BESIDE = """layer Beside {
  dim       d, h
  input     q[d], k[d], v[d]
  gate      alpha: decay, theta: decay, eta: unit
  const     b = 64
  fn        M(x) = A @ x + W1 @ gelu(W2 @ x)
  memory    A[d, d], W1[d, h], W2[h, d]
  bias      1/2 * |M(k) - v|^2
  retention alpha * (A, W1, W2)
  optimizer momentum(decay = theta, rate = eta, batch = b)
  read      M(q)
}"""


def without_gradients(name: str) -> float:
    module = ttmdsl.load(name)
    assert module._READ_LATER
    drawn = draw(module, Shape("", tokens=70, heads=2, dims=(12, 70)), dtype=torch.float32)
    results = []
    for record in (True, False):
        x = {key: t.clone().requires_grad_(record) for key, t in drawn.x.items()}
        y, end = module.op(**x, initial_state=drawn.state, output_final_state=True, backend="triton")
        results.append([y.detach(), *(t.detach() for t in end.values())])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["omega_net", "beside"])
def test_what_is_read_apart_needs_no_backward_pass_to_follow(
    interpreter: ProcessPoolExecutor, beside: str, name: str
) -> None:
    assert interpreter.submit(without_gradients, {"beside": beside}.get(name, name)).result() == 0


def test_a_memory_beside_that_lacks_the_dim_stays_in_registers(interpreter: ProcessPoolExecutor, beside: str) -> None:
    shapes = [Shape("a state", tokens=70, heads=2, dims=(12, 70), state=True)]
    assert interpreter.submit(worst, beside, {}, shapes).result() == []


def one_token(name: str) -> tuple[set[str], list[str]]:
    """Which forms the kernels are of that one token with gradients starts, in the middle of a group and of windows."""
    module, started = ttmdsl.load(name), set()
    launch = module._Schedule.launch

    def seen(s: Any, kernel: Any, *arguments: Any) -> None:
        started.add(kernel.name.split("_")[1])
        launch(s, kernel, *arguments)

    shapes = [
        Shape("one", batch=2, tokens=1, heads=2, dims=(5, 70)),
        Shape("packed", tokens=3, dims=(5, 70), lengths=(1, 1, 1)),
    ]
    with mock.patch.object(module._Schedule, "launch", seen):
        return started, worst(name, {}, shapes)


@pytest.mark.parametrize("name", ["titans", "omega_net"])
def test_one_token_with_gradients_goes_by_units(interpreter: ProcessPoolExecutor, name: str) -> None:
    started, misses = interpreter.submit(one_token, name).result()
    assert misses == []
    assert started == {"resumed"}
