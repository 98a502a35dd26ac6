"""Token ids on disk as one long sequence with random access."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtraining_jax.data.files import errors_as
from mtraining_jax.utils.errors import UserError

# Streams up to this many tokens are validated at startup (under a second), longer ones per batch.
_CHECKED_AT_START = 2**26
_CHUNK = 2**22


@dataclass(frozen=True)
class Part:
    """One file of a stream: integer ids [n], usually memory-mapped, and the row length if 2-D."""

    name: str
    ids: np.ndarray
    row_len: int | None = None


@dataclass(frozen=True)
class Vocab:
    """Number of token ids, and its origin for messages."""

    size: int
    origin: str

    def check(self, ids: np.ndarray, name: str, positions: np.ndarray | range) -> None:
        """Rejects token ids [n] outside of the vocabulary."""
        if not ids.size or (ids.min() >= 0 and ids.max() < self.size):
            return
        first = int(np.argmax((ids < 0) | (ids >= self.size)))
        raise UserError(
            f"{name}: token id {ids[first]} at position {positions[first]} is outside the "
            f"vocabulary (0 to {self.size - 1}, from {self.origin})"
        )


class TokenStream:
    """Concatenation of non-empty parts with random access; checks ids against the vocabulary."""

    def __init__(self, parts: Sequence[Part], vocab: Vocab) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([part.ids.size for part in self._parts])
        self._vocab = vocab
        if len(self) <= _CHECKED_AT_START:
            for part in self._parts:
                for start, chunk in chunks(part.ids):
                    self._vocab.check(chunk, part.name, range(start, start + chunk.size))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, positions: np.ndarray) -> np.ndarray:
        if not positions.size:
            return np.zeros(0, np.int32)
        ends = (positions.min(), positions.max())
        first, last = np.searchsorted(self._ends, ends, side="right").tolist()
        if first == last:
            return self._read(first, positions)
        out = np.empty(positions.shape, np.int32)
        part_of = np.searchsorted(self._ends, positions, side="right")
        for number in np.unique(part_of).tolist():  # documents of a pack may be in several files
            inside = part_of == number
            out[inside] = self._read(number, positions[inside])
        return out

    def _read(self, number: int, positions: np.ndarray) -> np.ndarray:
        part = self._parts[number]
        local = positions - (int(self._ends[number]) - part.ids.size)
        ids = part.ids[local]
        self._vocab.check(ids, part.name, local)
        return ids.astype(np.int32)


def spill(documents: Iterable[np.ndarray], dtype: np.dtype, name: str) -> Part:
    """Writes documents, ids [n] each, to an anonymous temporary file and memory-maps it."""
    size = 0
    problem = (
        f"the temporary folder {tempfile.gettempdir()} cannot hold the token ids of {name}; set "
        "TMPDIR to a folder with enough space"
    )
    with (
        errors_as(UserError, problem, OSError),
        tempfile.TemporaryFile(prefix="mtraining-tokens-") as file,
    ):
        for ids in documents:
            size += file.write(ids.data)
        file.flush()
        ids = np.memmap(file, dtype, mode="r") if size else np.zeros(0, dtype)
    return Part(name, ids)


def chunks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Splits ids [n] into chunks; yields the start and the ids of each."""
    for start in range(0, ids.size, _CHUNK):
        yield start, ids[start : start + _CHUNK]
