"""The layers written by hand, per token, from equations.md: the tests' second opinion on what a layer means.

Input: `op`'s tensors by the spec's names (decays as themselves, not as logarithms), float64, and an initial state.
Output: y and every memory at the end. No autodiff takes part in the update; the gradients below are the closed forms of
section 1. Each oracle starts at token 0 of a sequence and runs it whole, so resumption is tested against it by cutting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

Tensors: TypeAlias = dict[str, torch.Tensor]
Result: TypeAlias = tuple[torch.Tensor, Tensors]
Step: TypeAlias = Callable[[torch.Tensor, Tensors], torch.Tensor]


def _tokens(x: Tensors, b: int = 0, h: int = 0) -> list[Tensors]:
    """The tokens of one sequence and head, each a dict of scalars and vectors."""
    length = next(iter(x.values())).shape[1]
    return [{name: value[b, t, h] for name, value in x.items()} for t in range(length)]


def _each_head(run: Callable[[list[Tensors], Tensors], Result], x: Tensors, state: Tensors) -> Result:
    """Runs one sequence and head at a time and puts the results together."""
    batch, _, heads = next(iter(x.values())).shape[:3]
    runs = [
        [run(_tokens(x, b, h), {name: m[b, h] for name, m in state.items()}) for h in range(heads)]
        for b in range(batch)
    ]
    y = torch.stack([torch.stack([r[0] for r in row], 1) for row in runs])
    final = {name: torch.stack([torch.stack([r[1][name] for r in row]) for row in runs]) for name in state}
    return y, final


def _outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, None] * b[None, :]


# ---- linear memories, no chunk: M_t = step(M_{t-1}, token), y_t = M_t q_t --------------------------------------


def _recurrence(step: Step, x: Tensors, state: Tensors) -> Result:
    def run(tokens: list[Tensors], start: Tensors) -> Result:
        m, ys = start["S"], []
        for token in tokens:
            m = step(m, token)
            ys.append(m @ token["q"])
        return torch.stack(ys), {"S": m}

    return _each_head(run, x, state)


def linear_attention(x: Tensors, state: Tensors) -> Result:
    return _recurrence(lambda m, n: m + _outer(n["v"], n["k"]), x, state)


def mamba2(x: Tensors, state: Tensors) -> Result:
    return _recurrence(lambda m, n: n["alpha"] * m + _outer(n["v"], n["k"]), x, state)


def gla(x: Tensors, state: Tensors) -> Result:
    return _recurrence(lambda m, n: m @ torch.diag(n["alpha"]) + _outer(n["v"], n["k"]), x, state)


def delta_net(x: Tensors, state: Tensors) -> Result:
    def step(m: torch.Tensor, n: Tensors) -> torch.Tensor:
        k, beta = n["k"], n["beta"]
        return m @ (torch.eye(len(k), dtype=k.dtype) - beta * _outer(k, k)) + beta * _outer(n["v"], k)

    return _recurrence(step, x, state)


def gated_delta_net(x: Tensors, state: Tensors) -> Result:
    def step(m: torch.Tensor, n: Tensors) -> torch.Tensor:
        k, beta = n["k"], n["beta"]
        return n["alpha"] * m @ (torch.eye(len(k), dtype=k.dtype) - beta * _outer(k, k)) + beta * _outer(n["v"], k)

    return _recurrence(step, x, state)


def hgrn2(x: Tensors, state: Tensors) -> Result:
    return gla(x | {"k": 1 - x["alpha"]}, state)


def retnet(x: Tensors, state: Tensors) -> Result:
    alpha = x["alpha"].expand(x["q"].shape[:3])
    return mamba2(x | {"alpha": alpha}, state)


def rwkv7(x: Tensors, state: Tensors) -> Result:
    def step(m: torch.Tensor, n: Tensors) -> torch.Tensor:
        k, beta = n["k"], n["beta"]
        return m @ (torch.diag(n["alpha"]) - beta * _outer(k, k)) + beta * _outer(n["v"], k)

    return _recurrence(step, x, state)


def longhorn(x: Tensors, state: Tensors) -> Result:
    def step(m: torch.Tensor, n: Tensors) -> torch.Tensor:
        # the minimum itself, row by row: argmin 1/2 |w - m|^2 + beta/2 (w.k - v)^2
        k, rows = n["k"], []
        for i, beta in enumerate(n["beta"]):
            system = torch.eye(len(k), dtype=k.dtype) + beta * _outer(k, k)
            rows.append(torch.linalg.solve(system, m[i] + beta * n["v"][i] * k))
        return torch.stack(rows)

    return _recurrence(step, x, state)


# ---- chunk-frozen gradients -----------------------------------------------------------------------------------


# The gradient of one token's loss with respect to the memories at the frozen point.
Gradient: TypeAlias = Callable[[Tensors, Tensors], Tensors]
Read: TypeAlias = Callable[[Tensors, Tensors], torch.Tensor]


def _frozen(
    gradient: Gradient,
    x: Tensors,
    state: Tensors,
    b: int,
    rate: str = "eta",
    decay: str = "",
    momentum: str = "",
    read: Read = lambda m, n: m["S"] @ n["q"],
) -> Result:
    """Gradient descent from the state before each group of b tokens; decay and momentum by the gates' names."""

    def run(tokens: list[Tensors], start: Tensors) -> Result:
        m = frozen = start
        speed = {name: torch.zeros_like(w) for name, w in m.items()}
        ys = []
        for t, n in enumerate(tokens):
            if t % b == 0:
                frozen = m
            g = gradient(frozen, n)
            for name in speed:
                kept = n[momentum] * speed[name] if momentum else 0
                speed[name] = kept - n[rate] * g[name]
            m = {name: (n[decay] if decay else 1) * w + speed[name] for name, w in m.items()}
            ys.append(read(m, n))
        return torch.stack(ys), m

    return _each_head(run, x, state)


def titans_linear(x: Tensors, state: Tensors, b: int = 16) -> Result:
    def gradient(m: Tensors, n: Tensors) -> Tensors:
        return {"S": _outer(m["S"] @ n["k"] - n["v"], n["k"])}

    return _frozen(gradient, x, state, b, decay="alpha", momentum="theta")


def moneta(x: Tensors, state: Tensors, b: int = 16, p: float = 3) -> Result:
    def gradient(m: Tensors, n: Tensors) -> Tensors:
        e = m["S"] @ n["k"] - n["v"]
        return {"S": _outer(e.sign() * e.abs() ** (p - 1), n["k"])}

    return _frozen(gradient, x, state, b, decay="alpha")


def yaad(x: Tensors, state: Tensors, b: int = 16, delta: float = 1.0) -> Result:
    def gradient(m: Tensors, n: Tensors) -> Tensors:
        e = m["S"] @ n["k"] - n["v"]
        return {"S": min(1.0, delta / float(e.norm())) * _outer(e, n["k"])}

    return _frozen(gradient, x, state, b, decay="alpha")


def ttt_norm(x: Tensors, state: Tensors, b: int = 16) -> Result:
    def gradient(m: Tensors, n: Tensors) -> Tensors:
        z = m["S"] @ n["k"]
        unit = z / z.norm()
        e = unit - n["v"]
        return {"S": _outer((e - unit * (unit @ e)) / z.norm(), n["k"])}

    return _frozen(gradient, x, state, b, rate="gamma", decay="mu")


def memora(x: Tensors, state: Tensors, b: int = 16) -> Result:
    def run(tokens: list[Tensors], start: Tensors) -> Result:
        m = frozen = start["S"]
        ys = []
        for t, n in enumerate(tokens):
            if t % b == 0:
                frozen = m
            weight = m ** n["alpha"] * torch.exp(-n["eta"] * _outer(frozen @ n["k"] - n["v"], n["k"]))
            m = weight / weight.sum(1, keepdim=True)
            ys.append(m @ n["q"])
        return torch.stack(ys), {"S": m}

    return _each_head(run, x, state)


# ---- deep memories --------------------------------------------------------------------------------------------


def _layer_norm(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """z normalised, without weights, and the spread that it was divided by."""
    centered = z - z.mean()
    spread = (centered.square().mean() + 1e-5).sqrt()
    return centered / spread, spread


def _layer_norm_jacobian_t(z: torch.Tensor, cot: torch.Tensor) -> torch.Tensor:
    """J^T cot for the normalisation without weights."""
    hat, spread = _layer_norm(z)
    return (cot - cot.mean() - hat * (hat * cot).mean()) / spread


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.special.ndtr(x)


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _mlp(m: Tensors, x: torch.Tensor) -> torch.Tensor:
    return m["W1"] @ _gelu(m["W2"] @ x)


def _mlp_gradient(m: Tensors, x: torch.Tensor, r: torch.Tensor) -> Tensors:
    """Of a loss whose gradient with respect to the output is r."""
    h = m["W2"] @ x
    return {"W1": _outer(r, _gelu(h)), "W2": _outer((m["W1"].T @ r) * _gelu_slope(h), x)}


def ttt_linear(x: Tensors, state: Tensors, b: int = 16) -> Result:
    return _each_normed(lambda m, z: m["S"] @ z, lambda m, z, r: {"S": _outer(r, z)}, x, state, b)


def ttt_mlp(x: Tensors, state: Tensors, b: int = 16) -> Result:
    return _each_normed(_mlp, _mlp_gradient, x, state, b)


def _each_normed(
    forward: Callable[[Tensors, torch.Tensor], torch.Tensor],
    backward: Callable[[Tensors, torch.Tensor, torch.Tensor], Tensors],
    x: Tensors,
    state: Tensors,
    b: int,
) -> Result:
    """f(z) = z + LN(forward(z)), LN with the weights ln_w and ln_b, learnt by 1/2 |f(k) - v|^2."""

    def f(m: Tensors, n: Tensors, z: torch.Tensor) -> torch.Tensor:
        return z + n["ln_w"] * _layer_norm(forward(m, z))[0] + n["ln_b"]

    def gradient(m: Tensors, n: Tensors) -> Tensors:
        e = f(m, n, n["k"]) - n["v"]
        return backward(m, n["k"], _layer_norm_jacobian_t(forward(m, n["k"]), n["ln_w"] * e))

    shape = x["q"].shape
    x = x | {name: x[name].expand(shape) for name in ("ln_w", "ln_b")}
    return _frozen(gradient, x, state, b, read=lambda m, n: f(m, n, n["q"]))


def titans(x: Tensors, state: Tensors, b: int = 16) -> Result:
    def gradient(m: Tensors, n: Tensors) -> Tensors:
        return _mlp_gradient(m, n["k"], n["k"] + _mlp(m, n["k"]) - n["v"])

    return _frozen(gradient, x, state, b, decay="alpha", momentum="theta", read=lambda m, n: n["q"] + _mlp(m, n["q"]))


def dla(x: Tensors, state: Tensors, b: int = 16) -> Result:
    def gradient(m: Tensors, n: Tensors) -> Tensors:
        return _mlp_gradient(m, n["k"], -n["v"])

    return _frozen(gradient, x, state, b, decay="alpha", read=lambda m, n: n["q"] + _mlp(m, n["q"]))


# ---- slots ----------------------------------------------------------------------------------------------------

# What one slot s_i of Lattice receives: c_i P(s_i) h / |s_i|, with c in R^m and h in R^d by the kind of layer.
Slot: TypeAlias = Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, torch.Tensor]]


def _unit(column: torch.Tensor, n: Tensors) -> torch.Tensor:
    return column / column.norm()


def _soft_threshold(column: torch.Tensor, n: Tensors) -> torch.Tensor:
    least = n["gamma"] * n["lam"]
    return torch.where(column > least, column - least, torch.where(column < -least, column + least, 0))


def _lattice(
    kind: Slot, x: Tensors, state: Tensors, b: int, after: Callable[[torch.Tensor, Tensors], torch.Tensor] | None
) -> Result:
    def run(tokens: list[Tensors], start: Tensors) -> Result:
        m = frozen = start["S"]
        ys = []
        for t, n in enumerate(tokens):
            if t % b == 0:
                frozen = m
            unit = frozen / frozen.norm(dim=0)
            c, h = kind(unit, n)
            columns = []
            for i in range(m.shape[1]):
                ahead = h - unit[:, i] * (unit[:, i] @ h)
                column = n["mu"] * m[:, i] - n["gamma"] * c[i] * ahead / frozen[:, i].norm()
                columns.append(after(column, n) if after else column)
            m = torch.stack(columns, 1)
            ys.append(m @ n["q"])
        return torch.stack(ys), {"S": m}

    return _each_head(run, x, state)


def lattice_dec(x: Tensors, state: Tensors, b: int = 1, project: int = 1) -> Result:
    return _lattice(lambda unit, n: (n["k"], unit @ n["k"] - n["v"]), x, state, b, _unit if project else None)


def lattice_enc(x: Tensors, state: Tensors, b: int = 1, project: int = 1) -> Result:
    return _lattice(lambda unit, n: (unit.T @ n["v"] - n["k"], n["v"]), x, state, b, _unit if project else None)


def lattice_sim(x: Tensors, state: Tensors, b: int = 1, project: int = 1) -> Result:
    return _lattice(lambda unit, n: (-n["k"], n["v"]), x, state, b, _unit if project else None)


def lattice_l1(x: Tensors, state: Tensors, b: int = 1) -> Result:
    x = x | {"lam": x["lam"].expand(x["gamma"].shape)}
    return _lattice(lambda unit, n: (n["k"], unit @ n["k"] - n["v"]), x, state, b, _soft_threshold)


# ---- two passes -----------------------------------------------------------------------------------------------


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _l2_silu(x: torch.Tensor, eps: float) -> torch.Tensor:
    a = _silu(x)
    return a / torch.sqrt((a * a).sum() + eps)


def _l2_silu_jacobian(x: torch.Tensor, eps: float) -> torch.Tensor:
    """d phi_i / d x_j."""
    a, sigma = _silu(x), 1 / (1 + torch.exp(-x))
    slope = sigma * (1 + x * (1 - sigma))
    norm = torch.sqrt((a * a).sum() + eps)
    return (torch.eye(len(x), dtype=x.dtype) / norm - _outer(a, a) / norm**3) @ torch.diag(slope)


def _ln_silu(x: torch.Tensor) -> torch.Tensor:
    a = _silu(x)
    centered = a - a.sum() / len(a)
    return centered / torch.sqrt((centered * centered).sum() / len(a) + 1e-5)


def trellis(x: Tensors, state: Tensors, b: int = 16, eps: float = 0.01) -> Result:
    def compress(m: torch.Tensor, frozen: torch.Tensor, key: torch.Tensor, n: Tensors) -> torch.Tensor:
        z = frozen @ key
        u = _l2_silu_jacobian(z, eps).T @ (_l2_silu(z, eps) - n["a"])
        return n["beta"] * m - n["gamma"] * _outer(u, key)

    def run(tokens: list[Tensors], start: Tensors) -> Result:
        keys = frozen_keys = start["K"]
        values = frozen_values = start["V"]
        ys = []
        for t, n in enumerate(tokens):
            if t % b == 0:
                frozen_keys, frozen_values = keys, values
            keys = compress(keys, frozen_keys, n["k"], n)
            values = compress(values, frozen_values, n["v"], n)
            ys.append(_l2_silu(values.T @ _ln_silu(keys @ n["q"]), eps))
        return torch.stack(ys), {"K": keys, "V": values}

    return _each_head(run, x, state)


def _slots(kept: Callable[[Tensors], torch.Tensor], written: str, x: Tensors, state: Tensors) -> Result:
    """K and V keep the slots' shares of what they hold, and the token is added; read by softmax over the slots."""

    def run(tokens: list[Tensors], start: Tensors) -> Result:
        keys, values, ys = start["K"], start["V"], []
        for n in tokens:
            keys = kept(n)[:, None] * keys + _outer(n[written], n["k"])
            values = kept(n)[:, None] * values + _outer(n[written], n["v"])
            weights = torch.exp(keys @ n["q"])
            ys.append(values.T @ weights / weights.sum())
        return torch.stack(ys), {"K": keys, "V": values}

    return _each_head(run, x, state)


def abc(x: Tensors, state: Tensors) -> Result:
    return _slots(lambda n: torch.ones_like(n["a"]), "a", x, state)


def gsa(x: Tensors, state: Tensors) -> Result:
    return _slots(lambda n: n["alpha"], "rest", x | {"rest": 1 - x["alpha"]}, state)


ORACLES: dict[str, Callable[..., Result]] = {
    f.__name__: f
    for f in (
        linear_attention,
        mamba2,
        gla,
        delta_net,
        gated_delta_net,
        titans_linear,
        lattice_dec,
        lattice_enc,
        lattice_sim,
        trellis,
        retnet,
        hgrn2,
        rwkv7,
        longhorn,
        moneta,
        yaad,
        memora,
        ttt_norm,
        ttt_linear,
        ttt_mlp,
        titans,
        dla,
        lattice_l1,
        abc,
        gsa,
    )
}
