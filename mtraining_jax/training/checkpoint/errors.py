"""Messages for failed reads and writes.

A message says "damaged" only with evidence of damage, and no message asks to delete a file.

Orbax reads and writes many arrays at once in its own event loop, raises the first failure and
closes the loop. Each remaining array would later fail to wake the closed loop, and Python would
print a traceback. Orbax also logs a failure once in every thread that it passes through. So
`WaitingEventLoop` and `print_errors_once` keep it from printing an error that it also raises.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

from orbax.checkpoint._src import asyncio_utils

from mtraining_jax.utils.errors import UserError

# Names of TensorStore errors and messages of the operating system.
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Cannot allocate memory")
_NO_ROOM = ("No space left", "Disk quota exceeded", "File too large")
# Evidence that a file has changed; the last one: data that cannot be decompressed. Any other
# failure may come from the network, a disk or a library, while the files are intact.
_CHANGED = ("DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION")
_PARSERS = (json.JSONDecodeError, UnicodeDecodeError)
# From TensorStore, and from Orbax for a folder without one of its items.
_NOT_THERE = ("NOT_FOUND", "was not found in the checkpoint")
# The first words of an error of TensorStore, for example "UNAVAILABLE: ".
_STATUS = re.compile("[A-Z_]+: ")
# Its status, the name of an array, and the innermost file.
_ARRAY = re.compile(r'([A-Z_]+: ).*?"([^"]+)/[^"/]+" in OCDBT .*local file "([^"]+)"')
_FILES = ("record/metadata", "arrays/_METADATA")
_WAY_OUT = (
    "train.py resumes from the newest intact checkpoint, if there is one, with "
    "checkpoint.skip_damaged=true, or starts from scratch with checkpoint.resume=false"
)


class DamagedCheckpoint(UserError):
    """A checkpoint that will stay unreadable."""


def unreadable(path: Path, error: Exception) -> UserError:
    """Builds the message for a checkpoint that could not be read."""
    causes = _causes(error)
    if (cause := _first(causes, (MemoryError,), _NO_MEMORY)) is not None:
        return UserError(f"not enough memory to read the checkpoint {path} ({_line(cause)})")
    # Exceptions that Orbax wraps around the first cause name its own objects, not the file.
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if _first(causes, _PARSERS, _CHANGED) is not None:
        return damaged(path, _line(root))
    if _first(causes, (FileNotFoundError, NotADirectoryError), _NOT_THERE) is not None:
        missing = [name for name in _FILES if path.is_dir() and not (path / name).is_file()]
        reason = missing[0] if missing else _line(root)
        return DamagedCheckpoint(
            f"a file is missing from the checkpoint {path} ({reason}): it is damaged, or "
            f"its file system is only partly available; {_WAY_OUT}"
        )
    if isinstance(root, OSError) or _STATUS.match(str(root)):
        return UserError(
            f"the checkpoint {path} could not be read ({_line(root)}); its files may be intact, "
            "so run the same command again to retry"
        )
    return DamagedCheckpoint(
        f"the content of the checkpoint {path} is not as expected ({type(root).__name__}: "
        f"{_line(root)}): it is damaged, or another version of Orbax wrote it; {_WAY_OUT}"
    )


def damaged(path: Path, reason: str) -> DamagedCheckpoint:
    """Builds the message for a checkpoint with files that have changed."""
    return DamagedCheckpoint(f"the checkpoint {path} is damaged ({reason}); {_WAY_OUT}")


@contextlib.contextmanager
def writing_into(folder: Path, before: os.stat_result | None) -> Iterator[None]:
    """Turns any exception while writing into `folder` into a `UserError`.

    `before` is its status when it was opened; None in a bucket.
    """
    try:
        yield
    except Exception as error:  # Orbax raises many types
        # Orbax may have made a new one.
        if before and not (folder.exists() and os.path.samestat(folder.stat(), before)):
            raise UserError(
                f"{folder} was moved or deleted during the run, so a checkpoint could not be "
                "written; move it back and run the same command again to resume from its newest "
                "checkpoint"
            ) from error
        causes = _causes(error)
        reason, when = _line(causes[-1]), "after fixing this"
        if (full := _first(causes, (), _NO_ROOM)) is not None:
            reason = next(name for name in _NO_ROOM if name in str(full))
            when = "when there is free space"
        raise UserError(
            f"{folder}: a checkpoint could not be written ({reason}); older ones are intact, so "
            f"{when} run the same command again to resume from the newest one"
        ) from error


def _causes(error: BaseException) -> list[BaseException]:
    causes = []
    current: BaseException | None = error
    while current is not None and current not in causes:
        causes.append(current)
        current = current.__cause__ or current.__context__
    return causes


def _first(
    causes: list[BaseException], types: tuple[type[Exception], ...], texts: tuple[str, ...]
) -> BaseException | None:
    """Returns the first cause of one of the types, or with one of the texts in its message."""
    known = (x for x in causes if isinstance(x, types) or any(text in str(x) for text in texts))
    return next(known, None)


def _line(error: BaseException) -> str:
    """Returns the shortened first line of an error's message, or its type name."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if found := _ARRAY.match(line):
        return f"{found[1]}array {found[2]} in {found[3]}"
    return textwrap.shorten(line, 200, placeholder=" ...")


# Seconds that the remaining reads and writes get to end after the first failure.
_PATIENCE = 60


class WaitingEventLoop(asyncio.SelectorEventLoop):
    """Waits for its tasks before it closes."""

    def close(self) -> None:
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            done, _ = self.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE))
            for task in done:
                if not task.cancelled():
                    task.exception()  # retrieved, so that Python does not print it
        super().close()


def print_errors_once() -> None:
    """Applies to all later calls of Orbax in this process; may be called again."""
    # The module creates all event loops of Orbax, with `asyncio.new_event_loop`.
    names = vars(asyncio) | {"new_event_loop": WaitingEventLoop}
    asyncio_utils.asyncio = types.SimpleNamespace(**names)  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger("absl").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Drops Orbax's records of raised errors, and messages on preemption and sizes of objects."""
    raised = record.exc_info is not None or "raised an exception" in record.getMessage()
    known = raised or any(x in record.getMessage() for x in ("preemption", "object size logging"))
    return not (known and "orbax" in record.pathname)
