"""Sequences walked in parts, side by side: the factors that carry a state through a part, and kernels that use them."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_eval import Interpreter, draw_leaf
from test_lower import lowered, shipped

import ttmdsl
from ttmdsl.ir import reachable
from ttmdsl.transfer import Transfer, transfers

SIZES = {"t": 4, "d_k": 3, "d_v": 3, "m": 3}


def of(name: str) -> list[Transfer]:
    chunk = shipped(name).chunk
    return [] if chunk is None else transfers(chunk.forward)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mamba2", [("S", True)]),
        ("gla", [("S", True)]),
        ("hgrn2", [("S", True)]),
        ("swla", [("S", True)]),
        ("gsa", [("K", True), ("V", True)]),
        ("delta_net", [("S", False)]),
        ("gated_delta_net", [("S", False)]),
        ("rwkv7", [("S", False)]),
        ("dplr", [("S", False)]),
        ("titans_linear", []),  # momentum
        ("yaad", []),  # a frozen gradient that is not linear in the state
        ("trellis", []),
    ],
)
def test_which_states_are_carried_linearly(name: str, expected: list[tuple[str, bool]]) -> None:
    found = of(name)
    assert [(t.memory, t.elementwise) for t in found] == expected
    for t in found:
        # nothing that is written is left, and it does not mix along its free axis
        assert not any(t.free in n.axes for n in reachable([t.end]) if n.role == "token")
        assert {t.free, t.other} == set(t.end.axes)


@pytest.mark.parametrize("name", ["mamba2", "gla", "hgrn2", "gsa", "delta_net", "gated_delta_net", "rwkv7"])
def test_a_chunks_end_is_what_it_writes_and_what_it_keeps(name: str) -> None:
    """end(S) = end(0) + L(S), with L from the factor, which is what becomes of the identity or of ones."""
    chunk = shipped(name).chunk
    assert chunk is not None
    program = chunk.forward
    generator = torch.Generator().manual_seed(1)
    leaves = {leaf: draw_leaf(leaf, SIZES, generator) for leaf in program.leaves()}
    for t in transfers(program):
        (carry,) = (leaf for leaf in leaves if leaf.role == "carry" and leaf.name == t.memory)

        def end(node: Any, state: torch.Tensor, carry: Any = carry) -> torch.Tensor:
            return Interpreter(leaves | {carry: state}, SIZES)(node)

        whole, S = program.outputs[f"carry:{t.memory}"], leaves[carry]
        kept = end(whole, S) - end(whole, torch.zeros_like(S))
        torch.testing.assert_close(end(t.end, S), kept)
        if t.elementwise:
            product = end(t.end, torch.ones_like(S)) * S
        else:
            factor = end(t.end, torch.eye(3, dtype=S.dtype))
            product = S @ factor if carry.axes[0] == t.free else factor @ S
        torch.testing.assert_close(product, kept)


def test_what_also_says_what_is_kept_is_no_write() -> None:
    text = """layer L { dim d_k, d_v input q[d_k], k[d_k], v[d_v] gate a: decay
      memory S[d_v, d_k] bias -<S @ k, v> retention sigmoid(<v, v>) * a * S read S @ q }"""
    chunk = lowered(text).chunk
    assert chunk is not None
    (found,) = transfers(chunk.forward)
    assert found.free == "d_k"  # v is needed for what is kept: k is what may be left out


def test_a_factor_is_of_its_own_size() -> None:
    """What depends on the size of the free dim would be wrong for the identity, which has another."""
    mean = """layer L { dim d_k, d_v input q[d_k], k[d_k], v[d_v] gate b: unit
      memory S[d_v, d_k] bias 1/2 * mean((S @ k - v)^2) optimizer gd(rate = b) read S @ q }"""
    chunk = lowered(mean).chunk
    assert chunk is not None
    assert transfers(chunk.forward) == []


TURNED = """layer Turned { dim d_k, d_v input q[d_k], k[d_k], v[d_v] gate a: decay, b: unit
  memory S[d_k, d_v] bias 1/2 * |S^T @ k - v|^2 retention a * S optimizer gd(rate = b) read S^T @ q }"""


STEPS = """layer Steps { dim d_k, d_v input q[d_k], k[n, d_k], v[n, d_v] gate a: decay, b[n]: unit const n = 3
  memory S[d_v, d_k] bias 1/2 * |S @ k - v|^2 retention a * S optimizer gd(rate = b, steps = n) read S @ q }"""


def parted(
    name: str, lengths: tuple[int, ...], state: bool, dims: tuple[int, int] = (6, 10)
) -> tuple[list[int], dict[str, float]]:
    """Parts of each sequence, and the error of y, final states and every gradient; in the interpreter's process."""
    torch.set_num_threads(1)
    module = ttmdsl.compile(name) if " " in name else ttmdsl.load(name)
    with pytest.MonkeyPatch.context() as patch:  # a device that wants many parts
        patch.setattr(module, "_processors", lambda device: 10**6)
        patch.setattr(module, "_LEAST_UNITS", 1)
        patch.setattr(module, "_FEWEST_PARTS", 3)
        patch.setattr(module, "_MOST_PARTS", 4)
        module._schedule.cache_clear()
        found = _parted(module, lengths, state, dims)
        module._schedule.cache_clear()
    return found


def _parted(
    module: Any, lengths: tuple[int, ...], state: bool, dims: tuple[int, int]
) -> tuple[list[int], dict[str, float]]:
    from ttmdsl.drawing import Shape, draw

    shape = Shape("", tokens=lengths[0], heads=2, dims=dims, lengths=lengths if len(lengths) > 1 else (), state=state)
    drawn = draw(module, shape)
    packed = {"cu_seqlens": torch.tensor(drawn.bounds)} if drawn.bounds else {}
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        x = {k: t.to(dtype).requires_grad_() for k, t in drawn.x.items()}
        numbers = {k: t for k, t in (drawn.state or {}).items() if not t.is_floating_point()}
        start = {k: t.to(dtype).requires_grad_() for k, t in (drawn.state or {}).items() if k not in numbers}
        given = start | numbers or None
        y, final = module.op(**x, initial_state=given, output_final_state=True, backend=backend, **packed)
        final = {k: t for k, t in final.items() if t.is_floating_point()}
        generator = torch.Generator().manual_seed(2)
        loss = torch.zeros((), dtype=torch.float64)
        for t in (y, *(final[k] for k in sorted(final))):
            loss = loss + (t.double() * torch.randn(t.shape, generator=generator, dtype=torch.float64)).sum()
        grads = torch.autograd.grad(loss, [*x.values(), *start.values()])
        names = ["y", *sorted(final), *(f"d_{k}" for k in (*x, *start))]
        results.append(dict(zip(names, (y, *(final[k] for k in sorted(final)), *grads), strict=True)))
    exact, found = results
    errors = {k: float((found[k] - t).square().mean().sqrt() / t.square().mean().sqrt()) for k, t in exact.items()}
    bounds = drawn.bounds or (0, lengths[0])
    sizes = tuple(module._sizes(drawn.x, final).items())
    device = torch.device("cpu")
    schedule = module._schedule("chunk", tuple(bounds), (0,) * (len(bounds) - 1), 2, sizes, torch.float32, device)
    first, last = (torch.arange(schedule.N)[index].tolist() for index in (schedule.first, schedule.last))
    return [b + 1 - a for a, b in zip(first, last, strict=True)], errors


@pytest.mark.parametrize(
    ("name", "lengths", "state", "dims"),
    [
        ("gated_delta_net", (64 * 5 + 9,), True, (6, 10)),
        ("gated_delta_net", (64 * 4, 64 * 3 + 1, 0, 70), True, (6, 10)),
        ("gated_delta_net", (64 * 4 + 1,), True, (70, 40)),  # matrices in several blocks
        (TURNED, (64 * 4, 64 * 3 + 1), True, (70, 40)),
        (STEPS, (64 * 3 + 7, 64 * 4), True, (6, 10)),  # parts that begin amid a token's steps
        ("mamba2", (64 * 4,), False, (6, 10)),
        ("gla", (64 * 4 + 3, 64 * 3), True, (6, 10)),
        ("gsa", (64 * 3 + 1,), True, (6, 10)),
        ("rwkv7", (64 * 3 + 5,), True, (6, 10)),
        ("swla", (64 * 3 + 5,), True, (6, 10)),
        ("swla", (64 * 3, 64 * 4 + 2, 1), False, (6, 10)),
    ],
)
def test_parts_are_the_whole(
    name: str, lengths: tuple[int, ...], state: bool, dims: tuple[int, int], interpreter: ProcessPoolExecutor
) -> None:
    parts, errors = interpreter.submit(parted, name, lengths, state, dims).result()
    assert max(parts) >= 3
    assert {k: e for k, e in errors.items() if not e < 1e-5} == {}


LINEAR = "abc delta_net delta_product dplr gated_delta_net gla gsa hgrn2 linear_attention mamba2 rwkv7 swla".split()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*LINEAR, TURNED]),
    st.tuples(st.integers(192, 330), st.integers(0, 330)),
    st.booleans(),
    st.sampled_from([(6, 10), (20, 18), (70, 40), (17, 33)]),
)
def test_parts_of_any_lengths_are_the_whole(
    interpreter: ProcessPoolExecutor, name: str, lengths: tuple[int, ...], state: bool, dims: tuple[int, int]
) -> None:
    parts, errors = interpreter.submit(parted, name, lengths, state, dims).result()
    assert max(parts) >= 3
    assert {k: e for k, e in errors.items() if not e < 1e-5} == {}
