"""Messages for failed writes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.training.checkpoint.reading import causes_of, first_line
from mtraining_jax.utils.errors import UserError

# Messages of the operating system and TensorStore for a full disk or quota.
_NO_ROOM = ("No space left", "Disk quota exceeded", "File too large")


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Turns any exception while writing into `folder` into a `UserError`."""
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
