"""Reads the files of tasks: texts, JSON, and published data sets with one record per line."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mtraining_jax.data.files import shown_names
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import LARGEST_TEXT, read_bounded

Record = dict[str, Any]


def read_text(path: Path, option: str) -> str:
    """Reads a UTF-8 file or pipe of at most 256 MiB, without a byte order mark.

    `option` is that of the task, for messages.
    """
    try:
        with path.expanduser().open("rb") as file:
            return read_stream(file, option)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, option, error) from error


def read_stream(file: BinaryIO, option: str) -> str:
    """Reads an open file or pipe, like `read_text`; also raises UnicodeDecodeError."""
    try:
        return read_bounded(file).decode("utf-8-sig")
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def read_json(path: Path, option: str) -> Any:
    """Reads a JSON file, like `read_text`."""
    return _parsed(read_text(path, option), f"{option}: {path}")


def iterate_records(
    path: Path, option: str, fields: tuple[str, ...]
) -> Iterator[tuple[str, Record]]:
    """Yields the records of a file with their location; all must have these fields.

    A .json file is one list of objects; any other file has one object per line.
    """
    for where, record in _entries(path, option):
        if not isinstance(record, dict):
            raise UserError(f"{option}: {where} is {type(record).__name__}, not a JSON object")
        for field in fields:
            if field not in record:
                has = shown_names(record)
                raise UserError(f'{option}: {where} has no field "{field}"; it has {has}')
        yield where, record


def _entries(path: Path, option: str) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        content = read_json(path, option)
        if not isinstance(content, list):
            raise UserError(f"{option}: {path} is {type(content).__name__}, not a list")
        yield from ((f"{path}, entry {i}", each) for i, each in enumerate(content, 1))
        return
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = iter(functools.partial(file.readline, LARGEST_TEXT + 1), "")
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                if len(line) > LARGEST_TEXT:
                    raise UserError(f"{option}: {where} has more than {LARGEST_TEXT:,} characters")
                if line.strip():
                    yield where, _parsed(line, f"{option}: {where}")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, option, error) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({error})") from error


def _unreadable(path: Path, option: str, error: OSError | UnicodeDecodeError) -> UserError:
    if isinstance(error, OSError):
        return UserError(f"{option}: {path} cannot be read ({error.strerror})")
    return UserError(f"{option}: {path} is not UTF-8 text (byte {error.start})")
