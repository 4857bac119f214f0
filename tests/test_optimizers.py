"""Optimizers beyond gradient descent with momentum, stop(...), and gradients where a residual is exactly zero.

The oracles are written by hand, one sequence and head at a time, without autodiff; Newton-Schulz acts on the singular
values that an SVD finds, the argmins are solved from their normal equations.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeAlias

import pytest
import torch
from test_lower import lowered
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ttmdsl
from ttmdsl.check import check
from ttmdsl.derive import derive
from ttmdsl.drawing import Shape, draw
from ttmdsl.errors import DeriveError
from ttmdsl.parity import parity
from ttmdsl.parse import parse
from ttmdsl.testing import check_layer

Token: TypeAlias = dict[str, Tensor]
Oracle: TypeAlias = Callable[[list[Token], Token, int], tuple[list[Tensor], Token]]

SHAPES = (
    Shape("T=7, dims 12 and 20", batch=2, tokens=7, heads=2, dims=(12, 20)),
    Shape("T=18, from the default state", tokens=18, dims=(6, 5), state=False),
    Shape("T=6, dims 60 and 24", tokens=6, dims=(60, 24)),
    Shape("T=13, cut at 3 and 8", tokens=13, dims=(5, 8), cuts=(3, 8)),
    Shape("packed 6+0+1+5", heads=2, dims=(8, 4), lengths=(6, 0, 1, 5)),
)


def layer(bias: str, *clauses: str, memory: str = "S[d_v, d_k]", read: str = "S @ q") -> str:
    return f"""layer Probe {{
      dim d_k, d_v
      input q[d_k], k[d_k], v[d_v]
      gate alpha: decay, theta: decay, eta: unit, beta: positive, row[d_v]: positive, column[d_k]: positive
      param lam: positive, mu: decay
      const b = 1
      memory {memory}
      bias {bias}
      {" ".join(clauses)}
      read {read}
    }}"""


SQUARE = "1/2 * |S @ k - v|^2"
MUON = layer(SQUARE, "retention alpha * S", "optimizer muon(momentum = theta, rate = eta, batch = b)")
DEEP = """layer Deep {
  dim d, h
  input q[d], k[d], v[d]
  gate alpha: decay, theta: decay, eta: unit
  const b = 3
  memory W1[d, h], W2[h, d]
  fn M(x) = x + W1 @ gelu(W2 @ x)
  bias 1/2 * |M(k) - v|^2
  retention alpha * (W1, W2)
  optimizer muon(momentum = theta, rate = eta, steps = 5, batch = b)
  read M(q)
}"""


# ---- by hand --------------------------------------------------------------------------------------------------------


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[:, None] * b[None, :]


def linear(step: Callable[[Tensor, Token], Tensor]) -> Oracle:
    def run(tokens: list[Token], state: Token, b: int) -> tuple[list[Tensor], Token]:
        m, ys = state["S"], []
        for n in tokens:
            m = step(m, n)
            ys.append(m @ n["q"])
        return ys, {"S": m}

    return run


def dplr(m: Tensor, n: Token) -> Tensor:
    return m @ (torch.diag(n["alpha"]) + outer(n["a"], n["b"])) + outer(n["v"], n["k"])


def longhorn(m: Tensor, n: Token) -> Tensor:
    """Row i minimises 1/2 |p - m_i|^2 + beta_i / 2 (<p, k> - v_i)^2."""
    k = n["k"]
    rows = []
    for i, beta in enumerate(n["beta"]):
        normal = torch.eye(len(k), dtype=k.dtype) + beta * outer(k, k)
        rows.append(torch.linalg.solve(normal, m[i] + beta * n["v"][i] * k))
    return torch.stack(rows)


def mesa(tokens: list[Token], state: Token, b: int) -> tuple[list[Tensor], Token]:
    lam = tokens[0]["lam"]
    normal = lam * torch.eye(len(tokens[0]["k"]), dtype=lam.dtype)
    total = torch.zeros_like(state["S"])
    ys = []
    for n in tokens:
        normal, total = normal + outer(n["k"], n["k"]), total + outer(n["v"], n["k"])
        ys.append(total @ torch.linalg.inv(normal) @ n["q"])
    return ys, {"S": total @ torch.linalg.inv(normal), "S_inverse": torch.linalg.inv(normal)}


def newton_schulz(m: Tensor, steps: int = 5) -> Tensor:
    u, s, v = torch.linalg.svd(m, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def muon(tokens: list[Token], state: Token, b: int) -> tuple[list[Tensor], Token]:
    m = point = state["S"]
    u = torch.zeros_like(m)
    ys = []
    for t, n in enumerate(tokens):
        if t % b == 0:
            point = m
        u = n["theta"] * u + outer(point @ n["k"] - n["v"], n["k"])
        m = n["alpha"] * m - n["eta"] * newton_schulz(u)
        ys.append(m @ n["q"])
    return ys, {"S": m, "S_momentum": u}


def muon_deep(tokens: list[Token], state: Token, b: int) -> tuple[list[Tensor], Token]:
    gelu = torch.nn.functional.gelu
    w1, w2 = p1, p2 = state["W1"], state["W2"]
    u1, u2 = torch.zeros_like(w1), torch.zeros_like(w2)
    ys = []
    for t, n in enumerate(tokens):
        if t % b == 0:
            p1, p2 = w1, w2
        x, h = n["k"], p2 @ n["k"]
        slope = torch.special.ndtr(h) + h * (-h * h / 2).exp() / (2 * torch.pi) ** 0.5
        r = x + p1 @ gelu(h) - n["v"]
        u1 = n["theta"] * u1 + outer(r, gelu(h))
        u2 = n["theta"] * u2 + outer(p1.T @ r * slope, x)
        w1 = n["alpha"] * w1 - n["eta"] * newton_schulz(u1)
        w2 = n["alpha"] * w2 - n["eta"] * newton_schulz(u2)
        ys.append(n["q"] + w1 @ gelu(w2 @ n["q"]))
    return ys, {"W1": w1, "W2": w2, "W2_momentum": u2}


def by_hand(oracle: Oracle, module: Any, x: dict[str, Tensor], state: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """The oracle for every sequence and head: y, and the states that it tells."""
    plain = {key.removeprefix("log_"): t.exp() if key.startswith("log_") else t for key, t in x.items()}
    per_head = {key.removeprefix("log_") for key in module.PARAMS}
    batch, length, heads = x["q"].shape[:3]
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for n in range(batch):
        for h in range(heads):
            tokens = [{key: v[h] if key in per_head else v[n, t, h] for key, v in plain.items()} for t in range(length)]
            ys, final = oracle(tokens, {key: s[n, h] for key, s in state.items()}, b)
            found[n, h] = {"y": torch.stack(ys), **final}
    keys = found[0, 0].keys()
    rows = [[found[n, h] for h in range(heads)] for n in range(batch)]
    stacked = {key: torch.stack([torch.stack([one[key] for one in row]) for row in rows]) for key in keys}
    return stacked | {"y": stacked["y"].transpose(1, 2)}


ORACLES: dict[str, tuple[Callable[[], Any], Oracle, int]] = {
    "dplr": (lambda: ttmdsl.load("dplr"), linear(dplr), 1),
    "longhorn": (lambda: ttmdsl.load("longhorn"), linear(longhorn), 1),
    "mesa": (lambda: ttmdsl.load("mesa"), mesa, 1),
    "muon": (lambda: ttmdsl.compile(MUON), muon, 1),
    "muon in groups": (lambda: ttmdsl.compile(MUON, b=4), muon, 4),
    "muon, deep": (lambda: ttmdsl.compile(DEEP), muon_deep, 3),
}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ORACLES)
def test_layers_mean_what_the_equations_say(name: str, backend: str) -> None:
    build, oracle, b = ORACLES[name]
    module = build()
    drawn = draw(module, Shape("", batch=2, tokens=11, heads=2, dims=(5, 4)))
    state = {} if name == "mesa" else {k: t for k, t in (drawn.state or {}).items() if k in module.MEMORY}
    y, final = module.op(**drawn.x, initial_state=state, output_final_state=True, backend=backend)
    start = state or {"S": torch.zeros(2, 2, *(y.shape[-1], drawn.x["k"].shape[-1]), dtype=y.dtype)}
    expected = by_hand(oracle, module, drawn.x, start, b)
    torch.testing.assert_close(y, expected.pop("y"), rtol=1e-9, atol=1e-11)
    for key, value in expected.items():
        torch.testing.assert_close(final[key], value, rtol=1e-9, atol=1e-11)


# ---- parity ---------------------------------------------------------------------------------------------------------

PARITY = {
    "scalar rate": layer(SQUARE, "retention alpha * S", "optimizer implicit(rate = beta)"),
    "rate along the columns": layer("eta / 2 * |S @ k - v|^2", "optimizer implicit(rate = column)"),
    "rate along the rows, projected": layer(
        "sum((S @ k - v)^2) + sum(S @ k) / 2", "optimizer implicit(rate = row)", "project S / 2"
    ),
    "transposed": layer(
        "1/2 * <row * (S^T @ k - v), S^T @ k - v> - <S^T @ k, v>",
        "retention alpha * S",
        "optimizer implicit(rate = beta)",
        memory="S[d_k, d_v]",
        read="S^T @ q",
    ),
    "least squares, weighted": layer("eta / 2 * |S @ k - v|^2", "optimizer least_squares(ridge = lam + mu)"),
    "least squares, transposed": layer(
        "1/2 * |S^T @ k - v|^2", "optimizer least_squares(ridge = 0.5)", memory="S[d_k, d_v]", read="S^T @ q"
    ),
    "muon": MUON,
    "muon of a square memory": layer(
        "1/2 * |S^T @ v - row|^2",
        "optimizer muon(momentum = theta, rate = eta, steps = 2, at = retained)",
        memory="S[d_v, d_v]",
        read="S @ v",
    ),
    "muon, deep": DEEP,
    "stop": layer("1/2 * |S @ k - stop(S @ q) - v|^2", "retention alpha * S", "optimizer gd(rate = eta)"),
    "stop at a frozen point": layer("1/2 * |S @ k - stop(tanh(S @ q)) - v|^2", "optimizer gd(rate = eta, batch = 4)"),
}


@pytest.mark.parametrize("name", PARITY)
def test_backends_agree(name: str) -> None:
    check_layer(ttmdsl.compile(PARITY[name]), shapes=SHAPES, dtypes=(torch.float64,))


def misses(text: str) -> list[str]:
    """What a layer's kernels miss; in the process that interprets them."""
    torch.set_num_threads(1)
    shapes = (Shape("T=6, dims 12 and 20", tokens=6, dims=(12, 20)), Shape("cut", tokens=5, dims=(24, 3), cuts=(2,)))
    rows = parity(ttmdsl.compile(text), dtypes=(torch.float32,), shapes=shapes, backends=("triton",))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


@pytest.mark.parametrize("name", PARITY)
def test_kernels_are_the_reference(name: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(misses, PARITY[name]).result() == []


@pytest.mark.parametrize("name", ["dplr", "longhorn", "mesa"])
def test_shipped_layers_agree(name: str) -> None:
    check_layer(ttmdsl.load(name), shapes=SHAPES, dtypes=(torch.float64,))


@pytest.mark.parametrize(
    ("text", "recurrence"),
    [
        (PARITY["scalar rate"], "affine"),
        (PARITY["rate along the columns"], "affine"),
        (PARITY["rate along the rows, projected"], "sequential"),
        (layer("-<S @ k, v>", "optimizer implicit(rate = beta)"), "additive"),
        (layer("-<S @ k, v> - <stop(S @ q), S @ k>"), "affine"),
        (PARITY["stop at a frozen point"], "frozen"),
        (PARITY["least squares, weighted"], "sequential"),
        (MUON, "sequential"),
    ],
)
def test_recurrences(text: str, recurrence: str) -> None:
    found = lowered(text)
    assert (found.recurrence, bool(found.reason)) == (recurrence, recurrence == "sequential")


# ---- argmins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scalar rate", "rate along the rows, projected", "transposed"])
def test_an_implicit_step_ends_where_the_objective_is_flat(name: str) -> None:
    text = PARITY[name].replace("project S / 2", "")
    module = ttmdsl.compile(text)
    drawn = draw(module, Shape("", tokens=1, dims=(5, 4)))
    assert drawn.state is not None
    _, final = module.op(**drawn.x, initial_state=drawn.state, output_final_state=True, backend="torch")
    n = {key: t[0, 0, 0] for key, t in drawn.x.items() if key not in module.PARAMS}
    start, found = drawn.state["S"][0, 0], final["S"][0, 0].requires_grad_()
    if "alpha * S" in text:
        start = n["log_alpha"].exp() * start
    e = (found.T if name == "transposed" else found) @ n["k"] - n["v"]
    rate = n["row"][:, None] if "row)" in text.split("implicit")[1] else n["beta"]
    loss = {
        "scalar rate": lambda: (e @ e) / 2,
        "rate along the rows, projected": lambda: e @ e + (e + n["v"]).sum() / 2,
        "transposed": lambda: (n["row"] * e) @ e / 2 - (e + n["v"]) @ n["v"],
    }[name]()
    objective = ((found - start).square() / rate).sum() / 2 + loss
    (slope,) = torch.autograd.grad(objective, found)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_ridge_is_where_the_sum_starts(backend: str) -> None:
    module = ttmdsl.load("mesa")
    drawn = draw(module, Shape("", tokens=4, heads=2, dims=(3, 2)))
    x = {key: t.requires_grad_() for key, t in drawn.x.items()}
    _, state = module.op(**{k: t[:, :0] if k != "lam" else t for k, t in x.items()}, output_final_state=True)
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(state["S_inverse"], (eye / x["lam"][:, None, None])[None])
    y, _ = module.op(**x, backend=backend)
    (slope,) = torch.autograd.grad(y.sum(), x["lam"])
    assert slope.abs().min() > 0
    y, _ = module.op(**x, initial_state={"S_inverse": eye.expand(1, 2, 3, 3)}, backend=backend)
    (slope,) = torch.autograd.grad(y.sum(), x["lam"], allow_unused=True)
    assert slope is None or not slope.any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (layer("1/3 * |S @ k - v|_3^3", "optimizer implicit(rate = eta)"), "quadratic in each component"),
        (layer("|S @ k - v|", "optimizer implicit(rate = eta)"), "quadratic in each component"),
        (layer("<S @ k, v>^2", "optimizer least_squares(ridge = lam)"), "quadratic in each component"),
        (layer("1/2 * |tanh(S @ k) - v|^2", "optimizer implicit(rate = eta)"), "quadratic in each component"),
        (layer("<S @ k, S @ q>", "optimizer implicit(rate = eta)"), "this one has 2 such reads"),
        (layer(f"{SQUARE} + |S|^2", "optimizer implicit(rate = eta)"), "here S stands elsewhere, too"),
        (layer("1/2 * |S @ (S^T @ v) - v|^2", "optimizer implicit(rate = eta)"), "here S stands elsewhere, too"),
        (layer("-<stop(S @ k), S @ k>", "optimizer implicit(rate = eta)"), "no gradient point"),
        (layer("1/2 * <row, (S @ k - v)^2>", "optimizer least_squares(ridge = lam)"), "one curvature"),
        (DEEP.partition("optimizer")[0] + "optimizer implicit(rate = eta) read M(q) }", "one memory"),
        (layer("<stop(S @ k), v>"), "stop(...) makes a constant of S"),
    ],
)
def test_biases_without_a_closed_form(text: str, message: str) -> None:
    with pytest.raises(DeriveError) as caught:
        derive(check(parse(text), text))
    assert message in str(caught.value)
    assert all(d.span.line for d in caught.value.diagnostics)


# ---- Newton-Schulz --------------------------------------------------------------------------------------------------


def test_newton_schulz_multiplies_over_the_narrow_side() -> None:
    token = lowered(DEEP).token
    sides = [n.attr[0] for p in (token.forward, token.backward) for n in p.nodes if n.op.startswith("newton_schulz")]
    assert len(sides) == 6  # forward, and once more for the backward
    assert set(sides) == {"d"}


def test_newton_schulz_knows_how_wide_powers_are() -> None:
    bias = "1/2 * |S^T @ power(k, 2) - v|^2"
    text = layer(bias, "optimizer muon(momentum = theta, rate = eta)", memory="S[d_k^2, d_v]", read="S^T @ power(q, 2)")
    token = lowered(text).token
    sides = {n.attr[0] for p in (token.forward, token.backward) for n in p.nodes if n.op.startswith("newton_schulz")}
    assert sides == {"d_v"}


class Widest(TorchDispatchMode):
    """The side of the widest square matrix that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.side = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.ndim > 2 and made.shape[-2] == made.shape[-1]:
            self.side = max(self.side, made.shape[-1])
        return made


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_newton_schulz_makes_no_matrix_as_wide_as_the_longer_side(backend: str) -> None:
    module = ttmdsl.compile(MUON)
    for dims in ((37, 5), (5, 37)):
        x = draw(module, Shape("", tokens=4, dims=dims)).x
        with Widest() as widest:
            y, _ = module.op(**{name: t.requires_grad_() for name, t in x.items()}, backend=backend)
            y.sum().backward()
        assert widest.side == 5


def test_a_zero_momentum_takes_no_step() -> None:
    module = ttmdsl.compile(MUON)
    x = draw(module, Shape("", tokens=3, dims=(4, 3))).x
    x["v"] = torch.zeros_like(x["v"])
    for backend in ("reference", "torch"):
        leaves = {key: t.clone().requires_grad_() for key, t in x.items()}
        y, _ = module.op(**leaves, backend=backend)
        assert not y.any()
        slopes = torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True)
        assert all(slope.isfinite().all() for slope in slopes if slope is not None)


# ---- residuals that are exactly zero --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "loss",
    [
        "|S @ k - v|",
        "|S @ k - v|^1.5",
        "|S @ k - v|^0.5",
        "|S @ k - v|_1.5^1.5",
        "|S @ k - v|_0.5^0.5",
        "|S @ k - v|_1",
        "|S @ k - v|_3",
        "|S @ k - v|_3^2",
        "1/2 * min(|S @ k - v|, 1)^2 + max(|S @ k - v| - 1, 0)",
    ],
)
def test_slopes_at_a_zero_residual(loss: str, batch: int) -> None:
    module = ttmdsl.compile(layer(loss, f"optimizer gd(rate = eta, batch = {batch})"))
    x = draw(module, Shape("", tokens=7, dims=(5, 6))).x
    x["v"][:, :3] = 0
    x["v"][:, 5] = 0
    x["v"][..., 0] = 0
    x["k"][:, 1] = 0
    found = {}
    for backend in ("reference", "torch"):
        leaves = {key: t.clone().requires_grad_() for key, t in x.items()}
        y, final = module.op(**leaves, output_final_state=True, backend=backend)
        assert final is not None
        ((y * y).sum() + final["S"].sum()).backward()
        slopes = {key: t.new_zeros(t.shape) if t.grad is None else t.grad for key, t in leaves.items()}
        found[backend] = {"y": y.detach(), **slopes}
    for key, got in found["torch"].items():
        assert got.isfinite().all()
        torch.testing.assert_close(got, found["reference"][key], rtol=1e-9, atol=1e-11)
