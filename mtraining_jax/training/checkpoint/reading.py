"""Failing reads: all of them end before a failure is reported, and the report names the cause."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.errors import UserError

# How TensorStore and XLA name failures that say nothing about the files themselves.
_NOT_THE_FILES = (
    "PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED",
    "CANCELLED", "RESOURCE_EXHAUSTED",
)  # fmt: skip
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
    for cause in _causes(error):
        if isinstance(cause, MemoryError) or "RESOURCE_EXHAUSTED" in str(cause):
            return UserError(
                f"there is not enough memory to read the checkpoint {path} ({_first_line(cause)})"
            )
        about_access = any(name in str(cause) for name in _NOT_THE_FILES)
        missing = isinstance(cause, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if about_access or (isinstance(cause, OSError) and not missing):
            return UserError(
                f"the checkpoint {path} could not be read ({_first_line(cause)}); the same command "
                "tries again"
            )
    # Messages that Orbax wraps around the first cause name its own objects, not the file.
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    return damaged(path, _first_line(root))


def damaged(path: Path, reason: str) -> UserError:
    """The message about a checkpoint whose files are not as they were written."""
    return UserError(
        f"the checkpoint {path} is damaged ({reason}); delete it to go on from the one before, or "
        "start anew with checkpoint.resume=false"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from or beside."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
