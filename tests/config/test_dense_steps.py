"""Dense steps of a sparse run."""

import itertools

import pytest

from mtraining_jax.config import Config
from mtraining_jax.config.schema import DenseSteps
from tests.training.common import changed, tiny_config


def test_warm_up_cooldown_and_every_nth_step():
    assert [step for step in range(1, 21) if step in DenseSteps(20, 2, 3, 5)] == [
        1,
        2,
        5,
        10,
        15,
        18,
        19,
        20,
    ]
    assert not any(step in DenseSteps(20) for step in range(1, 21))
    assert all(step in DenseSteps(20, every=1) for step in range(1, 21))


@pytest.mark.parametrize("total", [1, 7, 12])
def test_count_matches_membership(total):
    for first, last, every in itertools.product(range(4), range(4), range(5)):
        if first + last > total:
            continue
        steps = DenseSteps(total, first, last, every)
        for after in range(total + 1):
            found = sum(step in steps for step in range(after + 1, total + 1))
            assert steps.count(after) == found, (steps, after)
    # Without iterating over all steps.
    assert DenseSteps(2**62, every=2**32).count() == 2**30


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (DenseSteps(9), "none: 0 of 9 steps"),
        (DenseSteps(9, first=1), "the first: 1 of 9 steps"),
        (DenseSteps(9, last=4), "the last 4: 4 of 9 steps"),
        (DenseSteps(100, 5, 10, 20), "the first 5, the last 10 and one in 20: 19 of 100 steps"),
    ],
)
def test_description(steps, text):
    assert steps.describe() == text


def test_dense_steps_of_a_configuration(tmp_path):
    fields = {"dense_warmup_steps": 1, "dense_cooldown_steps": 2, "dense_interval": 3}
    config = changed(tiny_config(tmp_path), run={"steps": 9}, sparsity=fields)
    assert Config.from_dict(config.to_dict(), "a test").dense_steps == DenseSteps(9, 1, 2, 3)
    # A dense run has no dense steps in this sense.
    assert changed(config, sparsity={"kind": "dense"}).dense_steps.count() == 0
