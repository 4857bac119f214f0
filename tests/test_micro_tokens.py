"""Windows at every token as micro-tokens: which windows are, and what a chunk of them takes."""

from __future__ import annotations

import pytest
from test_window import BY_CHANNEL, GATED, MOMENTUM, NORMALISED, OMEGA, PASSES, SWLA, chunk_of

from ttmdsl.ir import is_product
from ttmdsl.loader import read
from ttmdsl.unfold import MOST_MICRO

MICRO = {
    "as it is": (OMEGA, {}),
    "no weight": (NORMALISED, {}),
    "delays and a declared decay": (GATED.replace("const     b = 3", "").replace(", batch = b", ""), {}),
    "features": (OMEGA, {"p": 2}),
    "momentum": (MOMENTUM, {}),
    "a decay per channel": (BY_CHANNEL, {}),
    "at the retained state": (OMEGA.replace("batch = b", "at = retained"), {}),
}
NO_MICRO = {
    "free of the memory": (SWLA, {}),
    "in groups": (OMEGA, {"b": 4}),
    "of one token": (OMEGA, {"c": 1}),
    "too long": (OMEGA, {"c": MOST_MICRO + 1}),
    "beside a pass without a window": (PASSES.replace(", batch = b", "").replace("window(2) of ", ""), {}),
}


@pytest.mark.parametrize("why", MICRO)
def test_windows_at_every_token_are_micro_tokens(why: str) -> None:
    text, consts = MICRO[why]
    found = chunk_of(text, **consts)
    micro = found.prelude.micro
    assert found.recurrence == "affine"
    assert found.chunk is not None
    assert micro is not None
    vectors = [n.name for n in found.chunk.forward.leaves() if n.role == "token" and len(n.axes) > 1]
    assert len([name for name in vectors if name.endswith("micro")]) == 2  # however long the window is
    assert found.whole_tokens(64) == 64 // micro.number * micro.number
    assert found.whole_tokens(1) == micro.number


def test_micro_tokens_are_as_much_work_as_tokens() -> None:
    """A chunk of them takes the products of a gated delta rule, however long the window is."""
    chunks = [chunk_of(read("gated_delta_net")[0]).chunk, *(chunk_of(OMEGA, c=c).chunk for c in (2, 7, MOST_MICRO))]
    assert len({sum(map(is_product, c.forward.nodes)) for c in chunks if c}) == 1
    assert len({sum(map(is_product, c.backward.nodes)) for c in chunks if c}) == 1


@pytest.mark.parametrize("why", NO_MICRO)
def test_other_windows_have_no_micro_tokens(why: str) -> None:
    text, consts = NO_MICRO[why]
    assert chunk_of(text, **consts).prelude.micro is None
