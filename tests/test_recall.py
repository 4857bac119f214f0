"""Every layer's memory recalls: a small model around its `Layer` learns multi-query associative recall."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import ttmdsl
from ttmdsl.demo.recall import Settings, Task, train

DOC = Path(__file__).parent.parent / "docs" / "recall.md"
# A group of tokens that share a gradient point (16 at most) ends inside of a sequence.
TASK = Task(pairs=6, keys=12, values=8)
SETTINGS = Settings(steps=300, enough=0.5)
# Where a token costs ten times more than elsewhere: Newton-Schulz on each matrix of a deep memory.
SLOW = {"atlas": {"h": 16}, "atlas_pp": {"h": 16}}
SHORT = Task(pairs=4, keys=8, values=8)


@pytest.mark.parametrize("name", ttmdsl.layers())
def test_the_loss_falls_well_below_chance(name: str) -> None:
    module, slow = ttmdsl.load(name), name in SLOW
    task, settings = (SHORT, replace(SETTINGS, batch=16)) if slow else (TASK, SETTINGS)
    outcome = train(lambda: module.Layer(settings.hidden, settings.heads, **SLOW.get(name, {})), task, settings)
    assert all(math.isfinite(loss) for loss in outcome.losses)
    bar = settings.enough * task.chance
    assert bar < math.log(task.pairs), "a model that knows the values alone would pass"
    assert outcome.loss < bar, f"{outcome.losses[::20]}"
    assert outcome.accuracy > 0.5
