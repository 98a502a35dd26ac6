"""Reads published data sets: files of JSON lines, or one JSON list."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtraining_jax.data.files import shown_names
from mtraining_jax.utils.errors import UserError


def read_text(path: Path, option: str) -> str:
    """Reads a UTF-8 file; `option` is the task's option, for messages."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {path} is not UTF-8 text (byte {error.start})") from error


def read_records(path: Path, option: str, fields: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Reads all records of a file with these fields, cached until the file changes.

    A .json file is one list of objects; any other file has one object per line.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read ({error.strerror})") from error
    return _records(path, option, fields, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _records(
    path: Path, option: str, fields: tuple[str, ...], *state: int
) -> tuple[dict[str, Any], ...]:
    records = tuple(record for _, record in iterate_records(path, option, fields))
    if not records:
        raise UserError(f"{option}: {path} is empty")
    return records


def iterate_records(
    path: Path, option: str, fields: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the records of a file with their location; see `read_records`."""
    for where, text in _texts(path, option):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{option}: {where} is not valid JSON ({error})") from error
        entries = [(where, content)]
        if path.suffix == ".json":
            if not isinstance(content, list):
                raise UserError(f"{option}: {path} is {type(content).__name__}, not a list")
            entries = [(f"{path}, entry {i}", each) for i, each in enumerate(content, 1)]
        for place, record in entries:
            if not isinstance(record, dict):
                raise UserError(f"{option}: {place} is {type(record).__name__}, not a JSON object")
            for field in fields:
                if field not in record:
                    raise UserError(
                        f'{option}: {place} has no field "{field}"; it has {shown_names(record)}'
                    )
            yield place, record


def _texts(path: Path, option: str) -> Iterator[tuple[str, str]]:
    """Yields the JSON texts of a file with their location."""
    if path.suffix == ".json":
        yield str(path), read_text(path, option)
        return
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {path} is not UTF-8 text (byte {error.start})") from error
