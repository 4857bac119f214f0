"""The demonstration: its parts, and a quick run of the whole."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiers import thorough

import ttmdsl
from ttmdsl.demo import text
from ttmdsl.demo.model import ByteModel
from ttmdsl.demo.train import Curve, Settings, evaluate, train

SMALL = Settings(steps=3, batch=2, length=16, hidden=16, heads=2, blocks=2, every=2)


def small_model(name: str) -> ByteModel:
    torch.manual_seed(0)
    return ByteModel(ttmdsl.load(name), hidden=SMALL.hidden, heads=SMALL.heads, blocks=SMALL.blocks)


def test_text_is_english_and_held_out_at_its_end() -> None:
    corpus = text.load()
    assert len(corpus.heldout) / (len(corpus.train) + len(corpus.heldout)) == pytest.approx(0.1, abs=1e-4)
    assert " the " in text.decode(corpus.heldout.tolist())


def test_bigram_bits() -> None:
    """Two bytes in turn are certain; a byte that never came costs log2 of what smoothing leaves."""
    turns = torch.tensor([65, 66] * 5000)
    assert text.bigram_bits(text.Text(turns, turns[:100])) < 0.01
    unseen = torch.tensor([65, 67])
    seen = 4999 + 1  # pairs that begin with 65
    expected = math.log2((seen + 0.1 * 256) / 0.1)
    assert text.bigram_bits(text.Text(turns, unseen)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["linear_attention", "gated_delta_net", "lattice_dec"])
def test_step_continues_what_forward_computes(name: str) -> None:
    model = small_model(name).double()
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    whole, past = model(tokens), None
    for t in range(tokens.shape[1]):
        logits, past = model.step(tokens[:, t], past)
        torch.testing.assert_close(logits, whole[:, t])


def trained(settings: Settings) -> dict[str, Curve]:
    corpus = text.Text(torch.arange(256).repeat(4), torch.arange(100))
    return train({name: small_model(name) for name in ("linear_attention", "delta_net")}, corpus, settings)


def test_training_is_deterministic_and_looks_at_the_end() -> None:
    first, second = trained(SMALL), trained(SMALL)
    for name, curve in first.items():
        assert curve.train == second[name].train
        assert [step for step, _ in curve.heldout] == [2, 3]
        assert curve.final == curve.heldout[-1][1]
        assert curve.tokens == 3 * 2 * 16
        assert curve.speed > 0


def test_training_stops_with_the_budget_for_all_alike() -> None:
    curves = trained(replace(SMALL, steps=10**6, budget=1.0))
    steps = {len(curve.train) for curve in curves.values()}
    assert len(steps) == 1
    assert steps.pop() < 10**6
    assert all(curve.heldout[-1][0] == len(curve.train) for curve in curves.values())


def test_evaluation_covers_every_window() -> None:
    model = small_model("linear_attention")
    with torch.no_grad():
        model.head.weight.zero_()  # every byte as likely as any other
    assert evaluate(model, torch.arange(100), SMALL) == pytest.approx(8.0)


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ttmdsl.demo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False)


def test_the_whole_of_it(tmp_path: Path) -> None:
    done = demo("--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(projection onto the orthogonal complement of s, divided by |s|)" in done.stdout
    assert done.stdout.count("comparisons hold") == 3
    assert "triton float32" in done.stdout
    assert "bigram model" in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@thorough
def test_a_model_that_has_learned_nothing_is_a_failure(tmp_path: Path) -> None:
    done = demo("--quick", "--steps", 1, "--out", tmp_path)
    assert done.returncode == 1
    assert "not clearly better than the bigram model" in done.stdout
