"""Ten layers written by hand, per token, from equations.md: the tests' second opinion on what a layer means.

Input: `op`'s tensors by the spec's names (decays as themselves, not as logarithms), float64, and an initial state.
Output: y and every memory at the end. No autodiff takes part in the update; the gradients below are the closed forms of
section 1. Each oracle starts at token 0 of a sequence and runs it whole, so resumption is tested against it by cutting.
"""

from __future__ import annotations

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


# ---- chunk-frozen gradients -----------------------------------------------------------------------------------


def titans_linear(x: Tensors, state: Tensors, b: int = 16) -> Result:
    def run(tokens: list[Tensors], start: Tensors) -> Result:
        m = frozen = start["S"]
        momentum = torch.zeros_like(m)
        ys = []
        for t, n in enumerate(tokens):
            if t % b == 0:
                frozen = m
            momentum = n["theta"] * momentum - n["eta"] * _outer(frozen @ n["k"] - n["v"], n["k"])
            m = n["alpha"] * m + momentum
            ys.append(m @ n["q"])
        return torch.stack(ys), {"S": m}

    return _each_head(run, x, state)


# What one slot s_i of Lattice receives: c_i P(s_i) h / |s_i|, with c in R^m and h in R^d by the kind of layer.
Slot: TypeAlias = Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, torch.Tensor]]


def _lattice(kind: Slot, x: Tensors, state: Tensors, b: int, project: int) -> Result:
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
                columns.append(column / column.norm() if project else column)
            m = torch.stack(columns, 1)
            ys.append(m @ n["q"])
        return torch.stack(ys), {"S": m}

    return _each_head(run, x, state)


def lattice_dec(x: Tensors, state: Tensors, b: int = 1, project: int = 1) -> Result:
    return _lattice(lambda unit, n: (n["k"], unit @ n["k"] - n["v"]), x, state, b, project)


def lattice_enc(x: Tensors, state: Tensors, b: int = 1, project: int = 1) -> Result:
    return _lattice(lambda unit, n: (unit.T @ n["v"] - n["k"], n["v"]), x, state, b, project)


def lattice_sim(x: Tensors, state: Tensors, b: int = 1, project: int = 1) -> Result:
    return _lattice(lambda unit, n: (-n["k"], n["v"]), x, state, b, project)


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
    )
}
