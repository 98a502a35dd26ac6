"""Result files of JSON lines; a process that is killed may leave a cut last line."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtraining_jax.utils.errors import UserError


def read_lines(path: Path) -> list[Any]:
    """Reads the values of a file; a missing one has none, and a cut last line is ignored.

    Raises:
        UserError: if another line is not JSON.
    """
    found = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON") from None
    return found


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Adds values to a file, after removing a cut last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        for value in values:
            file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
