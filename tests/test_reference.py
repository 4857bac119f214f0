"""The reference against layers written by hand, and its printing of every kind of expression."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from oracles import ORACLES
from torch import Tensor

from ttmdsl.check import check
from ttmdsl.drawing import in_range
from ttmdsl.emit_reference import emit_reference
from ttmdsl.parse import parse
from ttmdsl.resources import folder
from ttmdsl.spec import LayerSpec

Tensors: TypeAlias = dict[str, Tensor]
Reference: TypeAlias = Callable[[Tensors, Tensors], tuple[Tensor, Tensors]]

SIZES = {"d_k": 5, "d_v": 4, "d": 6, "m": 3, "h": 7, "n": 2}


def checked(text: str, consts: Mapping[str, float] | None = None) -> LayerSpec:
    return check(parse(text), text, "<test>", consts)


def shipped(name: str, consts: Mapping[str, float] | None = None) -> LayerSpec:
    return checked((folder("layers") / f"{name}.ttm").read_text(), consts)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[LayerSpec], Reference]:
    counter = itertools.count()

    def load(spec: LayerSpec) -> Reference:
        path = tmp_path / f"generated_{next(counter)}.py"
        path.write_text(f"from __future__ import annotations\n\nimport torch\n\n\n{emit_reference(spec)}")
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        reference: Reference = module._reference
        return reference

    return load


def drawn(spec: LayerSpec, batch: int, tokens: int, heads: int, seed: int = 0) -> tuple[Tensors, Tensors]:
    """x by keyword and a complete state; points are garbage, to be replaced at position 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = {}
    for t in spec.tensors:
        lead = (heads,) if t.kind == "param" else (batch, tokens, heads)
        x[t.keyword] = in_range(normal(*lead, *(SIZES[dim] for dim in t.shape)), t.range)
        if t.kind == "input":  # rates of up to 1 are stable for vectors of about unit length
            x[t.keyword] /= SIZES[t.shape[-1]] ** 0.5
        if t.kind == "param" and t.range == "positive":  # a soft threshold that leaves something
            x[t.keyword] /= 32
    state: Tensors = {}
    for p in spec.passes:
        for m in p.memories:
            rows, columns = (SIZES[dim] for dim in m.shape)
            value = normal(batch, heads, rows, columns) / 2
            like = {"orthonormal": value / value.norm(dim=-2, keepdim=True), "uniform": value.softmax(-1)}
            state[m.name] = like.get(m.initial, value)
            if p.optimizer.kind == "momentum":
                state[f"{m.name}_momentum"] = torch.zeros_like(value)
            if p.optimizer.batch > 1:
                state[f"{m.name}_point"] = normal(*value.shape)
                state["position"] = torch.zeros(batch, dtype=torch.int64)
    return x, state


def plain(spec: LayerSpec, x: Tensors) -> Tensors:
    """The tensors by the spec's names, decays as themselves."""
    return {t.name: x[t.keyword].exp() if t.range == "decay" else x[t.keyword] for t in spec.tensors}


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def span(x: Tensors, start: int, end: int) -> Tensors:
    return {key: t[:, start:end] for key, t in x.items()}


LATTICE: list[dict[str, float]] = [{"b": b, "project": p} for b, p in ((1, 0), (4, 0), (4, 1))]
CASES: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in ORACLES),
    *((name, {"b": b}) for name in ("yaad", "memora", "ttt_linear", "ttt_mlp", "dla") for b in (1, 3)),
    ("titans", {"b": 3}),
    ("moneta", {"b": 3, "p": 1.5}),
    ("yaad", {"b": 4, "delta": 0.5}),
    ("lattice_l1", {"b": 4}),
    ("titans_linear", {"b": 3}),
    ("titans_linear", {"b": 1}),
    ("trellis", {"b": 1}),
    ("trellis", {"b": 4, "eps": 0.1}),
    *((f"lattice_{kind}", chosen) for kind in ("dec", "enc", "sim") for chosen in LATTICE),
]


@pytest.mark.parametrize(("name", "consts"), CASES)
def test_layers_mean_what_the_equations_say(
    name: str, consts: dict[str, float], load: Callable[[LayerSpec], Reference]
) -> None:
    spec = shipped(name, consts)
    reference = load(spec)
    x, state = drawn(spec, 2, 19, 2)
    y, final = reference(x, state)
    expected, memories = ORACLES[name](plain(spec, x), {m.name: state[m.name] for m in spec.memories}, **consts)
    assert error(y, expected) < 1e-12
    for key, value in memories.items():
        assert error(final[key], value) < 1e-12
    assert final.keys() == state.keys()


@pytest.mark.parametrize(
    ("name", "consts"),
    [("gated_delta_net", {}), ("titans_linear", {"b": 4}), ("trellis", {"b": 3}), ("lattice_enc", {"b": 4})],
)
@pytest.mark.parametrize("cut", [1, 4, 6, 10])
def test_pieces_equal_the_whole(
    name: str, consts: dict[str, float], cut: int, load: Callable[[LayerSpec], Reference]
) -> None:
    spec = shipped(name, consts)
    reference = load(spec)
    x, state = drawn(spec, 2, 11, 1)
    y, final = reference(x, state)
    first, middle = reference(span(x, 0, cut), state)
    second, last = reference(span(x, cut, 11), middle)
    assert torch.equal(torch.cat([first, second], 1), y)
    assert all(torch.equal(last[key], final[key]) for key in final)
    if "position" in final:
        assert middle["position"].tolist() == [cut % int(consts["b"])] * 2


def test_every_sequence_has_its_own_position(load: Callable[[LayerSpec], Reference]) -> None:
    spec = shipped("titans_linear", {"b": 4})
    reference = load(spec)
    x, state = drawn(spec, 2, 9, 1)
    _, ahead = reference(span(x, 0, 3), state)
    mixed = {key: torch.cat([ahead[key][:1], state[key][1:]]) for key in state}
    y, final = reference(x, mixed)
    for n, alone in enumerate((ahead, state)):
        expected, _ = reference(
            {key: t[n : n + 1] for key, t in x.items()}, {key: t[n : n + 1] for key, t in alone.items()}
        )
        assert error(y[n : n + 1], expected) < 1e-14
    assert final["position"].tolist() == [0, 1]


def test_position_counts_modulo_the_least_common_multiple(load: Callable[[LayerSpec], Reference]) -> None:
    text = (folder("layers") / "trellis.ttm").read_text().replace("batch = b", "batch = 4", 1)
    spec = checked(text, {"b": 6})
    x, state = drawn(spec, 1, 31, 1)
    _, final = load(spec)(x, state)
    assert int(final["position"]) == 31 % 12


def test_an_empty_sequence_leaves_the_state(load: Callable[[LayerSpec], Reference]) -> None:
    spec = shipped("trellis")
    x, state = drawn(spec, 2, 0, 3)
    y, final = load(spec)(x, state)
    assert y.shape == (2, 0, 3, SIZES["d_v"])
    assert all(torch.equal(final[key], state[key]) for key in state)


@pytest.mark.parametrize(
    ("name", "consts"),
    [("gated_delta_net", {}), ("lattice_dec", {"b": 2}), ("titans_linear", {"b": 2}), ("trellis", {"b": 2})],
)
def test_gradients_are_those_of_finite_differences(
    name: str, consts: dict[str, float], load: Callable[[LayerSpec], Reference]
) -> None:
    spec = shipped(name, consts)
    reference = load(spec)
    x, state = drawn(spec, 1, 3, 1)
    kept = {key: t for key, t in state.items() if not t.is_floating_point()}
    names = [*x, *(key for key in state if key not in kept)]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, values, strict=True))
        y, final = reference({key: given[key] for key in x}, kept | {key: given[key] for key in state if key in given})
        return y, *(t for t in final.values() if t.is_floating_point())

    leaves = [t.clone().requires_grad_() for t in (*x.values(), *(state[key] for key in state if key not in kept))]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_values_need_no_graph(load: Callable[[LayerSpec], Reference]) -> None:
    spec = shipped("trellis", {"b": 3})
    reference = load(spec)
    x, state = drawn(spec, 1, 5, 1)
    y, _ = reference(x, state)
    with torch.no_grad():
        assert torch.equal(reference(x, state)[0], y)
    with torch.inference_mode():
        inside = reference({k: t.clone() for k, t in x.items()}, {k: t.clone() for k, t in state.items()})
        assert torch.equal(inside[0], y)


# ---- expressions: a layer whose read-out is the expression, against the same in torch -------------------------------


READS: dict[str, Callable[[Tensors, Tensor], Tensor]] = {
    "S @ (g * k)": lambda x, s: (s @ (x["g"][..., None] * x["k"])[..., None])[..., 0],
    "(r * S) @ k": lambda x, s: ((x["r"][..., :, None] * s) @ x["k"][..., None])[..., 0],
    "(w * S) @ k": lambda x, s: ((x["w"][:, None, :] * s) @ x["k"][..., None])[..., 0],
    "S @ k + (S^T)^T @ (k / g)": lambda x, s: (s @ (x["k"] * (1 + 1 / x["g"][..., None]))[..., None])[..., 0],
    "S @ k / size(k) + c": lambda x, s: (s @ x["k"][..., None])[..., 0] / 5 + 0.25,
    "r * (sum(k) - mean(k) * -2)": lambda x, s: x["r"] * (x["k"].sum(-1) + 2 * x["k"].mean(-1))[..., None],
    "r * |k|": lambda x, s: x["r"] * x["k"].norm(dim=-1, keepdim=True),
    "r * |k|_1": lambda x, s: x["r"] * x["k"].abs().sum(-1, keepdim=True),
    "r * |k|_3^3": lambda x, s: x["r"] * x["k"].abs().pow(3).sum(-1, keepdim=True),
    "r * |k|_3": lambda x, s: x["r"] * x["k"].abs().pow(3).sum(-1, keepdim=True) ** (1 / 3),
    "r * |k|_4^2": lambda x, s: x["r"] * x["k"].pow(4).sum(-1, keepdim=True).sqrt(),
    "r * |g|": lambda x, s: x["r"] * x["g"].abs()[..., None],
    "r - (r - r^2)": lambda x, s: x["r"] ** 2,
    "r / (r / 2)": lambda x, s: torch.full_like(x["r"], 2),
    "(-r)^2 * sqrt(c)": lambda x, s: x["r"] ** 2 * 0.5,
    "max(r, 0) + min(r, g)": lambda x, s: x["r"].clamp(min=0) + torch.minimum(x["r"], x["g"][..., None]),
    "softmax(r) * exp(log(p))": lambda x, s: torch.softmax(x["r"], -1) * x["p"][:, None],
    "gelu(r) + relu(r) + softplus(r) + abs(r) + sign(r)": lambda x, s: (
        torch.nn.functional.gelu(x["r"]) + x["r"].relu() + (1 + x["r"].exp()).log() + x["r"].abs() + x["r"].sign()
    ),
    "tanh(r) + sigmoid(r) + silu(r)": lambda x, s: x["r"].tanh() + x["r"].sigmoid() * (1 + x["r"]),
    "<k, k> * r": lambda x, s: (x["k"] ** 2).sum(-1, keepdim=True) * x["r"],
    "columns(weighted, S) @ k": lambda x, s: (
        x["u"][:, :, None] * s * x["p"][:, None, None] / (s.sum(-2, keepdim=True) ** 2 + 1) @ x["k"][..., None]
    )[..., 0],
    "rows(softmax, S) @ k": lambda x, s: (torch.softmax(s, -1) @ x["k"][..., None])[..., 0],
    "columns(softmax, S) @ k": lambda x, s: (torch.softmax(s, -2) @ x["k"][..., None])[..., 0],
    "weighted(r)": lambda x, s: x["u"] * x["r"] * x["p"][:, None] / (x["r"].sum(-1, keepdim=True) ** 2 + 1),
    "pairs(r)": lambda x, s: (x["r"][..., :, None] - x["r"][..., None, :]).abs().sum(-1),
    "nested(r)": lambda x, s: x["r"] + 4 * (x["r"] - x["r"].mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True),
    "flat(r)": lambda x, s: (x["r"].sum(-1, keepdim=True) * 8).expand_as(x["r"]),
    "constant(r)": lambda x, s: torch.full_like(x["r"], 3),
    "e + S @ k": lambda x, s: x["r"] * x["g"][..., None] + (s @ x["k"][..., None])[..., 0],
}

LAYER = """layer Probe {
  dim       d_k, d_v
  input     k[d_k], r[d_v]
  gate      g: positive
  param     p: decay, w[d_k], u[d_v]
  const     c = 0.25
  fn        weighted(s)[i] = u[i] * s[i] * p / (sum(j, s[j])^2 + 1)
  fn        pairs(s)[i] = sum(j, abs(s[i] - s[j]))
  fn        centred(s)[i] = s[i] - mean(i, s[i])
  fn        nested(s)[i] = s[i] + sum(j, mean(i, centred(s)[i]^2))
  fn        flat(s)[i] = sum(j, sum(l, s[l]) + s[j] * size(s))
  fn        constant(s)[i] = c * size(s) * 3
  let       torch_ = r * g
  let       e = torch_
  memory    S[d_v, d_k]
  bias      -<S @ k, r>
  optimizer gd(rate = 0)
  read      READ
}
"""


@pytest.mark.parametrize("read", READS)
def test_expressions_print_as_they_mean(read: str, load: Callable[[LayerSpec], Reference]) -> None:
    spec = checked(LAYER.replace("READ", read))
    x, state = drawn(spec, 2, 1, 3)
    y, _ = load(spec)(x, state)
    token = {key: t if key in ("p", "w", "u") else t[:, 0] for key, t in plain(spec, x).items()}
    torch.testing.assert_close(y[:, 0], READS[read](token, state["S"]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("loss", ["|S @ k|", "|S @ k|^1.5", "|S @ k|_1.5^1.5", "|S @ k|_1", "|S @ k|_3^3"])
def test_a_norm_has_the_subgradient_zero_at_zero(loss: str, load: Callable[[LayerSpec], Reference]) -> None:
    spec = checked(LAYER.replace("-<S @ k, r>", loss).replace("rate = 0", "rate = 1").replace("READ", "S @ k"))
    x, state = drawn(spec, 1, 2, 1)
    x = {key: t.requires_grad_() for key, t in x.items()}
    y, final = load(spec)(x, {"S": torch.zeros_like(state["S"], requires_grad=True)})
    assert not final["S"].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x["k"]], allow_unused=True) if g is not None)


def test_a_deep_memory_learns_all_its_matrices(load: Callable[[LayerSpec], Reference]) -> None:
    spec = checked(
        """layer Deep {
          dim       d, h
          input     q[d], k[d], v[d]
          gate      alpha: decay, theta: decay, eta[h]
          memory    W1[d, h], W2[h, d]
          fn        M(x) = x + W1 @ gelu(W2 @ x) / size(W2 @ x)
          bias      1/2 * |M(k) - v|^2
          retention alpha * (W1, W2)
          optimizer momentum(decay = theta, rate = eta, batch = 2)
          read      M(q)
        }"""
    )
    x, state = drawn(spec, 1, 3, 1)
    y, final = load(spec)(x, state)
    n, gelu = plain(spec, x), torch.nn.functional.gelu
    w1, w2 = state["W1"][0, 0], state["W2"][0, 0]
    u1, u2 = torch.zeros_like(w1), torch.zeros_like(w2)
    for t in range(3):
        if t % 2 == 0:
            p1, p2 = w1, w2
        k, h = n["k"][0, t, 0], p2 @ n["k"][0, t, 0]
        cdf, pdf = torch.special.ndtr(h), (-h * h / 2).exp() / (2 * torch.pi) ** 0.5
        r = k + p1 @ gelu(h) / 7 - n["v"][0, t, 0]
        eta, theta, alpha = n["eta"][0, t, 0], n["theta"][0, t, 0], n["alpha"][0, t, 0]
        u1 = theta * u1 - eta[None, :] * torch.outer(r, gelu(h)) / 7
        u2 = theta * u2 - eta[:, None] * torch.outer(p1.T @ r * (cdf + h * pdf) / 7, k)
        w1, w2 = alpha * w1 + u1, alpha * w2 + u2
        q = n["q"][0, t, 0]
        torch.testing.assert_close(y[0, t, 0], q + w1 @ gelu(w2 @ q) / 7, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(final["W2_momentum"][0, 0], u2, rtol=1e-12, atol=1e-13)


def test_the_section_reads_like_the_spec() -> None:
    text = emit_reference(shipped("gated_delta_net"))
    assert "# bias 1/2 * |S @ k - v|^2" in text
    assert "return 0.5 * (((S @ k[..., None])[..., 0] - v) ** 2).sum(-1)" in text
    assert "_ref_power" not in text
    assert max(map(len, text.splitlines())) <= 120
