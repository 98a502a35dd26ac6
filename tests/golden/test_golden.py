"""Results that a change of structure must not move: selections, attention, gradients and losses.

`record` says what is compared, and `write` how results are recorded that move on purpose.
"""

import numpy as np
import pytest

from tests.golden import cases, record

RECORDED = record.read()


def check(kind, name, found):
    moved = list(record.differences(RECORDED[kind][name], found, record.compares_bits(RECORDED)))
    if moved:
        pytest.fail("\n".join([f"{name}:", *moved, record.HOW]), pytrace=False)


@pytest.mark.parametrize("name", cases.ATTENTION)
def test_attention_has_the_recorded_bits(name):
    check("attention", name, record.attention_entry(name))


@pytest.mark.parametrize(
    "name", [x if x == "tiny" else pytest.param(x, marks=pytest.mark.slow) for x in cases.TRAINING]
)
def test_training_has_the_recorded_bits(name, tmp_path):
    check("training", name, record.training_entry(name, tmp_path))


def test_bits_are_those_of_this_environment():
    assert {kind: set(RECORDED[kind]) for kind in ("attention", "training")} == {
        "attention": set(cases.ATTENTION),
        "training": set(cases.TRAINING),
    }
    recorded, here = RECORDED["environment"], record.environment()
    assert here["inputs"] == recorded["inputs"], "NumPy draws other inputs; record bits.json again"
    if not record.compares_bits(RECORDED):
        pytest.skip(f"only samples are compared: bits are for {recorded}, here is {here}")


def test_a_failure_tells_last_bits_from_other_results():
    x = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
    last, other = x.copy(), x.copy()
    last[7, 3] = np.nextafter(last[7, 3], np.inf, dtype=np.float32)
    other[8:16] *= 1.001
    old = {"out": record._summary(x)}
    for y, words in ((last, "out moved in its last bits"), (other, "out is another result")):
        (sentence,) = record.differences(old, {"out": record._summary(y)}, bits=True)
        assert sentence.startswith(words)
    assert not list(record.differences(old, {"out": record._summary(last)}, bits=False))
    assert list(record.differences(old, {"out": record._summary(other)}, bits=False))
