"""Memories over an infinite-dimensional feature map: the declared loss, by hand, on dense matrices of kernel values."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiers import beyond
from torch import Tensor

import ttmdsl
from ttmdsl.aot import parse_variant
from ttmdsl.drawing import Shape
from ttmdsl.errors import DeriveError
from ttmdsl.kernel_form import lower_kernel
from ttmdsl.options import Options
from ttmdsl.parity import Row, parity
from ttmdsl.pipeline import run

Tensors = dict[str, Tensor]
LAYERS = ["attention", "swa:c=5", "deep_transformer", "swdt", "swdt:c=1", "dot", "dot:c=3", "dot:b=4", "dot:b=4:c=7"]


def load(variant: str) -> ModuleType:
    name, consts = parse_variant(variant)
    return ttmdsl.load(name, **consts)


def draw(module: ModuleType, batch: int, length: int, heads: int = 2, dims: tuple[int, int] = (6, 4)) -> Tensors:
    torch.manual_seed(length)
    size = {"d_k": dims[0], "d_v": dims[1], **{name: int(value) for name, value in module.CONSTS.items()}}
    x = {
        key: torch.randn(batch, length, heads, *(size[a] for a in axes), dtype=torch.float64) / 2
        for key, axes in (module.INPUTS | module.GATES).items()
    }
    return {key: -t.abs() if module.RANGES[key] == "decay" else t for key, t in x.items()}


# ---- by hand ------------------------------------------------------------------------------------------------------


def softmax_attention(x: Tensors, window: int) -> Tensor:
    score = torch.einsum("bthd,bshd->bhts", x["q"], x["k"]) / math.sqrt(x["q"].shape[-1])
    ago = torch.arange(score.shape[-1])[:, None] - torch.arange(score.shape[-1])
    weight = torch.softmax(score.masked_fill((ago < 0) | (ago >= window), -math.inf), -1)
    return torch.einsum("bhts,bshd->bthd", weight, x["v"])


def deep_transformer(x: Tensors, scale: float) -> Tensor:
    kernel = torch.exp(scale * torch.einsum("bthd,bshd->bhts", x["q"], x["k"])).tril()
    left = x["log_alpha"].cumsum(1).transpose(1, 2)
    decay = torch.exp((left[..., :, None] - left[..., None, :]).tril())
    return torch.einsum("bhts,bsh,bshd->bthd", kernel * decay, x["eta"], x["v"])


def coefficients(x: Tensors, scale: float, window: int, batch: int, learns: bool) -> Tensor:
    """Atlas eqs 27-29 for one token after the other: C <- alpha C, then C_i -= eta gamma_i (sum_j K_ji C'_j - v_i)."""
    kernel = torch.exp(scale * torch.einsum("bihd,bjhd->bhij", x["k"], x["k"]))
    c = torch.zeros_like(x["v"]).transpose(1, 2)  # [B, H, T, d_v]
    point, ys = c, []
    for t in range(x["q"].shape[1]):
        if t % batch == 0:
            point = c
        c = x["log_alpha"][:, t].exp()[..., None, None] * c
        for i in range(max(0, t - window + 1), t + 1):
            rate = x["gamma"][:, t, :, window - 1 - (t - i)] * (x["eta"][:, t] if "eta" in x else 1)
            e = -x["v"][:, i]
            if learns:
                e = e + torch.einsum("bhj,bhjd->bhd", kernel[:, :, i], point)
            row = torch.nn.functional.one_hot(torch.tensor(i), c.shape[2]).to(c)
            c = c - row[:, None] * (rate[..., None] * e)[:, :, None]
        read = torch.exp(scale * torch.einsum("bhd,bjhd->bhj", x["q"][:, t], x["k"]))
        ys.append(torch.einsum("bhj,bhjd->bhd", read, c))
    return torch.stack(ys, 1)


def by_hand(module: ModuleType, x: Tensors) -> Tensor:
    consts = module.CONSTS
    name = module.SPEC.split("layer ")[1].split()[0]
    oracles: dict[str, Callable[[], Tensor]] = {
        "Attention": lambda: softmax_attention(x, x["q"].shape[1]),
        "Swa": lambda: softmax_attention(x, int(consts["c"])),
        "DeepTransformer": lambda: deep_transformer(x, consts["scale"]),
        "Swdt": lambda: coefficients(x, consts["scale"], int(consts["c"]), 1, False),
        "Dot": lambda: coefficients(x, consts["scale"], int(consts["c"]), int(consts["b"]), True),
    }
    return oracles[name]()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_outputs_and_gradients_are_those_of_the_dense_formulas(name: str, backend: str) -> None:
    module = load(name)
    x = {key: t.requires_grad_() for key, t in draw(module, 2, 13).items()}
    expected = by_hand(module, x)
    y, _ = module.op(**x, backend=backend)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(y)
    found = torch.autograd.grad((y * weight).sum(), list(x.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(x.values()))
    for key, g, w in zip(x, found, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"grad {key}: {m}")


def test_attention_is_torchs() -> None:
    x = draw(load("attention"), 2, 100, dims=(8, 8))
    y, _ = load("attention").op(**x)
    q, k, v = (x[key].transpose(1, 2) for key in ("q", "k", "v"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(y.transpose(1, 2), expected, rtol=1e-10, atol=1e-10)


def test_it_is_gradient_descent_on_an_explicit_feature_map() -> None:
    """<phi(x), phi(y)> = sum_i <x, y>^i / i!: with enough powers a matrix memory by autodiff finds the same outputs."""
    module = load("dot:c=3:b=4")
    x = draw(module, 1, 9, heads=1, dims=(2, 3))
    x |= {"q": x["q"] / 2, "k": x["k"] / 2}

    def features(u: Tensor) -> Tensor:
        powers = [torch.ones(1, dtype=u.dtype)]
        for i in range(1, 12):
            powers.append(torch.outer(powers[-1], u).flatten() / math.sqrt(i))
        return torch.cat(powers)

    q, k, v = (x[key][0, :, 0] for key in ("q", "k", "v"))
    alpha, eta, gamma = x["log_alpha"].exp()[0, :, 0], x["eta"][0, :, 0], x["gamma"][0, :, 0]
    m = torch.zeros(3, len(features(k[0])), dtype=torch.float64)
    point, ys = m, []
    for t in range(9):
        point = m if t % 4 == 0 else point
        at = point.detach().requires_grad_()
        window = [(i, gamma[t, 2 - t + i]) for i in range(max(0, t - 2), t + 1)]
        bias = sum(w * 0.5 * (at @ features(k[i]) - v[i]).square().sum() for i, w in window)
        (g,) = torch.autograd.grad(bias, at)
        m = alpha[t] * m - eta[t] * g
        ys.append(m @ features(q[t]))
    torch.testing.assert_close(module.op(**x)[0][0, :, 0], torch.stack(ys), rtol=1e-7, atol=1e-7)


# ---- every backend ------------------------------------------------------------------------------------------------

INVENTED = {
    "retained": """
  gate beta: unit, alpha: decay
  feature phi = exp(<., .> / sqrt(d_k))
  memory S[d_v, phi]
  bias 1/2 * beta * |S @ phi(k) - v|^2
  retention alpha * S
  optimizer gd(rate = beta, at = retained)
  read S @ phi(q)""",
    "last, and a readout in an expression": """
  param alpha: decay, tau: positive
  feature phi = exp(<., .> / d_k)
  let u = tau * k
  memory S[d_v, phi]
  bias 1/2 * |S @ phi(u) - v|^2
  retention alpha * S, last(5)
  optimizer gd(rate = 0.5)
  read v + silu(S @ phi(q))""",
    "averaged, with a window": """
  const c = 3
  gate alpha: decay, eta: positive, gamma[c]: positive
  feature phi = exp(<., .> / sqrt(d_k))
  memory S[d_v, phi]
  bias window(c, weight = gamma) of -<S @ phi(k), v> * 2 - alpha * <S @ phi(k), v>
  retention alpha * S, last(7)
  optimizer gd(rate = eta)
  read normalized(S @ phi(q)) + v""",
    "two passes": """
  gate alpha: decay
  const b = 3
  feature phi = exp(<., .> / sqrt(d_k))
  pass z { memory S[d_k, phi]  bias -<S @ phi(k), q>  read normalized(S @ phi(q)) }
  pass y {
    memory R[d_v, phi]
    bias 1/2 * |R @ phi(z) - v|^2
    retention 0.9 * alpha * R
    optimizer gd(rate = 0.3, batch = b)
    read R @ phi(q)
  }""",
}


def invented(name: str) -> ModuleType:
    return ttmdsl.compile("layer Invented { dim d_k, d_v input q[d_k], k[d_k], v[d_v]" + INVENTED[name] + "\n}")


SHAPES = (
    Shape("T=21, cut at 2 and 9", batch=2, tokens=21, heads=2, dims=(5, 3), cuts=(2, 9)),
    Shape("packed 3+0+1+9", heads=1, dims=(4, 6), lengths=(3, 0, 1, 9)),
)
# lengths, from nothing, of which rows are several blocks: what a window shows ends amid one, or leaves whole ones out
LONG = {"averaged, with a window": 70, "dot:c=3": 70, "last, and a readout in an expression": 140}


def shapes(name: str) -> tuple[Shape, ...]:
    tokens = LONG.get(name)
    return SHAPES if tokens is None else (*SHAPES, Shape("long", batch=1, tokens=tokens, dims=(6, 4), state=False))


@pytest.mark.parametrize("name", beyond([*LAYERS, *INVENTED], "dot:b=4:c=7", "swdt:c=1"))
def test_the_torch_backend_equals_the_reference(name: str) -> None:
    module = invented(name) if name in INVENTED else load(name)
    rows = parity(module, dtypes=(torch.float64,), shapes=shapes(name), backends=("torch",))
    assert [row for row in rows if not row.error <= row.tolerance] == []


def misses(name: str) -> list[Row]:
    torch.set_num_threads(1)
    module = invented(name) if name in INVENTED else load(name)
    rows = parity(module, dtypes=(torch.float32,), shapes=shapes(name), backends=("triton",))
    return [row for row in rows if not row.error <= row.tolerance]


@pytest.mark.parametrize("name", beyond([*LAYERS, *INVENTED], "dot:b=4:c=7", "swdt:c=1"))
def test_the_kernels_equal_the_reference(interpreter: ProcessPoolExecutor, name: str) -> None:
    assert interpreter.submit(misses, name).result() == []


def of_no_weight(backend: str) -> list[str]:
    """What depends on a key whose write has weight 0, however far above all others its score is."""
    torch.set_num_threads(1)
    module = ttmdsl.compile(
        """layer Invented { dim d_k, d_v  input q[d_k], k[d_k], v[d_v]  gate eta
  feature phi = exp(<., .>)
  memory S[d_v, phi]
  bias -<S @ phi(k), v>
  optimizer gd(rate = eta)
  read normalized(S @ phi(q)) }"""
    )
    found = []
    for length in (0.0, 60.0):
        x = {key: t.float() for key, t in draw(module, 1, 20).items()}
        x["eta"] = 0.5 + x["eta"].abs()
        x["eta"][:, 3] = 0.0
        x["q"][..., 0] = 5.0
        x["k"][:, 3] = torch.eye(6)[0] * length
        y, _ = module.op(**{key: t.requires_grad_() for key, t in x.items()}, backend=backend)
        y.square().sum().backward()
        assert all(t.grad is not None and t.grad.isfinite().all() for t in x.values())
        others = {key: t.grad for key, t in x.items() if t.grad is not None and key != "eta"}
        found.append({"y": y.detach(), **others})
    near, far = found
    return [name for name, t in near.items() if not torch.allclose(far[name], t, rtol=1e-4, atol=1e-6)]


def test_what_has_no_weight_counts_for_nothing(interpreter: ProcessPoolExecutor) -> None:
    assert of_no_weight("torch") == []
    assert interpreter.submit(of_no_weight, "triton").result() == []


# ---- the state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_step_equals_op(name: str) -> None:
    module = load(name)
    x = draw(module, 2, 8)
    whole, final = module.op(**x, output_final_state=True)
    state, ys = None, []
    for t in range(8):
        y, state = module.step(**{key: v[:, t] for key, v in x.items()}, initial_state=state)
        ys.append(y)
    torch.testing.assert_close(torch.stack(ys, 1), whole, rtol=1e-10, atol=1e-10)
    assert list(state) == list(module.STATE)
    for key in final:
        torch.testing.assert_close(state[key], final[key], rtol=1e-10, atol=1e-10)


def of_one_state(backend: str) -> dict[str, Tensor]:
    """Two sequences that go on from one state, whose entries lie amid others' in memory."""
    torch.set_num_threads(1)
    module = load("dot:b=4")
    x = {key: t.float() for key, t in draw(module, 2, 9).items()}
    _, state = module.op(**{key: t[:1, :6] for key, t in x.items()}, output_final_state=True, backend="torch")
    amid = {key: torch.cat([t, t + 1, t + 2])[:1] for key, t in state.items()}
    y, final = module.op(**x, initial_state=amid, output_final_state=True, backend=backend)
    return {"y": y, **final}


def test_sequences_go_on_from_one_state(interpreter: ProcessPoolExecutor) -> None:
    found, expected = interpreter.submit(of_one_state, "triton").result(), of_one_state("reference")
    assert found.keys() == expected.keys()
    for key, t in expected.items():
        torch.testing.assert_close(found[key], t, rtol=1e-4, atol=1e-5)


def test_a_memory_of_the_last_tokens_holds_no_more() -> None:
    module = load("swa:c=5")
    _, state = module.op(**draw(module, 1, 12), output_final_state=True)
    assert state["S_keys"].shape[2] == state["S_values"].shape[2] == 5
    assert state["tokens"].tolist() == [12]


@pytest.mark.parametrize("name", ["swdt", "dot:c=3", "attention"])
def test_sequences_of_different_lengths_resume_together(name: str) -> None:
    module = load(name)
    x, lengths = draw(module, 2, 9), (2, 6)
    packed = {key: torch.cat([t[n, :length] for n, length in enumerate(lengths)])[None] for key, t in x.items()}
    _, state = module.op(**packed, cu_seqlens=torch.tensor([0, 2, 8]), output_final_state=True)
    rest = {key: torch.stack([t[n, length : length + 3] for n, length in enumerate(lengths)]) for key, t in x.items()}
    y, _ = module.op(**rest, initial_state=state)
    whole, _ = module.op(**x)
    for n, length in enumerate(lengths):
        torch.testing.assert_close(y[n], whole[n, length : length + 3], rtol=1e-10, atol=1e-10)


def test_strong_decays_keep_their_digits() -> None:
    module = load("deep_transformer")
    x = draw(module, 1, 300)
    x["log_alpha"] = torch.where(torch.arange(300)[None, :, None] % 3 == 0, -20.0, -1e-6).double().expand(1, 300, 2)
    exact, _ = module.op(**x)
    single, _ = module.op(**{key: t.float() for key, t in x.items()})
    assert (single - exact).square().mean().sqrt() < 1e-5 * exact.square().mean().sqrt()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("S_weights"), "expected 'S_weights' along with the others"),
        (lambda s: s.update(S=s["S_keys"]), "'S': the state of another layer"),
        (lambda s: s.update(S_values=s["S_values"][:, :, 1:]), r"with L = 4 \(as in S_keys\)"),
    ],
)
def test_states_that_are_refused(change: Callable[[Tensors], object], message: str) -> None:
    module = load("attention")
    x = draw(module, 2, 4)
    _, state = module.op(**x, output_final_state=True)
    change(state)
    with pytest.raises(ValueError, match=message):
        module.op(**x, initial_state=state)


# ---- the compiler -------------------------------------------------------------------------------------------------


def spec(bias: str, read: str = "S @ phi(q)", rest: str = "") -> str:
    head = "layer A { dim d_k, d_v input q[d_k], k[d_k], v[d_v] feature phi = exp(<., .>) memory S[d_v, phi]\n"
    return f"{head}bias {bias}\nread {read}\n{rest} }}"


@pytest.mark.parametrize(
    ("bias", "read", "message"),
    [
        ("1/3 * |S @ phi(k) - v|_3^3", "S @ phi(q)", "linear in what it reads, or half its squared distance"),
        ("1/2 * |tanh(S @ phi(k)) - v|^2", "S @ phi(q)", "linear in what it reads, or half its squared distance"),
        ("1/2 * |S @ phi(k) - v|^2", "normalized(S @ phi(q))", "an average only if the gradient is free of the memory"),
        ("-<S @ phi(k), v> - <S @ phi(q), v>", "S @ phi(q)", "reads `S` at 2 keys"),
        ("-<S @ phi(k), v>", "S @ phi(q) + S @ phi(k)", "at 2 queries"),
        ("-<S @ phi(k), v>", "S @ phi(v)", r"the query is \[d_v\], and the key is \[d_k\]"),
    ],
)
def test_gradients_without_a_kernel_form(bias: str, read: str, message: str) -> None:
    with pytest.raises(DeriveError, match=message) as caught:
        ttmdsl.compile(spec(bias, read))
    assert all(d.hint for d in caught.value.diagnostics)


def test_the_form_is_read_off_the_derived_gradient() -> None:
    bias = "1/2 * |2 * (S @ phi(k)) - v|^2 - <S @ phi(k), 3 * v>"
    job = run(spec(bias), "<spec>", {}, Options.from_environment(), after="derive")
    (form,) = lower_kernel(job.done["derive"]).forms
    assert not form.additive
    assert not form.decays
    module = ttmdsl.compile(spec(bias))
    x = draw(module, 1, 7)
    plain = ttmdsl.compile(spec("1/2 * |S @ phi(k) - 5/4 * v|^2", rest="optimizer gd(rate = 4)"))
    torch.testing.assert_close(module.op(**x)[0], plain.op(**x)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["attention", "swdt", "dot"])
def test_what_explain_says(name: str) -> None:
    job = run(load(name).SPEC, name, {}, Options.from_environment(), after="lower")
    assert job.done["lower"].title.startswith("kernel: ")
    assert f"Recurrence {job.done['lower'].title[:20]}" in Path(str(load(name).__file__)).read_text()
