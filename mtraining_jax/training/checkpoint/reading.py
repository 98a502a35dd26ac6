"""Failing reads: all of them end before a failure is reported, and the report names the cause.

Only what shows damage is called damage. No message tells anyone to delete a file.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.errors import UserError

# What shows that a file is not as it was written: names of TensorStore's errors (the last one is of
# data that cannot be unpacked), and what parsers raise. Any other failure may be of the network, a
# disk or a library, and the files may be whole.
_OF_THE_FILE = ("DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION")
_PARSERS = (json.JSONDecodeError, UnicodeDecodeError)
# Of TensorStore, and of Orbax about a folder that lacks a whole part.
_NOT_THERE = ("NOT_FOUND", "was not found in the checkpoint")
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Cannot allocate memory")
# Moved and not deleted: a backup, a repaired disk or another reader may still make use of it.
_WAY_OUT = (
    "move it out of this folder to go on from the one before, or start anew with "
    "checkpoint.resume=false"
)
# Seconds that the other reads get to end after the first failure.
_PATIENCE = 60


@contextlib.contextmanager
def reads_end_together() -> Iterator[None]:
    """While the block runs, event loops that are made end only when their tasks have ended.

    Orbax reads many arrays at once in an event loop of its own, and closes it at the first
    failure. Each of the other reads would then fail to wake the closed loop, at any time later,
    and Python would print a traceback for each.
    """
    make_loop = asyncio.new_event_loop
    asyncio.new_event_loop = _LoopThatWaits
    try:
        yield
    finally:
        asyncio.new_event_loop = make_loop


class _LoopThatWaits(asyncio.SelectorEventLoop):
    def close(self) -> None:
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            done, _ = self.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE))
            for task in done:
                if not task.cancelled():
                    task.exception()  # looked at, or it would be printed
        super().close()


def unreadable(path: Path, error: Exception) -> UserError:
    """The message about a checkpoint that could not be read.

    Args:
        path: of the checkpoint.
        error: what was raised.
    """
    causes = list(causes_of(error))
    for cause in causes:
        if isinstance(cause, MemoryError) or any(name in str(cause) for name in _NO_MEMORY):
            return UserError(
                f"there is not enough memory to read the checkpoint {path} ({first_line(cause)})"
            )
    # Messages that Orbax wraps around the first cause name its own objects, not the file.
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    for cause in causes:
        if isinstance(cause, _PARSERS) or any(name in str(cause) for name in _OF_THE_FILE):
            return damaged(path, first_line(root))
    missing = (FileNotFoundError, NotADirectoryError)
    if any(isinstance(x, missing) or any(y in str(x) for y in _NOT_THERE) for x in causes):
        return UserError(
            f"the checkpoint {path} lacks a file ({first_line(root)}): it is damaged, or its file "
            f"system is not there as a whole; {_WAY_OUT}"
        )
    return UserError(
        f"the checkpoint {path} could not be read ({first_line(root)}); its files may be whole, "
        "and the same command tries again"
    )


def damaged(path: Path, reason: str) -> UserError:
    """The message about a checkpoint whose files are not as they were written."""
    return UserError(f"the checkpoint {path} is damaged ({reason}); {_WAY_OUT}")


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from or beside."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut; its kind without one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
