"""What rounding does to a program: what enlarges it, and the chains of products along which it adds up."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import cast

import pytest
from test_differentiate import forms

from ttmdsl.builder import Builder
from ttmdsl.ir import Node, Program, is_product, nearest, reachable, tied
from ttmdsl.plan import plan
from ttmdsl.rounding import CHAIN, FEW, UNBOUNDED, adding_up, bent, enlarged, steep, taken_exactly, unbounded


@pytest.fixture
def b() -> Builder:
    return Builder(("i", "j", "k"))


def test_what_enlarges_rounding(b: Builder) -> None:
    x, k = b.leaf("token", "x", ("t", "i")), b.leaf("token", "k", ("t", "i"))
    weights = b.leaf("token", "w", ("t", "s"))
    twice = b.mul(x, k)

    def of(node: Node) -> set[Node]:
        return enlarged(reachable([node])) & {x, k, weights, twice}

    assert of(b.map("exp2", twice)) == {twice, x, k}  # an exponent
    assert of(b.cumsum(b.sum(twice, {"i"}), "t")) >= {x, k}  # sums up to every token, by way of one over a dim
    assert not of(b.map("tanh", twice))
    later = b.rename(x, "t", "s")
    assert not of(b.cumsum(b.contract(weights, later, {"s"}), "t"))  # which rounds them anyway
    square = b.contract(weights, b.rename(b.rename(weights, "s", "u"), "t", "s"), {"s"})
    assert of(b.map("exp2", square)) == {weights}  # weights of tokens it does not


def test_what_functions_take_of_products(b: Builder) -> None:
    x, w = b.leaf("token", "x", ("t", "i")), b.leaf("param", "w", ("i", "j"))
    product = b.contract(x, w, {"i"})
    other = b.contract(b.map("tanh", b.mul(product, b.const(2.0))), b.rename(w, "i", "k"), {"j"})
    found = bent(reachable([other]))
    assert product in found  # scaled or not
    assert other not in found
    assert not bent(reachable([b.map("exp2", product)]))


@pytest.mark.parametrize("inner", ["j", ""])
def test_sums_along_the_inside_of_a_memory_average_rounding_out(b: Builder, inner: str) -> None:
    x, v = b.leaf("token", "x", ("t", "i")), b.leaf("token", "v", ("t", "i"))
    hidden, read = (b.contract(n, b.leaf("param", f"{n.name}_in", ("i", "j")), {"i"}) for n in (x, v))
    gate = b.cumsum(b.sum(b.mul(b.map("tanh", hidden), read), {"j"}), "t")
    program = Program("chunk", ("i", "j"), b, {"gate": gate}, inner)
    found = taken_exactly(program.nodes, program) & {hidden, read}
    assert found == ({hidden} if inner else {hidden, read})  # what a function bends, and what a sum takes


@pytest.mark.parametrize(("name", "consts"), [("titans", {"b": 64}), ("omega_net", {"b": 64}), ("trellis", {"b": 64})])
def test_pieces_amid_a_group_pass_what_is_bent_exactly(name: str, consts: dict[str, int]) -> None:
    made = forms(name, consts)
    whole = plan("chunk", made["chunk"])
    for found, exactly in ((whole, False), (plan("resumed", made["resumed"], choice=whole.choice), True)):
        saves = {n for k in found.forward if k.kind == "scan" for n in k.saves}
        hidden = bent(made[found.name].forward.nodes).intersection(saves)
        assert hidden
        assert all((hidden <= k.exact) is exactly for k in found.kernels())


def chain(b: Builder, x: Node, lengths: int) -> list[Node]:
    """Products of tiles, each of the one before it and a function of it in between."""
    found = [x]
    for i in range(lengths):
        of, to = ("i", "j") if i % 2 == 0 else ("j", "i")
        found.append(b.map("tanh", b.contract(found[-1], b.leaf("param", f"w{i}", (of, to)), {of})))
    return [n.args[0] for n in found[1:]]


@pytest.mark.parametrize("length", [CHAIN - 1, CHAIN, CHAIN + 1, CHAIN + 3])
def test_all_but_the_last_products_of_long_chains(b: Builder, length: int) -> None:
    x = b.leaf("token", "x", ("t", "i"))
    products = chain(b, x, length)
    short = chain(b, b.leaf("token", "z", ("t", "i")), CHAIN)
    found = adding_up(program(b, {"y": products[-1], "z": short[-1]}), program(b, {"d:x": products[0]}))
    assert found == (frozenset(products[:-FEW]) if length > CHAIN else frozenset())
    assert not adding_up(Program("chunk", ("i", "j"), b, {"y": products[-1]}, "j"), program(b, {}))


@pytest.mark.parametrize("other", ["k", "a"])
def test_tokens_of_two_inputs_enlarge_rounding(b: Builder, other: str) -> None:
    k, read = b.leaf("token", "k", ("t", "i")), b.leaf("token", other, ("t", "i"))
    inverse = b.tri_inv(b.mask(b.contract(read, b.rename(k, "t", "s"), {"i"}), "strict"))
    links = chain(b, b.contract(inverse, b.rename(k, "t", "s"), {"s"}), UNBOUNDED + FEW)
    found = adding_up(program(b, {"y": links[-1]}), program(b, {}))
    assert unbounded(program(b, {"y": links[-1]})) == (other == "a")
    assert bool(found) == (other == "a")  # chains as short as this add up then


def test_chains_go_on_in_the_next_unit(b: Builder) -> None:
    products = chain(b, b.leaf("carry", "S", ("t", "i")), 6)
    assert CHAIN < 12
    forward = program(b, {"carry:S": b.map("tanh", products[-1])})
    assert adding_up(forward, program(b, {})) == frozenset(products)
    back = chain(b, b.leaf("cocarry", "S", ("t", "i")), 6)
    assert adding_up(program(b, {}), program(b, {"carry:S": b.map("tanh", back[-1])})) == frozenset(back)


def test_a_product_of_inputs_rounds_nothing(b: Builder) -> None:
    q, k = (b.leaf("token", name, (axis, "i")) for name, axis in (("q", "t"), ("k", "s")))
    scores = b.contract(q, k, {"i"})
    products = chain(b, b.contract(b.map("tanh", scores), k, {"s"}), CHAIN - 1)
    assert not adding_up(program(b, {"y": products[-1]}), program(b, {}))
    more = chain(b, products[-1], 2)
    found = adding_up(program(b, {"y": more[-1]}), program(b, {}))
    assert found
    assert scores not in found


def program(b: Builder, outputs: dict[str, Node]) -> Program:
    return Program("chunk", ("i", "j"), b, outputs)


@pytest.mark.parametrize(
    ("name", "consts", "expected"),
    [("lattice_enc", {"b": 4, "project": 0}, True), ("ttt_norm", {"b": 4}, False), ("gated_delta_net", {}, False)],
)
def test_products_are_wide_where_a_state_is_divided_by_its_length(
    name: str, consts: dict[str, float], expected: bool
) -> None:
    form = forms(name, consts)["chunk"]
    found = plan("chunk", form)
    assert steep(form.forward) == expected
    for kernel in found.kernels():
        chain = reachable((v for _, v in kernel.carried), set(kernel.given))
        careful = expected and kernel.kind == "scan" and not kernel.reverse
        products = {n for n in chain if is_product(n)} if careful else set()
        assert kernel.wide >= products
        assert bool(kernel.wide) == bool(products)
        assert not careful or kernel.exact.issuperset((*kernel.saves, *kernel.given))


@pytest.mark.parametrize("name", ["dplr", "gated_delta_net"])
def test_what_the_chain_adds_to_passes_exactly_where_tokens_enlarge_rounding(name: str) -> None:
    found = plan("chunk", forms(name, {})["chunk"])
    free = next(k for k in found.backward if k.kind == "map")
    assert free.exact.issuperset(free.saves) == (name == "dplr")


@pytest.mark.parametrize("tokens", [16, 64])
def test_products_are_wide_where_their_rounding_adds_up(tokens: int) -> None:
    form = forms("trellis", {"b": tokens})["chunk"]
    found = plan("chunk", form, tokens)
    long = adding_up(found.forward[0].program, found.backward[-1].program)
    assert len(long) > 5
    chained, handed = tied(found.backward[-1].program, "cocarry"), found.backward[-1].program.ends().values()
    added = {n for end in handed for n in nearest(end, is_product, lambda n: n.op == "leaf")}
    assert len(added - chained) == 2 == len(added & chained)  # of two memories each
    assert added - chained <= long
    for kernel in found.kernels():
        assert kernel.wide == long.intersection(kernel.nodes)
    assert all(k.wide for k in found.forward if k.kind == "scan")
    assert not any(k.wide for k in plan("chunk", forms("ttt_linear", {"b": 4})["chunk"]).kernels())


def test_what_several_kernels_find_passes_in_one_way() -> None:
    """A tile that rounds in one kernel and not in another leaves the difference in sums of what both find."""
    found = plan("chunk", forms("trellis", {"b": 64})["chunk"])
    saves = [(k, n) for k in found.kernels() for n in k.saves if len(n.axes) > 1]
    twice = {n for _, n in saves if sum(n is m for _, m in saves) > 1}
    assert twice
    for n in twice:
        takers = {a for k in found.kernels() for a in k.nodes if n in k.given and n in a.args}
        assert any(not is_product(a) for a in takers)
        assert all(n in k.exact for k in found.kernels() if n in (*k.saves, *k.given))


def lost_at_unit_keys() -> dict[str, float]:
    """What y and gradients lose in half precision at keys of unit length, by way of a long chain; in the other process.

    But gradients of decays, differences of sums over all later tokens.
    """
    import torch

    from ttmdsl.bench.subjects import Case, tensors
    from ttmdsl.interpreted import rounded
    from ttmdsl.parity import relative_error

    case = Case("trellis:b=64", (1, 192, 2, 64), device="cpu")
    module = case.load()
    torch.manual_seed(0)
    given = {k: t.detach() for k, t in tensors(module, case).items()}
    weight = torch.randn(given["v"].shape).bfloat16()
    found = []
    for backend, dtype in (("torch", torch.float64), ("triton", None)):
        x = {k: t.to(dtype or t.dtype, copy=True).requires_grad_() for k, t in given.items()}
        with rounded():
            y, _ = module.op(**x, backend=backend)
            y.backward(weight.to(y.dtype))
        found.append({"y": y.detach(), **{k: cast(torch.Tensor, t.grad) for k, t in x.items() if k != "log_beta"}})
    exact, got = found
    return {k: relative_error(got[k].double(), exact[k].double()) for k in exact}


def test_a_long_chain_keeps_what_half_precision_has(interpreter: ProcessPoolExecutor) -> None:
    assert max(interpreter.submit(lost_at_unit_keys).result().values()) < 5e-3
