"""Token ids of documents in a file that one process of a host writes and all of them map.

The file has token ids, the label mask (bool), document lengths (int64), a record in JSON, and a
checksum. It grows under the name `KEY.partial`, locked by its writer. The system releases the lock
of a process that ends, and another process takes over. The complete file is renamed to
`KEY.tokens`. Maps of it hold a shared lock; files without a lock are deleted when another one is
written.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mtraining_jax.data.files import errors_as, reason
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.data.stream import Part, chunks
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.printable import print_message

REPORT_AFTER = 10.0  # seconds until a process prints that it works or waits; intervals double
_POLL = 0.1
_PREFIX = "mtraining-tokens-"
# The end of a finished file: the bytes of the record, a magic number, and the checksum of all this.
_END, _MAGIC, _CHECKSUM = struct.Struct("<Q8s"), b"\x93tokens2", struct.Struct("<I")
_CHUNK = 2**24


def key_of(files: Iterable[Path], *values: object) -> str:
    """A key of JSON values and of files with these paths, sizes and times."""
    found: list[tuple[object, ...]] = []
    for path in map(Path.absolute, files):
        try:
            stat = path.stat()
        except OSError:  # reported when it is read
            continue
        # A replacement with the same date has another time of change.
        found.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return hashlib.sha256(json.dumps([found, *values]).encode()).hexdigest()[:32]


def tokenized(
    documents: Callable[[], Iterable[MaskedTokens]],
    dtype: np.dtype,
    name: str,
    key: str | None = None,
    kept_length: int | None = None,
) -> tuple[Part, np.ndarray, dict[str, int]]:
    """Memory-maps encoded documents, which one process of the host encodes and writes.

    Args:
        documents: Encodes the documents, with ids of type `dtype`.
        name: The data, for messages.
        key: Equal only if the result is equal; None: this process uses a file of its own.
        kept_length: Keeps only documents of this length.

    Returns:
        The kept documents, the lengths of all documents (int64 [d]), and their numbers by note.

    Raises:
        UserError: A document is invalid, or the temporary folder is full.
    """
    temporary = tempfile.gettempdir()
    problem = (
        f"the temporary folder {temporary} cannot hold the token ids of {name}; set TMPDIR to a "
        "folder with enough space"
    )

    def write(file: BinaryIO) -> None:
        with errors_as(UserError, problem, OSError), _reported(file, name):
            _write(file, documents(), dtype, kept_length)

    if key is not None:
        folder = Path(temporary) / f"{_PREFIX}{os.getuid()}-{socket.gethostname()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():  # also of a link
                raise PermissionError(errno.EPERM, "it belongs to another user")
            with _shared_file(folder / f"{key}.tokens", write, name) as file:
                return _mapped(file, dtype, name)
        except OSError as error:
            what = f"the processes of this host cannot share the token ids of {name}"
            _note(f"{what} in {folder} ({reason(error)}), so this one makes its own")
    with errors_as(UserError, problem, OSError), tempfile.TemporaryFile(prefix=_PREFIX) as file:
        write(file)
        return _mapped(file, dtype, name)


def _shared_file(path: Path, write: Callable[[BinaryIO], None], name: str) -> BinaryIO:
    """Opens a complete file; writes it first, or waits for the process that does."""
    partial = path.with_suffix(".partial")
    attempts = itertools.count()
    while True:
        is_first = next(attempts) == 0
        with contextlib.ExitStack() as opened:
            with contextlib.suppress(FileNotFoundError):
                file = opened.enter_context(path.open("rb"))
                fcntl.flock(file, fcntl.LOCK_SH)
                if (record := _record(file)) is not None:
                    if is_first:  # else another process has just made them
                        made = record["date"]
                        _note(f"the token ids of {name} are those of {path}, made {made}")
                    opened.pop_all()
                    return file
                file.close()
                path.unlink()
                _note(f"{path} is damaged, so the token ids of {name} are made again")
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)
            file = opened.enter_context(open(descriptor, "r+b"))
            waited = _wait_for_lock(file, partial, name)
            if not _is_at(partial, file):  # complete, failed, or deleted
                if problem := (_record(file) or {}).get("error"):
                    raise UserError(problem)
                continue
            if path.exists():  # it was not, above
                partial.unlink()
                continue
            if waited or os.fstat(descriptor).st_size:
                _note(f"the process that tokenized {name} ended too early; this one starts over")
            for other in path.parent.iterdir():
                with contextlib.suppress(OSError), other.open("r+b") as unused:
                    fcntl.flock(unused, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    other.unlink()
            file.truncate(0)
            try:
                write(file)
            except BaseException as error:
                if isinstance(error, UserError):  # raised by those who wait, too
                    with contextlib.suppress(OSError):
                        os.ftruncate(descriptor, 0)  # the disk may be full
                        _finish(file, {"error": str(error)})
                partial.unlink(missing_ok=True)
                raise
            partial.rename(path)
            fcntl.flock(file, fcntl.LOCK_SH)
            opened.pop_all()
            return file


def _wait_for_lock(file: BinaryIO, path: Path, name: str) -> bool:
    """Waits for the lock, or until the path names another file; returns whether it waited."""
    begin, report, waited = time.monotonic(), REPORT_AFTER, False
    while _is_at(path, file):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        waited = True
        time.sleep(_POLL)
        if (seconds := time.monotonic() - begin) >= report:
            report *= 2
            size = os.fstat(file.fileno()).st_size / 1e6
            _note(
                f"waited {seconds:,.0f} s for another process of this host that tokenizes {name}: "
                f"{size:,.1f} MB of token ids so far"
            )
    return waited


@contextlib.contextmanager
def _reported(file: BinaryIO, name: str) -> Iterator[None]:
    """Prints the size of a file that is written for long, also while a reader finds no document."""
    begin, ended = time.monotonic(), threading.Event()

    def report() -> None:
        interval = REPORT_AFTER
        while not ended.wait(interval):
            seconds, size = time.monotonic() - begin, os.fstat(file.fileno()).st_size / 1e6
            _note(f"tokenizing {name} for {seconds:,.0f} s: {size:,.1f} MB of token ids so far")
            interval = seconds

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether the path names this open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _write(
    file: BinaryIO, documents: Iterable[MaskedTokens], dtype: np.dtype, kept_length: int | None
) -> None:
    lengths, notes, size = array("q"), Counter[str](), 0
    with contextlib.ExitStack() as opened:
        masks: BinaryIO | None = None
        for document in documents:
            ids, trained = document.ids, document.trained
            lengths.append(ids.size)
            notes[document.note] += 1
            if kept_length not in (None, ids.size):
                continue
            if masks is None and trained is not None:
                masks = opened.enter_context(tempfile.TemporaryFile(prefix=_PREFIX))
                for _, chunk in chunks(np.broadcast_to(True, size)):
                    masks.write(chunk.tobytes())
            if masks is not None:
                masks.write(np.ones(ids.size, bool) if trained is None else trained.data)
            size += file.write(ids.data) // dtype.itemsize
        if masks is not None:
            masks.seek(0)
            shutil.copyfileobj(masks, file)
        file.write(lengths)
        sizes = size, 0 if masks is None else size, len(lengths)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    _finish(file, {"sizes": sizes, "notes": notes, "date": date})


def _finish(file: BinaryIO, record: dict[str, Any]) -> None:
    text = json.dumps(record).encode()
    file.write(text + _END.pack(len(text), _MAGIC))
    file.flush()
    file.write(_CHECKSUM.pack(_checksum(file, file.tell())))
    file.flush()
    os.fsync(file.fileno())


def _record(file: BinaryIO, check: bool = True) -> dict[str, Any] | None:
    """The record of a finished file; None if the file is unfinished or has changed."""
    checked = os.fstat(file.fileno()).st_size - _CHECKSUM.size
    end = checked - _END.size
    if end < 0:
        return None
    ending = os.pread(file.fileno(), _END.size + _CHECKSUM.size, end)
    size, magic = _END.unpack_from(ending)
    if magic != _MAGIC:
        return None
    if check and _CHECKSUM.unpack_from(ending, _END.size) != (_checksum(file, checked),):
        return None
    return json.loads(os.pread(file.fileno(), size, end - size))


def _checksum(file: BinaryIO, size: int) -> int:
    """The checksum of the first bytes of a file; 2 GB take a second."""
    checksum = 0
    for start in range(0, size, _CHUNK):
        chunk = os.pread(file.fileno(), min(_CHUNK, size - start), start)
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def _mapped(file: BinaryIO, dtype: np.dtype, name: str) -> tuple[Part, np.ndarray, dict[str, int]]:
    """Maps a finished file. Maps keep the file and its lock."""
    record = _record(file, check=False) or {}
    kinds, arrays, offset = (dtype, np.dtype(bool), np.dtype(np.int64)), [], 0
    for size, kind in zip(record["sizes"], kinds, strict=True):
        arrays.append(np.memmap(file, kind, "r", offset, size) if size else np.zeros(0, kind))
        offset += size * kind.itemsize
    ids, trained, lengths = arrays
    return Part(name, ids, trained=trained if trained.size else None), lengths, record["notes"]


def _note(text: str) -> None:
    print_message(f"note: {text}")
