"""Handles failed writes: one message, without extra output from Orbax or TensorStore."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mtraining_jax.errors import UserError
from mtraining_jax.training.checkpoint.reading import causes_of, first_line

# Messages of the operating system and TensorStore for a full disk or quota.
_NO_ROOM = ("No space left", "Disk quota exceeded", "File too large")

_PATIENCE = 10  # seconds


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Stops Orbax from logging errors that it also raises, and its preemption messages.

    Orbax logs each failure with its traceback, once in every thread that it passes through. The
    first one is raised while other threads still run, so this waits for them. If a write of
    TensorStore fails after the first one, its event loop is already closed, and Python would print
    that.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_tells_more)
    hook = sys.unraisablehook
    sys.unraisablehook = _without_closed_loops(hook)
    try:
        yield
    finally:
        end = time.monotonic() + _PATIENCE
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("orbax."):
                # Orbax's `join` would raise the error of the thread again.
                threading.Thread.join(thread, max(0.0, end - time.monotonic()))
        logger.removeFilter(_tells_more)
        sys.unraisablehook = hook


def _without_closed_loops(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    def report(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    return report


def _tells_more(record: logging.LogRecord) -> bool:
    raised = record.exc_info is not None or "raised an exception" in record.getMessage()
    known = raised or "preemption" in record.getMessage()
    return not (known and "orbax" in record.pathname)


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Turns a failure to write a checkpoint into a `UserError`.

    Args:
        folder: folder of the checkpoints.

    Raises:
        UserError: if the block raises any exception.
    """
    try:
        yield
    except Exception as error:  # Orbax raises many types
        causes = list(causes_of(error))
        cause = next((x for x in causes if any(name in str(x) for name in _NO_ROOM)), causes[-1])
        name = next((name for name in _NO_ROOM if name in str(cause)), None)
        reason = first_line(cause) if name is None else name
        when = "after fixing this" if name is None else "when there is free space"
        raise UserError(
            f"{folder}: a checkpoint could not be written ({reason}); older ones are intact, so "
            f"{when} run the same command again to resume from the newest one"
        ) from error
