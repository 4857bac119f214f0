"""Layers that nobody wrote: drawn specs, compiled and held against the reference, outputs, states and all gradients.

A longer run by hand: `python -m ttmdsl.strategies 1000 --seed 1`, with `--triton` for the kernels.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import given, settings

from ttmdsl.strategies import compare, distinct
from ttmdsl.testing import layer_specs

# What long runs found (docs/drawn.md), reduced by hand.
FOUND = {
    "momenta turned in stages, a point that its own norm pulls at": """layer Drawn {
      dim d_k, d_v
      input q[d_k], v[d_v], k[d_k]
      gate alpha: decay, theta: decay, eta: unit
      memory S[d_v, d_k]
      bias 1/2 * |S @ k - v|^2 + 0.05 * |S|^2
      retention alpha * S
      optimizer muon(momentum = theta, rate = eta, steps = 2, batch = 4)
      read S @ q
    }""",
    "momenta turned in stages, a softmax of a deep memory": """layer Drawn {
      dim d, h
      input q[d], k[d], v[d]
      gate theta: decay
      param eta: positive
      fn M(x) = x + W1 @ relu(W2 @ x)
      memory W1[d, h], W2[h, d]
      bias 1/2 * |softmax(M(k)) - v|^2
      optimizer muon(momentum = theta, rate = 0.2 * eta, steps = 2, batch = 3)
      read sigmoid(M(q))
    }""",
    "momenta turned in stages, two tensors of one gradient": """layer Drawn {
      dim d_k, d_v
      input q[d_k], k[d_k], v[d_v], w[d_v]
      gate theta: decay, eta: unit
      memory S[d_v, d_k]
      bias 1/2 * |S @ k - v - w|^2
      optimizer muon(momentum = theta, rate = eta, steps = 2, batch = 2)
      read S @ q
    }""",
    "momenta turned in stages, whose gradients are free of the point": """layer Drawn {
      dim d_k, d_v
      input q[d_k], v[d_v], k[d_k]
      gate theta: decay, eta: unit
      memory S[d_v, d_k]
      bias -<S @ k, v>
      optimizer muon(momentum = theta, rate = eta, steps = 2, batch = 2)
      read S @ q
    }""",
    "momenta turned in stages behind a pass that walks": """layer Drawn {
      dim d_k, d_v, m
      input q[d_k], k[d_k], v[d_v], a[m]
      gate alpha_1: decay, eta_2[m]: unit
      param eta_1[d_k]: unit, alpha_2: decay
      pass s {
        memory K[d_k, m]
        bias 1/2 * |tanh(K @ a) - k|^2
        retention alpha_1 * K
        optimizer gd(rate = eta_1, batch = 4)
        read tanh(K^T @ q)
      }
      pass y {
        memory V[m, d_v]
        bias 1/2 * |silu(V^T @ s) - v|^2
        retention alpha_2 * V
        optimizer muon(momentum = 0.5, rate = eta_2 / (1 + <k, k>), steps = 2, batch = 4)
        read tanh(V^T @ a)
      }
    }""",
    "momenta turned in stages, a walk that takes its memory's points itself": """layer Drawn {
      dim d_k, d_v, m
      input q[d_k], k[d_k], v[d_v], a[m]
      gate alpha[m]: decay, eta: positive, theta: decay
      const b = 2
      const p = 3
      pass s {
        memory K[m, d_k]
        bias 1/p * |columns(softmax, K) @ k - a|_p^p
        retention alpha * K
        optimizer gd(rate = eta, batch = b)
        read K @ q
      }
      pass y {
        memory V[d_v, m]
        bias 1/2 * |V @ s - v|^2
        retention 0.9 * V
        optimizer muon(momentum = theta, rate = eta, steps = 2, batch = b)
        read V @ a
      }
    }""",
    "a weight, and columns that are centred, tokens in groups": """layer Drawn {
      dim d_k, d_v
      input q[d_k], v[d_v], k[d_k]
      gate alpha: decay, weight: unit, eta: unit
      fn centred(s)[i] = s[i] - mean(j, s[j])
      memory S[d_v, d_k]
      bias weight / 2 * |columns(centred, S)^T @ v - k|^2
      retention alpha * S
      optimizer gd(rate = eta, batch = 2)
      read S @ q
    }""",
    "a ridge under a decay for every key channel, tokens in groups": """layer Drawn {
      dim d_k, d_v
      input q[d_k], k[d_k], v[d_v]
      gate alpha[d_k]: decay, eta: unit
      memory S[d_v, d_k]
      bias -<S @ k, v> + 0.05 * |S|^2
      retention alpha * S
      optimizer gd(rate = eta, batch = 5)
      read S @ q
    }""",
    "what is handed on of centred columns, found by way of a tile": """layer Drawn {
      dim d_k, d_v
      input q[d_k], v[d_v], k[d_k]
      gate alpha: decay, eta: unit
      fn normed(s)[i] = (s[i] - mean(j, s[j])) / sqrt(mean(j, (s[j] - mean(l, s[l]))^2) + 0.1)
      memory S[d_k, d_v] = uniform
      bias 1/2 * |columns(normed, S)^T @ k - v|^2
      retention alpha * log(S)
      optimizer gd(rate = eta)
      project rows(softmax, S)
      read columns(normed, S)^T @ q
    }""",
    "a rate for every hidden unit, in kernels that walk over these": """layer Drawn {
      dim d, h
      input q[d], k[d], v[d]
      param eta[h]: positive
      memory W1[d, h], W2[h, d]
      bias 1/2 * |W1 @ relu(W2 @ k) - v|^2
      optimizer gd(rate = eta, batch = 4)
      read W1 @ relu(W2 @ q)
    }""",
    "centred columns of powers, in kernels that walk over a head": """layer Drawn {
      dim d_k, d_v
      input q[d_k], v[d_v], k[d_k]
      gate alpha: decay, eta: positive
      fn normed(s)[i] = (s[i] - mean(j, s[j])) / sqrt(mean(j, (s[j] - mean(l, s[l]))^2) + 0.5)
      memory S[d_k^2, d_v]
      bias 1/2 * |silu(columns(normed, S) @ v) - power(k, 2)|^2
      retention alpha * S
      optimizer momentum(decay = 0.5, rate = eta, batch = 5)
      read S^T @ power(q, 2)
    }""",
    "columns of powers, whose gradient passes through a product of three axes": """layer Drawn {
      dim d_k, d_v
      input q[d_k], v[d_v], k[d_k]
      gate alpha: decay, eta: positive
      fn unit(s)[i] = s[i] / sqrt(sum(j, s[j]^2) + 0.01)
      memory S[d_v, d_k^2]
      bias window(2) of 1/4 * |sigmoid(columns(unit, S) @ power(k, 2)) - v|_4^4
      retention alpha * S
      optimizer gd(rate = eta / (1 + <k, k>), batch = 2)
      read sigmoid(S @ power(q, 2))
    }""",
    "momenta of a memory that keeps all, in groups": """layer Drawn {
      dim d_k, d_v
      input q[d_k], k[d_k], v[d_v]
      gate theta: decay, eta: positive
      memory S[d_v, d_k]
      bias 1/2 * |S @ k - v|^2
      optimizer momentum(decay = theta, rate = eta, batch = 4)
      read S @ q
    }""",
}


def found(text: str, triton: bool = False) -> list[str]:
    """What misses; fit to be sent from another process."""
    torch.set_num_threads(1)
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in compare(text, triton=triton)]


@pytest.mark.parametrize("text", distinct(60), ids=map(str, range(60)))
def test_torch_is_the_reference(text: str) -> None:
    assert found(text) == [], text


@pytest.mark.parametrize("text", distinct(12, seed=1), ids=map(str, range(12)))
def test_kernels_are_the_reference(text: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(found, text, triton=True).result() == [], text


@pytest.mark.parametrize("name", FOUND)
def test_found_in_torch(name: str) -> None:
    assert found(FOUND[name]) == []


@pytest.mark.parametrize("name", FOUND)
def test_found_in_kernels(name: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(found, FOUND[name], triton=True).result() == []


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layer_specs())
def test_every_drawn_spec_checks(text: str) -> None:
    from ttmdsl.check import check
    from ttmdsl.parse import parse

    spec = check(parse(text), text)
    assert spec.name == "Drawn"
