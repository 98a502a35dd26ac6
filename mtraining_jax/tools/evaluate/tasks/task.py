"""The interface of a task: it makes samples from a seed, and scores answers. Imports no JAX."""

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtraining_jax.data.files import named_files
from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import fields_of, options
from mtraining_jax.utils.random_bits import Stream

# Last characters of a prompt that affect the tokens of a continuation.
_TAIL = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question, determined by task, options, length, number and seed."""

    task: str
    length: int  # requested tokens; prompt and `max_new_tokens` together do not exceed it
    number: int
    prompt: str | tuple[int, ...] = field(repr=False)  # text, or ids if the task has no text
    prompt_ids: np.ndarray = field(repr=False, compare=False)  # int32 [n]
    references: tuple[str, ...] | tuple[int, ...]  # gold answers; the task says how many it needs
    max_new_tokens: int
    depth: float | None = None  # of the needle, from 0 (first) to 1 (last)
    answer: str | tuple[int, ...] | None = None  # what teacher forcing appends to the prompt
    answer_ids: np.ndarray | None = field(default=None, repr=False, compare=False)  # int32 [m]
    # Ascending indices of the scored `answer_ids`; None for all. The others are given, such as the
    # colon before a value.
    scored: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()  # texts that end an answer
    cut_tokens: int = 0  # removed from the middle of a published prompt to make it fit

    @property
    def prompt_hash(self) -> str:
        """Hexadecimal SHA-256 of the prompt, as UTF-8 or as little-endian int32 ids."""
        return _hash(self.prompt if isinstance(self.prompt, str) else self.prompt_ids)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A long text for the loss by position."""

    task: str
    length: int
    number: int
    name: str  # its location, for messages
    ids: np.ndarray = field(repr=False, compare=False)

    @property
    def prompt_hash(self) -> str:
        return _hash(self.ids)


def _hash(prompt: str | np.ndarray) -> str:
    content = prompt.encode() if isinstance(prompt, str) else prompt.astype("<i4").tobytes()
    return hashlib.sha256(content).hexdigest()


@options(kw_only=True)
class Task:
    """Base class of tasks, frozen dataclasses: their fields are options."""

    needs: ClassVar[tuple[str, ...]] = ()  # required options, e.g. a file; their default is None
    needs_tokenizer: ClassVar[bool] = True  # whether prompts are text

    name: str  # that the user gave; several names may share a class

    @property
    def teacher_forced(self) -> bool:
        """Whether one forward pass over prompt and a single known answer can decide."""
        return False

    @property
    def files(self) -> list[Path]:
        """The files that determine samples and scores; by default those that options name."""
        return named_files(vars(self))

    def check(self) -> None:
        """Raises UserError for a missing option or an unreadable file, before anything runs."""
        for option in self.needs:
            if not getattr(self, option):
                what = fields_of(type(self))[option].doc.rstrip(".")
                raise UserError(f'task "{self.name}" needs --task.{option}=VALUE: {what}')

    def count(self, tokenizer: Tokenizer | None, length: int) -> int:
        """Returns the number of different samples of a length."""
        return sys.maxsize

    def check_length(
        self, length: int, samples: int, seed: int, tokenizer: Tokenizer | None
    ) -> None:
        """Raises UserError if the shortest of the first samples do not fit a length."""

    def sample(
        self, length: int, number: int, seed: int, tokenizer: Tokenizer | None
    ) -> Sample | Document:
        """Makes one sample; UserError if none fits the length, or a file is malformed."""
        raise NotImplementedError(f"{type(self).__name__}.sample")

    def score(self, sample: Sample, answer_text: str) -> float:
        """Scores a generated answer, from 0 to 1."""
        raise NotImplementedError(f"{type(self).__name__}.score")

    def score_forced(self, sample: Sample, is_most_likely: np.ndarray) -> float:
        """Returns 1 by teacher forcing if all scored tokens are the most likely ones, else 0."""
        asked = is_most_likely if sample.scored is None else is_most_likely[list(sample.scored)]
        return float(np.all(asked))

    def stream(self, length: int, number: int, seed: int, part: int = 0) -> Stream:
        """Returns independent random numbers for each task, length, number, seed and part."""
        text = f"{self.name}/{length}/{number}/{seed}"
        mixed_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        return Stream(mixed_seed, part)

    def too_short(self, length: int, smallest: int) -> UserError:
        """The error for a length below the smallest possible one."""
        return UserError(
            f'length {length} is too short for task "{self.name}"; its shortest prompt and '
            f"answer take {smallest} tokens with this tokenizer"
        )

    def text_sample(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        prompt_ids: np.ndarray,
        *,
        length: int,
        max_new_tokens: int,
        answer: str | None = None,
        given: str = "",
        **fields: Any,
    ) -> Sample:
        """Builds a text sample, with the token ids of its answer, and checks its length.

        In teacher forcing, the text `given` comes between prompt and answer, and is not scored.
        """
        if len(prompt_ids) + max_new_tokens > length:
            raise self.too_short(length, len(prompt_ids) + max_new_tokens)
        if answer is not None:
            answer_ids = continuation_ids(tokenizer, prompt, given + answer)
            if len(answer_ids) > max_new_tokens:
                raise UserError(
                    f'task "{self.name}": the answer "{answer}" has {len(answer_ids)} tokens, more '
                    f"than the maximum of {max_new_tokens}"
                )
            if given:
                asked = continuation_ids(tokenizer, prompt + given, answer)
                fields["scored"] = tuple(range(len(answer_ids) - len(asked), len(answer_ids)))
            fields |= {"answer": given + answer, "answer_ids": answer_ids}
        return Sample(
            task=self.name,
            length=length,
            prompt=prompt,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            max_new_tokens=max_new_tokens,
            **fields,
        )


def continuation_ids(tokenizer: Tokenizer, prompt: str, answer: str) -> np.ndarray:
    """Returns the token ids of an answer after a prompt, int32 [m].

    Raises UserError if the tokenizer merges the end of the prompt with the start of the answer.
    """
    tail = prompt[-_TAIL:]
    before, both = tokenizer.encode(tail), tokenizer.encode(tail + answer)
    if len(both) <= len(before) or not np.array_equal(both[: len(before)], before):
        raise UserError(
            f'the tokenizer {tokenizer.name} gives "{answer}" no separate token ids after '
            f'"{tail[-16:]}"; score generated answers instead (--generate)'
        )
    return np.asarray(both[len(before) :], np.int32)
