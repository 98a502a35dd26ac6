"""Sequences that hold several documents, each beginning at a block of attention."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mtraining_jax.data.packing import chunked, consecutive, packed_order
from mtraining_jax.errors import UserError

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig

# A document of one token has nothing to predict.
_SHORTEST = 2


class Packs(Protocol):
    """Sequences of documents, at any of which reading can begin."""

    def __len__(self) -> int: ...

    def pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """One sequence: where its documents begin in the stream, and their tokens.

        Returns:
            int64 [d] each, in order of their places in the sequence, at least one.
        """
        ...

    @property
    def summary(self) -> str:
        """What they are, in a few words."""
        ...

    @property
    def digest(self) -> str:
        """Is another one for other packs."""
        ...


class Documents(Protocol):
    """Where the documents of a stream are, and how sequences are made of them."""

    def packs(self, data: "DataConfig", block_size: int) -> Packs:
        """Makes sequences, as `data.mode` says.

        Args:
            data: the section.
            block_size: g, tokens of a block of attention, of which `data.seq_len` is a multiple.

        Raises:
            UserError: there is not one sequence.
        """
        ...


@dataclass(frozen=True)
class PackArrays:
    """Packs as arrays.

    Attributes:
        starts: int64 [d], of all documents in the order of packs and of places.
        lengths: int64 [d], their tokens, at least 1.
        ends: int64 [packs], documents up to the end of each pack.
        block_size: g.
        seq_len: S, tokens of a pack with its padding.
        notes: words for the summary on what was left out and cut.
    """

    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    block_size: int
    seq_len: int
    notes: str = ""

    def __len__(self) -> int:
        return self.ends.shape[0]

    def pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """As of `Packs`."""
        own = slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))
        return self.starts[own], self.lengths[own]

    @property
    def waste(self) -> float:
        """Share of all places that hold padding."""
        return 1 - float(self.lengths.sum()) / (len(self) * self.seq_len)

    @property
    def summary(self) -> str:
        """As of `Packs`."""
        mean = self.starts.shape[0] / len(self)
        return f"{mean:.1f} documents each, {self.waste:.1%} padding{self.notes}"

    @property
    def digest(self) -> str:
        """As of `Packs`."""
        found = hashlib.sha256()
        for array in (self.starts, self.lengths, self.ends):
            found.update(np.ascontiguousarray(array, "<i8").data)
        return found.hexdigest()[:16]


@dataclass(frozen=True)
class DocumentSpans:
    """Documents that lie in a stream one after the other.

    Attributes:
        starts: int64 [d], the first token of each.
        lengths: int64 [d], tokens of each, with its end token; may be 0.
    """

    starts: np.ndarray
    lengths: np.ndarray

    def packs(self, data: "DataConfig", block_size: int) -> PackArrays:
        """As of `Documents`.

        ``pack``: by `best_fit`; longer documents are cut every `data.seq_len` tokens first.
        ``concat``: one after the other, by `consecutive`.

        Documents of no token or one are left out, as they have nothing to predict.
        """
        capacity = data.seq_len // block_size
        kept = self.lengths >= _SHORTEST
        starts, lengths = self.starts[kept], self.lengths[kept]
        if data.mode == "pack":
            starts, lengths = chunked(starts, lengths, data.seq_len)
            order, ends = packed_order(-(-lengths // block_size), capacity, data.seed)
            starts, lengths = starts[order], lengths[order]
        else:
            starts, lengths, ends = consecutive(starts, lengths, block_size, capacity)
        if not ends.size:
            raise UserError(_nothing(data, self.lengths, kept, block_size))
        notes = ""
        if left_out := int(kept.size - kept.sum()):
            notes += f", {left_out:,} of less than {_SHORTEST} tokens left out"
        if longer := int((self.lengths > data.seq_len).sum()):
            notes += f", {longer:,} longer than a sequence cut"
        return PackArrays(starts, lengths, ends, block_size, data.seq_len, notes)


def _nothing(data: "DataConfig", lengths: np.ndarray, kept: np.ndarray, block_size: int) -> str:
    """Why there is not one sequence."""
    if not lengths.size:
        return f'data.source = "{data.source}" has no document'
    found = f'the {lengths.size:,} documents of data.source = "{data.source}"'
    if not kept.any():
        return f"{found} have less than {_SHORTEST} tokens each: there is nothing to predict"
    filled = int(np.sum(-(-lengths[kept] // block_size))) * block_size
    return (
        f"data.seq_len = {data.seq_len} is more than the {filled} tokens that {found} take in "
        f'blocks of {block_size}, and data.mode = "concat" keeps whole sequences: there is not '
        'one; data.mode = "pack" would do'
    )


def block_table(lengths: np.ndarray, block_size: int, num_blocks: int) -> np.ndarray:
    """The document of each block of a sequence, in global order.

    Args:
        lengths: int64 [d], tokens of its documents in order of their places.
        block_size: g.
        num_blocks: NB.

    Returns:
        int32 [NB, 3]: of the block's document the first block, one past its last block, and its
        real tokens; NB, 0, 0 for a block of padding.

    Raises:
        ValueError: they take more than NB blocks.
    """
    blocks = -(-lengths // block_size)
    ends = np.cumsum(blocks)
    if ends[-1] > num_blocks:
        raise ValueError(f"documents of {ends[-1]} blocks do not fit a sequence of {num_blocks}")
    table = np.empty((num_blocks, 3), np.int32)
    table[:] = num_blocks, 0, 0
    table[: ends[-1]] = np.repeat(np.stack([ends - blocks, ends, lengths], axis=1), blocks, axis=0)
    return table


def stream_places(
    starts: np.ndarray, table: np.ndarray, positions: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """From places in a sequence to places in the stream.

    Args:
        starts: int64 [d], of the documents in order of their places.
        table: int32 [NB, 3], from `block_table`.
        positions: int64 [n], from 0 to below S.
        block_size: g.

    Returns:
        ``(places, left)``, int64 [n] each: the place in the stream, and how many tokens of its
        document there are from there on; 0 for padding, whose place means nothing.
    """
    block = positions // block_size
    # Each document begins at the block that its rows of the table name.
    number = np.cumsum(table[:, 0] == np.arange(table.shape[0])) - 1
    first, _, tokens = table[block].T.astype(np.int64)
    within = positions - first * block_size
    return starts[number[block]] + within, np.where(tokens, np.maximum(tokens - within, 0), 0)
