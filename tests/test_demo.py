"""The demonstration: its parts, and a quick run of the whole."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ttmdsl
from ttmdsl.demo import text
from ttmdsl.demo.model import ByteModel
from ttmdsl.demo.train import Settings, evaluate, seconds_per_step, train

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


def test_training_is_deterministic_and_looks_at_the_end() -> None:
    corpus = text.Text(torch.arange(256).repeat(4), torch.arange(100))
    curves = [train(small_model("linear_attention"), corpus, SMALL) for _ in range(2)]
    assert curves[0].train == curves[1].train
    assert [step for step, _ in curves[0].heldout] == [2, 3]
    assert curves[0].final == curves[0].heldout[-1][1]
    assert curves[0].tokens == 3 * 2 * 16
    assert curves[0].speed > 0


def test_evaluation_covers_every_window() -> None:
    model = small_model("linear_attention")
    with torch.no_grad():
        model.head.weight.zero_()  # every byte as likely as any other
    assert evaluate(model, torch.arange(100), SMALL) == pytest.approx(8.0)


def test_timing_leaves_the_model_alone() -> None:
    model = small_model("linear_attention")
    before = [parameter.clone() for parameter in model.parameters()]
    assert seconds_per_step(model, text.load(), SMALL) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


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


def test_a_model_that_has_learned_nothing_is_a_failure(tmp_path: Path) -> None:
    done = demo("--quick", "--steps", 1, "--out", tmp_path)
    assert done.returncode == 1
    assert "not clearly better than the bigram model" in done.stdout
