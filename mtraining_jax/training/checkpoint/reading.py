"""Messages for failed reads.

A message says "damaged" only with evidence of damage, and no message asks to delete a file.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.utils.errors import UserError

# Evidence that a file has changed: names of TensorStore errors (the last one: data that cannot be
# decompressed) and exceptions of parsers. Any other failure may come from the network, a disk or a
# library, while the files are intact.
_OF_THE_FILE = ("DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION")
_PARSERS = (json.JSONDecodeError, UnicodeDecodeError)
# From TensorStore, and from Orbax for a folder without one of its items.
_NOT_THERE = ("NOT_FOUND", "was not found in the checkpoint")
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Cannot allocate memory")
# Move, not delete: a backup, a repaired disk or another reader may still make use of it.
_WAY_OUT = (
    "move it out of this folder to resume from the previous checkpoint, or start from scratch with "
    "checkpoint.resume=false"
)


def unreadable(path: Path, error: Exception) -> UserError:
    """Builds the message for a checkpoint that could not be read."""
    causes = list(causes_of(error))
    for cause in causes:
        if isinstance(cause, MemoryError) or any(name in str(cause) for name in _NO_MEMORY):
            return UserError(
                f"not enough memory to read the checkpoint {path} ({first_line(cause)})"
            )
    # Exceptions that Orbax wraps around the first cause name its own objects, not the file.
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    for cause in causes:
        if isinstance(cause, _PARSERS) or any(name in str(cause) for name in _OF_THE_FILE):
            return damaged(path, first_line(root))
    missing = (FileNotFoundError, NotADirectoryError)
    if any(isinstance(x, missing) or any(y in str(x) for y in _NOT_THERE) for x in causes):
        return UserError(
            f"a file is missing from the checkpoint {path} ({first_line(root)}): it is damaged, or "
            f"its file system is only partly available; {_WAY_OUT}"
        )
    return UserError(
        f"the checkpoint {path} could not be read ({first_line(root)}); its files may be intact, "
        "so run the same command again to retry"
    )


def damaged(path: Path, reason: str) -> UserError:
    """Builds the message for a checkpoint with files that have changed."""
    return UserError(f"the checkpoint {path} is damaged ({reason}); {_WAY_OUT}")


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields the exception, its causes and its contexts."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    """Returns the truncated first line of an error's message, or its type name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
