"""Failing writes: one sentence, and nothing of the library that would complain later."""

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

# How the operating system and TensorStore say that there is no room.
_NO_ROOM = ("No space left", "Disk quota exceeded", "File too large")

_PATIENCE = 10  # seconds


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """While the block runs, Orbax does not log what it raises as well, or what our loop asked it.

    It logs each failure with its traceback, once in every thread that the failure passes through.
    The first is raised while others are still on their way, so its threads are waited for. A write
    of TensorStore that fails after the first one finds the event loop closed that it would tell,
    and has Python print that instead.
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
                # Their own `join` raises once more what they failed by.
                threading.Thread.join(thread, max(0.0, end - time.monotonic()))
        logger.removeFilter(_tells_more)
        sys.unraisablehook = hook


def _without_closed_loops(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    def tell(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    return tell


def _tells_more(record: logging.LogRecord) -> bool:
    raised = record.exc_info is not None or "raised an exception" in record.getMessage()
    known = raised or "preemption" in record.getMessage()
    return not (known and "orbax" in record.pathname)


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Turns a failure to write a checkpoint into a sentence.

    Args:
        folder: where checkpoints are.

    Raises:
        UserError: if the block fails, however the library names that.
    """
    try:
        yield
    except Exception as error:  # Orbax raises many kinds
        causes = list(causes_of(error))
        told = next((x for x in causes if any(name in str(x) for name in _NO_ROOM)), causes[-1])
        name = next((name for name in _NO_ROOM if name in str(told)), None)
        reason = first_line(told) if name is None else name
        when = "that is mended" if name is None else "there is room again"
        raise UserError(
            f"{folder}: a checkpoint cannot be written ({reason}); older ones are as they were, "
            f"and when {when} the same command goes on from the newest"
        ) from error
