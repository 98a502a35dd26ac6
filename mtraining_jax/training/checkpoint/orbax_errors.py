"""Keeps Orbax from printing an error again that it also raises.

Orbax reads and writes many arrays at once in an event loop of its own, raises the first failure and
closes the loop. Each remaining array would later fail to wake the closed loop, and Python would
print a traceback. Orbax also logs a failure once in every thread that it passes through.
"""

import asyncio
import logging
import types

from orbax.checkpoint._src import asyncio_utils

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
