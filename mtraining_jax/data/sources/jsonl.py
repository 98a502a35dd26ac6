"""JSON lines, one document per line."""

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.documents import Document, TableSource
from mtraining_jax.data.files import COMPRESSIONS, errors_as, open_compressed, shown_names
from mtraining_jax.data.masked import integers
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options, shortened

_LONGEST_LINE = 2**27  # a small compressed file can have gigabytes without a line break


@options(kw_only=True)
class JsonLines(TableSource):
    """Files with one JSON object per line, may be compressed; skips blank lines."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.zst")

    def documents(self) -> Iterator[tuple[str, Document]]:
        for path in self.files():
            for number, line in enumerate(_lines(path), 1):
                where = f"{path}, line {number}"
                if len(line) > _LONGEST_LINE:
                    raise UserError(f"{where} is longer than {_LONGEST_LINE:,} bytes")
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield where, self._parsed(line, where)

    def _parsed(self, line: bytes, where: str) -> Document:
        try:
            text = line.rstrip(b"\r\n").decode("utf-8")
            record = json.loads(text, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not valid JSON ({_reason(error)})") from error
        if not isinstance(record, dict):
            raise UserError(f"{where} is {_kind(record)}, not a JSON object")
        values = [self._value(record, name, where) for name in self.columns_in(record, where)]
        return self.document(values, where)

    def _value(self, record: dict[str, Any], option: str, where: str) -> Any:
        field, name = self.shown(option), self.columns[option]
        if name not in record:
            raise UserError(f"{where} has no field of {field}; it has {shown_names(record)}")
        value = record[name]
        if value is None:
            return None
        if option == "token_field":
            return integers(value, f"{where}: the field of {field}")
        if option in ("text_field", "prompt_field") and not isinstance(value, str):
            raise UserError(f"{where}: the field of {field} is {_kind(value)}, not text")
        return value


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; cuts lines that are too long."""
    with errors_as(UserError, f"data.paths: {path} cannot be read", Exception):
        with path.open("rb") as file:
            head = file.read(4)
        kinds = [kind for kind, magic in COMPRESSIONS.items() if head.startswith(magic)]
        with open_compressed(path, kinds[0] if kinds else None) as lines:
            while line := lines.readline(_LONGEST_LINE + 1):
                yield line


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; JSON does not say which of two fields of one name counts."""
    record = dict(pairs)
    if len(record) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'an object has two fields named "{shortened(name, 40)}"')
    return record


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
