"""The interface of a task: it makes samples from a seed, and scores answers to them.

A task is a frozen dataclass whose fields are its options, registered in `registry.py`, or a class
of the user's own, named as `package.module:Name`. Nothing here imports JAX.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.errors import UserError
from mtraining_jax.evaluation.tasks.tokens import continuation_ids
from mtraining_jax.plugins import attribute_docs
from mtraining_jax.random_bits import Stream


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question. Task, options, length, number and seed decide everything in it.

    Attributes:
        task: name of the task.
        length: tokens that were asked for: the prompt's and `max_new_tokens` do not exceed it.
        number: which sample of this task and length, from 0.
        prompt: text, or token ids where a task needs no tokenizer.
        prompt_ids: token ids of the prompt, int32 [n]. No token is added at its begin.
        references: gold answers. How many of them count is the task's rule.
        max_new_tokens: most tokens of an answer.
        depth: where a needle was asked to lie, from 0 (first) to 1 (last), if the task has one.
        answer: what teacher forcing appends to the prompt; None if only a generated answer can be
            scored.
        answer_ids: token ids of `answer`, int32 [m]; None with it.
        scored: which of `answer_ids` are asked for, ascending; None for all of them. The others
            are given, such as the colon before a value.
        stop: an answer ends before any of these texts.
        cut_tokens: tokens that were left out in the middle of the published prompt to make it fit.
            0 for prompts that are made to measure.
    """

    task: str
    length: int
    number: int
    prompt: str | tuple[int, ...] = field(repr=False)
    prompt_ids: np.ndarray = field(repr=False, compare=False)
    references: tuple[str, ...] | tuple[int, ...]
    max_new_tokens: int
    depth: float | None = None
    answer: str | tuple[int, ...] | None = None
    answer_ids: np.ndarray | None = field(default=None, repr=False, compare=False)
    scored: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    cut_tokens: int = 0

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the prompt in hexadecimal: of UTF-8, or of ids as little-endian int32."""
        if isinstance(self.prompt, str):
            return hashlib.sha256(self.prompt.encode("utf-8")).hexdigest()
        return hashlib.sha256(self.prompt_ids.astype("<i4").tobytes()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Document:
    """A long text whose loss is measured by position.

    Attributes:
        task: name of the task.
        length: tokens that were asked for, and that it has.
        number: which document, from 0.
        name: where it begins, for people: a file, or a line of one.
        ids: token ids, int32 [length].
    """

    task: str
    length: int
    number: int
    name: str
    ids: np.ndarray = field(repr=False, compare=False)

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the ids as little-endian int32, in hexadecimal."""
        return hashlib.sha256(self.ids.astype("<i4").tobytes()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every task derives from. Fields are its options.

    Attributes:
        name: as the user gave it; several names may share a class.
        kind: "answer": `sample` gives a `Sample`. "loss": it gives a `Document`, and there is no
            score.
        needs: options without which it cannot run, e.g. a file; their default is None.
        needs_tokenizer: whether prompts are text.
    """

    kind: ClassVar[str] = "answer"
    needs: ClassVar[tuple[str, ...]] = ()
    needs_tokenizer: ClassVar[bool] = True

    name: str

    @property
    def teacher_forced(self) -> bool:
        """Whether one forward pass over prompt and answer can decide, without generation.

        It can where the right answer is one known text: a model that always takes its most likely
        token begins with that text exactly if each token of it is the most likely one. Rules that
        look for the text anywhere in a generated answer are looser.
        """
        return False

    def problems(self) -> Iterator[str]:
        """One sentence for each mistake that can be detected before anything runs.

        Files are read here for the first time, so that a later `sample` finds them as they were.
        """
        docs = attribute_docs(type(self))
        for option in self.needs:
            if not getattr(self, option):
                what = docs[option].rstrip(".")
                yield f'task "{self.name}" needs --task.{option}=VALUE: {what}'

    def count(self, tokenizer: Tokenizer | None, length: int | None = None) -> int | None:
        """How many different samples there are, of a length if given; None for any number."""
        return None

    def sample(
        self, length: int, number: int, seed: int, tokenizer: Tokenizer | None
    ) -> "Sample | Document":
        """Makes one sample.

        Args:
            length: most tokens of prompt and answer together.
            number: which sample, from 0.
            seed: of all that is random.
            tokenizer: the model's; None where `needs_tokenizer` is false.

        Raises:
            UserError: no sample fits the length, or a file of the task is malformed.
        """
        raise NotImplementedError(f"{type(self).__name__}.sample")

    def score(self, sample: Sample, answer_text: str) -> float:
        """How good a generated answer is, from 0 to 1."""
        raise NotImplementedError(f"{type(self).__name__}.score")

    def score_forced(self, sample: Sample, is_most_likely: np.ndarray) -> float:
        """The score by teacher forcing, from 0 to 1: all tokens that are asked for, or nothing.

        Args:
            sample: one of this task.
            is_most_likely: bool [m], whether each of `sample.answer_ids` has the largest logit.
        """
        asked = is_most_likely if sample.scored is None else is_most_likely[list(sample.scored)]
        return float(np.all(asked))

    def stream(self, length: int, number: int, seed: int, part: int = 0) -> Stream:
        """Random numbers for one sample: independent for each task, length, number and part."""
        text = f"{self.name}/{length}/{number}/{seed}"
        mixed_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        return Stream(mixed_seed, part)

    def too_short(self, length: int, smallest: int) -> UserError:
        """The error of a length below the smallest possible one."""
        return UserError(
            f'length {length} is too short for task "{self.name}": its shortest prompt and answer '
            f"take {smallest} tokens with this tokenizer"
        )

    def text_sample(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        length: int,
        number: int,
        references: tuple[str, ...],
        max_new_tokens: int,
        prompt_ids: np.ndarray | None = None,
        answer: str | None = None,
        given: str = "",
        depth: float | None = None,
        stop: tuple[str, ...] = (),
        cut_tokens: int = 0,
    ) -> Sample:
        """A sample of text, with the token ids of prompt and answer.

        Args:
            tokenizer: the model's.
            prompt: the text.
            prompt_ids: its ids if they are known.
            answer: the text that is asked for.
            given: what stands between prompt and answer in teacher forcing, and is not asked for.
            length, number, references, max_new_tokens, depth, stop, cut_tokens: as of `Sample`.

        Raises:
            UserError: prompt and new tokens exceed the length, or so does the answer its part.
        """
        if prompt_ids is None:
            prompt_ids = tokenizer.encode(prompt)
        if len(prompt_ids) + max_new_tokens > length:
            raise self.too_short(length, len(prompt_ids) + max_new_tokens)
        answer_ids = scored = None
        if answer is not None:
            answer_ids = continuation_ids(tokenizer, prompt, given + answer)
            if len(answer_ids) > max_new_tokens:
                raise UserError(
                    f'task "{self.name}": the answer "{answer}" is {len(answer_ids)} tokens, more '
                    f"than the {max_new_tokens} of an answer"
                )
            if given:
                asked = continuation_ids(tokenizer, prompt + given, answer)
                scored = tuple(range(len(answer_ids) - len(asked), len(answer_ids)))
                answer = given + answer
        return Sample(
            task=self.name,
            length=length,
            number=number,
            prompt=prompt,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            references=references,
            max_new_tokens=max_new_tokens,
            depth=depth,
            answer=answer,
            answer_ids=answer_ids,
            scored=scored,
            stop=stop,
            cut_tokens=cut_tokens,
        )
