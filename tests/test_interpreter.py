"""Every shipped layer's Triton kernels, and drawn ones, against the reference: in Triton's interpreter, on a CPU.

They run in the process of the fixture `interpreter`.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
from test_zoo import group
from tiers import beyond, mostly_beyond, thorough

import ttmdsl
from ttmdsl.drawing import Shape, draw

SHAPES: tuple[dict[str, Any], ...] = (
    {"label": "T=21, cut at 6", "tokens": 21, "heads": 2, "dims": (12, 20, 9), "cuts": (6,)},
    {"label": "packed 5+0+1", "dims": (5, 3), "lengths": (5, 0, 1)},
    {"label": "T=9, dims 60 and 24", "tokens": 9, "dims": (60, 24), "state": False},
    {"label": "T=3, y alone", "tokens": 3, "state": False, "final": False},
)


# as wide as heads are: errors of narrow ones differ from draw to draw; more than a chunk of tokens, or, where the
# sequential form is all there is, than two of the segments that its backward pass walks over, or than a group where it
# runs in stages, each token of which takes half a second here
HALF: tuple[dict[str, Any], ...] = ({"label": "T=67", "tokens": 67, "dims": (64,)},)
HALF_STAGED: tuple[dict[str, Any], ...] = ({"label": "T=21", "tokens": 21, "dims": (64,)},)
HALF_BY_TOKEN: tuple[dict[str, Any], ...] = ({"label": "T=37", "tokens": 37, "dims": (64,)},)

GROUPED = [layer for layer in ttmdsl.layers() if group(layer) > 1]

# of a layer so many tokens alone with gradients, at a draw
FEW = [("retnet", 2, 0), ("gated_delta_net", 9, 0), ("delta_product", 2, 0), ("omega_net", 2, 2)]


def misses(
    layer: str, consts: dict[str, float], dtype: str, shapes: tuple[dict[str, Any], ...], seed: int = 0
) -> list[str]:
    """What a layer misses; in the other process."""
    import torch

    from ttmdsl.drawing import Shape
    from ttmdsl.parity import parity

    torch.set_num_threads(1)
    how: dict[str, Any] = {
        "dtypes": (getattr(torch, dtype),),
        "shapes": [Shape(**shape) for shape in shapes],
        "seed": seed,
    }
    rows = parity(ttmdsl.load(layer, **consts), **how, backends=("triton",))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


@pytest.mark.parametrize("layer", beyond(ttmdsl.layers(), "atlas", "atlas_pp"))
def test_kernels_are_the_reference(layer: str, interpreter: ProcessPoolExecutor) -> None:
    # a group of 5 tokens: several of them in a sequence, and one cut in two
    consts = {"b": 5} if layer in GROUPED else {}
    assert interpreter.submit(misses, layer, consts, "float32", SHAPES).result() == []


UNITS = ["lattice_dec", "omega_net", "titans", "trellis", "ttt_norm", "yaad"]


@pytest.mark.parametrize("layer", mostly_beyond(UNITS, "lattice_dec", "ttt_norm", "yaad"))
def test_units_of_no_tokens(layer: str, interpreter: ProcessPoolExecutor) -> None:
    # three units of up to 16 tokens a group: the sequence begins in the second, and nothing is in the third
    shapes = ({"label": "T=30, cut at 20", "tokens": 30, "dims": (12, 20, 9), "cuts": (20,)},)
    assert interpreter.submit(misses, layer, {"b": 40}, "float32", shapes).result() == []


@pytest.mark.parametrize("layer", mostly_beyond(["lattice_dec", "lattice_enc", "lattice_sim"], "lattice_enc"))
def test_y_read_of_the_states_after_the_scan(layer: str, interpreter: ProcessPoolExecutor) -> None:
    """Where products on which a carry depends have twice the digits, for units of 64 tokens: three of them, the second
    one cut; and with no state that is given or asked for."""
    shapes: tuple[dict[str, Any], ...] = (
        {"label": "T=150, cut at 70", "tokens": 150, "dims": (12, 20), "cuts": (70,)},
        {"label": "T=67, y alone", "tokens": 67, "dims": (60,), "state": False, "final": False},
    )
    assert interpreter.submit(misses, layer, {"b": 64, "project": 0}, "float32", shapes).result() == []


SLOW = "atlas atlas_linear atlas_pp deep_transformer dot longhorn mesa omega_net polynomial_attention swdt".split()


@pytest.mark.parametrize("layer", beyond(ttmdsl.layers(), *SLOW))
def test_bfloat16_as_a_gpu_computes_it(layer: str, interpreter: ProcessPoolExecutor) -> None:
    forms = getattr(ttmdsl.load(layer), "_FORMS", ("chunk",))  # one over feature maps has none
    shapes = HALF if "chunk" in forms else HALF_STAGED if layer in GROUPED else HALF_BY_TOKEN
    assert interpreter.submit(misses, layer, {}, "bfloat16", shapes).result() == []


@pytest.mark.parametrize(("layer", "seed"), [("gated_delta_net", 3), ("delta_product", 3), ("dla", 1)])
def test_small_heads_in_bfloat16(layer: str, seed: int, interpreter: ProcessPoolExecutor) -> None:
    """Draws of which half precision loses more: gradients of decays, that up to 7e-3 of them is rounding in."""
    shapes: tuple[dict[str, Any], ...] = ({"label": "T=33", "tokens": 33, "heads": 2, "dims": (8,)},)
    assert interpreter.submit(misses, layer, {}, "bfloat16", shapes, seed).result() == []


def test_pieces_amid_a_group_in_bfloat16(interpreter: ProcessPoolExecutor) -> None:
    """A draw of which states' cotangents in half precision cost the gradient of decays 6e-3."""
    shapes: tuple[dict[str, Any], ...] = ({"label": "T=130", "tokens": 130, "heads": 1, "dims": (60,)},)
    assert interpreter.submit(misses, "dla", {}, "bfloat16", shapes, 22).result() == []


@thorough
def test_cotangents_at_right_angles_to_their_states_in_bfloat16(interpreter: ProcessPoolExecutor) -> None:
    """A draw of which sums over tokens in half precision cost the gradient of decays 8e-3."""
    shapes: tuple[dict[str, Any], ...] = ({"label": "T=256", "tokens": 256, "heads": 2, "dims": (60,)},)
    assert interpreter.submit(misses, "trellis", {}, "bfloat16", shapes).result() == []


@pytest.mark.parametrize(("layer", "tokens", "seed"), FEW)
def test_few_tokens_in_bfloat16(layer: str, tokens: int, seed: int, interpreter: ProcessPoolExecutor) -> None:
    """Draws of which units lose more: of gradients of gates, that 6e-3 to 3e-2 of them are rounding in."""
    shapes = ({"label": f"T={tokens}", "tokens": tokens, "heads": 2, "dims": (60,)},)
    assert interpreter.submit(misses, layer, {}, "bfloat16", shapes, seed).result() == []


@pytest.mark.parametrize(
    ("shape", "dtype", "alone"),
    [
        ({"tokens": 16}, "bfloat16", True),
        ({"tokens": 17}, "bfloat16", False),
        ({"tokens": 2}, "float32", False),
        ({"tokens": 1}, "float32", True),
        ({"tokens": 2, "batch": 512, "heads": 4}, "float16", False),  # states before tokens would take half a GB
        ({"tokens": 1, "batch": 512, "heads": 4}, "float16", True),
    ],
)
def test_few_tokens_go_one_by_one(
    shape: dict[str, int], dtype: str, alone: bool, interpreter: ProcessPoolExecutor
) -> None:
    assert interpreter.submit(one_by_one, shape, dtype).result() is alone


def one_by_one(shape: dict[str, int], dtype: str) -> bool:
    """Whether tokens with gradients take the sequential form; in the other process."""
    import torch

    module: Any = ttmdsl.load("gated_delta_net")
    batch, heads = shape.get("batch", 1), shape.get("heads", 2)
    state = {"S": torch.empty(batch, heads, 64, 64, device="meta")}
    return bool(module._one_by_one(shape["tokens"], getattr(torch, dtype), state))


def end_alone(layer: str) -> list[float]:
    """Errors of the inputs' gradients where the loss is of the final state alone, from a state that needs no gradient;
    in the other process."""
    import torch

    from ttmdsl.parity import relative_error

    module = ttmdsl.load(layer)
    drawn = draw(module, Shape("", tokens=21, heads=2, dims=(12, 20)))
    state = {key: t for key, t in drawn.state.items() if key in module.MEMORY}
    found = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        x = {key: t.to(dtype).requires_grad_() for key, t in drawn.x.items()}
        _, final = module.op(**x, initial_state=state, output_final_state=True, backend=backend)
        loss = sum(t.sin().sum() for key, t in final.items() if key in module.MEMORY)
        grads = torch.autograd.grad(loss, [*x.values()], allow_unused=True, materialize_grads=True)
        found.append([t.double() for t in grads])
    return [relative_error(got, expected) for expected, got in zip(*found, strict=True)]


@pytest.mark.parametrize("layer", ["gated_delta_net", "ttt_linear", "lattice_enc", "longhorn"])
def test_the_final_state_alone_has_gradients(layer: str, interpreter: ProcessPoolExecutor) -> None:
    assert max(interpreter.submit(end_alone, layer).result()) < 1e-5


def walked_twice(layer: str) -> list[float]:
    """By how much gradients change when a graph that was kept is walked once more."""
    import torch

    module = ttmdsl.load(layer)
    x = {k: t.float().requires_grad_() for k, t in draw(module, Shape("", tokens=70, dims=(16,))).x.items()}
    y, _ = module.op(**x, backend="triton")
    first = torch.autograd.grad(y.sin().sum(), [*x.values()], retain_graph=True)
    second = torch.autograd.grad(y.sin().sum(), [*x.values()])
    return [(a - b).abs().max().item() for a, b in zip(first, second, strict=True)]


def test_a_graph_that_is_kept_is_walked_again(interpreter: ProcessPoolExecutor) -> None:
    assert max(interpreter.submit(walked_twice, "gated_delta_net").result()) == 0


def by_itself(name: str) -> list[tuple[str, float]]:
    """Errors in bfloat16 of y, the final state and gradients, and of a step, in an interpreter that nobody mended."""
    import torch

    module = ttmdsl.load(name)
    drawn = draw(module, Shape("state", tokens=33, heads=2, dims=(24, 20), state=True))

    def found(backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x = {k: t.to(torch.bfloat16).to(dtype).requires_grad_() for k, t in drawn.x.items()}
        y, final = module.op(**x, initial_state=drawn.state, output_final_state=True, backend=backend)
        assert y.dtype == dtype
        d = torch.autograd.grad(y.double().sin().sum(), [*x.values()], allow_unused=True)
        last = {k: t if k in module.PARAMS else t[:, 0] for k, t in x.items()}
        after, _ = module.step(**{k: t.detach() for k, t in last.items()}, initial_state=final, backend=backend)
        return {"y": y, "step": after, **final, **{k: g for k, g in zip(x, d, strict=True) if g is not None}}

    narrow, wide = found("triton", torch.bfloat16), found("reference", torch.float64)
    return [(k, float((narrow[k].double() - t).norm() / t.norm())) for k, t in wide.items() if t.is_floating_point()]


@pytest.mark.parametrize("name", ["gated_delta_net", "swdt"])
def test_the_interpreter_by_itself_is_right_in_bfloat16(interpreter: ProcessPoolExecutor, name: str) -> None:
    """Triton's takes bits for integers: kernels take float32 there."""
    errors = interpreter.submit(by_itself, name).result()
    assert len(errors) > 5
    assert max(error for _, error in errors) < 5e-3, errors


def product() -> tuple[float, float, bool]:
    """The error of a product of bfloat16 tiles, and of numbers that become bfloat16; in the other process."""
    import torch
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    from ttmdsl.interpreted import rounded

    @triton.jit
    def kernel(a_ptr, b_ptr, y_ptr, z_ptr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        y = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
        tl.store(y_ptr + at, y)
        tl.store(z_ptr + at, y.to(tl.bfloat16).to(tl.float32))

    before = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16).bfloat16()
    y, z = torch.zeros(2, 16, 16)
    with rounded():
        kernel[(1,)](a, b, y, z)
    expected = a.double() @ b.double()
    restored = before == (InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc)
    return float((y - expected).abs().max()), float((z - y.bfloat16().float()).abs().max()), restored


def test_the_interpreters_bfloat16_is_mended(interpreter: ProcessPoolExecutor) -> None:
    error, rounding, restored = interpreter.submit(product).result()
    assert error < 1e-5
    assert rounding == 0
    assert restored


def replaced() -> tuple[int, int, bool]:
    """How often Triton's operations are replaced for a kernel, and for one that calls a function twice; and whether
    they are back in their places. In the other process."""
    import torch
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    @triton.jit
    def twice(x):  # type: ignore[no-untyped-def]
        return x + x

    globals()["twice"] = twice  # where an interpreted kernel looks for names

    @triton.jit
    def plain(y_ptr):  # type: ignore[no-untyped-def]
        tl.store(y_ptr, tl.load(y_ptr) * 4)

    @triton.jit
    def calling(y_ptr):  # type: ignore[no-untyped-def]
        tl.store(y_ptr, twice(twice(tl.load(y_ptr))))

    counts = []
    for kernel in (plain, calling):
        y = torch.ones(1)
        with mock.patch.object(interpreter, "_patch_builtin", side_effect=interpreter._patch_builtin) as replace:
            kernel[(1,)](y)
        assert y.item() == 4
        counts.append(replace.call_count)
    return counts[0], counts[1], tl.core.is_builtin(tl.load)


def test_what_a_kernel_calls_replaces_nothing_anew(interpreter: ProcessPoolExecutor) -> None:
    plain, calling, restored = interpreter.submit(replaced).result()
    assert 0 < calling == plain
    assert restored


def of_tile(layer: str, name: str, x: Any, number: int, precision: str) -> Any:
    """What a helper of a layer's module makes of one tile [32, 32]."""
    import torch
    import triton
    import triton.language as tl

    globals()["tile"] = getattr(ttmdsl.load(layer), name)  # where an interpreted kernel looks for names

    @triton.jit
    def kernel(x_ptr, y_ptr, NUMBER: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(y_ptr + at, tile(tl.load(x_ptr + at), NUMBER, PRECISION))  # noqa: F821

    y = torch.zeros(32, 32)
    kernel[(1,)](x, y, number, precision)
    return y


def transposed(name: str) -> list[float]:
    """By how much a product of tiles differs where its dims come first: of 64 tokens by more dims, and by as many; in
    the other process."""
    import torch
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    trans = InterpreterBuilder.create_trans
    globals()["dot"] = getattr(ttmdsl.load("lattice_dec", b=64, project=0), name)

    @triton.jit
    def kernel(a_ptr, b_ptr, y_ptr, N: tl.constexpr, DIMS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
        rows, columns, over = tl.arange(0, 64)[:, None], tl.arange(0, N)[None, :], tl.arange(0, 32)
        a = tl.load(a_ptr + rows * 32 + over[None, :])
        b = tl.load(b_ptr + over[:, None] * N + columns)
        tl.store(y_ptr + rows * N + columns, dot(a, b, tl.bfloat16, "tf32", DIMS_FIRST))  # noqa: F821

    found, turned = [], []
    for n in (128, 64):
        a, b, y = torch.randn(64, 32), torch.randn(32, n), torch.zeros(2, 64, n)
        for i in range(2):
            with mock.patch.object(InterpreterBuilder, "create_trans", autospec=True, side_effect=trans) as turns:
                kernel[(1,)](a, b, y[i], n, bool(i))
            turned.append(turns.called)
        found.append(float((y[0] - y[1]).norm() / y[0].norm()))
    assert turned == [False, True, False, False]
    return found


@pytest.mark.parametrize("name", ["_tile_dot", "_wide_dot"])
def test_products_whose_dims_come_first_are_the_same(name: str, interpreter: ProcessPoolExecutor) -> None:
    wide, narrow = interpreter.submit(transposed, name).result()
    assert wide < 1e-6
    assert narrow == 0


def newton_schulz() -> tuple[float, float]:
    """What a matrix of almost one direction loses in Newton-Schulz, in tf32 and in full; in the other process."""
    import torch

    from ttmdsl.interpreted import rounded
    from ttmdsl.lower_optimizer import NEWTON_SCHULZ
    from ttmdsl.parity import relative_error

    torch.manual_seed(0)
    x = torch.outer(torch.randn(32), torch.randn(32)) + 1e-3 * torch.randn(32, 32)
    x /= x.norm()
    exact, (first, third, fifth) = x.double(), NEWTON_SCHULZ
    for _ in range(5):
        gram = exact @ exact.mT
        exact = first * exact + (third * gram + fifth * gram @ gram) @ exact
    with rounded():
        found = [of_tile("atlas_linear", "_tile_newton_schulz", x, 5, precision) for precision in ("tf32", "ieee")]
    fast, full = (relative_error(y.double(), exact) for y in found)
    return fast, full


def error_of(function: str, middle: float, width: float) -> float:
    """The relative error of a function of numbers around one; in the other process."""
    import torch

    from ttmdsl.parity import relative_error

    memory = "input q[d], k[d], v[d]\n memory S[d, d]\n bias -<S @ k, v>"
    module: Any = ttmdsl.loader.compile(f"layer Bare {{ dim d\n {memory}\n read {function}(S @ q) }}")
    numbers = middle + width * torch.linspace(-1, 1, 16)
    q, nothing = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)
    state = {"S": torch.diag(numbers).reshape(1, 1, 16, 16)}
    y, _ = module.op(q=q, k=nothing, v=nothing, initial_state=state, backend="triton")
    exact = {"tanh": torch.tanh, "softplus": lambda x: x.clamp(min=0) + (-x.abs()).exp().log1p()}[function]
    return relative_error(y.flatten().double(), exact(numbers.double()))


@pytest.mark.parametrize(
    ("function", "most", "places"),
    [
        ("tanh", 3e-7, [(0, 1e-30), (0, 1e-6), (0, 1e-2), (0, 0.25), (0, 0.3), (0, 1), (0, 9)]),
        ("softplus", 2e-6, [(0, 1e-6), (-0.5, 0.5), (-3, 1), (-9, 1), (-30, 1), (-70, 1), (2, 2), (60, 40)]),
    ],
)
def test_functions_keep_their_digits(
    function: str, most: float, places: list[tuple[float, float]], interpreter: ProcessPoolExecutor
) -> None:
    errors = {place: interpreter.submit(error_of, function, *place).result() for place in places}
    assert {place: error for place, error in errors.items() if error > most} == {}


def test_newton_schulz_does_not_enlarge_rounding(interpreter: ProcessPoolExecutor) -> None:
    fast, full = interpreter.submit(newton_schulz).result()
    assert fast < 1e-4  # with plain tf32 1e-3
    assert full < 1e-4


def inverse() -> tuple[list[float], bool]:
    """What (I - n)^-1 loses where float16 holds it, and where it does not; in the other process."""
    import torch

    from ttmdsl.parity import relative_error

    torch.manual_seed(0)
    errors = []
    for size in (0.3, 3.0):
        n = size * torch.randn(32, 32).tril(-1)
        exact = torch.linalg.inv(torch.eye(32, dtype=torch.float64) - n.double())
        y = of_tile("gated_delta_net", "_tile_inverse", n, 32, "tf32")
        errors.append(relative_error(y.double(), exact))
    return errors, bool(exact.abs().max() > 1e5)


def test_an_inverse_that_leaves_the_range_of_float16(interpreter: ProcessPoolExecutor) -> None:
    errors, large = interpreter.submit(inverse).result()
    assert large
    assert errors[0] < 5e-3
    assert errors[1] < 1e-5  # by substitution, in float32
