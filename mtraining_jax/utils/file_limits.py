"""Reads small untrusted files with a size limit.

Without limits, a file of many gigabytes, deeply nested JSON or an endless device could exhaust the
host's memory before any check.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from mtraining_jax.utils.errors import UserError

MIB = 2**20
# Largest known files: 33 MB for a tokenizer.json, 20 MB for a shard index.
LARGEST_CONFIG = 16 * MIB
LARGEST_INDEX = 256 * MIB
LARGEST_TOKENIZER = 256 * MIB
LARGEST_TEXT = 256 * MIB  # of a prompt or document; the longest context has 8M tokens


def absence(name: str | Path) -> str | None:
    """Why a path is not a regular file or folder, as a predicate: "does not exist"; else None."""
    path = Path(name).expanduser()
    if path.is_file() or path.is_dir():
        return None
    if is_url(str(name)):
        return "is a URL, but only local paths are supported: download it or mount its file system"
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which does not exist"
    if path.exists():
        return "is not a regular file"
    return "does not exist"


def is_url(name: str) -> bool:
    """Whether a name begins with a scheme, e.g. `gs://`; also as a `Path`, with one slash."""
    return re.match("[a-zA-Z][a-zA-Z0-9+.-]+:/", name) is not None


def check_size(path: str | Path, limit: int) -> None:
    """Checks the type and size of a file before it is read."""
    info = os.stat(path)
    # Opening a folder gives a good error message already.
    if not stat.S_ISREG(info.st_mode) and not stat.S_ISDIR(info.st_mode):
        raise UserError(f"{path} is not a regular file")
    if info.st_size > limit:
        size, most = (f"{number / MIB:,.0f} MiB" for number in (info.st_size, limit))
        raise UserError(f"{path} is {size}; the limit is {most}")


def read_text(path: Path, limit: int = LARGEST_CONFIG) -> str:
    """Reads a small UTF-8 file, without a byte order mark.

    A file of another type or beyond `limit` bytes is a `UserError`.
    """
    check_size(path, limit)
    return path.read_text(encoding="utf-8-sig")


def read_bounded(file: BinaryIO, limit: int = LARGEST_TEXT) -> bytes:
    """Reads an open file or pipe to its end; more than `limit` bytes are a `UserError`."""
    chunks, size = list[bytes](), 0
    while chunk := file.read(MIB):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise UserError(f"{file.name} has more than {limit / MIB:,.0f} MiB")
    return b"".join(chunks)


def read_json(path: Path, limit: int = LARGEST_CONFIG) -> Any:
    """Reads a small JSON file, see `read_text`; invalid JSON is a `ValueError`."""
    text = read_text(path, limit)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_plain_name(name: str) -> bool:
    """Whether a file name is safe: no folders, no path traversal."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
