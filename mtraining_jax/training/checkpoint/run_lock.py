"""Allows one run at a time in a folder, with a lock file next to it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.utils.errors import UserError


@contextlib.contextmanager
def only_run_in(
    folder: Path, run: str = "", way_out: str = "run.name or run.output_dir"
) -> Iterator[str | None]:
    """Keeps other runs out of a folder, which need not exist, while the block runs.

    It takes an operating system lock on OUTPUT_DIR/.NAME.lock, which is released when the process
    ends for any reason. It also works between hosts if the file system supports locks; otherwise
    it yields a note. Raises a UserError if another run holds the lock.

    Args:
        run: Names this run to others, next to its process.
        way_out: Options with which both could run.
    """
    folder = folder.absolute()
    path = _lock_file(folder)
    name = f"process {os.getpid()} on {socket.gethostname()}{run and f', {run}'}\n".encode()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file, note = _locked(path, folder, name, way_out)
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


def _locked(path: Path, folder: Path, name: bytes, way_out: str) -> tuple[int, str | None]:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(file, 1000).decode(errors="replace").strip()
            os.close(file)
            raise UserError(
                f"another run writes into {folder} ({other or 'just starting'}); wait until it "
                f"ends, or set another {way_out}"
            ) from None
        except OSError as error:
            os.write(file, name)
            return file, (
                f"warning: no lock on {path}, because its file system does not support locks "
                f"({error.strerror}); a second run in this folder would not be detected"
            )
        # The previous holder may have unlinked the name since the file was opened.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file)):
                os.ftruncate(file, 0)
                os.write(file, name)
                return file, None
        os.close(file)
