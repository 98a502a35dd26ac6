"""Token ids on disk as one long sequence with random access."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtraining_jax.utils.errors import UserError

# Streams up to this many tokens are validated at startup (under a second), longer ones per batch.
_CHECKED_AT_START = 2**26
_CHUNK = 2**22


@dataclass(frozen=True)
class Part:
    """One file of a stream: integer ids [n], usually memory-mapped, and the row length if 2-D.

    `trained` is the label mask, bool [n], if any.
    """

    name: str
    ids: np.ndarray
    row_len: int | None = None
    trained: np.ndarray | None = None


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

    @classmethod
    def joined(cls, streams: Sequence["TokenStream"]) -> "TokenStream":
        """The streams one after the other."""
        parts = [part for stream in streams for part in stream._parts]
        return cls(parts, max((stream._vocab for stream in streams), key=lambda x: x.size))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def masked(self) -> bool:
        """Whether a part has a label mask."""
        return any(part.trained is not None for part in self._parts)

    @property
    def summary(self) -> str:
        """Number of tokens and the fraction that is trained; a UserError if none is."""
        text = f"{len(self):,} tokens"
        if not self.masked:
            return text
        (count,) = self.trained_before(np.array([len(self)])).tolist()
        if not count:
            names = ", ".join(part.name for part in self._parts[:3])
            raise UserError(f"no token is trained: the label mask of {names} is 0 everywhere")
        return f"{text} ({count / len(self):.1%} trained)"

    def take(self, positions: np.ndarray) -> np.ndarray:
        out = np.empty(positions.shape, np.int32)
        for part, inside, local in self._by_part(positions):
            ids = part.ids[local]
            self._vocab.check(ids, part.name, local)
            out[inside] = ids
        return out

    def trained(self, positions: np.ndarray) -> np.ndarray:
        """Whether the tokens at positions int64 [n] are trained, bool [n]."""
        out = np.ones(positions.shape, bool)
        for part, inside, local in self._by_part(positions):
            if part.trained is not None:
                out[inside] = part.trained[local]
        return out

    def trained_before(self, positions: np.ndarray) -> np.ndarray:
        """Number of trained tokens before each position, ascending int64 [n]; reads all masks."""
        out = np.empty(positions.shape, np.int64)
        begin = total = 0
        for part in self._parts:
            mask = np.broadcast_to(True, part.ids.shape) if part.trained is None else part.trained
            for _, chunk in chunks(mask):
                inside = slice(*np.searchsorted(positions, [begin, begin + chunk.size]))
                cuts = np.concatenate([[0], positions[inside] - begin])
                # A tenth of the time of a sum at every token, which int32 is enough for.
                counts = np.add.reduceat((chunk != 0).view(np.uint8), cuts, dtype=np.int32)
                counts[np.diff(cuts, append=chunk.size) == 0] = 0
                sums = total + np.cumsum(counts, dtype=np.int64)
                out[inside] = sums[:-1]
                begin, total = begin + chunk.size, int(sums[-1])
        out[np.searchsorted(positions, begin) :] = total
        return out

    def _by_part(self, positions: np.ndarray) -> Iterator[tuple[Part, Any, np.ndarray]]:
        """Yields each part, the indices of its positions, and these positions within the part."""
        if not positions.size:
            return
        ends = (positions.min(), positions.max())
        first, last = np.searchsorted(self._ends, ends, side="right").tolist()
        part_of = None
        if first != last:  # documents of a pack may be in several files
            part_of = np.searchsorted(self._ends, positions, side="right")
        for number in [first] if part_of is None else np.unique(part_of).tolist():
            part = self._parts[number]
            inside = slice(None) if part_of is None else part_of == number
            yield part, inside, positions[inside] - (int(self._ends[number]) - part.ids.size)


def chunks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Splits ids [n] into chunks; yields the start and the ids of each."""
    for start in range(0, ids.size, _CHUNK):
        yield start, ids[start : start + _CHUNK]
