"""Does the training example run, and compare what it says it compares?"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny.py"
# On a GPU the two operations round differently, and three steps are too few for it to grow. On the CPU they are the same one, and
# what differs is the order in which PyTorch's threads add.
TOLERANCE = 2e-2 if torch.cuda.is_available() else 1e-4


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_three_steps_of_both_trainings_give_the_same_losses_and_a_plot(example, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = {}
    draw = example.draw
    monkeypatch.setattr(example, "draw", lambda curves, out: drawn.update(curves) or draw(curves, out))
    out = tmp_path / "curves.png"
    example.main(["--steps", "3", "--batch", "1", "--out", str(out)])
    ours, theirs = drawn.values()
    assert len(ours) == len(theirs) == 3
    assert ours == pytest.approx(theirs, rel=0, abs=TOLERANCE)
    assert ours[0] == pytest.approx(math.log(2 * example.PAIRS), abs=1.0)            # before anything was learnt
    assert out.stat().st_size > 1000
    said = capsys.readouterr().out
    assert "largest difference of the losses" in said
    assert ("tell nothing of the kernels" in said) is not torch.cuda.is_available()


def test_what_is_asked_is_told_before(example):
    batch = example.recall_batch(2, torch.Generator().manual_seed(0))
    assert batch.shape == (2, 2 * example.PAIRS * example.ROUNDS)
    for tokens in batch.view(2, example.ROUNDS, example.PAIRS, 2).tolist():
        told, *asked = (dict(pairs) for pairs in tokens)
        assert sorted(told) == list(range(example.PAIRS))
        assert all(answers == told for answers in asked)
