"""Documents in a column of Arrow tables: text or lists of token ids."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.documents import Document, TableSource
from mtraining_jax.data.files import first_line, shown_names
from mtraining_jax.utils.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ArrowSource(TableSource):
    """A source whose files pyarrow reads; subclasses open them."""

    name: ClassVar[str]
    file_format: ClassVar[str]

    def open_table(self, path: Path, pyarrow: Any) -> tuple[Any, Callable[[str], Iterable[Any]]]:
        """The schema of a file, and a function that reads one column in record batches."""
        raise NotImplementedError(f"{type(self).__name__}.open_table")

    def documents(self) -> Iterator[tuple[str, Document]]:
        pyarrow = _load_pyarrow(self.name)
        unreadable = pyarrow.ArrowException, OSError, UnicodeDecodeError
        name = self.token_field or self.text_field
        for path in self.files():
            try:
                schema, batches = self.open_table(path, pyarrow)
                names = schema.names  # decoded here
            except unreadable as error:
                problem = f"is not a valid {self.file_format} file ({first_line(error)})"
                raise UserError(f"data.paths: {path} {problem}") from error
            self._check(schema, names, path, pyarrow.types)
            row = 0
            try:
                for batch in batches(name):
                    for value in batch.column(batch.schema.get_field_index(name)):
                        where = f"{path}, row {row}"
                        yield where, self._document(value, where)
                        row += 1
            except unreadable as error:
                raise UserError(
                    f"data.paths: {path} cannot be read after row {row} ({first_line(error)})"
                ) from error

    @property
    def _column(self) -> str:
        if self.token_field is None:
            return f'the column of data.text_field = "{self.text_field}"'
        return f'the column of data.token_field = "{self.token_field}"'

    def _check(self, schema: Any, names: list[str], path: Path, types: Any) -> None:
        """Checks that a file has the column, with a valid type."""
        name = self.token_field or self.text_field
        if name not in names:
            raise UserError(f"{path} lacks {self._column}; it has {shown_names(names)}")
        kind = schema.field(name).type
        if not self.holds_ids:
            if not (types.is_string(kind) or types.is_large_string(kind)):
                raise UserError(f"{path}: {self._column} is {kind}, not text")
            return
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not (is_list and types.is_integer(kind.value_type)):
            raise UserError(f"{path}: {self._column} is {kind}, not a list of integers")

    def _document(self, value: Any, where: str) -> Document:
        if not value.is_valid:
            raise UserError(f"{where}: {self._column} is null")
        if not self.holds_ids:
            return value.as_py()
        if value.values.null_count:
            raise UserError(f"{where}: {self._column} has a null in its list")
        return value.values.to_numpy(zero_copy_only=False)


def _load_pyarrow(source: str) -> Any:
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
