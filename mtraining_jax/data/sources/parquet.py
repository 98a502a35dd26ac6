"""Parquet files: a column of text, or of token ids. One document a row."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtraining_jax.data.arrow_columns import Column, load_pyarrow
from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import first_line
from mtraining_jax.data.source import FileSource
from mtraining_jax.errors import UserError
from mtraining_jax.field_types import Text

# A row may be a sequence of half a million tokens; 16 of them are 64 MB as int64.
_ROWS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Parquet(FileSource, DocumentSource):
    """Parquet files (needs the extra parquet).

    Attributes:
        text_field: Field of a JSONL line, or column of a table, that holds the text.
        token_field: Column of a table that holds token ids, read instead of text_field.
    """

    text_field: Text = "text"
    token_field: Text | None = None
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    @property
    def holds_ids(self) -> bool:
        """As of `DocumentSource`."""
        return self.token_field is not None

    def documents(self) -> Iterator[tuple[str, str | np.ndarray]]:
        """As of `DocumentSource`."""
        column = Column(self.token_field or self.text_field, self.holds_ids, "parquet")
        for path in self.files():
            with _opened(path) as file:
                column.check(file.schema_arrow, path)
                batches = functools.partial(file.iter_batches, _ROWS_AT_ONCE, columns=[column.name])
                yield from column.documents(batches, path)


def _opened(path: Path) -> Any:
    pyarrow = load_pyarrow("parquet")
    try:
        file = pyarrow.parquet.ParquetFile(path)
        file.schema_arrow.names  # noqa: B018 - which are decoded only here
        return file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.paths: {path} is not a whole Parquet file ({first_line(error)})"
        ) from error
