"""JSON lines: one document a line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import shown_names
from mtraining_jax.data.source import FileSource
from mtraining_jax.errors import UserError
from mtraining_jax.field_types import Text


@dataclass(frozen=True, kw_only=True)
class JsonLines(FileSource, DocumentSource):
    """Files of one JSON object a line. Blank lines are passed over.

    Attributes:
        text_field: Field of a JSONL line, or column of a table, that holds the text.
    """

    text_field: Text = "text"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)

    def documents(self) -> Iterator[tuple[str, str]]:
        """As of `DocumentSource`."""
        for path in self.files():
            try:
                lines = path.open("rb")
            except OSError as error:
                raise UserError(f"data.paths: {path} cannot be read ({error.strerror})") from error
            with lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield where, self._text(line, where)

    def _text(self, line: bytes, where: str) -> str:
        field = self.text_field
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise UserError(f"{where} is {type(record).__name__}, not a JSON object")
        if field not in record:
            raise UserError(
                f'{where} has no field of data.text_field = "{field}"; it has {shown_names(record)}'
            )
        if not isinstance(record[field], str):
            raise UserError(
                f'{where}: the field of data.text_field = "{field}" is '
                f"{type(record[field]).__name__}, not text"
            )
        return record[field]
