"""What a run says when it resumes with other options."""

import json
from pathlib import Path

import pytest

from mtraining_jax.training.loop.saving import resume_notes
from tests.training.common import changed, tiny_config


def notes(before, now, step):
    saved = json.loads(json.dumps(before.to_dict()))
    return list(resume_notes(Path("checkpoint"), saved, now, step))


@pytest.fixture
def cosine(tmp_path):
    optimizer = {"lr": 1e-2, "schedule": "cosine", "final_lr_ratio": 0.1, "warmup_steps": 1}
    return tiny_config(tmp_path, optimizer=optimizer, run={"steps": 4})


def test_nothing_is_said_without_changes(cosine):
    assert notes(cosine, cosine, 2) == []
    # The schedule already ended, or does not depend on the length.
    kept = changed(cosine, optimizer={"decay_steps": 3})
    assert notes(kept, changed(kept, run={"steps": 8}), 4) == []
    constant = changed(cosine, optimizer={"schedule": "constant"})
    assert notes(constant, changed(constant, run={"steps": 8}), 4) == []


def test_an_extended_run_says_that_its_learning_rate_rises(cosine):
    """Rates after warm-up: 1e-2 (0.1 + 0.9 (1 + cos(pi (t - 1) / (n - 1))) / 2)."""
    longer = changed(cosine, run={"steps": 8})
    text = (
        "note: the learning rate was 3.25e-03 in step 4 and is 6.50e-03 in step 5, where the "
        "schedule of the checkpoint has 1.00e-03"
    )
    assert notes(cosine, longer, 4) == [f"{text}; optimizer.decay_steps=4 keeps that"]
    # What it names continues without a jump.
    said = notes(cosine, changed(longer, optimizer={"decay_steps": 4}), 4)
    assert said[1:] == ["  optimizer.decay_steps = 4, was none"]
    to_zero = changed(cosine, optimizer={"final_lr_ratio": 0.0})
    (said,) = notes(to_zero, changed(to_zero, run={"steps": 8}), 4)
    assert said.endswith("has 0.00e+00; optimizer.lr and optimizer.schedule set a lower one")
    (said,) = notes(cosine, longer, 2)  # before its end
    assert "was 1.00e-02 in step 2 and is 9.55e-03 in step 3" in said
    assert said.endswith("the checkpoint has 7.75e-03")


def test_changed_options_and_a_repeated_cooldown_are_named(cosine):
    sparse = changed(cosine, sparsity={"dense_cooldown_steps": 1}, optimizer={"decay_steps": 4})
    others = {"clip_norm": 0.5, "warmup_steps": 3}
    found = notes(sparse, changed(sparse, run={"steps": 8, "seed": 1}, optimizer=others), 4)
    assert found == [
        "options that differ from those of the checkpoint:",
        "  run.seed = 1, was 0",
        "  optimizer.clip_norm = 0.5, was 1.0",
        "  optimizer.warmup_steps = 3, was 1",
        "note: the steps of the dense cooldown (sparsity.dense_cooldown_steps = 1) are again the "
        "last ones, from step 8 on",
    ]
    assert notes(sparse, changed(sparse, run={"steps": 8}), 3) == []
    # A higher rate than planned, within the warm-up.
    (*_, said) = notes(cosine, changed(cosine, optimizer={"lr": 2e-2}), 1)
    assert said.startswith("note: the learning rate was 1.00e-02 in step 1 and is 2.00e-02 in ")
