"""States that grow with every token: rows are written behind others, and many are shared out among programs."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from types import ModuleType

import pytest
import torch
from torch import Tensor

import ttmdsl
from ttmdsl import drawing
from ttmdsl.aot import parse_variant
from ttmdsl.drawing import Shape

Tensors = dict[str, Tensor]
ADDITIVE = ["attention", "swa:c=5", "deep_transformer", "swdt"]


def load(variant: str) -> ModuleType:
    name, consts = parse_variant(variant)
    return ttmdsl.load(name, **consts)


def draw(module: ModuleType, length: int, batch: int = 2, heads: int = 2, seed: int = 0) -> Tensors:
    shape = Shape("", batch=batch, tokens=length, heads=heads, dims=(6, 4), state=False)
    return drawing.draw(module, shape, dtype=torch.float32, seed=seed).x


def token(x: Tensors, t: int) -> Tensors:
    return {key: value[:, t] for key, value in x.items()}


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def memory(state: Tensors) -> list[int]:
    return [state[key].untyped_storage().data_ptr() for key in ("S_keys", "S_values")]


@pytest.mark.parametrize("name", ADDITIVE)
def test_a_token_is_written_behind_the_others(name: str) -> None:
    module = load(name)
    x = draw(module, 60)
    whole, final = module.op(**x, output_final_state=True)
    state, ys, places = None, [], []
    with torch.no_grad():
        for t in range(60):
            y, state = module.step(**token(x, t), initial_state=state)
            ys.append(y)
            places.append(memory(state))
    torch.testing.assert_close(torch.stack(ys, 1), whole, rtol=1e-5, atol=1e-6)
    same(state, final)
    assert len({tuple(place) for place in places[5:]}) == 1  # no copy since the second token


@pytest.mark.parametrize("name", ADDITIVE)
def test_two_sequences_go_on_from_one_state(name: str) -> None:
    module = load(name)
    x, other = draw(module, 12), draw(module, 12, seed=1)
    with torch.no_grad():
        _, state = module.op(**x, output_final_state=True)
        for t in range(4):
            _, state = module.step(**token(x, t), initial_state=state)
        before = {key: value.clone() for key, value in state.items()}
        firsts, seconds = state, state
        for t in range(4, 12):
            y, firsts = module.step(**token(x, t), initial_state=firsts)
            z, seconds = module.step(**token(other, t), initial_state=seconds)
        assert all(torch.equal(state[key], before[key]) for key in state)
        for found, last, drawn in ((firsts, y, x), (seconds, z, other)):
            rest = {key: value[:, 4:] for key, value in drawn.items()}
            expected, final = module.op(**rest, initial_state=before, output_final_state=True)
            same(found, final)
            torch.testing.assert_close(last, expected[:, -1], rtol=1e-5, atol=1e-6)


def test_gradients_go_through_a_state_that_steps_have_left() -> None:
    """What follows a state leaves the rows alone that a backward pass of it will read."""
    module = load("attention")
    x = draw(module, 12)
    with torch.no_grad():
        _, state = module.op(**x, output_final_state=True)
        _, state = module.step(**token(x, 0), initial_state=state)
    leaves = {key: value.clone().requires_grad_() for key, value in token(x, 1).items()}
    y, _ = module.step(**leaves, initial_state=state)
    with torch.no_grad():
        module.step(**token(x, 2), initial_state=state)
    y.square().sum().backward()
    copied = {key: value.clone() for key, value in state.items()}
    again = {key: value.detach().clone().requires_grad_() for key, value in leaves.items()}
    module.step(**again, initial_state=copied)[0].square().sum().backward()
    for key, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, again[key].grad, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_state_of_another_mode(mode: type[torch.no_grad]) -> None:
    module = load("attention")
    x = draw(module, 6)
    state = None
    for t in range(6):
        with (torch.inference_mode if t % 2 else mode)():
            y, state = module.step(**token(x, t), initial_state=state)
    torch.testing.assert_close(y.clone(), module.op(**x)[0][:, -1], rtol=1e-5, atol=1e-6)


def test_a_state_that_was_reordered() -> None:
    """As beams are: what was indexed lies elsewhere."""
    module = load("attention")
    x = draw(module, 9)
    with torch.no_grad():
        _, state = module.op(**{key: value[:, :8] for key, value in x.items()}, output_final_state=True)
        _, state = module.step(**token(x, 8), initial_state=state)
        turned = {key: value[[1, 0]] for key, value in state.items()}
        y, final = module.step(**{key: value.flip(0) for key, value in token(x, 3).items()}, initial_state=turned)
        expected, ends = module.step(**token(x, 3), initial_state=state)
    assert torch.equal(y.flip(0), expected)
    same({key: value.flip(0) for key, value in final.items()}, ends)


# ---- many rows for few programs -------------------------------------------------------------------------------------


def of_parts(name: str, tokens: int) -> tuple[list[float], list[int]]:
    """Relative errors of outputs and gradients when rows are shared out, and among how many programs they were."""
    torch.set_num_threads(1)
    module = load(name)
    x = draw(module, tokens, batch=1, heads=1)
    with torch.no_grad():
        _, state = module.op(**draw(module, 2200, batch=1, heads=1, seed=1), output_final_state=True, backend="torch")
    found, parts, combine = [], [], module._of_parts
    module._of_parts = lambda count, *rest: parts.append(count) or combine(count, *rest)
    for processors in (0, 132):
        module._processors = lambda device, count=processors: count
        leaves = {key: value.clone().requires_grad_() for key, value in x.items()}
        y, _ = module.op(**leaves, initial_state=state, backend="triton")
        y.square().sum().backward()
        with torch.no_grad():  # rows as the state has them
            z, _ = module.op(**x, initial_state=state, output_final_state=True, backend="triton")
        found.append([y.detach(), z, *(leaf.grad for leaf in leaves.values())])
    return [float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True)], parts


@pytest.mark.parametrize(("name", "tokens"), [("attention", 1), ("deep_transformer", 1), ("swa:c=2100", 20)])
def test_rows_are_shared_out(interpreter: ProcessPoolExecutor, name: str, tokens: int) -> None:
    errors, parts = interpreter.submit(of_parts, name, tokens).result()
    assert max(errors) < 1e-5
    assert parts == [2, 2]
