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
    path = _lock_file(folder)
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


def holder(folder: Path) -> str | None:
    """Returns the process that runs in a folder, if this process sees the lock file."""
    try:
        return _lock_file(folder.absolute()).read_text(errors="replace").strip()
    except OSError:
        return None


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _own_name() -> bytes:
    return f"process {os.getpid()} on {socket.gethostname()}\n".encode()


def _locked(path: Path, folder: Path) -> tuple[int, str | None]:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            raise UserError(
                f"another run writes into {folder} ({other or 'just starting'}); wait until it "
                "ends, or set another run.name or run.output_dir"
            ) from None
        except OSError as error:
            os.write(file, _own_name())
            return file, (
                f"warning: no lock on {path}, because its file system does not support locks "
                f"({error.strerror}); a second run in this folder would not be detected"
            )
        # The previous holder may have unlinked the name since the file was opened.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file)):
                os.ftruncate(file, 0)
                os.write(file, _own_name())
                return file, None
        os.close(file)
