"""Runs tasks on a model, sample by sample, through the `Model` interface."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.models.label_scores import means_by_bucket
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.model import Model
from mtraining_jax.tools.evaluate.progress import Watch
from mtraining_jax.tools.evaluate.results import Key, Line, Results
from mtraining_jax.tools.evaluate.tasks import Document, Sample, Task
from mtraining_jax.utils.errors import UserError

# Sparse patterns select from the last queries, so the loss of these is also reported separately.
LAST_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to evaluate: tasks, each at every length of prompt and answer together."""

    tasks: Sequence[Task]
    lengths: Sequence[int]
    samples: int  # per task and length, limited by the data set
    seed: int = 0
    generate: bool = False  # answers even where teacher forcing is enough
    # Names of tasks that are skipped at lengths that are too short for them, as in a group.
    optional: Collection[str] = ()
    skipped: Mapping[tuple[str, int], str] = dataclasses.field(default_factory=dict)

    def samples_of(self, task: Task, length: int, tokenizer: Tokenizer | None) -> int:
        """The number of samples of a task and length."""
        if (task.name, length) in self.skipped:
            return 0
        return min(self.samples, task.count(tokenizer, length))


def check_lengths(lengths: Sequence[int], max_positions: int, name: str) -> None:
    """Raises UserError for a length beyond the positions of the model `name`."""
    if max(lengths) > max_positions:
        raise UserError(
            f"length {max(lengths)} is more than the {max_positions} positions of {name} "
            "(max_position_embeddings)"
        )


def check(plan: Plan, model: Model, name: str) -> Plan:
    """Checks that a plan fits a model before anything runs; `name` is for messages.

    Returns the plan with reasons for the tasks and lengths to skip (`Plan.skipped`). Raises
    UserError if anything else does not fit, or nothing remains.
    """
    check_lengths(plan.lengths, model.max_positions, name)
    for task in plan.tasks:
        if task.needs_tokenizer and model.tokenizer is None:
            raise UserError(
                f'task "{task.name}" uses text, but {name} has no tokenizer; set --tokenizer to '
                "the path of a tokenizer.json, or to bytes"
            )
        ids = getattr(task, "vocab_size", 0)
        if ids > model.vocab_size:
            raise UserError(
                f'task "{task.name}" has {ids} token ids, but {name} has a vocabulary of only '
                f"{model.vocab_size}; --task.vocab_size must be at most {model.vocab_size}"
            )
    skipped: dict[tuple[str, int], str] = {}
    for task, length in itertools.product(plan.tasks, plan.lengths):
        try:
            samples = plan.samples_of(task, length, model.tokenizer)
            task.check_length(length, samples, plan.seed, model.tokenizer)
        except UserError as error:
            everything = len(skipped) + 1 == len(plan.tasks) * len(plan.lengths)
            if task.name not in plan.optional or everything:
                raise
            skipped[task.name, length] = str(error)
    return dataclasses.replace(plan, skipped=skipped)


class _Question(NamedTuple):
    """A sample that is not yet made, and the keys of its lines."""

    task: Task
    length: int
    number: int
    keys: Sequence[Key]


def evaluate(
    plan: Plan,
    models: Mapping[str, Model],
    label: str,
    results: Results,
    watch: Watch,
    after_task: Callable[[], None] = lambda: None,
) -> None:
    """Evaluates samples without a result, and appends a line for each.

    Samples are made once and given to all of `models`, by attention kind, so that their scores
    can be compared pairwise. `label` is that of the models in the results. `after_task` is called
    when all samples of a task have results. Raises UserError from a task or a model, or if existing
    lines have other prompts.
    """
    tokenizer = next(iter(models.values())).tokenizer
    questions = [
        _Question(task, length, number, [Key(label, x, task.name, length, number) for x in models])
        for task in plan.tasks
        for length in plan.lengths
        for number in range(plan.samples_of(task, length, tokenizer))
    ]
    keys = [key for question in questions for key in question.keys]
    where = f"{results.folder}, last evaluated {results.last_date or 'at an unknown date'}"
    watch.start(len(keys), sum(key in results for key in keys), where)
    task = None
    for question, sample in _samples(_to_ask(questions, results), plan.seed, tokenizer):
        if task is not None and question.task is not task:
            after_task()
        task = question.task
        _check_ids(sample, next(iter(models.values())))
        watch.at(f"{task.name}, {question.length} tokens")
        for key in question.keys:
            # The text may be the same, and the beginning-of-sequence token new.
            same = {"prompt_hash": sample.prompt_hash, "prompt_tokens": len(_ids(sample))}
            if key in results and not same.items() <= results[key].items():
                raise UserError(
                    f'{results.folder}: sample {key.number} of task "{key.task}" at length '
                    f"{key.length} had another prompt, so data, tokenizer or options have "
                    "changed; use another --output"
                )
        # Answers of token ids are never generated.
        forced = task.teacher_forced and not (plan.generate and task.needs_tokenizer)
        for key in question.keys:
            if key not in results:
                begin = time.perf_counter()
                line: Line = {**key._asdict(), "prompt_hash": sample.prompt_hash}
                line |= _answer(task, sample, models[key.attention], forced)
                line["seconds"] = round(time.perf_counter() - begin, 4)
                results.add(line)
                watch.add(line)


def _to_ask(questions: Sequence[_Question], results: Results) -> Iterator[_Question]:
    """Yields questions with a missing line, and one per task and length to compare prompts."""
    compared = set()
    for question in questions:
        cell = question.task.name, question.length
        there = [key in results for key in question.keys]
        if not all(there) or cell not in compared:
            yield question
        if any(there):
            compared.add(cell)


def _samples(
    questions: Iterable[_Question], seed: int, tokenizer: Tokenizer | None
) -> Iterator[tuple[_Question, Sample | Document]]:
    """Makes each sample while the model reads the previous one."""
    with ThreadPoolExecutor(1, "prompts") as maker:
        submitted = (
            (x, maker.submit(x.task.sample, x.length, x.number, seed, tokenizer)) for x in questions
        )
        # In pairs, so that the next sample is submitted before this one is yielded.
        ahead: Iterator[Any] = itertools.chain(submitted, [(None, None)])
        for (question, sample), _ in itertools.pairwise(ahead):
            yield question, sample.result()


def _answer(task: Task, sample: Sample | Document, model: Model, forced: bool) -> Line:
    """Asks a model one question; returns the fields of a line with its answer."""
    if isinstance(sample, Document):
        losses, density = model.losses_and_density(sample.ids)
        _check_finite(losses, sample)
        means, counts = means_by_bucket(losses)
        return {
            "how": "loss",
            "document": sample.name,
            "prompt_tokens": len(sample.ids),
            "loss": float(losses.mean(dtype=np.float64)),
            "loss_by_position": means,
            "tokens_by_position": counts,
            "loss_of_last": float(losses[-LAST_TOKENS:].mean(dtype=np.float64)),
            "density": density,
        }
    about = {
        "depth": sample.depth,
        "prompt_tokens": len(sample.prompt_ids),
        "cut_tokens": sample.cut_tokens,
        "references": list(sample.references),
    }
    if forced and sample.answer_ids is not None:
        found = model.forced(sample.prompt_ids, sample.answer_ids)
        log_probs = np.asarray(found.log_probs, np.float64)
        _check_finite(log_probs, sample)
        is_argmax = np.asarray(found.is_argmax, bool)
        asked = slice(None) if sample.scored is None else list(sample.scored)
        return {
            "how": "forced",
            **about,
            "score": task.score_forced(sample, is_argmax),
            # Only over the tokens that are asked for.
            "log_prob": float(log_probs[asked].sum()),
            "answer_tokens": len(log_probs[asked]),
            "right_tokens": int(is_argmax[asked].sum()),
            "density": found.density,
        }
    options = GenerateOptions(sample.max_new_tokens, stop=sample.stop)
    generated = model.generate(sample.prompt_ids, options)
    return {
        "how": "generated",
        **about,
        "answer": generated.text,
        "score": task.score(sample, generated.text),
        "density": generated.density,
        "prefill_seconds": round(generated.prefill_seconds, 4),
        "decode_seconds": round(generated.decode_seconds, 4),
    }


def _ids(sample: Sample | Document) -> np.ndarray:
    return sample.ids if isinstance(sample, Document) else sample.prompt_ids


def _check_ids(sample: Sample | Document, model: Model) -> None:
    """Rejects ids that only the tokenizer has."""
    ids = _ids(sample)
    if ids.max() >= model.vocab_size:
        raise UserError(
            f'sample {sample.number} of task "{sample.task}" at length {sample.length} has token '
            f"id {ids.max()}, but the model has only ids from 0 to {model.vocab_size - 1}"
        )


def _check_finite(numbers: np.ndarray, sample: Sample | Document) -> None:
    if not np.all(np.isfinite(numbers)):
        raise UserError(
            f'the model has a non-finite loss on sample {sample.number} of task "{sample.task}" at '
            f"length {sample.length}"
        )
