"""One run at a time in a folder: a file beside it that the run holds locked."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.errors import UserError


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[str | None]:
    """Keeps other runs out of a folder while the block runs.

    The lock is the operating system's, on OUTPUT_DIR/.NAME.lock, so it ends with the process,
    however that ends. It also holds between hosts where the file system has locks.

    Args:
        folder: of the run; need not exist.

    Yields:
        None; or, on a file system without locks, a sentence that says so.

    Raises:
        UserError: if another run holds it, or the file cannot be made.
    """
    folder = folder.absolute()
    path = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file, note = _locked(path, folder)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
    try:
        yield note
    finally:
        if note is None:
            # While it is still held: who waits for it sees that the name is gone.
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
                f"another run writes into {folder} ({holder or 'just starting'}); wait for it, or "
                "choose another run.name or run.output_dir"
            ) from None
        except OSError as error:
            return file, (
                f"no lock: the file system of {path} has none ({error.strerror}), so a second run "
                "in this folder would not be noticed"
            )
        # The one that held it may have removed the name since the file was opened.
        try:
            same = os.path.samestat(os.stat(path), os.fstat(file))
        except FileNotFoundError:
            same = False
        if same:
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return file, None
        os.close(file)
