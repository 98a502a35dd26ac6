"""Base class of tasks from published files; prompts that are too long are truncated."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.tasks.metrics import best
from mtraining_jax.evaluation.tasks.records import read_records
from mtraining_jax.evaluation.tasks.task import Sample, Task

Record = dict[str, Any]


class Part(NamedTuple):
    """One part of a data set; its rule scores an answer, given what the data set expects."""

    max_new_tokens: int
    rule: Callable[..., float]


@dataclass(frozen=True, kw_only=True)
class PublishedTask(Task):
    """Records of a file in their order: sample n is record n for every seed.

    A prompt that is too long loses its middle, as in the original benchmarks.

    Attributes:
        family: prefix of the task names.
        fields: fields that every record must have.
        parts: all parts by name.
    """

    family: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    parts: ClassVar[Mapping[str, Part]]

    @property
    def part(self) -> str:
        return self.name.removeprefix(f"{self.family}_")

    @property
    def path(self) -> Path:
        return Path(getattr(self, self.needs[0])).expanduser() / f"{self.part}.jsonl"

    def template(self) -> str:
        return _templates(self.family)[self.part]

    def prompt(self, record: Record) -> str:
        return self.template().format(**record)

    def references(self, record: Record) -> tuple[str, ...]:
        raise NotImplementedError(f"{type(self).__name__}.references")

    def records(self) -> tuple[Record, ...]:
        return read_records(self.path, self.needs[0], self.fields)

    def check(self) -> None:
        super().check()
        self.records()

    def count(self, tokenizer: Tokenizer | None, length: int) -> int:
        return len(self.records())

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        assert tokenizer is not None  # this task needs one
        record, max_new_tokens = self.records()[number], self.parts[self.part].max_new_tokens
        prompt = self.prompt(record)
        ids, cut = np.asarray(tokenizer.encode(prompt), np.int32), 0
        room = length - max_new_tokens
        if ids.size > room:
            half = room // 2
            if half < 1:
                raise self.too_short(length, max_new_tokens + 2)
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
            max_new_tokens=max_new_tokens,
            cut_tokens=cut,
        )

    def score(self, sample: Sample, answer_text: str) -> float:
        """Scores an answer by the rule of its part, the maximum over the references."""
        return best(self.parts[self.part].rule, answer_text, map(str, sample.references))


@functools.cache
def _templates(family: str) -> dict[str, str]:
    path = Path(__file__).with_name(f"{family}.json")
    return json.loads(path.read_text(encoding="utf-8"))
