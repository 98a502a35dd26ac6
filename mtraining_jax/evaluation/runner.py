"""Runs tasks on a model, sample by sample, through the `Model` interface."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.asking import Model, ask
from mtraining_jax.evaluation.results import Key, Line, Results
from mtraining_jax.evaluation.tasks import Document, Sample, Task
from mtraining_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to evaluate: tasks, each at every length of prompt and answer together.

    Attributes:
        samples: number of samples per task and length, limited by the data set.
        generate: generate answers even where teacher forcing is enough.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    samples: int
    seed: int = 0
    generate: bool = False

    def numbers(self, task: Task, length: int, tokenizer: Tokenizer | None) -> range:
        there = task.count(tokenizer, length)
        return range(self.samples if there is None else min(self.samples, there))

    def forces(self, task: Task) -> bool:
        """Whether a task is scored by teacher forcing; answers of token ids always are."""
        return task.teacher_forced and not (self.generate and task.needs_tokenizer)


class Watcher(Protocol):
    """Receives the progress of an evaluation."""

    def start(self, total: int, done: int) -> None:
        """Called once with the number of planned and of existing lines."""

    def at(self, model: str, task: Task, length: int) -> None:
        """Called when a task and length start."""

    def add(self, line: Line) -> None:
        """Called with each new line."""


def check_lengths(lengths: Sequence[int], max_positions: int, name: str) -> None:
    """Raises UserError for a length beyond the positions of the model `name`."""
    for length in lengths:
        if length > max_positions:
            raise UserError(
                f"length {length} is more than the {max_positions} positions of {name} "
                "(max_position_embeddings)"
            )


def check_vocabulary(tasks: Sequence[Task], vocab_size: int, name: str) -> None:
    """Raises UserError if the tasks have token ids that the model lacks."""
    for task in tasks:
        ids = getattr(task, "vocab_size", None)
        if ids is not None and ids > vocab_size:
            raise UserError(
                f'task "{task.name}" has {ids} token ids, but {name} has a vocabulary of only '
                f"{vocab_size}; --task.vocab_size must be at most {vocab_size}"
            )


def check(plan: Plan, model: Model, name: str) -> None:
    """Checks lengths and tokenizer of a plan before anything runs; `name` is for messages."""
    check_lengths(plan.lengths, model.max_positions, name)
    for task in plan.tasks:
        if task.needs_tokenizer and model.tokenizer is None:
            raise UserError(
                f'task "{task.name}" uses text, but {name} has no tokenizer; set --tokenizer to '
                "the path of a tokenizer.json, or to bytes"
            )


def evaluate(
    plan: Plan, models: Mapping[str, Model], label: str, results: Results, watcher: Watcher
) -> None:
    """Evaluates samples without a result, and appends a line for each.

    Samples are made once and given to all of `models`, so that their scores can be compared
    pairwise. These have the same parameters, by attention kind "dense" or "sparse".

    Raises:
        UserError: from a task or a model, or if existing lines have other prompts.
    """
    tokenizer = next(iter(models.values())).tokenizer
    questions = [
        _Question(
            task,
            length,
            number,
            [Key(label, attention, task.name, length, number) for attention in models],
        )
        for task in plan.tasks
        for length in plan.lengths
        for number in plan.numbers(task, length, tokenizer)
    ]
    wanted = [key for question in questions for key in question.keys]
    watcher.start(len(wanted), sum(key in results for key in wanted))
    at = None
    for question, sample in _samples(_to_ask(questions, results), plan.seed, tokenizer):
        if (question.task, question.length) != at:
            at = question.task, question.length
            watcher.at(label, *at)
        for key in question.keys:
            if key in results:
                _check_same_prompt(results[key], sample, results)
        forced = plan.forces(question.task)
        for key in question.keys:
            if key not in results:
                line = ask(key, question.task, sample, models[key.attention], forced=forced)
                results.add(line)
                watcher.add(line)


@dataclasses.dataclass(frozen=True)
class _Question:
    """A sample that is not yet made, and the keys of its lines."""

    task: Task
    length: int
    number: int
    keys: Sequence[Key]


def _to_ask(questions: Sequence[_Question], results: Results) -> list[_Question]:
    """Returns questions with a missing line, and one with a line per task and length.

    The prompt of the latter shows whether existing lines belong to the same data.
    """
    asked, compared = [], set()
    for question in questions:
        cell = question.task.name, question.length
        there = [key in results for key in question.keys]
        if not all(there) or cell not in compared:
            asked.append(question)
        if any(there):
            compared.add(cell)
    return asked


def _samples(
    questions: Sequence[_Question], seed: int, tokenizer: Tokenizer | None
) -> Iterator[tuple[_Question, Sample | Document]]:
    """Makes each sample while the model reads the previous one."""

    def make(question: _Question) -> Sample | Document:
        return question.task.sample(question.length, question.number, seed, tokenizer)

    with ThreadPoolExecutor(1, "prompts") as maker:
        following = None
        for i, question in enumerate(questions):
            sample = make(question) if following is None else following.result()
            following = maker.submit(make, questions[i + 1]) if i + 1 < len(questions) else None
            yield question, sample


def _check_same_prompt(line: Line, sample: Sample | Document, results: Results) -> None:
    if line["prompt_hash"] != sample.prompt_hash:
        raise UserError(
            f'{results.folder}: sample {sample.number} of task "{sample.task}" at length '
            f"{sample.length} had another prompt, so data, tokenizer or options have changed; use "
            "another --output"
        )
