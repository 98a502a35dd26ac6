"""Runs tasks on a model, sample by sample. Models are known by an interface only."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.errors import UserError
from mtraining_jax.evaluation.decode.sampling import GenerateOptions
from mtraining_jax.evaluation.results import Key, Line, Results
from mtraining_jax.evaluation.tasks import Document, Sample, Task
from mtraining_jax.models.position_buckets import means_by_bucket

# The index of sparse attention is chosen by the last queries; their loss is reported by itself.
LAST_TOKENS = 64


class Forced(Protocol):
    """What an engine says about a given answer.

    Attributes:
        log_probs: fp32 [n], natural logarithm of the probability of each token.
        is_argmax: bool [n], whether it is the most likely one.
        density: computed over causal pairs in that pass, mean over layers; None if not known.
    """

    log_probs: np.ndarray
    is_argmax: np.ndarray
    density: float | None


class Generated(Protocol):
    """What an engine generates.

    Attributes:
        text: without the prompt.
        prefill_seconds, decode_seconds: wall-clock times.
        density: as of `Forced`, of the pass over the prompt.
    """

    text: str
    prefill_seconds: float
    decode_seconds: float
    density: float | None


class Model(Protocol):
    """What tasks run on: an `Engine`, or anything like it.

    Attributes:
        tokenizer: None where a model has none.
        max_positions: tokens of context that it is meant for.
    """

    tokenizer: Tokenizer | None
    max_positions: int

    def token_losses(self, tokens: np.ndarray) -> np.ndarray:
        """int32 [S] -> fp32 [S - 1], -log p of each token but the first."""

    def forced(self, prompt_ids: np.ndarray, answer_ids: np.ndarray) -> Forced:
        """How likely an answer is, in one forward pass."""

    def generate(self, prompt_ids: np.ndarray, options: GenerateOptions) -> Generated:
        """New tokens, one after the other."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to evaluate.

    Attributes:
        tasks: each on every length.
        lengths: tokens of prompt and answer together.
        samples: of each task and length; fewer where a data set has fewer.
        seed: of all that is random in the samples.
        generate: decode answers also where teacher forcing decides as well.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    samples: int
    seed: int = 0
    generate: bool = False

    def numbers(self, task: Task, length: int, tokenizer: Tokenizer | None) -> range:
        """The samples of a task and length."""
        there = task.count(tokenizer, length)
        return range(self.samples if there is None else min(self.samples, there))

    def forces(self, task: Task) -> bool:
        """Whether a task is scored by teacher forcing; answers of token ids always are."""
        return task.teacher_forced and not (self.generate and task.needs_tokenizer)


class Watcher(Protocol):
    """Is told how an evaluation goes on."""

    def start(self, total: int, done: int) -> None:
        """Called once: how many lines there will be, and how many there are already."""

    def at(self, model: str, task: Task, length: int) -> None:
        """Called when a task and length begin."""

    def add(self, line: Line) -> None:
        """Called with each new line."""


def check_lengths(lengths: Sequence[int], max_positions: int, name: str) -> None:
    """Raises UserError for a length beyond the positions of the model called `name`."""
    for length in lengths:
        if length > max_positions:
            raise UserError(
                f"length {length} is more than the {max_positions} positions of {name} "
                "(max_position_embeddings)"
            )


def check(plan: Plan, model: Model, name: str) -> None:
    """Finds what cannot be evaluated, before anything runs.

    Args:
        plan: what to evaluate.
        model: on which.
        name: of it, for messages.

    Raises:
        UserError: a length beyond the model's positions, a task of text for a model without a
            tokenizer, or a plan without lengths or samples.
    """
    check_lengths(plan.lengths, model.max_positions, name)
    for task in plan.tasks:
        if task.needs_tokenizer and model.tokenizer is None:
            raise UserError(
                f'task "{task.name}" is text, and {name} has no tokenizer: give --tokenizer, the '
                "path of a tokenizer.json or bytes"
            )


def evaluate(
    plan: Plan, models: Mapping[str, Model], label: str, results: Results, watcher: Watcher
) -> None:
    """Evaluates what has no line yet, and appends a line for each sample.

    Samples are made once and given to all of `models`, so that their scores can be compared pair
    by pair.

    Args:
        plan: what to evaluate; checked.
        models: the same parameters by the attention they run with, "dense" or "sparse".
        label: what results call these parameters.
        results: where lines go.
        watcher: is told of progress.

    Raises:
        UserError: from a task or a model, or if lines that are there have other prompts.
    """
    tokenizer = next(iter(models.values())).tokenizer
    cells = [(task, length) for task in plan.tasks for length in plan.lengths]

    def keys(task: Task, length: int, number: int) -> list[Key]:
        return [Key(label, attention, task.name, length, number) for attention in models]

    wanted = [
        key
        for task, length in cells
        for number in plan.numbers(task, length, tokenizer)
        for key in keys(task, length, number)
    ]
    watcher.start(len(wanted), sum(key in results for key in wanted))
    for task, length in cells:
        watcher.at(label, task, length)
        compared = False
        for number in plan.numbers(task, length, tokenizer):
            there = [key for key in keys(task, length, number) if key in results]
            if len(there) == len(models) and compared:
                continue
            sample = task.sample(length, number, plan.seed, tokenizer)
            for key in there:
                _check_same_prompt(results[key], sample, results)
                compared = True
            for key in keys(task, length, number):
                if key not in results:
                    line = _line(key, task, sample, models[key.attention], plan)
                    results.add(line)
                    watcher.add(line)


def _check_same_prompt(line: Line, sample: Sample | Document, results: Results) -> None:
    if line["prompt_hash"] != sample.prompt_hash:
        raise UserError(
            f'{results.folder}: sample {sample.number} of task "{sample.task}" at length '
            f"{sample.length} had another prompt (data, tokenizer or options have changed): give "
            "another --output"
        )


def _line(
    key: Key, task: Task, sample: Sample | Document, model: Model, plan: Plan
) -> Line:
    """Asks the model, and says what it answered."""
    begin = time.perf_counter()
    line: Line = {**key._asdict(), "prompt_hash": sample.prompt_hash}
    if isinstance(sample, Document):
        line |= _loss(sample, model)
    elif plan.forces(task) and sample.answer_ids is not None:
        line |= _forced(task, sample, model)
    else:
        line |= _generated(task, sample, model)
    return line | {"seconds": round(time.perf_counter() - begin, 4)}


def _loss(document: Document, model: Model) -> Line:
    losses = model.token_losses(document.ids)
    _check_finite(losses, document)
    means, counts = means_by_bucket(losses)
    return {
        "how": "loss",
        "document": document.name,
        "prompt_tokens": len(document.ids),
        "loss": float(losses.mean(dtype=np.float64)),
        "loss_by_position": means,
        "tokens_by_position": counts,
        "loss_of_last": float(losses[-LAST_TOKENS:].mean(dtype=np.float64)),
    }


def _about(sample: Sample) -> Line:
    return {
        "depth": sample.depth,
        "prompt_tokens": len(sample.prompt_ids),
        "cut_tokens": sample.cut_tokens,
        "references": list(sample.references),
    }


def _forced(task: Task, sample: Sample, model: Model) -> Line:
    found = model.forced(sample.prompt_ids, sample.answer_ids)
    log_probs = np.asarray(found.log_probs, np.float64)
    _check_finite(log_probs, sample)
    is_argmax = np.asarray(found.is_argmax, bool)
    asked = slice(None) if sample.scored is None else list(sample.scored)
    return {
        "how": "forced",
        **_about(sample),
        "score": task.score_forced(sample, is_argmax),
        # Of the tokens that are asked for.
        "log_prob": float(log_probs[asked].sum()),
        "answer_tokens": len(log_probs[asked]),
        "right_tokens": int(is_argmax[asked].sum()),
        "density": found.density,
    }


def _generated(task: Task, sample: Sample, model: Model) -> Line:
    options = GenerateOptions(max_new_tokens=sample.max_new_tokens, stop=sample.stop)
    found = model.generate(sample.prompt_ids, options)
    return {
        "how": "generated",
        **_about(sample),
        "answer": found.text,
        "score": task.score(sample, found.text),
        "density": found.density,
        "prefill_seconds": round(found.prefill_seconds, 4),
        "decode_seconds": round(found.decode_seconds, 4),
    }


def _check_finite(numbers: np.ndarray, sample: Sample | Document) -> None:
    if not np.all(np.isfinite(numbers)):
        raise UserError(
            f'the model gives a loss that is not finite on sample {sample.number} of task '
            f'"{sample.task}" at length {sample.length}'
        )


