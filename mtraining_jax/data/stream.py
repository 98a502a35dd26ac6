"""Token ids on disk as one long sequence with random access."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtraining_jax.utils.errors import UserError

# Streams up to this many tokens are validated at startup (under a second), longer ones per batch.
_CHECKED_AT_START = 2**26
_CHUNK = 2**22


@dataclass(frozen=True)
class Part:
    """One file of a stream: its name, and integer ids [n], usually memory-mapped."""

    name: str
    ids: np.ndarray


class TokenStream:
    """Concatenation of parts with random access.

    Args:
        parts: at least one, all non-empty.

    Raises:
        UserError: a token id outside the vocabulary, if the stream is short enough to check here.
    """

    def __init__(self, parts: Sequence[Part], vocab_size: int, vocab_name: str):
        self._parts = tuple(parts)
        self._ends = np.cumsum([part.ids.shape[0] for part in self._parts])
        self._vocab_size = vocab_size
        self._vocab_name = vocab_name
        if len(self) <= _CHECKED_AT_START:
            for part in self._parts:
                for start, chunk in chunks(part.ids):
                    self._check(chunk, part.name, lambda i, start=start: start + i)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Reads token ids, int32 [n].

        Args:
            positions: int64 [n] in ``range(len(self))``, in any order.
        """
        out = np.empty(positions.shape, np.int32)
        if not positions.size:
            return out
        first, last = np.searchsorted(
            self._ends, (positions.min(), positions.max()), side="right"
        ).tolist()
        indices = [first]
        if first != last:  # documents of a pack may be in different files
            part_of = np.searchsorted(self._ends, positions, side="right")
            indices = np.unique(part_of).tolist()
        for index in indices:
            part = self._parts[index]
            begin = int(self._ends[index]) - part.ids.shape[0]
            inside = slice(None) if first == last else part_of == index
            local = positions[inside] - begin
            ids = part.ids[local]
            self._check(ids, part.name, lambda i, local=local: int(local[i]))
            out[inside] = ids
        return out

    def _check(self, ids: np.ndarray, name: str, place: Callable[[int], int]) -> None:
        check_ids(ids, name, self._vocab_size, self._vocab_name, place)


def check_ids(
    ids: np.ndarray,
    name: str,
    vocab_size: int,
    vocab_name: str,
    place: Callable[[int], int] = lambda i: i,
) -> None:
    """Rejects token ids [n] outside of ``range(vocab_size)``.

    `place` maps an index of `ids` to the position in the error message, which has the
    origins `name` and `vocab_name`.
    """
    if not ids.size or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    worst = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise UserError(
        f"{name}: token id {int(ids[worst])} at position {place(worst)} is outside the vocabulary "
        f"(0 to {vocab_size - 1}, from {vocab_name})"
    )


def spill(documents: Iterable[np.ndarray], dtype: np.dtype, name: str) -> Part:
    """Writes documents, integer ids [n] each, to an anonymous temporary file and memory-maps it."""
    size = 0
    try:
        with tempfile.TemporaryFile(prefix="mtraining-tokens-") as file:
            for ids in documents:
                size += file.write(ids.astype(dtype).data)
            file.flush()
            ids = np.memmap(file, dtype, mode="r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise UserError(
            f"the temporary folder {tempfile.gettempdir()} cannot hold the token ids of {name} "
            f"({error.strerror}); set TMPDIR to a folder with enough space"
        ) from error
    return Part(name, ids)


def chunks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Splits ids [n] into chunks; yields the start and the ids of each."""
    for start in range(0, ids.shape[0], _CHUNK):
        yield start, ids[start : start + _CHUNK]
