"""Token ids on disk as one long sequence, of which only requested positions are read."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

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
        indices = [first]
        if first != last:  # documents of a pack may lie in any files
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
    """Checks token ids against the vocabulary.

    Args:
        ids: integers [n].
        name: where they are from, for the message.
        vocab_size: every id must be from 0 to below this.
        vocab_name: what set ``vocab_size``, for the message.
        place: from an index into `ids` to the position that the message names.

    Raises:
        UserError: naming the first id outside, and its position.
    """
    if not ids.size or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    worst = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise UserError(
        f"{name}: token id {int(ids[worst])} at position {place(worst)} is outside the vocabulary "
        f"(0 to {vocab_size - 1}, from {vocab_name})"
    )


def spill(documents: Iterable[np.ndarray], dtype: np.dtype, name: str) -> Part:
    """Writes documents one after the other to a temporary file without a name, and maps it.

    A corpus never has to fit in memory, and the system deletes the file with the process.

    Args:
        documents: integer ids [n] each, taken one at a time.
        dtype: unsigned type that holds every id.
        name: for messages.

    Returns:
        The mapped ids.

    Raises:
        UserError: the temporary folder cannot hold the ids.
    """
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
            f"({error.strerror}); set TMPDIR to a folder with room"
        ) from error
    return Part(name, ids)


def chunks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts ids [n] into pieces that are read one at a time, each with where it starts."""
    for start in range(0, ids.shape[0], _CHUNK):
        yield start, ids[start : start + _CHUNK]
