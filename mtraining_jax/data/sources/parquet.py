"""Parquet files with a column of text or token ids, one document per row."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import first_line
from mtraining_jax.data.source import FileSource
from mtraining_jax.data.sources.arrow_columns import Column, load_pyarrow
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.field_types import Text

# 16 rows of half a million tokens are 64 MB as int64.
_ROWS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Parquet(FileSource, DocumentSource):
    """Parquet files (needs the extra parquet).

    Attributes:
        text_field: JSONL field or table column with the text.
        token_field: Table column with token ids, used instead of text_field.
    """

    text_field: Text = "text"
    token_field: Text | None = None
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    @property
    def holds_ids(self) -> bool:
        return self.token_field is not None

    def documents(self) -> Iterator[tuple[str, str | np.ndarray]]:
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
        file.schema_arrow.names  # noqa: B018 - decoded here, may raise UnicodeDecodeError
        return file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.paths: {path} is not a valid Parquet file ({first_line(error)})"
        ) from error
