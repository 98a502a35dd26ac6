"""Documents one after the other: from text, JSONL and Parquet files, as text or as token ids.

Each reader is a generator of ``(where, document)`` that holds one document (Parquet: a few rows)
at a time; ``where`` says where the document stands, for messages.
"""

import json
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mtraining_jax.errors import UserError

# A row may be a sequence of half a million tokens: 16 of them are 64 MB as int64.
_PARQUET_ROWS_AT_ONCE = 16


def read_python(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Reads Python sources, each in the encoding that it declares: one document a file."""
    for path in files:
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (OSError, UnicodeDecodeError, SyntaxError) as error:
            raise UserError(f"{path} cannot be read as Python source ({error}).") from error
        yield str(path), text


def read_text(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Reads UTF-8 text files, byte for byte: one document a file."""
    for path in files:
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise UserError(f"data.paths: {path} cannot be read ({error.strerror}).") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.paths: {path} is not UTF-8 text (byte {error.start})."
            ) from error
        yield str(path), text


def read_jsonl(files: Sequence[Path], text_field: str) -> Iterator[tuple[str, str]]:
    """Reads files of one JSON object a line: one document a line. Blank lines are passed over.

    Raises:
      UserError: naming the file, the line and what is wrong with it.
    """
    for path in files:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{where} is not valid JSON ({error}).") from error
                if not isinstance(record, dict):
                    raise UserError(f"{where} is {type(record).__name__}, not a JSON object.")
                if text_field not in record:
                    raise UserError(
                        f"{where} has no field {text_field!r} (data.text_field); it has"
                        f" {_names(record)}."
                    )
                text = record[text_field]
                if not isinstance(text, str):
                    raise UserError(
                        f"{where}: field {text_field!r} (data.text_field) is"
                        f" {type(text).__name__}, not text."
                    )
                yield where, text


def read_parquet_text(files: Sequence[Path], text_field: str) -> Iterator[tuple[str, str]]:
    """Reads a text column of Parquet files: one document a row.

    Raises:
      UserError: naming the file, the column and what is wrong with it, or a missing pyarrow.
    """
    pyarrow = _pyarrow()
    for path in files:
        with _parquet_file(path) as file:
            kind = _column_type(file, path, "text_field", text_field)
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(
                    f"{path}: column {text_field!r} (data.text_field) is {kind}, not text."
                )
            for where, value in _rows(file, path, text_field):
                yield where, value.as_py()


def read_parquet_tokens(
    files: Sequence[Path], token_field: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads a column of integer lists from Parquet files: one document a row, integers [n].

    Raises:
      UserError: naming the file, the column and what is wrong with it, or a missing pyarrow.
    """
    types = _pyarrow().types
    for path in files:
        with _parquet_file(path) as file:
            kind = _column_type(file, path, "token_field", token_field)
            is_list = (
                types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            )
            if not (is_list and types.is_integer(kind.value_type)):
                raise UserError(
                    f"{path}: column {token_field!r} (data.token_field) is {kind}, not a list of"
                    " integers."
                )
            for where, value in _rows(file, path, token_field):
                if value.values.null_count:
                    raise UserError(
                        f"{where}: column {token_field!r} (data.token_field) has a null in its"
                        " list."
                    )
                yield where, value.values.to_numpy(zero_copy_only=False)


def _opened(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"data.paths: {path} cannot be read ({error.strerror}).") from error


def _names(names) -> str:
    names = [repr(name) for name in names]
    shown = ", ".join(names[:8]) or "no fields"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _pyarrow():
    # Not at the top: pyarrow is large, and an extra of the package.
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "data.source 'parquet' needs pyarrow, which is not installed; install the 'parquet'"
            " extra (mtraining-jax[parquet])."
        ) from error
    return pyarrow


def _parquet_file(path: Path):
    pyarrow = _pyarrow()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"data.paths: {path} is not a whole Parquet file ({_first_line(error)})."
        ) from error


def _column_type(file, path: Path, option: str, name: str):
    schema = file.schema_arrow
    if name not in schema.names:
        raise UserError(
            f"{path} has no column {name!r} (data.{option}); it has {_names(schema.names)}."
        )
    return schema.field(name).type


def _rows(file, path: Path, name: str):
    """Values of one column with the row they stand in, counted from 0 over the file."""
    pyarrow = _pyarrow()
    row = 0
    try:
        for batch in file.iter_batches(_PARQUET_ROWS_AT_ONCE, columns=[name]):
            for value in batch.column(0):
                where = f"{path}, row {row}"
                if not value.is_valid:
                    raise UserError(f"{where}: column {name!r} is null.")
                yield where, value
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"data.paths: {path} cannot be read after row {row} ({_first_line(error)})."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
