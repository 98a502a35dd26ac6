"""JSON lines, one document per line."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import errors_as, shown_names
from mtraining_jax.data.source import FileSource
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import Text


@dataclass(frozen=True, kw_only=True)
class JsonLines(FileSource, DocumentSource):
    """Files with one JSON object per line; skips blank lines.

    Attributes:
        text_field: JSONL field or table column with the text.
    """

    text_field: Text = "text"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():
            with errors_as(UserError, f"data.paths: {path} cannot be read", OSError):
                lines = path.open("rb")
            with lines:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                        _check_not_packed(line, path)
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield where, self._text(line, where)

    def _text(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not valid JSON ({_reason(error)})") from error
        if not isinstance(record, dict):
            raise UserError(f"{where} is {_kind(record)}, not a JSON object")
        field = f'data.text_field = "{self.text_field}"'
        if self.text_field not in record:
            raise UserError(f"{where} has no field of {field}; it has {shown_names(record)}")
        text = record[self.text_field]
        if not isinstance(text, str):
            raise UserError(f"{where}: the field of {field} is {_kind(text)}, not text")
        return text


def _check_not_packed(line: bytes, path: Path) -> None:
    for name, magic in (("gzip", b"\x1f\x8b"), ("zstd", b"\x28\xb5\x2f\xfd")):
        if line.startswith(magic):
            raise UserError(f"data.paths: {path} is compressed with {name}: decompress it first")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):  # without the line number
        return f"{error.msg}: character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start + 1}"
    return str(error)


def _kind(value: Any) -> str:
    """The JSON type of a value."""
    kinds = {dict: "an object", list: "an array", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "text" if isinstance(value, str) else "a number")
