"""Parquet files: a column of text, or of token ids. One document a row."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import first_line, shown_names
from mtraining_jax.data.source import FileSource
from mtraining_jax.errors import UserError
from mtraining_jax.field_types import Text

# A row may be a sequence of half a million tokens; 16 of them are 64 MB as int64.
_ROWS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Parquet(FileSource, DocumentSource):
    """Parquet files (needs the extra parquet).

    Attributes:
        text_field: Field of a JSONL line, or column of a Parquet file, that holds the text.
        token_field: Column of a Parquet file that holds token ids, read instead of text_field.
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
        read = self._ids_of if self.holds_ids else self._text_of
        for path in self.files():
            with _opened(path) as file:
                yield from read(file, path)

    def _text_of(self, file: Any, path: Path) -> Iterator[tuple[str, str]]:
        types, column = _pyarrow().types, f'the column of data.text_field = "{self.text_field}"'
        kind = _type_of(file, path, column, self.text_field)
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise UserError(f"{path}: {column} is {kind}, not text")
        for where, value in _rows(file, path, column, self.text_field):
            yield where, value.as_py()

    def _ids_of(self, file: Any, path: Path) -> Iterator[tuple[str, np.ndarray]]:
        types, column = _pyarrow().types, f'the column of data.token_field = "{self.token_field}"'
        kind = _type_of(file, path, column, self.token_field)
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not (is_list and types.is_integer(kind.value_type)):
            raise UserError(f"{path}: {column} is {kind}, not a list of integers")
        for where, value in _rows(file, path, column, self.token_field):
            if value.values.null_count:
                raise UserError(f"{where}: {column} has a null in its list")
            yield where, value.values.to_numpy(zero_copy_only=False)


def _pyarrow() -> Any:
    # Not at the top: pyarrow is large, and an extra of the package.
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            'data.source = "parquet" needs pyarrow, which is not installed: pip install pyarrow, '
            "or uv run --extra parquet"
        ) from error
    return pyarrow


def _opened(path: Path) -> Any:
    pyarrow = _pyarrow()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"data.paths: {path} is not a whole Parquet file ({first_line(error)})"
        ) from error


def _type_of(file: Any, path: Path, column: str, name: str) -> Any:
    schema = file.schema_arrow
    if name not in schema.names:
        raise UserError(f"{path} lacks {column}; it has {shown_names(schema.names)}")
    return schema.field(name).type


def _rows(file: Any, path: Path, column: str, name: str) -> Iterator[tuple[str, Any]]:
    """Values of one column with their row, counted from 0 over the file."""
    pyarrow = _pyarrow()
    row = 0
    try:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[name]):
            for value in batch.column(0):
                where = f"{path}, row {row}"
                if not value.is_valid:
                    raise UserError(f"{where}: {column} is null")
                yield where, value
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"data.paths: {path} cannot be read after row {row} ({first_line(error)})"
        ) from error
