"""Needle, passkey and recall tasks, and the helpers of all tasks."""

import hashlib

import numpy as np
import pytest

from mtraining_jax.tools.evaluate.tasks import make_tasks
from mtraining_jax.tools.evaluate.tasks.recall import mqar
from mtraining_jax.tools.evaluate.tasks.sized import largest_size
from mtraining_jax.tools.evaluate.tasks.task import continuation_ids
from mtraining_jax.utils.errors import UserError
from tests.tools.evaluate.contract import BYTES, TaskContract


def task(name, **options):
    (made,) = make_tasks([name], options)
    return made


def test_mqar_is_the_sequence_of_its_definition():
    tokens, labels = mqar(32, 2, 64, 7)
    expected = (
        "30 14 10 31 22 6 46 59 11 4 12 27 35 51 24 0 46 59 30 2 24 2 35 51 14 4 6 3 20 8 16 19"
    )
    assert tokens.tolist() == [int(x) for x in expected.split()]
    assert {i: x for i, x in enumerate(labels.tolist()) if x >= 0} == {16: 59, 22: 51}
    tokens, labels = mqar(4096, 64, 8192, 0)
    digest = [hashlib.sha256(x.astype("<i4").tobytes()).hexdigest()[:16] for x in (tokens, labels)]
    assert digest == ["8ea25c1aae4f8615", "fab9d2fbed301aa5"]


def test_a_sample_of_recall_asks_for_the_values():
    recall = task("mqar", pairs=4, vocab_size=64)
    sample = recall.sample(64, 0, 0, None)
    assert len(sample.prompt) == 32 and len(sample.answer) == 32
    asked = sample.answer_ids[list(sample.scored)]
    assert tuple(asked) == sample.references and len(asked) == 4
    keys = sample.answer_ids[np.array(sample.scored) - 1]
    after = dict(zip(sample.prompt, sample.prompt[1:], strict=False))
    assert [after[key] for key in keys.tolist()] == list(sample.references)
    found = np.ones(32, bool)
    assert recall.score_forced(sample, found) == 1
    found[sample.scored[0]] = False
    assert recall.score_forced(sample, found) == 0.75
    with pytest.raises(UserError, match="supports teacher forcing only"):
        recall.score(sample, "")


class TestNeedles(TaskContract):
    names = ("needle", "passkey")
    options = {"depths": 4}


class TestRecall(TaskContract):
    names = ("mqar",)
    length = 512


@pytest.mark.parametrize("name", ["needle", "passkey"])
def test_a_needle_lies_at_its_depth(name):
    finder = task(name, depths=5)
    for number, depth in enumerate((0, 1, 0.5, 0.25, 0.75)):
        sample = finder.sample(4096, number, 1, BYTES)
        assert sample.depth == depth and sample.number == number
        (value,) = sample.references
        assert sample.prompt.count(value) == (1 if name == "needle" else 2)
        place = sample.prompt.index(value) / len(sample.prompt)
        assert abs(place - depth) < 0.12
        assert finder.score(sample, f"I say {value}!") == 1
        assert finder.score(sample, value[:-1]) == 0


@pytest.mark.parametrize("depths", [1, 2, 3, 5, 10, 37])
def test_any_number_of_samples_covers_all_depths(depths):
    needle = task("needle", depths=depths)
    found = [needle.depth(number) for number in range(2 * depths)]
    even = np.linspace(0, 1, depths) if depths > 1 else [0.5]
    np.testing.assert_allclose(sorted(found[:depths]), even)
    assert found[depths:] == found[:depths]
    for samples in range(2, depths):
        gaps = np.diff(sorted(found[:samples]))
        assert sum(gaps) == pytest.approx(1)  # from the beginning to the end
        assert max(gaps) <= 3 * min(gaps) + 1e-6  # halves of the same gap, and rounding


def test_a_haystack_of_essays(tmp_path):
    (tmp_path / "one.txt").write_text("First  of\nall. Second\tthing!\n")
    (tmp_path / "two.txt").write_text("Third one?")
    sample = task("needle", essays=str(tmp_path)).sample(512, 0, 0, BYTES)
    assert "First of all. Second thing! Third one? First of all." in sample.prompt


@pytest.mark.parametrize(
    ("names", "options", "sentence"),
    [
        (["needel"], {}, 'unknown task "needel"; did you mean "needle"[?] Choose one of needle'),
        (["rulers"], {}, 'unknown task "rulers"; did you mean "ruler"[?] Choose one of needle'),
        (["mqar"], {"paris": 3}, 'unknown option "paris" of the tasks mqar; use pairs'),
        (["mqar"], {"pairs": "many"}, 'option pairs = "many" of task "mqar": Input should be a'),
        (["mqar"], {"pairs": 0}, 'task "mqar": pairs=0 must be an integer .at least 1.'),
        (["mqar"], {"vocab_size": 64}, "vocab_size=64 must be divisible by 4 and at least 128"),
        (["needle"], {"essays": "nowhere"}, 'essays: "nowhere" does not exist'),
    ],
)
def test_invalid_options_are_reported(names, options, sentence):
    with pytest.raises(UserError, match=sentence):
        make_tasks(names, options)


def test_options_apply_to_the_tasks_that_have_them():
    needle, recall = make_tasks(["needle", "mqar", "needle"], {"pairs": "5", "depths": 3})
    assert needle.depths == 3 and recall.pairs == 5


def test_largest_size_takes_few_calls():
    calls = []

    def count(size):
        calls.append(size)
        return 40 + 7 * size + size // 10

    size, found = largest_size(count, 1, 100_000)
    assert count(size) == found <= 100_000 and found > 99_950
    assert len(calls) < 10
    assert largest_size(count, 5, 60) == (4, 75)
    assert largest_size(count, 1, 10**6, largest=50)[0] == 50


def test_the_ids_of_an_answer_do_not_depend_on_a_long_prompt():
    prompt = "word " * 1000 + "is"
    whole = BYTES.encode(prompt + " yes")
    np.testing.assert_array_equal(continuation_ids(BYTES, prompt, " yes"), whole[len(prompt) :])
    with pytest.raises(UserError, match="no separate token ids"):
        continuation_ids(BYTES, prompt, "")
