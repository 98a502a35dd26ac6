"""Token ids on disk as one long sequence, of which only the asked positions are ever read."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtraining_jax.errors import UserError

# Streams up to this many tokens are checked whole at the start (under a second); longer ones
# batch by batch, before the ids are handed out.
_CHECKED_AT_START = 2**26
_CHUNK = 2**22


@dataclass(frozen=True)
class Part:
    """One file of a stream: integer ids [n], usually a memmap, and its name for messages."""

    name: str
    ids: np.ndarray


class TokenStream:
    """The parts one after the other, read at any position.

    Args:
      parts: at least one, none of them empty.
      vocab_size: every id must be from 0 to below this.
      vocab_name: what set ``vocab_size``, for messages.

    Raises:
      UserError: a token id outside the vocabulary, if the stream is short enough to look now.
    """

    def __init__(self, parts: Sequence[Part], vocab_size: int, vocab_name: str):
        self._parts = tuple(parts)
        self._ends = np.cumsum([part.ids.shape[0] for part in self._parts])
        self._vocab_size = vocab_size
        self._vocab_name = vocab_name
        if len(self) <= _CHECKED_AT_START:
            for part in self._parts:
                for start, chunk in _chunks(part.ids):
                    self._check(chunk, part, lambda i, start=start: start + i)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Reads token ids.

        Args:
          positions: int64 [n], from 0 to below ``len(self)``, in any order.

        Returns:
          int32 [n].

        Raises:
          UserError: an id outside the vocabulary, with its file and place.
        """
        out = np.empty(positions.shape, np.int32)
        if not positions.size:
            return out
        first, last = np.searchsorted(
            self._ends, (positions.min(), positions.max()), side="right"
        ).tolist()
        for index in range(first, last + 1):
            part = self._parts[index]
            begin = int(self._ends[index]) - part.ids.shape[0]
            inside = slice(None)
            if first != last:
                inside = (positions >= begin) & (positions < self._ends[index])
            local = positions[inside] - begin
            ids = part.ids[local]
            self._check(ids, part, lambda i, local=local: int(local[i]))
            out[inside] = ids
        return out

    def _check(self, ids: np.ndarray, part: Part, place: Callable[[int], int]) -> None:
        if not ids.size or (ids.min() >= 0 and ids.max() < self._vocab_size):
            return
        worst = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
        raise UserError(
            f"{part.name}: token id {int(ids[worst])} at position {place(worst)} is outside the"
            f" vocabulary (0 to {self._vocab_size - 1}, from {self._vocab_name})."
        )


@dataclass(frozen=True)
class TokenFile:
    """A token file: ids [n], and the length of its rows when it is a table."""

    part: Part
    row_len: int | None


def open_token_file(path: Path, token_dtype: str) -> TokenFile:
    """Maps a ``.npy`` file (1-D or 2-D, integers) or a raw ``.bin`` file; reads no token yet.

    Args:
      path: the file; anything not called ``.npy`` is raw.
      token_dtype: numpy name of the integers of a raw file, little-endian.

    Returns:
      The mapped file. The rows of a 2-D array follow each other.

    Raises:
      UserError: an empty or truncated file, or one that holds something else.
    """
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"data.paths: {path} is empty.")
    if path.suffix != ".npy":
        dtype = np.dtype(token_dtype).newbyteorder("<")
        if size % dtype.itemsize:
            raise UserError(
                f"data.paths: {path} is truncated or not of data.token_dtype {token_dtype}:"
                f" its {size} bytes are no multiple of {dtype.itemsize}."
            )
        return TokenFile(Part(str(path), _mapped(path, dtype, 0, size // dtype.itemsize)), None)
    shape, dtype, offset = _npy_header(path)
    if dtype.kind not in "iu":
        raise UserError(f"data.paths: {path} holds {dtype}, not integer token ids.")
    if len(shape) not in (1, 2):
        raise UserError(
            f"data.paths: {path} has shape {shape}; token ids are 1-D, or 2-D with one sequence"
            " a row."
        )
    count = int(np.prod(shape))
    if count == 0:
        raise UserError(f"data.paths: {path} is empty (shape {shape}).")
    whole = offset + count * dtype.itemsize
    if size < whole:
        raise UserError(
            f"data.paths: {path} is truncated: shape {shape} of {dtype} needs {whole} bytes, the"
            f" file has {size}."
        )
    ids = _mapped(path, dtype, offset, count)
    return TokenFile(Part(str(path), ids), shape[1] if len(shape) == 2 else None)


def _mapped(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    try:
        return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,))
    except OSError as error:
        raise UserError(f"data.paths: {path} cannot be read ({error.strerror}).") from error


def _npy_header(path: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version not in readers:
                raise ValueError(f"format version {version}")
            shape, fortran, dtype = readers[version](file)
            offset = file.tell()
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"data.paths: {path} is truncated or no .npy file ({reason}).") from error
    if fortran and len(shape) == 2:
        raise UserError(
            f"data.paths: {path} is stored column by column (Fortran order); save it with"
            " numpy.ascontiguousarray so that a sequence lies together."
        )
    return shape, dtype, offset


def spill(documents: Iterable[np.ndarray], dtype: np.dtype, name: str) -> tuple[Part, np.ndarray]:
    """Writes documents to a temporary file without a name and maps it.

    So a corpus never has to fit in memory, and the system takes the file away with the process.

    Args:
      documents: integer ids [n] each, taken one at a time.
      dtype: unsigned type that holds every id.
      name: for messages.

    Returns:
      The mapped ids, and where each document ends: int64 [documents].

    Raises:
      UserError: the temporary folder cannot hold the ids.
    """
    ends, end = [], 0
    try:
        with tempfile.TemporaryFile(prefix="mtraining-tokens-") as file:
            for ids in documents:
                file.write(ids.astype(dtype).data)
                end += ids.shape[0]
                ends.append(end)
            file.flush()
            ids = np.memmap(file, dtype, mode="r") if end else np.zeros(0, dtype)
    except OSError as error:
        raise UserError(
            f"The temporary folder {tempfile.gettempdir()} cannot hold the token ids of {name}"
            f" ({error.strerror}); set TMPDIR to a folder with room."
        ) from error
    return Part(name, ids), np.asarray(ends, np.int64)


def documents_between(ids: np.ndarray, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the documents of a flat file: what stands between two ends.

    Reads the ids once, a few at a time.

    Args:
      ids: integers [n].
      eos: the id that ends a document; the last document may lack it.

    Returns:
      Starts and lengths of the documents that are not empty, without their ends: int64 [d] each.
    """
    found = [start + np.flatnonzero(chunk == eos) for start, chunk in _chunks(ids)]
    ends = np.concatenate([*found, [ids.shape[0]]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts
    return starts[lengths > 0], lengths[lengths > 0]


def _chunks(ids: np.ndarray):
    for start in range(0, ids.shape[0], _CHUNK):
        yield start, ids[start : start + _CHUNK]
