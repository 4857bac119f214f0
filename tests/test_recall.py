"""Every layer's memory recalls: a small model around its `Layer` learns multi-query associative recall."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiers import mostly_beyond, thorough

import ttmdsl
from ttmdsl.demo.recall import COMMAND, Settings, Task, document, main, train

DOC = Path(__file__).parent.parent / "docs" / "recall.md"
# A group of tokens that share a gradient point (16 at most) ends inside of a sequence.
TASK = Task(pairs=6, keys=12, values=8)
SETTINGS = Settings(steps=300, enough=0.5)
# Newton-Schulz at every token: a token costs ten times more than elsewhere.
SLOW = {"atlas": {"h": 16}, "atlas_linear": {}, "atlas_pp": {"h": 16}}
FIRST = "attention dot gated_delta_net lattice_dec mamba2 titans_linear trellis ttt_linear".split()
SHORT = Task(pairs=3, keys=6, values=8)


@pytest.mark.parametrize("name", mostly_beyond(ttmdsl.layers(), *FIRST))
def test_the_loss_falls_well_below_chance(name: str) -> None:
    module, slow = ttmdsl.load(name), name in SLOW
    task, settings = (SHORT, replace(SETTINGS, batch=16)) if slow else (TASK, SETTINGS)
    outcome = train(lambda: module.Layer(settings.hidden, settings.heads, **SLOW.get(name, {})), task, settings)
    assert all(math.isfinite(loss) for loss in outcome.losses)
    bar = settings.enough * task.chance
    assert bar < math.log(task.pairs), "a model that knows the values alone would pass"
    assert outcome.loss < bar, f"{outcome.losses[::20]}"
    assert outcome.accuracy > 0.5


def test_a_sequence_asks_for_every_key_once() -> None:
    task = Task(pairs=5, keys=9, values=3)
    tokens, answers = task.draw(50, torch.Generator().manual_seed(0))
    assert tokens.shape == (50, 15)
    assert answers.shape == (50, 5)
    for sequence, expected in zip(tokens.tolist(), answers.tolist(), strict=True):
        pairs = dict(zip(sequence[0:10:2], sequence[1:10:2], strict=True))
        assert len(pairs) == 5
        assert set(pairs) <= set(range(9))
        assert set(pairs.values()) <= set(range(9, 12))
        assert sorted(sequence[10:]) == sorted(pairs)
        assert [pairs[key] for key in sequence[10:]] == expected
    assert any(sequence[10:] != sequence[0:10:2] for sequence in tokens.tolist())
    with pytest.raises(ValueError, match=r"at most 4 pairs .* got 5"):
        Task(pairs=5, keys=4)


def test_without_a_memory_nothing_is_learned() -> None:
    """The task cannot be solved from a token alone: what the tests above see is the memory's doing."""

    class Nothing(torch.nn.Identity):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (0 * x,)

    outcome = train(Nothing, TASK, replace(SETTINGS, steps=100))
    assert outcome.loss > 0.95 * TASK.chance
    assert outcome.accuracy < 2 / TASK.values


def test_training_is_deterministic_and_stops_when_it_is_good_enough() -> None:
    layer = ttmdsl.load("attention").Layer
    seen: list[int] = []
    settings = replace(SETTINGS, enough=0.9)
    outcome = train(lambda: layer(32, 2), TASK, settings, lambda losses: seen.append(len(losses)))
    assert seen == list(range(1, len(outcome.losses) + 1))
    assert len(seen) < settings.steps
    assert outcome.loss < 0.9 * TASK.chance
    assert outcome.losses == train(lambda: layer(32, 2), TASK, settings).losses


@thorough
def test_the_command_writes_the_table(tmp_path: Path) -> None:
    spec = tmp_path / "mine.ttm"
    spec.write_text("layer Mine { dim d input q[d], k[d], v[d] memory S[d, d] bias -<S @ k, v> read S @ q }")
    path = tmp_path / "recall.md"
    options = ["--steps", "12", "--processes", "1", "--layer", "gla", "--layer", str(spec)]
    assert main([str(path), *options]) == 0
    table = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [line.split(" | ")[:3] for line in table] == [
        ["| `gla`", "additive", "12"],
        [f"| `{spec}`", "additive", "12"],
    ]


def test_the_table_in_docs_has_every_layer() -> None:
    text = DOC.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| \d+ \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert [name for name, *_ in rows] == ttmdsl.layers(), f"run {COMMAND}"
    assert all(float(loss) < 0.5 * float(chance) for *_, loss, chance in rows)
    described = document([], Task(), Settings()).split("\n| layer")[0]
    assert text.startswith(described), f"run {COMMAND}"
