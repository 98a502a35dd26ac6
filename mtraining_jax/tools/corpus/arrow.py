"""Documents in a column of Arrow tables: text or lists of token ids."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.documents import Document, TableSource
from mtraining_jax.data.files import errors_as, reason, shown_names
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options


@options(kw_only=True)
class ArrowSource(TableSource):
    """A source whose files pyarrow reads; subclasses open them."""

    name: ClassVar[str]
    file_format: ClassVar[str]

    def open_table(self, path: Path) -> tuple[Any, Callable[[list[str]], Iterable[Any]]]:
        """The schema of a file, and a function that reads columns in record batches."""
        raise NotImplementedError(f"{type(self).__name__}.open_table")

    def documents(self) -> Iterator[tuple[str, Document]]:
        needs = f'data.source = "{self.name}" needs pyarrow'
        remedy = "pip install pyarrow, or uv run --extra parquet"
        with errors_as(UserError, f"{needs}: {remedy}", ImportError):
            import pyarrow
        unreadable = pyarrow.ArrowException, OSError, UnicodeDecodeError
        for path in self.files():
            problem = f"data.paths: {path} is not a valid {self.file_format} file"
            with errors_as(UserError, problem, *unreadable):
                schema, batches = self.open_table(path)
                names = schema.names  # decoded here
            of = self.columns_in(names, str(path))
            for option in of:
                self._check(option, schema, names, path)
            row = 0
            try:
                for batch in batches(list(dict.fromkeys(of.values()))):
                    columns = {
                        option: batch.column(batch.schema.get_field_index(name))
                        for option, name in of.items()
                    }
                    for values in zip(*columns.values(), strict=True):
                        where = f"{path}, row {row}"
                        found = [
                            self._value(option, value, where)
                            for option, value in zip(columns, values, strict=True)
                        ]
                        yield where, self.document(found, where)
                        row += 1
            except unreadable as error:
                raise UserError(
                    f"data.paths: {path} cannot be read after row {row} ({reason(error)})"
                ) from error

    def _check(self, option: str, schema: Any, names: list[str], path: Path) -> None:
        """Checks that a file has the column of an option, with a valid type."""
        from pyarrow import types

        name, column = self.columns[option], f"the column of {self.shown(option)}"
        if name not in names:
            raise UserError(f"{path} lacks {column}; it has {shown_names(names)}")
        kind = schema.field(name).type
        if self.messages_field or types.is_null(kind):  # a list or JSON, checked with each row
            return
        if not self.holds_ids:
            if not (types.is_string(kind) or types.is_large_string(kind)):
                raise UserError(f"{path}: {column} is {kind}, not text")
            return
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        is_mask = option == "mask_field" and is_list and types.is_boolean(kind.value_type)
        if not is_mask and not (is_list and types.is_integer(kind.value_type)):
            raise UserError(f"{path}: {column} is {kind}, not a list of integers")

    def _value(self, option: str, value: Any, where: str) -> Any:
        if self.messages_field:
            return _without_nulls(value.as_py())
        if not self.holds_ids or not value.is_valid:
            return value.as_py()
        if value.values.null_count:
            raise UserError(f"{where}: the column of {self.shown(option)} has a null in its list")
        return value.values.to_numpy(zero_copy_only=False)


def _without_nulls(value: Any) -> Any:
    """Removes null fields: all objects of a column have the fields of each of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(x) for name, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value
