"""Small files from elsewhere, read up to a size: what is larger is refused, and not loaded.

A configuration, a tokenizer or an index that is gigabytes long, nested a million levels deep, or a
device that never ends, would otherwise take the machine's memory before anything is checked.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from mtraining_jax.errors import UserError

MIB = 2**20
# The largest that are known: 33 MB for a tokenizer.json, 20 MB for an index of shards.
LARGEST_CONFIG = 16 * MIB
LARGEST_INDEX = 256 * MIB
LARGEST_TOKENIZER = 256 * MIB


def check_size(path: str | Path, limit: int) -> None:
    """Refuses a file that is larger than its kind can be, and what is no file.

    Raises:
        UserError: it is.
        OSError: it cannot be looked at.
    """
    found = os.stat(path)
    # Of a folder the operating system has its own words.
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{path} is no ordinary file")
    if found.st_size > limit:
        raise UserError(
            f"{path} has {found.st_size / MIB:,.0f} MiB, and a file of its kind at most "
            f"{limit / MIB:,.0f}"
        )


def read_text(path: Path, limit: int = LARGEST_CONFIG) -> str:
    """The UTF-8 text of a small file.

    Raises:
        UserError: as `check_size`.
        OSError, UnicodeDecodeError: as `Path.read_text`.
    """
    check_size(path, limit)
    return path.read_text(encoding="utf-8")


def read_json(path: Path, limit: int = LARGEST_CONFIG) -> Any:
    """What a small JSON file holds.

    Raises:
        UserError: as `check_size`.
        OSError: it cannot be read.
        ValueError: it is not JSON, or nested too deeply.
    """
    text = read_text(path, limit)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_plain_name(name: str) -> bool:
    """Whether a name from a file is of one file beside it: no folder, no way out of its own."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
