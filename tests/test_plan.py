"""Plans: every output computed once, nothing used before it is there, and blocks only where columns are independent."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ir_eval import Interpreter, draw_leaf
from test_differentiate import LAYERS, SIZES, forms

from ttmdsl import staging
from ttmdsl import ways as searching
from ttmdsl.ahead import scaled
from ttmdsl.builder import Builder
from ttmdsl.ir import PAST, TOKEN_AXES, Node, Program, is_matmul, is_product, operands, original, reachable
from ttmdsl.kernel_writer import saved_name
from ttmdsl.kernels import Kernel
from ttmdsl.loader import read
from ttmdsl.lower import Form
from ttmdsl.options import Options
from ttmdsl.pipeline import run
from ttmdsl.plan import Plan, plan
from ttmdsl.rounding import taken_exactly
from ttmdsl.rounds import rounds
from ttmdsl.scans import free_axis, walks_at
from ttmdsl.schedule import FULL, Work, tiles_first, weights
from ttmdsl.staging import (
    ROOM,
    alive,
    computed,
    cost,
    ordered,
    peak_of_loads,
    spilled_at_128,
    staged,
)
from ttmdsl.vector_kernels import LEAST, crosses_tokens, is_vector
from ttmdsl.ways import split
from ttmdsl.write_kernel import turned

FORMS = {
    f"{name} {consts} {kind}": (kind, form)
    for name, consts in [*LAYERS, ("gsa", {})]
    for kind, form in forms(name, consts).items()
    if kind != "token"
}


@functools.cache
def planned(which: str) -> Plan:
    """Made by the first test that asks for it."""
    return plan(*FORMS[which])


@pytest.fixture(params=FORMS)
def which(request: pytest.FixtureRequest) -> str:
    """In turn, each form of some layers."""
    return str(request.param)


@pytest.fixture
def form(which: str) -> Form:
    return FORMS[which][1]


@pytest.fixture
def found(which: str) -> Plan:
    return planned(which)


def test_every_gradient_is_computed_once(form: Form, found: Plan) -> None:
    computed = [name for kernel in found.backward for name, _ in kernel.outputs]
    assert sorted(computed) == sorted(k[2:] for k in form.backward.outputs if k.startswith("d:"))
    for kernel in found.backward:
        assert all(kernel.program.outputs[f"d:{name}"] is node for name, node in kernel.outputs)
    assert len({id(kernel.program) for kernel in found.backward}) == 1


def test_every_carry_is_handed_on_once(form: Form, found: Plan) -> None:
    for kernels, program in ((found.forward, form.forward), (found.backward, form.backward)):
        carried = [name for kernel in kernels for name, _ in kernel.carried]
        assert sorted(carried) == sorted(program.ends())
        assert 1 <= [k.kind for k in kernels].count("scan") <= len(carried)
    assert [name for k in found.forward for name, _ in k.outputs] == ["y"]


def test_nothing_is_used_before_it_is_there(form: Form, found: Plan) -> None:
    saved: set[object] = set()
    states: set[str] = set()
    for kernel in found.kernels():
        assert set(kernel.given) <= saved
        read = {("d_" if n.role == "cocarry" else "") + n.name for n in kernel.leaves() if "carry" in n.role}
        own = {("d_" if kernel.reverse else "") + n.name for n in kernel.walked()}
        assert read - own <= states
        saved |= set(kernel.saves)
        states |= {("d_" if kernel.reverse else "") + name for name in kernel.keeps}


def saved_otherwise(found: Plan) -> set[str]:
    """Names under which kernels load what none before them has saved so."""
    known: set[str] = set()
    wrong: set[str] = set()
    for kernel in found.kernels():
        b = kernel.program.builder
        wrong |= {saved_name(b, n, kernel.exact) for n in kernel.given} - known
        known |= {saved_name(b, n, kernel.exact) for n in kernel.saves}
    return wrong


def test_what_is_saved_is_loaded_as_it_was_saved(form: Form, found: Plan) -> None:
    assert not saved_otherwise(found)


@pytest.mark.parametrize(("name", "consts"), [("trellis", {"b": 16}), ("titans", {"b": 64}), ("yaad", {"b": 16})])
def test_pieces_amid_a_group_go_the_way_of_whole_groups(
    name: str, consts: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which costs little more than the one that is found by looking; another form has no such way, and looks."""
    whole, pieces = (forms(name, consts)[kind] for kind in ("chunk", "resumed"))
    tokens = int(consts["b"])
    choice = plan("chunk", whole, tokens).choice
    backward, ways = searching._backward, list[searching.Way]()

    def counted(name: str, way: searching.Way, *rest: Any) -> Any:
        ways.append(way)
        return backward(name, way, *rest)

    monkeypatch.setattr(searching, "_backward", counted)
    chosen = plan("resumed", pieces, tokens, choice)
    assert len(ways) == 1
    assert chosen.choice == choice
    looked_for = plan("resumed", pieces, tokens)
    assert len(ways) > 2
    weight = weights(tokens)
    some, least = (sum(cost(k, weight) for k in found.kernels()) for found in (chosen, looked_for))
    assert some < 1.15 * least
    assert plan("resumed", pieces, tokens, replace(choice, way=99)).choice.way < 99


@pytest.mark.parametrize(("name", "kind"), [("ttt_mlp", "chunk"), ("ttt_mlp", "resumed"), ("titans", "chunk")])
def test_what_several_kernels_in_a_row_pass_on_they_also_save(name: str, kind: str) -> None:
    """One of them takes by single elements what is saved for products of later kernels."""
    assert not saved_otherwise(plan(kind, forms(name, {"b": 64})[kind]))


def test_names_are_unique_and_tell_the_form(form: Form, found: Plan) -> None:
    names = [kernel.name for kernel in found.kernels()]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"_{found.name}_") and name.endswith("_kernel") for name in names)


def test_a_block_of_the_free_axis_is_a_slice_of_the_whole(form: Form, found: Plan) -> None:
    """A kernel whose grid splits a dim gets a slice of every tensor that has it, and must give the same slice back."""
    generator = torch.Generator().manual_seed(0)
    for kernel in (k for k in found.kernels() if k.blocked):
        dim = kernel.blocked
        leaves = {n: draw_leaf(n, SIZES, generator) for n in kernel.program.leaves()}
        whole = Interpreter(leaves, SIZES)
        known = leaves | {n: whole(n) for n in kernel.given}
        cut = {n: x.narrow(n.axes.index(dim), 0, 1) if dim in n.axes else x for n, x in known.items()}
        block = Interpreter(cut, {**SIZES, dim: 1})
        block.known |= {n: cut[n] for n in kernel.given}
        for root in kernel.roots:
            assert dim in root.axes
            expected = whole(root).narrow(root.axes.index(dim), 0, 1)
            torch.testing.assert_close(block(root), expected, rtol=1e-9, atol=1e-9)


def test_free_axes_are_found_and_refused() -> None:
    b = Builder(("i", "j"))
    S, q = b.leaf("carry", "S", ("i", "j")), b.leaf("token", "q", ("t", "j"))
    read = b.contract(S, q, {"j"})
    program = Program("chunk", ("i", "j"), b, {"y": read})
    assert free_axis(program, [read]) == "i"
    assert free_axis(program, [read, b.sum(S, {"i"})]) == ""  # summed over
    assert free_axis(program, [read, q]) == ""  # a root without it
    assert free_axis(program, [read, b.rename(S, "i", "i'")]) == ""  # two names for one dim
    assert free_axis(program, []) == ""


def test_gradients_are_shared_out_in_full() -> None:
    for _, form in FORMS.values():
        gradients = {k[2:]: v for k, v in form.backward.outputs.items() if k.startswith("d:")}
        for groups in (1, 2, 3, 50):
            shares = split(form.backward, gradients, groups)
            assert sorted(name for share in shares for name in share) == sorted(gradients)
            assert 1 <= len(shares) <= groups


def peak_of(kernel: Kernel) -> float:
    return peak_of_loads(ordered(kernel, FULL), FULL)


def test_a_kernel_of_many_tiles_is_several_that_have_more_room() -> None:
    form = forms("trellis", {"b": 4})["chunk"]
    found = plan("chunk", form)
    parts = [k for k in found.backward if k.exact]
    assert len(parts) > 4
    for part in parts:
        assert set(part.saves) <= {n for k in found.backward for n in k.given}
    gradients = tuple((k[2:], v) for k, v in form.backward.outputs.items() if k.startswith("d:"))
    whole = Kernel("_whole_kernel", "map", form.backward, outputs=gradients)
    assert max(map(peak_of, parts)) < peak_of(whole) / 2
    assert not any(k.exact for k in plan("chunk", forms("linear_attention", {})["chunk"]).backward)


@pytest.mark.parametrize("name", ["dplr", "rwkv7"])
def test_kernels_in_a_row_do_not_pass_on_what_is_negated_of_what_they_pass_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negated() -> list[tuple[Kernel, Node]]:
        """Of what is passed on so, each with a kernel that takes it."""
        maps = [k for k in plan("chunk", forms(name, {})["chunk"]).backward if k.kind == "map"]
        passed = {n for k in maps for n in k.saves}
        found = [n for n in passed if n.op == "neg" and n.args[0] in passed and len(n.axes) == 2]
        return [(k, n) for k in maps for n in found if n in k.given]

    weight, left = weights(64), negated()
    for kernel, value in left:  # which would have no room to negate it
        fewer = kernel.giving(tuple(n for n in kernel.given if n is not value))
        assert alive(kernel, weight) <= ROOM < alive(fewer, weight)
    monkeypatch.setattr(staging, "_lean", lambda kernel, parts, weight: parts)
    assert len(negated()) > len(left)  # or the above says nothing


def test_orders_with_tiles_first_are_orders(form: Form, found: Plan) -> None:
    for kernel in (k for k in found.backward if k.kind == "map"):
        nodes = computed(kernel)
        for order in tiles_first(nodes, operands, FULL, staging._outside(nodes)):
            assert sorted(order, key=lambda n: n.id) == sorted(nodes, key=lambda n: n.id)
            place = {n: i for i, n in enumerate(order)}
            assert all(place[a] < i for n, i in place.items() for a in operands(n) if a in place)


@pytest.mark.parametrize("limit", [1.0, 4.0, 8.5])
def test_as_many_values_find_room_as_have_it(form: Form, found: Plan, limit: float) -> None:
    for kernel in (k for k in found.backward if k.kind == "map"):
        order = ordered(kernel, FULL)
        for first in range(0, len(order), 1 + len(order) // 3):
            work = Work(order, (), operands, FULL, staging._outside(order))
            count = work.fitting(first, limit, [0.0] * len(order))
            assert count == 1 or peak_of_loads(order[first : first + count], FULL) <= limit
            assert count == len(order) - first or peak_of_loads(order[first : first + count + 1], FULL) > limit


def test_an_order_that_is_searched_longer_is_one_and_no_worse(form: Form, found: Plan) -> None:
    weight = weights(64)
    for kernel in (k for k in found.backward if k.kind == "map"):
        plain, searched = (ordered(replace(kernel, searched=way), weight) for way in (False, True))
        assert sorted(searched, key=lambda n: n.id) == sorted(plain, key=lambda n: n.id)
        place = {n: i for i, n in enumerate(searched)}
        assert all(place[a] < i for n, i in place.items() for a in n.args if a in place)
        assert peak_of_loads(searched, weight) <= peak_of_loads(plain, weight)


def test_gradients_share_a_kernel_in_an_order_that_was_searched() -> None:
    found = plan("chunk", forms("gated_delta_net", {})["chunk"])
    (kernel,) = (k for k in found.backward if k.outputs)
    assert sorted(name for name, _ in kernel.outputs) == ["beta", "k", "log_alpha", "q", "v"]
    assert kernel.searched
    assert cost(kernel, weights(64)) < cost(replace(kernel, searched=False), weights(64))


def test_what_wide_heads_would_spill_counts() -> None:
    found = plan("chunk", forms("retnet", {})["chunk"])
    parts = [k for k in found.backward if k.outputs]
    outputs = tuple(o for k in parts for o in k.outputs)
    whole = Kernel("_all_kernel", "map", parts[0].program, outputs=outputs, searched=True)
    weight = weights(64)
    assert len(parts) == 2
    assert cost(whole, weight) < sum(cost(k, weight) for k in parts)
    assert spilled_at_128([whole], weight) > spilled_at_128(parts, weight)


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_no_kernel_is_cut_that_costs_less_whole(tokens: int) -> None:
    weight = weights(tokens)
    cut = 0
    for _, form in FORMS.values():
        gradients = {k[2:]: v for k, v in form.backward.outputs.items() if k.startswith("d:")}
        whole = Kernel("_all_kernel", "map", form.backward, outputs=tuple(gradients.items()))
        _, parts = staged(whole, weight)
        assert sum(cost(part, weight) for part in parts) <= cost(whole, weight)
        assert sorted(name for part in parts for name, _ in part.outputs) == sorted(gradients)
        cut += len(parts) > 1
    assert cut


STATE = {("carry", "S"), ("cocarry", "S")}


@pytest.mark.parametrize(
    ("name", "consts", "expected"),
    [
        ("linear_attention", {}, STATE),
        ("mamba2", {}, STATE),  # the decay's gradient sums S * dS
        ("gsa", {}, {(role, memory) for role in ("carry", "cocarry") for memory in ("K", "V")}),  # past a softmax
        ("ttt_norm", {"b": 4}, set()),  # S is at right angles to dS
        ("trellis", {"b": 4}, set()),
        ("lattice_enc", {"b": 4, "project": 0}, set()),
        ("ttt_mlp", {"b": 4}, {(role, memory) for role in ("carry", "cocarry") for memory in ("W1", "W2")}),
    ],
)
def test_states_that_lose_nothing_are_rounded(name: str, consts: dict[str, float], expected: set[object]) -> None:
    found = plan("chunk", forms(name, consts)["chunk"]).rounded()
    assert {(n.role, n.name) for n in found} == expected


@pytest.mark.parametrize("name", ["mamba2", "gated_delta_net", "titans", "omega_linear", "dla", "gsa"])
def test_products_take_all_digits_of_states_that_are_loaded(name: str) -> None:
    """What a kernel walks with has them in long calls, too, which would take twice the products there."""
    for which, form in forms(name, {}).items():
        if which == "token":
            continue
        found = plan(which, form)
        rounded = found.rounded()
        in_halves, amid = found.in_halves(rounded), which == "resumed"
        for kernel in found.kernels():
            for product in in_halves[kernel.name]:
                (state,) = {original(a) for a in product.args[:2]} & kernel.states()
                assert amid or state in rounded
        assert any(in_halves.values())


def test_the_backward_pass_saves_nothing_again_that_it_took(form: Form, found: Plan) -> None:
    """What it saves has room of its own: of the same name, whoever took it before would have found nothing there."""

    def named(kernel: Kernel, values: tuple[Node, ...]) -> set[str]:
        return {saved_name(kernel.program.builder, n, kernel.exact) for n in values}

    before = {name for kernel in found.forward for name in named(kernel, kernel.saves)}
    taken: set[str] = set()
    for kernel in found.backward:
        taken |= named(kernel, kernel.given) & before
        assert not taken & named(kernel, kernel.saves)


@pytest.mark.parametrize("name", ["omega_net", "trellis"])
def test_gradients_of_gates_take_products_that_are_shared_as_they_are(name: str) -> None:
    """Of decays they are small differences of sums over tiles: in half precision little of some would be left."""
    found = plan("chunk", forms(name, {})["chunk"], 16)
    walks = walks_at(k.kind for k in found.backward)
    used = {n for k in found.backward[walks] for n in k.given}
    shared = {n for k in found.backward[: walks.start] for n in k.saves if is_product(n)} - used
    taken = set()
    for kernel in found.backward[walks.stop :]:
        sums = [n for n in kernel.saves if is_vector(n)]  # what gradients of gates follow from
        gates = [*sums, *(v for _, v in kernel.outputs if len(v.axes) < 2)]
        nodes = [n for n in reachable(gates, kernel.given) if n not in kernel.given]
        here = shared & taken_exactly(nodes, kernel.program, sums)
        assert here <= kernel.exact
        taken |= here
    assert taken


@pytest.mark.parametrize("name", ["gla", "gsa", "dplr", "rwkv7"])
def test_decays_per_channel_are_summed_up_ahead_of_the_scan_that_products_take_them_in(name: str) -> None:
    found = plan("chunk", forms(name, {})["chunk"])
    ahead = {n for kernel in found.forward if kernel.kind == "map" for n in kernel.saves if scaled(n)}
    taken = {n for kernel in found.kernels() if kernel.kind == "scan" for n in kernel.given}
    assert {len(n.axes) for n in ahead & taken} == {1, 2}  # tokens' keys or queries, and the decays of a whole unit
    ahead &= taken
    for kernel in found.kernels():
        if kernel.kind == "scan":
            loaded = {n.name for n in kernel.leaves() if n.role == "token"}
            assert not loaded & {"log_alpha"} or any(n.op == "cumsum" for n in kernel.nodes)
            tiles = {n for n in ahead if len(n.axes) == 2}
            assert all(is_matmul(n) for n in kernel.nodes if n not in kernel.given and tiles & {*n.args})
        else:  # gradients of decays take what has not been rounded
            assert not ahead & {*kernel.given} or kernel in found.forward


def test_a_rounded_state_is_loaded_for_sums_of_products_alone(form: Form, found: Plan) -> None:
    rounded = found.rounded()
    for kernel in found.kernels():
        users = [n for n in kernel.nodes if n not in kernel.given and n.op != "rename"]
        for state in kernel.states() & rounded:
            names = {n for n in kernel.nodes if original(n) is state}
            assert not names & set(kernel.roots)
            for n in (n for n in users if names & set(n.args)):
                roles = {original(a).role for a in n.args}
                assert is_matmul(n) or (n.op == "contract" and roles <= {"carry", "cocarry"})
                assert n not in kernel.wide


def test_y_is_read_later_where_products_are_wide_and_units_long() -> None:
    """What the backward pass alone takes is stored where one may follow: of a kernel for all units at once, too."""
    form = forms("lattice_dec", {"b": 4, "project": 0})["chunk"]
    assert plan("chunk", form, 16).forward[-1].kind == "scan"
    found = plan("chunk", form, 64)
    scan, read = found.forward
    assert (scan.kind, read.kind) == ("scan", "map")
    assert not scan.outputs
    assert {n.name for n in scan.across if n.op == "leaf"} == {"S"} <= {*scan.keeps}
    assert {*read.given} == {*scan.saves} == {n for n in scan.across if n.op != "leaf"}
    taken = {n for k in found.backward for n in k.given}
    assert read.saves
    assert taken.issuperset(read.saves)
    assert not read.across
    assert all(k.across == frozenset(k.saves) for k in found.backward if k.kind == "map")


def test_a_vector_is_saved_for_a_scan_that_would_multiply_for_it_alone() -> None:
    """What a backward scan takes of the inputs and the state's direction alone comes from the kernel before it."""
    backward = plan("chunk", forms("lattice_sim", {"b": 4, "project": 0})["chunk"]).backward
    free, scan = backward[:2]
    given = [n for n in scan.given if len(n.axes) == 1]
    assert set(given) <= set(free.saves)
    vectors = [n for n in given if n.op != "cumsum"]  # decays so far are saved, too, where there is such a kernel
    assert vectors
    for vector in vectors:
        assert any(is_product(n) for n in reachable([vector]))


def test_weights_of_tokens_are_found_before_a_scan_that_would_take_several_products_for_them() -> None:
    def before(name: str, consts: dict[str, float]) -> list[tuple[str, ...]]:
        kernels = plan("chunk", forms(name, consts)["chunk"]).forward
        return [n.axes for k in kernels if k.kind == "map" for n in k.saves if len(n.axes) > 1]

    assert before("titans_linear", {"b": 64.0}) == [("t", "s")]  # momentum's, and with them the scores
    assert before("mamba2", {}) == []  # one product, q k


def test_weights_and_sums_over_tokens_are_found_in_the_kernel_before_a_scan_where_there_is_one() -> None:
    def scan_takes(name: str) -> tuple[list[Node], list[Node]]:
        forward = plan("chunk", forms(name, {})["chunk"]).forward
        before = {n for k in forward if k.kind == "map" for n in k.saves}
        scan = next(k for k in forward if k.kind == "scan")
        weights = [n for n in scan.given if n.axes == ("t", "s") and n.op != "tri_inv"]
        assert set(scan.given) <= before
        return weights, [n for n in scan.nodes if n.op in ("cumsum", "exp2") and n not in scan.given]

    (scores,), left = scan_takes("gated_delta_net")  # q k, decayed
    assert scores.op == "mul"
    assert any(n.op == "cumsum" for n in reachable([scores]))
    assert left  # of vectors: those of tiles are in the scores
    assert all(n.op == "exp2" and len(n.axes) < 2 for n in left)
    (scores,), _ = scan_takes("delta_net")
    assert scores.op == "mask"
    assert not any(k.kind == "map" for k in plan("chunk", forms("mamba2", {})["chunk"]).forward)


def test_weights_of_tokens_alone_are_found_ahead_of_a_scan_whose_writes_are_free_of_it() -> None:
    """A window's: all that the scan would take is as large as an input, or a state, and stays there."""
    for kind, form in forms("swla", {}).items():
        if kind != "token":
            vectors, before, *_ = plan(kind, form).forward
            assert before.kind == vectors.kind == "map"
            assert {n.axes for n in before.saves} == {("t", "s"), (PAST, "t")}
            assert set(before.given) <= set(vectors.saves)
    for name in ("retnet", "mamba2", "linear_attention"):  # one product for weights
        assert [k.kind for k in plan("chunk", forms(name, {})["chunk"]).forward] == ["scan"]


def test_what_scans_find_of_gates_by_a_product_comes_before_those_of_deep_memories() -> None:
    for kind, form in forms("titans", {"b": 64}).items():
        if kind == "token":
            continue
        before, *_ = found = plan(kind, form).forward
        assert before.kind == "map"
        scans = [k for k in (*found, *plan(kind, form).backward) if k.kind == "scan"]
        vectors = {n for k in scans for n in k.given if is_vector(n)}
        assert vectors >= {*before.saves}
        for k in scans:
            assert not any(crosses_tokens(n) for n in k.nodes if n not in k.given)
    for kind, form in forms("dla", {"b": 64}).items():  # by sums alone
        assert kind == "token" or plan(kind, form).forward[0].kind == "scan"


def test_programs_share_out_what_all_states_have(form: Form, found: Plan) -> None:
    for k in found.kernels():
        if k.shared:
            assert (k.kind, k.blocked, k.inner) == ("scan", "", "")
            assert all(k.shared in end.axes for _, end in k.carried)
            assert any(r.sums for r in rounds(k.roots, k.given, k.shared))


def test_gates_come_to_scans_by_way_of_the_kernel_before_them(form: Form, found: Plan) -> None:
    def gates(kernels: Iterable[Kernel]) -> set[Node]:
        return {n for k in kernels for n in k.leaves() if n.role == "token" and n.axes == ("t",)}

    first, scans = found.forward[0], [k for k in found.kernels() if k.kind == "scan"]
    left = {n for n in first.saves if n.op == "leaf"}
    if first.kind == "map" and not form.forward.inner:
        assert not gates(scans)
        assert left == {n for k in scans for n in k.given if n.op == "leaf"}
        assert left <= gates([first])
    else:
        assert not left
    others = [k for k in found.kernels() if k.kind == "map"]
    assert not any(n.op == "leaf" for k in others for n in k.given)  # they wait for none, and load them as they are


def test_units_of_few_tokens_have_a_kernel_for_gates() -> None:
    form = forms("moneta", {})["chunk"]
    for tokens, kinds in ((16, ["map", "scan"]), (64, ["scan"])):
        assert [k.kind for k in plan("chunk", form, tokens).forward] == kinds
    first, scan = plan("chunk", form, 16).forward
    assert {n.name for n in first.saves} == {"eta", "log_alpha"}
    assert set(first.saves) <= set(scan.given)
    deep = forms("ttt_mlp", {})["chunk"]  # its scans walk over blocks: a unit takes long
    assert not any(n.op == "leaf" for k in plan("chunk", deep, 16).forward for n in k.saves)


@pytest.mark.parametrize(("name", "consts"), [("omega_linear", {"b": 4}), ("swla", {}), ("omega_net", {"b": 4})])
def test_vectors_that_wait_for_many_sums_over_tokens_have_kernels_by_themselves(
    name: str, consts: dict[str, float]
) -> None:
    """Beside tiles each such sum would cross warps, and wait for the one before it."""
    for kind, form in forms(name, consts).items():
        if kind == "token":
            continue
        found = plan(kind, form)
        first, *_, last = (*found.forward, *found.backward)
        assert all(map(is_vector, (*first.nodes, *last.nodes)))
        assert first.saves
        assert all(len(v.axes) < 2 for _, v in last.outputs)
        others = [k for k in found.kernels() if k not in (first, last)]
        computed = [n for k in others for n in k.nodes if n not in k.given]
        assert not any(n.op in ("shift", "cumsum") for n in computed)
        assert sum(crosses_tokens(n) for k in (first, last) for n in k.nodes if n not in k.given) >= 2 * LEAST
        sums = [n for n in last.given if n not in first.saves]
        assert all(is_vector(n) for n in sums)
        assert set(sums) <= {n for k in others for n in k.saves}
        gates = {k[2:] for k, v in form.backward.outputs.items() if k.startswith("d:") and len(v.axes) < 2}
        assert {k for k, _ in last.outputs} == gates


@pytest.mark.parametrize("name", ["mamba2", "gated_delta_net", "titans_linear", "trellis", "lattice_dec"])
def test_where_few_sums_are_waited_for_vectors_stay_with_tiles(name: str) -> None:
    consts = {"b": 64.0} if name in ("trellis", "titans_linear", "lattice_dec") else {}
    found = plan("chunk", forms(name, consts)["chunk"])
    assert not any(all(map(is_vector, k.nodes)) for k in found.kernels())


def test_weights_of_a_window_take_no_product() -> None:
    """Once all tokens have added it that do, a write only decays."""
    form = forms("omega_linear", {"b": 64})["chunk"]
    weights = [n for n in form.forward.nodes if n.op == "behind"]
    assert {n.attr[1] for n in weights} == {"s", PAST}
    products = [n for p in (form.forward, form.backward) for n in p.nodes if is_product(n)]
    assert not any(all(set(a.axes) <= set(TOKEN_AXES) for a in n.args) for n in products)


def test_a_product_that_is_wanted_transposed_is_found_so() -> None:
    found = plan("chunk", forms("titans_linear", {"b": 64})["chunk"])
    wanted = [n for k in found.kernels() for n in turned(k)]
    assert wanted
    for k in found.kernels():
        for n in turned(k):
            (user,) = k.users[n]
            assert user.op == "rename"
            assert set(user.axes[:1]) != {n.axes[0]}
    text, _ = read("titans_linear")
    source = run(text, "", {"b": 64}, Options(cache=Path()), after="emit").done["emit"]
    products = set(re.findall(r"(\w+) = _tile_dot", source))
    assert not [x for x in re.findall(r"tl\.trans\((\w+)\)", source) if x in products and x.startswith("dot")]
