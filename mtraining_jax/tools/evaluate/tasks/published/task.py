"""Base class of tasks from published files; prompts that are too long are truncated."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.tools.evaluate.tasks.metrics import best
from mtraining_jax.tools.evaluate.tasks.records import Record, iterate_records, read_json
from mtraining_jax.tools.evaluate.tasks.task import Sample, Task
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options


class Part(NamedTuple):
    """One part of a data set; its rule scores an answer against a reference."""

    max_new_tokens: int
    rule: Callable[..., float]


@options(kw_only=True)
class PublishedTask(Task):
    """Records of a file in their order: sample n is record n for every seed.

    A prompt that is too long loses its middle, as in the original benchmarks.
    """

    family: ClassVar[str]  # prefix of the task names, and the option with the path of the files
    fields: ClassVar[tuple[str, ...]]  # that every record must have
    parts: ClassVar[Mapping[str, Part]]  # by name

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.family,)

    @property
    def part(self) -> str:
        return self.name.removeprefix(f"{self.family}_")

    @property
    def path(self) -> Path:
        return Path(getattr(self, self.family)).expanduser() / f"{self.part}.jsonl"

    @property
    def files(self) -> list[Path]:
        return [self.path]

    @cached_property
    def template(self) -> str:
        return read_json(Path(__file__).with_name(f"{self.family}.json"), self.family)[self.part]

    @cached_property
    def records(self) -> tuple[Record, ...]:
        records = tuple(x for _, x in iterate_records(self.path, self.family, self.fields))
        if not records:
            raise UserError(f"{self.family}: {self.path} is empty")
        return records

    def prompt(self, record: Record) -> str:
        return self.template.format(**record)

    def references(self, record: Record) -> tuple[str, ...]:
        raise NotImplementedError(f"{type(self).__name__}.references")

    def check(self) -> None:
        super().check()
        _ = self.records  # reads and checks the file

    def count(self, tokenizer: Tokenizer | None, length: int) -> int:
        return len(self.records)

    def check_length(
        self, length: int, samples: int, seed: int, tokenizer: Tokenizer | None
    ) -> None:
        # A longer prompt is cut to two tokens or more.
        smallest = self.parts[self.part].max_new_tokens + 2
        if length < smallest:
            raise self.too_short(length, smallest)

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        self.check_length(length, 1, seed, tokenizer)
        assert tokenizer is not None
        record, max_new_tokens = self.records[number], self.parts[self.part].max_new_tokens
        prompt = self.prompt(record)
        ids, cut = np.asarray(tokenizer.encode(prompt), np.int32), 0
        if ids.size > length - max_new_tokens:
            half = (length - max_new_tokens) // 2
            begin, end = ids[:half], ids[-half:]
            cut = ids.size - 2 * half
            ids = np.concatenate([begin, end])
            prompt = tokenizer.decode(begin) + tokenizer.decode(end)
        return self.text_sample(
            tokenizer,
            prompt,
            ids,
            length=length,
            number=number,
            references=self.references(record),
            max_new_tokens=max_new_tokens,
            cut_tokens=cut,
        )

    def score(self, sample: Sample, answer_text: str) -> float:
        """Scores an answer by the rule of its part, the maximum over the references."""
        return best(self.parts[self.part].rule, answer_text, map(str, sample.references))
