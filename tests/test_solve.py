"""Gradients that read memories at every token, in whole specs that nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_lower import lowered, shipped

import ttmdsl
from ttmdsl.drawing import Shape
from ttmdsl.ir import UNIT_AXES, depends_on
from ttmdsl.lower import Lowered
from ttmdsl.parity import parity

SHAPES = (
    Shape("T=70", tokens=70, heads=2, dims=(5, 3)),
    Shape("T=21, cut at 9", batch=2, tokens=21, dims=(4, 6), cuts=(9,)),
)
VECTORS = ("k", "l", "k - l")

Reads = Sequence[tuple[str, str]]


@st.composite
def layers(draw: st.DrawFn) -> tuple[str, bool]:
    """A layer whose bias has one or two l2 errors, each of one read or of the sum of two; and whether a chunk is found:
    what is written along one key follows from one error, or from the same as along all others."""
    memories = draw(st.sampled_from([["S"], ["S", "A"]]))
    read = st.tuples(st.sampled_from(memories), st.sampled_from(VECTORS))
    errors: list[Reads] = draw(st.lists(st.lists(read, min_size=1, max_size=2, unique=True), min_size=1, max_size=2))
    terms = [
        f"{weight}/2 * |{' + '.join(f'{m} @ ({x})' for m, x in reads)} - {target}|^2"
        for reads, weight, target in zip(errors, ("1", "eta"), ("v", "w"), strict=False)
    ]
    used = {m for reads in errors for m, _ in reads}
    dotted = "".join(f" - <{m} @ q, w>" for m in memories if m not in used or draw(st.booleans()))
    kinds = ["gd(rate = eta)", "gd(rate = eta, at = retained)", "momentum(decay = theta, rate = eta)"]
    optimizer = draw(st.sampled_from(kinds))
    channel = "" if "momentum" in optimizer else draw(st.sampled_from(["", "[d_k]"]))
    kept = ", ".join(f"alpha * {m}" for m in memories)
    text = f"""
layer Drawn {{
  dim d_k, d_v
  input q[d_k], k[d_k], l[d_k], v[d_v], w[d_v]
  gate alpha{channel}: decay, theta: decay, eta: unit
  memory {", ".join(f"{m}[d_v, d_k]" for m in memories)}
  bias {" + ".join(terms)}{dotted}
  retention {kept if len(memories) == 1 else f"({kept})"}
  optimizer {optimizer}
  read {" + ".join(f"{m} @ q" for m in memories)}
}}"""
    alike = {tuple(r in reads for reads in errors) for reads in errors for r in reads}
    return text, len(alike) == 1 or all(sum(of) == 1 for of in alike)


@st.composite
def windows(draw: st.DrawFn) -> str:
    """A layer that takes l2 errors of the last few tokens at every token."""
    c = draw(st.sampled_from([2, 3, 5]))
    weight = draw(st.sampled_from(["", ", weight = gamma", ", weight = softmax(gamma)"]))
    memories = draw(st.sampled_from([["S"], ["S", "A"]]))
    key = draw(st.sampled_from(["k", "u", "k / |k|", "alpha * k", "power(k, 2)"]))
    error = " + ".join(f"{m} @ ({key})" for m in memories) + draw(st.sampled_from([" - v", " - w * v", ""]))
    slope = draw(st.sampled_from(["1/2", "g/2"]))
    dotted = draw(st.sampled_from(["", " - <S @ (l), v>"])) if "power" not in key else ""
    at = draw(st.sampled_from(["", ", at = retained"]))
    optimizer, channel = draw(st.sampled_from([("gd(", ""), ("gd(", "[d_k]"), ("momentum(decay = theta, ", "")]))
    columns = "d_k^2" if "power" in key else "d_k"
    query = "power(q, 2)" if "power" in key else "u - q"
    channel = channel if columns == "d_k" else ""
    kept = ", ".join(f"alpha * {m}" for m in memories)
    return f"""
layer Drawn {{
  dim d_k, d_v
  input q[d_k], k[d_k], l[d_k], v[d_v], w[d_v]
  gate alpha{channel}: decay, theta: decay, eta: unit, g: unit, gamma[c]: unit
  const c = {c}
  let u = k + delay(l, 1)
  memory {", ".join(f"{m}[d_v, {columns}]" for m in memories)}
  bias window(c{weight}) of ({slope} * |{error}|^2{dotted})
  retention {kept if len(memories) == 1 else f"({kept})"}
  optimizer {optimizer}rate = eta{at})
  read {" + ".join(f"{m} @ ({query})" for m in memories)}
}}"""


def misses(text: str, backend: str, dtype: str) -> list[str]:
    torch.set_num_threads(1)
    rows = parity(ttmdsl.compile(text), dtypes=[getattr(torch, dtype)], shapes=SHAPES, backends=[backend])
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


TWO_MEMORIES = (
    "layer L { dim d_k, d_v input q[d_k], k[d_k], l[d_k], v[d_v] gate alpha: decay, theta: decay, eta: unit"
    " memory S[d_v, d_k], A[d_v, d_k] bias 1/2 * |S @ k + A @ l - v|^2 retention (alpha * S, alpha * A)"
    " optimizer momentum(decay = theta, rate = eta) read S @ q + A @ q }"
)


@pytest.mark.parametrize("spec", [shipped("delta_net"), shipped("omega_linear", c=2), lowered(TWO_MEMORIES)])
def test_cotangents_meet_inverses_by_vectors_alone(spec: Lowered) -> None:
    """However a system was solved, its cotangents are products of vectors: none of two matrices of tokens by tokens."""
    chunk = spec.chunk
    assert chunk
    assert "implicit" not in {n.op for p in (chunk.forward, chunk.backward) for n in p.nodes}
    cotangents = depends_on(chunk.backward.nodes, [n for n in chunk.backward.leaves() if n.role in ("cot", "cocarry")])
    solved = [n for n in chunk.backward.nodes if n.op == "tri_inv"]
    inverses = {*solved, *(n for n in chunk.backward.nodes if n.op == "rename" and n.args[0] in solved)}
    met = [n for n in chunk.backward.nodes if n in cotangents and n.op == "contract" and inverses & {*n.args}]
    assert met
    assert all(set(n.axes) - {*UNIT_AXES} for n in met)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(layers())
def test_torch_is_the_reference(drawn: tuple[str, bool]) -> None:
    text, solved = drawn
    assert (lowered(text).recurrence == "affine") == solved
    assert misses(text, "torch", "float64") == []


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(windows())
def test_windows_are_the_reference(text: str) -> None:
    found = lowered(text)
    assert found.recurrence == "affine"
    assert found.prelude.micro
    assert misses(text, "torch", "float64") == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_are_the_reference(dtype: str, interpreter: ProcessPoolExecutor) -> None:
    """Two memories, each read through a vector of its own, under momentum."""
    assert interpreter.submit(misses, TWO_MEMORIES, "triton", dtype).result() == []
