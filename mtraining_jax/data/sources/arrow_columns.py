"""Documents in a column of an Arrow table: text or lists of token ids."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.data.files import first_line, shown_names
from mtraining_jax.utils.errors import UserError


def load_pyarrow(source: str) -> Any:
    """Imports pyarrow, an optional dependency."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f'data.source = "{source}" needs pyarrow, which is not installed: pip install pyarrow, '
            "or uv run --extra parquet"
        ) from error
    return pyarrow


@dataclass(frozen=True)
class Column:
    """The column that a source reads."""

    name: str
    holds_ids: bool
    source: str

    @property
    def _shown(self) -> str:
        field = "token_field" if self.holds_ids else "text_field"
        return f'the column of data.{field} = "{self.name}"'

    def check(self, schema: Any, path: Path) -> None:
        """Checks that a file's schema has the column with a valid type."""
        if self.name not in schema.names:
            raise UserError(f"{path} lacks {self._shown}; it has {shown_names(schema.names)}")
        types, kind = load_pyarrow(self.source).types, schema.field(self.name).type
        if not self.holds_ids:
            if not (types.is_string(kind) or types.is_large_string(kind)):
                raise UserError(f"{path}: {self._shown} is {kind}, not text")
            return
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not (is_list and types.is_integer(kind.value_type)):
            raise UserError(f"{path}: {self._shown} is {kind}, not a list of integers")

    def documents(
        self, batches: Callable[[], Iterable[Any]], path: Path
    ) -> Iterator[tuple[str, str | np.ndarray]]:
        """Reads the rows of a file; call `check` first.

        Yields:
            The location of each row, for messages, and its text or token ids.
        """
        pyarrow = load_pyarrow(self.source)
        row = 0
        try:
            for batch in batches():
                for value in batch.column(batch.schema.get_field_index(self.name)):
                    yield f"{path}, row {row}", self._document(value, f"{path}, row {row}")
                    row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.paths: {path} cannot be read after row {row} ({first_line(error)})"
            ) from error

    def _document(self, value: Any, where: str) -> str | np.ndarray:
        if not value.is_valid:
            raise UserError(f"{where}: {self._shown} is null")
        if not self.holds_ids:
            return value.as_py()
        if value.values.null_count:
            raise UserError(f"{where}: {self._shown} has a null in its list")
        return value.values.to_numpy(zero_copy_only=False)
