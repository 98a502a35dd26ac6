"""Allows one run at a time in a folder, with a lock file next to it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.utils.errors import UserError


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[str | None]:
    """Keeps other runs out of a folder, which need not exist, while the block runs.

    It takes an operating system lock on OUTPUT_DIR/.NAME.lock, which is released when the process
    ends for any reason. It also works between hosts if the file system supports locks; otherwise
    it yields a note. Raises a UserError if another run holds the lock.
    """
    folder = folder.absolute()
    path = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file, note = _locked(path, folder)
    except OSError as error:
        raise UserError(f"{path} is not writable ({error.strerror})") from error
    try:
        yield note
    finally:
        if note is None:
            # Unlinked while still locked, so that a waiting run sees that the name is gone.
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(file)


def _locked(path: Path, folder: Path) -> tuple[int, str | None]:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            raise UserError(
                f"another run writes into {folder} ({holder or 'just starting'}); wait until it "
                "ends, or set another run.name or run.output_dir"
            ) from None
        except OSError as error:
            return file, (
                f"warning: no lock on {path}, because its file system does not support locks "
                f"({error.strerror}); a second run in this folder would not be detected"
            )
        # The previous holder may have unlinked the name since the file was opened.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file)):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return file, None
        os.close(file)
