"""Calls under torch.compile: one graph, whichever backend; kernels as one operation, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import ttmdsl
from ttmdsl.drawing import Shape, draw

# decays, groups of tokens in two passes, micro-tokens and a past, a deep memory, one that starts otherwise than from
# zeros, several gradient steps a token; in kernel form averages, and systems for groups of tokens
LAYERS: tuple[tuple[str, dict[str, float], int, bool], ...] = (
    ("gated_delta_net", {}, 70, True),
    ("trellis", {"b": 5}, 13, True),
    ("omega_linear", {}, 21, False),
    ("titans", {"b": 4}, 9, True),
    ("lattice_dec", {}, 7, False),
    ("delta_product", {}, 20, False),
    ("attention", {}, 9, False),
    ("dot", {"b": 3}, 9, False),
)


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


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer[0])
def test_kernels_in_one_graph(layer: tuple[Any, ...], interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(in_one_graph, *layer, "triton").result()


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS[1:3], ids=lambda layer: layer[0])
def test_the_torch_backend_in_one_graph(layer: tuple[Any, ...], interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(in_one_graph, *layer, "torch").result()


def a_step(name: str, consts: dict[str, float]) -> None:
    module = ttmdsl.load(name, **consts)
    x, start = drawn(module, 7, True)
    token = {k: t if k in module.PARAMS else t[:, 0] for k, t in x.items()}
    with torch.no_grad():
        _, state = module.op(**x, initial_state=start, output_final_state=True, backend="triton")
        step = torch.compile(module.step, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            y, end = module.step(**token, initial_state=state, backend="triton")
            y_whole, end_whole = step(**token, initial_state=state, backend="triton")
            assert difference({"y": y, **end}, {"y": y_whole, **end_whole}) < 1e-5
            state = end


@pytest.mark.slow
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
    about = " ".join(x), " ".join(state), [n for k in module._CARRIED for n in state[k].shape[2:]]
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    tensors = [t.detach().requires_grad_() for t in x.values()]
    torch.library.opcheck(module._graph_forward, (tensors, list(state.values()), *about, True), test_utils=tests)
    for final in (False, True):
        call = [t.detach() for t in tensors], list(state.values()), *about, final, False
        torch.library.opcheck(module._graph_alone, call, test_utils=tests)


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
    for name, failing in (("gated_delta_net", 0), ("gated_delta_net", 1), ("titans", 0), ("titans", 1)):
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


@pytest.mark.slow
def test_kernels_that_find_no_room(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(without_room).result()


def lengths() -> None:
    module = ttmdsl.load("trellis", b=5)
    graphs: list[Any] = []

    def call(x: Any) -> Any:
        return module.op(**x, output_final_state=True, backend="triton")

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    whole = torch.compile(call, fullgraph=True, dynamic=True, backend=seen)
    with torch.no_grad():
        for tokens in (7, 12, 23):
            x, _ = drawn(module, tokens, False)
            (y, end), (y_whole, end_whole) = call(x), whole(x)
            assert difference({"y": y, **end}, {"y": y_whole, **end_whole}) < 1e-5
    assert len(graphs) == 1
    torch._dynamo.reset()
    hidden, block = torch.randn(2, 9, 32), FirstOf(module.Layer(32, 2, backend="triton"))
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(block, (hidden,)).module()(hidden), block(hidden))


@pytest.mark.slow
def test_one_graph_for_all_lengths_without_gradients(interpreter: ProcessPoolExecutor) -> None:
    """And what torch.export makes of a layer."""
    interpreter.submit(lengths).result()


def between_two_graphs() -> None:
    module = ttmdsl.load("trellis", b=5)
    x, start = drawn(module, 10, True)
    _, state = module.op(**x, initial_state=start, output_final_state=True, backend="triton")
    packed = {k: t.detach()[:1] for k, t in x.items()} | {"cu_seqlens": torch.tensor([0, 3, 10])}
    piece = {k: t[:, :7] for k, t in x.items()} | {"initial_state": {k: t.detach() for k, t in state.items()}}

    def call(given: Any) -> Any:
        return module.op(**given, backend="triton")[0] * 2

    for given, gradients in ((packed, False), (piece, False), (piece, True)):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(torch.compile(call, backend="aot_eager")(given), call(given))
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
                torch.compile(call, backend="aot_eager", fullgraph=True)(given)
            torch._dynamo.reset()


@pytest.mark.slow
def test_what_the_host_looks_at_stands_between_two_graphs(interpreter: ProcessPoolExecutor) -> None:
    """Packed sequences, and several tokens from a state amid a group."""
    interpreter.submit(between_two_graphs).result()


class FirstOf(torch.nn.Module):
    """The first of what a module returns."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]  # type: ignore[no-any-return]


def a_block(name: str, kernel: str) -> None:
    torch.manual_seed(0)
    layer = ttmdsl.load(name).Layer(32, 2, backend="triton")
    block = torch.nn.Sequential(torch.nn.Linear(32, 32), FirstOf(layer), torch.nn.Linear(32, 32))
    x = torch.randn(2, 70, 32, requires_grad=True)
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
    past, bounds = torch.randn(2, 3, 12), torch.tensor([0, 4, 9])
    for given in (
        (x, weight, None, None, "silu", 6, torch.float32),
        (x, None, None, None, "sigmoid", 0, torch.bfloat16),
        (x, weight, past, None, "", 0, torch.float32),
        (x[:1].detach().requires_grad_(), weight, past, bounds, "silu", 4, torch.float32),
    ):
        torch.library.opcheck(module._graph_shaped, given, test_utils=tests)
    y, gate, norm = torch.randn(2, 9, 3, 4), torch.randn(2, 9, 12), torch.randn(4)
    given = *(t.requires_grad_() for t in (y, gate, norm)), 1e-5
    torch.library.opcheck(module._graph_gated, given, test_utils=tests)


def test_operations_around_a_call_are_what_they_say(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(around).result()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel"), [("gated_delta_net", "forward"), ("swa", "read")])
def test_a_block_of_a_model(name: str, kernel: str, interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(a_block, name, kernel).result()
