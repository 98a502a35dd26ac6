"""Requirements for every task with generated samples: derive from `TaskContract`."""

import dataclasses

import numpy as np
import pytest

from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.tools.evaluate.tasks import Sample, Task, make_tasks, option_docs
from mtraining_jax.utils.errors import UserError

BYTES = ByteTokenizer()


class TaskContract:
    """Set `names` (from `TASKS` or `GROUPS`) and override other attributes where needed.

    Attributes:
        names: the tasks.
        options: options of all tasks.
        length: a length that all tasks support.
        least_used: minimum fraction of the length that a sample uses.
    """

    names: tuple[str, ...]
    options: dict[str, object] = {}
    length = 8192
    least_used = 0.9

    def tasks(self) -> list[Task]:
        return make_tasks(self.names, self.options)

    def sample(self, task: Task, number: int = 1, seed: int = 7) -> Sample:
        return task.sample(self.length, number, seed, BYTES if task.needs_tokenizer else None)

    def test_a_sample_fits(self):
        for task in self.tasks():
            sample = self.sample(task)
            used = len(sample.prompt_ids) + sample.max_new_tokens
            assert self.least_used * self.length < used <= self.length, task.name
            assert sample.task == task.name and sample.number == 1
            assert sample.length == self.length and not sample.cut_tokens
            assert sample.prompt_ids.dtype == np.int32
            if task.needs_tokenizer:
                assert bytes(sample.prompt_ids.astype(np.uint8)).decode() == sample.prompt

    def test_a_sample_is_always_the_same_and_like_no_other(self):
        for task in self.tasks():
            sample = self.sample(task)
            again = self.sample(dataclasses.replace(task))
            assert again == sample and again.prompt_hash == sample.prompt_hash
            hashes = {
                self.sample(task, number, seed).prompt_hash
                for number, seed in ((1, 7), (2, 7), (1, 8), (11, 7))
            }
            assert len(hashes) == 4, task.name

    def test_right_answers_score_1_and_wrong_ones_0(self):
        for task in self.tasks():
            sample = self.sample(task)
            assert bool(sample.answer) == task.teacher_forced
            if task.teacher_forced:
                size = len(sample.answer_ids)
                assert size <= sample.max_new_tokens
                right = np.zeros(size, bool)
                right[list(sample.scored or range(size))] = True
                assert task.score_forced(sample, right) == 1
                right[(sample.scored or range(size))[-1]] = False
                assert task.score_forced(sample, right) < 1
                assert task.score_forced(sample, np.zeros(size, bool)) == 0
            if task.needs_tokenizer:
                assert task.score(sample, f" {', '.join(sample.references)}.") == 1
                assert task.score(sample, "") == task.score(sample, "nothing") == 0

    def test_forced_tokens_are_the_answer(self):
        for task in self.tasks():
            sample = self.sample(task)
            if task.teacher_forced and task.needs_tokenizer:
                ids = sample.answer_ids[list(sample.scored or range(len(sample.answer_ids)))]
                assert bytes(ids.astype(np.uint8)).decode().strip() == sample.references[0]
                assert bytes(sample.answer_ids.astype(np.uint8)).decode() == sample.answer

    def test_a_length_that_is_too_short_is_reported(self):
        for task in self.tasks():
            with pytest.raises(UserError, match=f'length 100 is too short for task "{task.name}"'):
                task.sample(100, 0, 0, BYTES if task.needs_tokenizer else None)

    def test_every_option_is_described(self):
        for task in self.tasks():
            assert all(text.lstrip("( ")[:1].isupper() for text in option_docs(type(task)).values())
