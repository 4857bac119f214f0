"""Test a layer of one's own: `pytest examples/property_test.py`, a few seconds.

`check_layer` holds every backend against the definition: outputs, final states and all gradients. What the layer is
meant to do is for its author to say; `layer_inputs` draws inputs to try it on, gates at the ends of their ranges
included, and hypothesis shrinks what fails.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings

import ttmdsl
from ttmdsl.testing import check_layer, layer_inputs

# A delta rule whose loss grows like |e| once an error is large.
SPEC = """
layer RobustDelta {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      alpha: decay, beta: unit
  const     b = 1
  memory    S[d_v, d_k]
  fn        charbonnier(e) = sqrt(1 + e^2)
  bias      sum(charbonnier(S @ k - v))
  retention alpha * S
  optimizer gd(rate = beta, batch = b)
  read      S @ q
}
"""
module = ttmdsl.compile(SPEC)


@pytest.mark.parametrize("b", [1, 8])
def test_every_backend_agrees_with_the_definition(b: int) -> None:
    check_layer(ttmdsl.compile(SPEC, b=b))


@settings(max_examples=30, deadline=None)
@given(layer_inputs(module))
def test_a_token_writes_no_more_than_its_key(x: dict[str, Any]) -> None:
    """The reason for this loss: |dL/dS| < |k|, whatever the value."""
    x["v"] = 1e6 * x["v"]
    _, final = module.op(**x, output_final_state=True)
    start = x["initial_state"]["S"].abs().amax((-2, -1)) if "initial_state" in x else 0.0
    written = (x["beta"] * x["k"].abs().amax(-1)).sum(1)
    assert torch.all(final["S"].abs().amax((-2, -1)) <= start + written + 1e-9)


@settings(max_examples=30, deadline=None)
@given(layer_inputs(module))
def test_the_past_does_not_depend_on_the_future(x: dict[str, Any]) -> None:
    y, _ = module.op(**x)
    half = (y.shape[1] + 1) // 2
    earlier, _ = module.op(**{name: t if name == "initial_state" else t[:, :half] for name, t in x.items()})
    torch.testing.assert_close(y[:, :half], earlier)
