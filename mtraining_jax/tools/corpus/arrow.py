"""Documents in a column of Arrow tables, text or token ids: Parquet, and Hugging Face datasets."""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.documents import Document, TableSource
from mtraining_jax.data.files import errors_as, find_folders, inside, reason, shown_names
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.file_limits import read_json


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


# 16 rows of half a million tokens are 64 MB as int64.
_ROWS_AT_ONCE = 16


@options(kw_only=True)
class Parquet(ArrowSource):
    """Parquet files (needs the extra parquet)."""

    name: ClassVar[str] = "parquet"
    file_format: ClassVar[str] = "Parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def open_table(self, path: Path) -> tuple[Any, Callable[[list[str]], Iterable[Any]]]:
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        read = functools.partial(file.iter_batches, _ROWS_AT_ONCE)
        return file.schema_arrow, lambda columns: read(columns=columns)


_STATE, _SPLITS = "state.json", "dataset_dict.json"
_FILE_MAGIC = b"ARROW1"  # Arrow file format, as opposed to the stream format
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@options(kw_only=True)
class HuggingFaceOnDisk(ArrowSource):
    """Folders written by `Dataset.save_to_disk` (needs the extra parquet)."""

    name: ClassVar[str] = "hf_disk"
    file_format: ClassVar[str] = "Arrow"

    def files(self) -> list[Path]:
        """The Arrow files of all data sets, in the order of their rows."""
        return [file for folder in find_folders(self.paths) for file in _data_files(folder)]

    def open_table(self, path: Path) -> tuple[Any, Callable[[list[str]], Iterable[Any]]]:
        import pyarrow

        source = pyarrow.memory_map(str(path))
        is_stream = source.read_at(len(_FILE_MAGIC), 0) != _FILE_MAGIC
        opened = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
        schema = opened(source).schema

        def batches(columns: list[str]) -> Iterator[Any]:
            source.seek(0)
            # Skips other columns, which may have any type.
            fields = [schema.names.index(column) for column in columns]
            options = pyarrow.ipc.IpcReadOptions(included_fields=fields)
            reader = opened(source, options=options)
            found = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            for batch in found:
                # Invalid offsets in a corrupt file would read out of bounds.
                batch.validate(full=True)
                yield batch
            # A stream truncated between two batches lacks only its end marker.
            end = source.read_at(len(_STREAM_END), source.size() - len(_STREAM_END))
            if is_stream and (source.tell() != source.size() or end != _STREAM_END):
                raise OSError("it is truncated")

        return schema, batches


def _data_files(folder: Path) -> list[Path]:
    """The files listed in state.json; the folder may also have cache files."""
    path = folder / _STATE
    if not path.is_file():
        if (folder / _SPLITS).is_file():
            splits = shown_names(p.parent.name for p in sorted(folder.glob(f"*/{_STATE}")))
            raise UserError(
                f"data.paths: {folder} has several splits, {splits}; use the folder of one split"
            )
        raise UserError(f"data.paths: {folder} was not written by save_to_disk: it has no {_STATE}")
    with errors_as(UserError, f"{path} cannot be read", OSError, ValueError, KeyError, TypeError):
        state = read_json(path)
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    if state.get("_indices_data_files"):
        raise UserError(
            f"{path}: this data set selects its rows with indices, which are not supported; call "
            "flatten_indices() and save it again"
        )
    if not names:
        raise UserError(f"{path} lists no files")
    files = [inside(folder, name, path) for name in names]
    for file in files:
        if not file.is_file():
            raise UserError(f"{path} lists {file.name}, which does not exist")
    return files
