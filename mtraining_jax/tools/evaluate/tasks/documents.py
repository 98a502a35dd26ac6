"""The loss of long documents by position, in one forward pass per document."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from mtraining_jax.data.files import find_files
from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.tools.evaluate.tasks.records import iterate_records, read_text
from mtraining_jax.tools.evaluate.tasks.task import Document, Task
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import Text
from mtraining_jax.utils.text import counted

_SUFFIXES = (".txt", ".jsonl")


@options(kw_only=True)
class LongDocuments(Task):
    """Loss of long documents by position; documents shorter than the length are skipped."""

    needs: ClassVar[tuple[str, ...]] = ("documents",)

    documents: str | None = None
    """File, folder of .txt and .jsonl files, or glob. A .jsonl file has one document per line, any
    other file is one document."""
    text_field: Text = "text"
    """Text field of a JSON line."""

    @property
    def files(self) -> list[Path]:
        return find_files([self.documents or ""], _SUFFIXES, field="documents")

    def check(self) -> None:
        super().check()
        for _ in self._texts():
            pass

    def count(self, tokenizer: Tokenizer | None, length: int) -> int:
        return len(_long_enough(self, length, tokenizer))

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Document:
        long_enough = _long_enough(self, length, tokenizer)
        if number >= len(long_enough):
            raise UserError(
                f'length {length} is too long for sample {number} of task "{self.name}": only '
                f"{counted(len(long_enough), 'document')} of {self.documents} are that long"
            )
        where, text = next(itertools.islice(self._texts(), long_enough[number], None))
        ids = _first_ids(text, length, tokenizer)
        assert ids is not None  # it is long enough
        return Document(task=self.name, length=length, number=number, name=where, ids=ids)

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yields documents with their location, one in memory at a time."""
        for path in self.files:
            if path.suffix != ".jsonl":
                yield str(path), read_text(path, "documents")
                continue
            for where, record in iterate_records(path, "documents", (self.text_field,)):
                text = record[self.text_field]
                if not isinstance(text, str):
                    field, kind = self.text_field, type(text).__name__
                    raise UserError(f'documents: {where}: the field "{field}" is {kind}, not text')
                yield where, text


@functools.lru_cache(maxsize=32)
def _long_enough(task: LongDocuments, length: int, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    texts = enumerate(text for _, text in task._texts())
    return tuple(i for i, text in texts if _first_ids(text, length, tokenizer) is not None)


def _first_ids(text: str, length: int, tokenizer: Tokenizer | None) -> np.ndarray | None:
    """Returns the first token ids of a text, int32 [length]; None if it has fewer."""
    assert tokenizer is not None  # the task needs one
    characters = 8 * length
    while True:
        ids = tokenizer.encode(text[:characters])
        # Near the cut, tokens may differ from those of the full text.
        if len(ids) >= length + 64 or (len(ids) >= length and characters >= len(text)):
            return np.asarray(ids[:length], np.int32)
        if characters >= len(text):
            return None
        characters *= 2
