"""Asks a model one question through the `Model` interface, and builds the line of results."""

import time
from typing import Protocol

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.decode.options import GenerateOptions
from mtraining_jax.evaluation.results import Key, Line
from mtraining_jax.evaluation.tasks import Document, Sample, Task
from mtraining_jax.models.position_buckets import means_by_bucket
from mtraining_jax.utils.errors import UserError

# Sparse patterns select from the last queries, so the loss of these is also reported separately.
LAST_TOKENS = 64


class Forced(Protocol):
    """How likely a model finds a given answer of n tokens."""

    @property
    def log_probs(self) -> np.ndarray:
        """Natural log probability of each token, fp32 [n]."""
        ...

    @property
    def is_argmax(self) -> np.ndarray:
        """Whether it is the most likely one, bool [n]."""
        ...

    @property
    def density(self) -> float | None:
        """Computed over causal pairs of the pass, mean over layers; None if unknown."""
        ...


class Generated(Protocol):
    """A generated answer: its text without the prompt, wall-clock times, the prompt's density."""

    @property
    def text(self) -> str: ...
    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...
    @property
    def density(self) -> float | None: ...


class Model(Protocol):
    """The interface of a model under evaluation; `Engine` implements it."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def max_positions(self) -> int:
        """Maximum context length in tokens."""
        ...

    def token_losses(self, tokens: np.ndarray) -> np.ndarray:
        """int32 [S] -> fp32 [S - 1], -log p of each token except the first."""
        ...

    def forced(self, prompt_ids: np.ndarray, answer_ids: np.ndarray) -> Forced:
        """Scores an answer in one forward pass."""
        ...

    def generate(self, prompt_ids: np.ndarray, options: GenerateOptions) -> Generated:
        """Generates new tokens one by one."""
        ...


def ask(key: Key, task: Task, sample: Sample | Document, model: Model, *, forced: bool) -> Line:
    """Asks a model one question, and returns the scored line, JSON-serializable.

    Args:
        forced: score the right answer by teacher forcing if the sample has one; else generate.

    Raises:
        UserError: from the model or the task, or if a loss is not finite.
    """
    begin = time.perf_counter()
    line: Line = {**key._asdict(), "prompt_hash": sample.prompt_hash}
    if isinstance(sample, Document):
        line |= _loss(sample, model)
    elif forced and sample.answer_ids is not None:
        line |= _forced(task, sample, sample.answer_ids, model)
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


def _forced(task: Task, sample: Sample, answer_ids: np.ndarray, model: Model) -> Line:
    found = model.forced(sample.prompt_ids, answer_ids)
    log_probs = np.asarray(found.log_probs, np.float64)
    _check_finite(log_probs, sample)
    is_argmax = np.asarray(found.is_argmax, bool)
    asked = slice(None) if sample.scored is None else list(sample.scored)
    return {
        "how": "forced",
        **_about(sample),
        "score": task.score_forced(sample, is_argmax),
        # Only over the tokens that are asked for.
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
            f'the model has a non-finite loss on sample {sample.number} of task "{sample.task}" at '
            f"length {sample.length}"
        )
