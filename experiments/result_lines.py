"""Reads and writes result files: JSON lines, with the values that rows share written once.

A line is one of three things:

- an object with "columns": a header. Its other fields hold for all rows below it.
- a list: a row, the values of the columns of the header above it. `null` and what is missing at the
  end are fields without a value.
- an object without "columns", such as the description of a run: it stands for itself.

Readers see each row as one dict (`Line`).
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mtraining_jax.errors import UserError

Line = dict[str, Any]

# Fields that differ from row to row, with their digits after the decimal point, by kind of row.
# Fields that are often missing come last.
COLUMNS = {
    "train": {
        "step": 0, "steps": 0, "loss": 6, "density": 6, "step_seconds": 8, "recall": 6,
        "recall_worst": 4, "dense_step": 0,
    },
    "loss": {"number": 0, "kind": 0, "density": 5, "loss_of_last": 6, "loss_by_position": 6},
    "task": {"number": 0, "depth": 3, "score": 6, "density": 5, "loss": 4},
}  # fmt: skip


def read_lines(path: Path) -> list[Line]:
    """Reads a JSONL file; a missing file has no lines. An incomplete last line is ignored.

    Raises:
        UserError: if another line is not JSON, or a row does not fit the header above it.
    """
    if not path.is_file():
        return []
    lines, header, texts = [], {}, path.read_text().split("\n")
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            value = json.loads(text)
        except ValueError:
            if number < len(texts):
                raise UserError(f"{path}, line {number} is not JSON") from None
            continue
        if isinstance(value, list):
            columns = header.get("columns", ())
            if len(value) > len(columns):
                raise UserError(
                    f"{path}, line {number} has {len(value)} values; the header above it names "
                    f"{len(columns)} columns"
                )
            shared = {name: x for name, x in header.items() if name != "columns"}
            row = zip(columns, value, strict=False)
            lines.append(shared | {name: x for name, x in row if x is not None})
        else:
            header = value
            if "columns" not in value:
                lines.append(value)
    return lines


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Adds lines to a JSONL file; an incomplete last line is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        file.seek(0)
        written = file.read()
        complete = written.rfind(b"\n") + 1
        file.truncate(complete)
        objects = (x for x in reversed(written[:complete].splitlines()) if x[:1] != b"[")
        last = next(objects, b"").decode()
        for shared, group in itertools.groupby(lines, _shared):
            for text in _texts(shared, list(group), last):
                file.write(text.encode() + b"\n")
                if not text.startswith("["):
                    last = text


def _shared(line: Line) -> Line:
    """The fields of a line that stand in the header."""
    columns = COLUMNS.get(line.get("what"), ())
    shared = {name: x for name, x in line.items() if name not in columns}
    return {"what": shared.pop("what"), **shared} if columns else shared


def _texts(shared: Line, group: list[Line], last: str) -> Iterator[str]:
    """Lines of the file for lines with the same shared fields.

    Args:
        shared: these fields.
        group: the lines.
        last: the last object in the file; not written again where it is the header of the group.
    """
    known = COLUMNS.get(shared.get("what"), {})
    columns = [name for name in known if any(name in line for line in group)]
    if not columns:
        yield from map(_text, group)
        return
    header = _text(shared | {"columns": columns})
    if header != last:
        yield header
    for line in group:
        row = [_rounded(line.get(name), known[name]) for name in columns]
        while row and row[-1] is None:
            row.pop()
        yield _text(row)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _rounded(value: Any, decimals: int) -> Any:
    if isinstance(value, list):
        return [_rounded(x, decimals) for x in value]
    if not isinstance(value, float):
        return value
    short = round(value, decimals)
    return int(short) if short.is_integer() else short
