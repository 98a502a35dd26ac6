"""Published data sets: the user provides the files, and long prompts are truncated."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.tasks.records import read_records
from mtraining_jax.evaluation.tasks.task import Sample, Task


@dataclass(frozen=True, kw_only=True)
class PublishedTask(Task):
    """Records of a file in their order: sample n is record n for every seed.

    A prompt that is too long loses its middle, as in the original benchmarks; `Sample.cut_tokens`
    has the number of removed tokens. Shorter prompts stay as they are.

    Attributes:
        family: prefix of the task names.
        fields: fields that every record must have.
    """

    family: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]

    @property
    def part(self) -> str:
        """The part of the set: the task's name without its family."""
        return self.name.removeprefix(f"{self.family}_")

    @property
    def path(self) -> Path:
        """The file of this part, in the user's folder."""
        return Path(getattr(self, self.needs[0])).expanduser() / f"{self.part}.jsonl"

    @property
    def new_tokens(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.new_tokens")

    def prompt(self, record: dict[str, Any]) -> str:
        raise NotImplementedError(f"{type(self).__name__}.prompt")

    def references(self, record: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError(f"{type(self).__name__}.references")

    def records(self) -> tuple[dict[str, Any], ...]:
        """Returns all records; for errors see `read_records`."""
        return read_records(self.path, self.needs[0], self.fields)

    def problems(self) -> Iterator[str]:
        missing = list(super().problems())
        yield from missing
        if not missing:
            self.records()

    def count(self, tokenizer: Tokenizer | None, length: int | None = None) -> int:
        return len(self.records())

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        assert tokenizer is not None  # this task needs one
        record = self.records()[number]
        prompt = self.prompt(record)
        ids, cut = np.asarray(tokenizer.encode(prompt), np.int32), 0
        room = length - self.new_tokens
        if ids.size > room:
            half = room // 2
            if half < 1:
                raise self.too_short(length, self.new_tokens + 2)
            begin, end = ids[:half], ids[-half:]
            cut = ids.size - 2 * half
            ids = np.concatenate([begin, end])
            prompt = tokenizer.decode(begin) + tokenizer.decode(end)
        return self.text_sample(
            tokenizer,
            prompt,
            prompt_ids=ids,
            length=length,
            number=number,
            references=self.references(record),
            max_new_tokens=self.new_tokens,
            cut_tokens=cut,
        )
