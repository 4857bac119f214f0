"""Calls under torch.compile: one graph, whichever backend; kernels as one operation, in Triton's interpreter."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from tiers import beyond, thorough

import ttmdsl
from ttmdsl.drawing import Shape, draw

# decays, groups of tokens in two passes, micro-tokens and a past, a deep memory, one that starts otherwise than from
# zeros, several gradient steps a token; in kernel form averages, and systems for groups of tokens
# constants, how many tokens, and whether they go on from a state
LAYERS: dict[str, tuple[dict[str, float], int, bool]] = {
    "gated_delta_net": ({}, 70, True),
    "trellis": ({"b": 5}, 13, True),
    "omega_linear": ({}, 21, False),
    "titans": ({"b": 4}, 9, True),
    "lattice_dec": ({}, 7, False),
    "delta_product": ({}, 20, False),
    "attention": ({}, 9, False),
    "dot": ({"b": 3}, 9, False),
}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, over the largest number of its tensor."""
    assert one.keys() == other.keys()
    found = [((one[k] - other[k]).abs().max() / one[k].abs().max().clamp(min=1e-6)).item() for k in one]
    return max(found)


def drawn(module: Any, tokens: int, state: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    given = draw(module, Shape("", batch=2, tokens=tokens, heads=2, dims=(6, 4), state=state))
    x = {k: t.float().requires_grad_() for k, t in given.x.items()}
    start = {k: t.float().requires_grad_() for k, t in (given.state or {}).items() if k in module.MEMORY}
    return x, start or None


def both(call: Callable[..., Any], x: dict[str, Any], start: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """What a call gives, and gradients of all that it takes."""
    y, end = call(x, start)
    found = {"y": y, **(end or {})}
    leaves = {**x, **(start or {})}
    loss = sum((t * torch.arange(t.numel()).view(t.shape).sin()).sum() for t in found.values() if t.is_floating_point())
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return found | {f"d_{k}": torch.zeros_like(t) if d is None else d for (k, t), d in pairs}


def in_one_graph(name: str, consts: dict[str, float], tokens: int, state: bool, backend: str) -> None:
    torch.set_num_threads(1)
    module = ttmdsl.load(name, **consts)

    def call(x: Any, start: Any) -> Any:
        return module.op(**x, initial_state=start, output_final_state=True, backend=backend)

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, start = drawn(module, tokens, state)
    assert difference(both(call, x, start), both(whole, x, start)) < 1e-5
    with torch.no_grad():
        y, end = call(x, start)
        y_whole, end_whole = whole(x, start)
        assert difference({"y": y, **end}, {"y": y_whole, **end_whole}) < 1e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("name", beyond(LAYERS, "trellis", "titans"))
def test_kernels_in_one_graph(name: str, interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(in_one_graph, name, *LAYERS[name], "triton").result()


@pytest.mark.parametrize("name", ["gated_delta_net", *beyond(["trellis", "omega_linear"], "trellis", "omega_linear")])
def test_the_torch_backend_in_one_graph(name: str, interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(in_one_graph, name, *LAYERS[name], "torch").result()


def a_step(name: str, consts: dict[str, float]) -> None:
    module = ttmdsl.load(name, **consts)
    x, start = drawn(module, 7, True)
    token = {k: t if k in module.PARAMS else t[:, 0] for k, t in x.items()}
    with torch.no_grad():
        _, state = module.op(**x, initial_state=start, output_final_state=True, backend="triton")
        for looks in (module._LOOKS, None):  # whether or not torch can mark what looks at the device: a step does not
            step = torch.compile(module.step, fullgraph=True, backend="aot_eager")
            with mock.patch.object(module, "_LOOKS", looks):
                for _ in range(3):
                    y, end = module.step(**token, initial_state=state, backend="triton")
                    y_whole, end_whole = step(**token, initial_state=state, backend="triton")
                    assert difference({"y": y, **end}, {"y": y_whole, **end_whole}) < 1e-5
                    state = end
            torch._dynamo.reset()


@pytest.mark.parametrize(("name", "consts"), [("trellis", {"b": 5}), ("omega_linear", {})])
def test_a_step_in_one_graph(name: str, consts: dict[str, float], interpreter: ProcessPoolExecutor) -> None:
    """From the state amid a group of tokens, and with a past."""
    interpreter.submit(a_step, name, consts).result()


def operations() -> None:
    module = ttmdsl.load("trellis", b=5)
    x, start = drawn(module, 13, True)
    state = {k: t.detach() for k, t in (start or {}).items()} | {"position": torch.zeros(2, dtype=torch.int64)}
    for k in module._CARRIED:
        state.setdefault(k, state.get(k.removesuffix("_point"), torch.zeros(0)).clone())
    about = None, " ".join(x), " ".join(state), [n for k in module._CARRIED for n in state[k].shape[2:]]
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    tensors = [t.detach().requires_grad_() for t in x.values()]
    for looks in (False, True):
        call = tensors, list(state.values()), *about, looks, True
        torch.library.opcheck(module._graph_forward[looks], call, test_utils=tests)
        for final in (False, True):
            call = [t.detach() for t in tensors], list(state.values()), *about, looks, final
            torch.library.opcheck(module._graph_alone[looks], call, test_utils=tests)


def dealt() -> None:
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"
    module = ttmdsl.load("omega_linear")
    for earlier in (False, True):
        torch.library.opcheck(
            module._graph_dealt, (torch.randn(2, 7, 3, 4, requires_grad=True), earlier), test_utils=tests
        )


def test_dealing_is_what_it_says(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(dealt).result()


def test_operations_are_what_they_say(interpreter: ProcessPoolExecutor) -> None:
    """That nothing is changed in place, and that shapes are those that are foretold."""
    interpreter.submit(operations).result()


def readouts() -> None:
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"
    # as tensors of tokens before heads are seen heads before tokens
    q, k, u = (torch.randn(2, 7, 3, n).transpose(1, 2).requires_grad_() for n in (4, 4, 5))
    for module, averaged in ((ttmdsl.load("attention"), True), (ttmdsl.load("dot", b=3), False)):
        seen = module._Sight(0, 1, 1, False)
        given = q, None, k, None, None, u, None, 0.5, 0, module._numbers(seen), averaged
        torch.library.opcheck(module._graph_read, given, test_utils=tests)
    slope, offset = torch.rand(2, 3, 7, requires_grad=True), torch.tensor([0, 2])
    before = module._Sight(0, 1, 1, True, batch=3, offset=offset)
    given = k, None, None, slope, u, offset, 0.5, 0, module._numbers(before)
    torch.library.opcheck(module._graph_solve, given, test_utils=tests)


def test_readouts_are_what_they_say(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(readouts).result()


def without_room() -> None:
    """Where a device has too little shared memory for kernels of chunks: another form, or backend, stands in."""
    import triton

    full = triton.runtime.errors.OutOfResources(1, 0, "shared memory")
    for name, failing in itertools.product(("gated_delta_net", "titans", "omega_linear"), (0, 1)):
        module = ttmdsl.load(name)
        x, start = drawn(module, 20, True)

        def call(x: Any, start: Any, module: Any = module) -> Any:
            return module.op(**x, initial_state=start, output_final_state=True, backend="triton")

        expected = both(call, x, start)

        def fails(s: Any, *given: Any, walk: Any = module._LAUNCH["chunk"][failing], module: Any = module) -> Any:
            if isinstance(s, module._Unstarted):
                return walk(s, *given)
            raise full

        launches = [mock.Mock(side_effect=fails) if i == failing else w for i, w in enumerate(module._LAUNCH["chunk"])]
        with mock.patch.dict(module._LAUNCH, {"chunk": tuple(launches)}):
            whole = torch.compile(call, fullgraph=True, backend="aot_eager")
            module._too_large.clear()
            for _ in range(2):
                assert difference(expected, both(whole, x, start)) < 1e-4
            assert launches[failing].called
        module._too_large.clear()
        torch._dynamo.reset()


@thorough
def test_kernels_that_find_no_room(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(without_room).result()


def lengths() -> None:
    module = ttmdsl.load("titans_linear", b=4)
    graphs: list[Any] = []

    def call(x: Any, bounds: Any) -> Any:
        return module.op(**x, cu_seqlens=bounds, output_final_state=True, backend="triton")

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, _)

    whole = torch.compile(call, fullgraph=True, dynamic=True, backend=seen)
    for gradients, packed in ((False, False), (True, False), (True, True)):
        graphs.clear()
        # not as many as there are heads, which torch would take for the same number
        for batch, cuts in ((3, [0, 7, 31]), (4, [0, 3, 9, 27]), (5, [0, 2, 20, 30, 44])):
            x, _ = drawn(module, cuts[-1], False)
            x = {k: t if k in module.PARAMS else torch.cat([t] * 3)[: 1 if packed else batch] for k, t in x.items()}
            x = {k: t.detach().requires_grad_(gradients) for k, t in x.items()}
            bounds = torch.tensor(cuts) if packed else None
            found = [functools.partial(lambda c, bounds, x, _: c(x, bounds), c, bounds) for c in (call, whole)]
            if gradients:
                one, other = (both(c, x, None) for c in found)
            else:
                one, other = ({"y": y, **end} for y, end in (c(x, None) for c in found))
            assert difference(one, other) < 1e-5
        assert len(graphs) == 1
        torch._dynamo.reset()
    hidden, block = torch.randn(2, 9, 32), FirstOf(module.Layer(32, 2, backend="triton"))
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(block, (hidden,)).module()(hidden), block(hidden))


@thorough
def test_one_graph_for_all_lengths(interpreter: ProcessPoolExecutor) -> None:
    """And numbers of sequences; and what torch.export makes of a layer."""
    interpreter.submit(lengths).result()


def looked_at(name: str, consts: dict[str, float], tokens: int) -> None:
    """Packed sequences, an empty one among them; and several tokens from a state amid a group."""
    torch.set_num_threads(1)
    module = ttmdsl.load(name, **consts)
    x, start = drawn(module, tokens, True)
    with torch.no_grad():
        _, state = module.op(**x, initial_state=start, output_final_state=True, backend="triton")
    counts = {k: state.pop(k) for k in [*state] if k not in module.MEMORY}
    bounds = torch.tensor([0, 3, 3, tokens])
    part = {k: (t if k in module.PARAMS else t[:1]).detach().requires_grad_() for k, t in x.items()}
    packed = {k: torch.cat([t.detach(), t[:1].detach()]).requires_grad_() for k, t in (start or {}).items()}
    cases: list[Any] = [(part, packed, {}, bounds)]
    if "position" in counts:
        cases.append((x, {k: t.requires_grad_() for k, t in state.items()}, counts, None))
    for tensors, carry, known, cu_seqlens in cases:

        def call(x: Any, start: Any, known: Any = known, cu_seqlens: Any = cu_seqlens) -> Any:
            given = {"initial_state": start | known, "cu_seqlens": cu_seqlens}
            return module.op(**x, **given, output_final_state=True, backend="triton")

        whole = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert difference(both(call, tensors, carry), both(whole, tensors, carry)) < 1e-5
        with torch.no_grad():
            (y, end), (y_whole, end_whole) = call(tensors, carry), whole(tensors, carry)
            assert difference({"y": y, **end}, {"y": y_whole, **end_whole}) < 1e-5
        torch._dynamo.reset()


@pytest.mark.parametrize("name", beyond([*LAYERS][:4], "trellis", "titans"))
def test_what_the_host_looks_at_in_one_graph(name: str, interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(looked_at, name, *LAYERS[name][:2]).result()


def bad_bounds() -> None:
    module = ttmdsl.load("gated_delta_net")
    x, _ = drawn(module, 9, False)
    packed = {k: t[:1].detach() for k, t in x.items()}
    whole = torch.compile(lambda x, bounds: module.op(**x, cu_seqlens=bounds, backend="triton"), backend="eager")
    for bounds, message in (([0, 5, 4, 9], "non-decreasing values, got 5 then 4"), ([0, 5], "end at T = 9, got 5")):
        with pytest.raises(ValueError, match=f"cu_seqlens: expected.*{message}"):
            whole(packed, torch.tensor(bounds))
    torch._dynamo.reset()


def test_bad_bounds_are_told_by_the_graph(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(bad_bounds).result()


def between_two_graphs() -> None:
    packed = {"cu_seqlens": torch.tensor([0, 3, 10])}
    for name, consts in (("swa", {}), ("trellis", {"b": 5})):
        module = ttmdsl.load(name, **consts)
        x = {k: t.detach()[:1] for k, t in drawn(module, 10, False)[0].items()} | packed
        without = mock.patch.object(module, "_LOOKS", None, create=True)

        def call(given: Any, module: Any = module) -> Any:
            return module.op(**given, backend="triton")[0] * 2

        with torch.no_grad(), without:
            torch.testing.assert_close(torch.compile(call, backend="aot_eager")(x), call(x))
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
                torch.compile(call, backend="aot_eager", fullgraph=True)(x)
            torch._dynamo.reset()


def test_what_stands_between_two_graphs(interpreter: ProcessPoolExecutor) -> None:
    """Packed sequences of a layer in kernel form; and of others where torch cannot mark what looks at the device."""
    interpreter.submit(between_two_graphs).result()


class FirstOf(torch.nn.Module):
    """The first of what a module returns."""

    def __init__(self, module: torch.nn.Module, cu_seqlens: torch.Tensor | None = None) -> None:
        super().__init__()
        self.module, self.cu_seqlens = module, cu_seqlens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x, cu_seqlens=self.cu_seqlens)[0]  # type: ignore[no-any-return]


def a_block(name: str, kernel: str, bounds: list[int] | None) -> None:
    torch.manual_seed(0)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    layer = ttmdsl.load(name).Layer(32, 2, backend="triton")
    block = torch.nn.Sequential(torch.nn.Linear(32, 32), FirstOf(layer, cu_seqlens), torch.nn.Linear(32, 32))
    x = torch.randn(2 if bounds is None else 1, 70, 32, requires_grad=True)
    found, operations = [], []

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, _)

    for call in (block, torch.compile(block, backend=seen, fullgraph=True)):
        y = call(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    # the same kernels as without it, around `op`, too
    for part in ("shaped", "gated", kernel):
        assert any(f"ttmdsl.{name}_{part}_" in operation for operation in operations)
    torch._dynamo.reset()


def around() -> None:
    module = ttmdsl.load("gated_delta_net")
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"
    x, weight = torch.randn(2, 9, 12, requires_grad=True), torch.randn(4, 12, requires_grad=True)
    past, packed = torch.randn(2, 3, 12), list(module._packed(torch.tensor([0, 4, 9]), 9))
    for given in (
        (x, weight, None, [], "silu", 6, torch.float32),
        (x, None, None, [], "sigmoid", 0, torch.bfloat16),
        (x, weight, past, [], "", 0, torch.float32),
        (x[:1].detach().requires_grad_(), weight, past, packed, "silu", 4, torch.float32),
    ):
        torch.library.opcheck(module._graph_shaped, given, test_utils=tests)
    y, gate, norm = torch.randn(2, 9, 3, 4), torch.randn(2, 9, 12), torch.randn(4)
    given = *(t.requires_grad_() for t in (y, gate, norm)), 1e-5
    torch.library.opcheck(module._graph_gated, given, test_utils=tests)


def test_operations_around_a_call_are_what_they_say(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(around).result()


@pytest.mark.parametrize(
    ("name", "kernel", "bounds"),
    [
        ("gated_delta_net", "forward", None),
        ("gated_delta_net", "looking_forward", [0, 9, 9, 40, 70]),
        ("swa", "read", None),
    ],
)
def test_a_block_of_a_model(name: str, kernel: str, bounds: list[int] | None, interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(a_block, name, kernel, bounds).result()
