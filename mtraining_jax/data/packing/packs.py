"""Sequences packed from documents, each aligned to attention blocks."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mtraining_jax.data.packing.rules import chunked, consecutive, packed_order
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.stream import TokenStream
from mtraining_jax.utils.errors import UserError

_SHORTEST = 2  # a document of one token has no label


class Packs(Protocol):
    """Random-access packed sequences."""

    def __len__(self) -> int: ...

    def pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts (in the stream) and lengths of a sequence's documents, int64 [d] each, d > 0."""
        ...

    @property
    def summary(self) -> str: ...

    @property
    def digest(self) -> str: ...  # content hash


@dataclass(frozen=True)
class Parts:
    """The parts of a mixture: their sequences follow each other and are read in proportion."""

    given: Mapping[str, float]  # weights by name, as configured
    weights: tuple[float, ...]  # of their numbers of sequences, in any unit
    ends: np.ndarray  # int64, number of sequences up to the end of each part

    @property
    def sequences(self) -> dict[str, range]:
        """The sequences of each part by name."""
        ends = [0, *self.ends.tolist()]
        return dict(zip(self.given, map(range, ends, ends[1:]), strict=True))

    @property
    def frequencies(self) -> np.ndarray:
        """How often each sequence is read, relative to their mean, float64 [n]."""
        sizes = np.diff(self.ends, prepend=0)
        found = np.repeat(np.array(self.weights) / sizes, sizes)
        return found / found.mean()

    def of(self, sequences: np.ndarray) -> np.ndarray:
        """The index of the part of each sequence, int64 [n]."""
        return np.searchsorted(self.ends, sequences, side="right")


@dataclass(frozen=True)
class PackArrays:
    """Packs as arrays, with documents in order of packs."""

    starts: np.ndarray  # int64 [d]
    lengths: np.ndarray  # int64 [d], tokens, at least 1
    ends: np.ndarray  # int64 [packs], number of documents up to the end of each pack
    seq_len: int
    notes: str = ""
    parts: Parts | None = None

    def __len__(self) -> int:
        return self.ends.size

    def pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        pack = slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))
        return self.starts[pack], self.lengths[pack]

    @property
    def frequencies(self) -> np.ndarray:
        """As in `Parts`; 1 if this is not a mixture."""
        return np.ones(len(self)) if self.parts is None else self.parts.frequencies

    @property
    def summary(self) -> str:
        frequencies = self.frequencies
        tokens = np.diff(np.cumsum(self.lengths)[self.ends - 1], prepend=0)
        padding = max(1 - float(np.mean(frequencies * tokens)) / self.seq_len, 0.0)
        mean = float(np.mean(frequencies * np.diff(self.ends, prepend=0)))
        return f"{mean:.1f} documents per sequence, {padding:.1%} padding{self.notes}"

    @property
    def digest(self) -> str:
        sha = hashlib.sha256()
        for array in (self.starts, self.lengths, self.ends):
            sha.update(np.ascontiguousarray(array, "<i8").data)
        return sha.hexdigest()[:16]


def pack_documents(
    lengths: np.ndarray,
    stream: TokenStream,
    data: DataSpec,
    block_size: int,
    upsample: tuple[int, int] | None = None,
) -> PackArrays:
    """Packs documents: ``pack`` by best fit, after splitting long ones; ``concat`` consecutively.

    Documents follow each other in the stream and have `lengths` in tokens, int64 [d]. Skips those
    with fewer than two tokens, which have no label; ``pack`` also skips those with labels that are
    all masked. It does not split documents with a label mask, such as conversations: labels of a
    later part would lack their context. Those longer than a sequence are skipped. `upsample` has a
    number of tokens, and how often documents of at least as many occur.
    """
    capacity, masked, dropped, too_long = data.seq_len // block_size, 0, 0, lengths[:0]
    kept = lengths >= _SHORTEST
    begins, sizes = (np.cumsum(lengths) - lengths)[kept], lengths[kept]
    if data.mode == "pack" and stream.masked:
        edges = np.stack([begins, begins + 1, begins + sizes], axis=1)
        first, second, last = stream.trained_before(edges.ravel()).reshape(edges.shape).T
        counted = last > second
        masked = int((~counted).sum())
        in_part = (last - first < sizes)[counted]
        begins, sizes = begins[counted], sizes[counted]
        fits = ~in_part | (sizes <= data.seq_len)
        too_long, begins, sizes = sizes[~fits], begins[fits], sizes[fits]
    if upsample is not None:
        counts = np.where(sizes >= upsample[0], upsample[1], 1)
        begins, sizes = np.repeat(begins, counts), np.repeat(sizes, counts)
    longer = int((sizes > data.seq_len).sum())
    if data.mode == "pack":
        begins, sizes = chunked(begins, sizes, data.seq_len)
        order, ends = packed_order(-(-sizes // block_size), capacity, data.seed)
        begins, sizes = begins[order], sizes[order]
    else:
        total = int(sizes.sum())
        begins, sizes, ends = consecutive(begins, sizes, block_size, capacity)
        dropped = total - int(sizes.sum())
    if not ends.size and too_long.size:
        raise UserError(
            f"data.seq_len = {data.seq_len} is less than the {too_long.min()} tokens of the "
            f'shortest document of data.source = "{data.source}", and those with a label mask are '
            "not split; use a larger data.seq_len"
        )
    if not ends.size and masked:
        raise UserError(f'no document of data.source = "{data.source}" has a trained label')
    if not ends.size:
        raise UserError(_nothing(data, lengths, kept, block_size))
    notes = ""
    if skipped := int(kept.size - kept.sum()):
        notes += f", {skipped:,} with fewer than {_SHORTEST} tokens skipped"
    if masked:
        notes += f", {masked:,} without a trained label skipped"
    if too_long.size:
        longest = int(too_long.max())
        notes += f", {too_long.size:,} longer than a sequence skipped (up to {longest:,} tokens)"
    if longer:
        notes += f", {longer:,} longer than a sequence split"
    if dropped:
        notes += f", {dropped:,} tokens dropped that fill no sequence"
    return PackArrays(begins, sizes, ends, data.seq_len, notes)


def _nothing(data: DataSpec, lengths: np.ndarray, kept: np.ndarray, block_size: int) -> str:
    """Error message if there is no sequence."""
    if not lengths.size:
        return f'data.source = "{data.source}" has no documents'
    found = f'the {lengths.size:,} documents of data.source = "{data.source}"'
    if not kept.any():
        return f"{found} have fewer than {_SHORTEST} tokens each: there is nothing to predict"
    filled = int(np.sum(-(-lengths[kept] // block_size))) * block_size
    return (
        f"data.seq_len = {data.seq_len} is more than the {filled} tokens of {found}, padded to "
        f'blocks of {block_size}, and data.mode = "concat" drops incomplete sequences; set '
        'data.mode = "pack" or a smaller data.seq_len'
    )


def stream_positions(
    starts: np.ndarray, first: np.ndarray, tokens: np.ndarray, positions: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Maps positions in a sequence, int64 [n], to positions in the stream and tokens left.

    Documents have `starts` [d]; `first` and `tokens`, int32 [NB], are a row of `Documents` with
    blocks of `size` tokens. Tokens left are those of the document from each position, inclusive; 0
    for padding, where the position in the stream is undefined.
    """
    block = positions // size
    number = np.cumsum(first == np.arange(first.size)) - 1  # counts the documents that begin
    first, tokens = first[block].astype(np.int64), tokens[block]
    within = positions - first * size
    return starts[number[block]] + within, np.where(tokens, np.maximum(tokens - within, 0), 0)
