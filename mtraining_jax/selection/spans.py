"""Sequences in which entries are selected: one per row, or several packed in a row.

Columns and diagonals are selected per sequence. A pack holds several, its documents, which one pass
over its blocks processes together: sums run over the blocks of each sequence, and limits are looked
up per block. Documents consist of whole blocks, so no block has entries of two.

Arrays of blocks are [..., R, NB] and of entries [..., R, NB, g], with R rows. A result per sequence
is [..., R] if rows are single sequences, and [..., R, E] if they may hold E. Each sequence numbers
its own blocks and entries from 0.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection.document_blocks import DocumentBlocks


@dataclasses.dataclass(frozen=True)
class OneSpan:
    """One sequence per row.

    Attributes:
        num_blocks: NB.
        tokens: valid tokens of each sequence, a number or int32 scalar.
    """

    num_blocks: int
    tokens: int | Array

    @property
    def blocks(self) -> Array:
        """The number of each block: int32 [NB], or [R, NB] if packed."""
        return jnp.arange(self.num_blocks, dtype=jnp.int32)

    def entries(self, size: int) -> Array:
        """Numbers the entries from 0, with g per block: int32 [NB, g], or [R, NB, g] if packed."""
        entries = jnp.arange(self.num_blocks * size, dtype=jnp.int32)
        return entries.reshape(self.num_blocks, size)

    def per_row(self, x: Array) -> Array:
        """Reshapes per-row numbers [..., R] or [..., 1] to broadcast with `tokens`."""
        return x

    def spread(self, x: Array) -> Array:
        """Looks up per-sequence values for each block: broadcasts with [..., R, NB]."""
        return x[..., None]

    def sums(self, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        """Sums int32 [..., R, NB, g] over the entries of each sequence, all arrays in one pass."""
        return _sums(parts, 2)

    def total(self, x: Array) -> Array:
        """Sums int32 [..., R, NB] over the blocks of each sequence."""
        return x.sum(-1, dtype=jnp.int32)

    def up_to(self, x: Array) -> Array:
        """Sums int32 [..., R, NB] over the blocks of the same sequence up to and including each."""
        return jnp.cumsum(x, axis=-1, dtype=jnp.int32)

    def from_previous(self, x: Array) -> Array:
        """Returns the previous block's entry of [..., R, NB]; 0 or False for the first block."""
        return _shifted(x)[..., :-1]

    def at(self, x: Array, blocks: Array) -> Array:
        """Returns entries of [R, NB] at block numbers, int32 [NB] or [R, NB], of the sequence."""
        return x[:, blocks]

    def of_first(self, x: Array, counts: Array) -> Array:
        """Sums the first `counts`, int32 [NB, g] or [R, NB, g], entries of x, int32 [R, NB, g]."""
        return _running(x)[:, counts.reshape(-1)].reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class PackedSpans:
    """Several sequences of whole blocks per row, at any position; methods as in `OneSpan`.

    Sums are differences of sums over the whole row. These may wrap around, but their differences
    are correct: those of one sequence fit in int32.

    Attributes:
        of_block: int32 [R, NB], the sequence of each block; E for none, with undefined results.
        first: int32 [R, E], the first block; NB for an empty slot.
        length: int32 [R, E], number of blocks; 0 for an empty slot.
        tokens: int32 [R, E], number of tokens; 0 for an empty slot.
    """

    of_block: Array
    first: Array
    length: Array
    tokens: Array

    @classmethod
    def of(cls, documents: DocumentBlocks, slots: int) -> "PackedSpans":
        """Returns the non-dense documents of each batch entry (R is B), in order.

        There must be at most `slots` (E) of them in any sequence.
        """
        batch, num_blocks = documents.first.shape
        numbers = jnp.arange(num_blocks, dtype=jnp.int32)
        sparse = (documents.length > 0) & ~documents.dense
        begins = sparse & (documents.first == numbers)
        slot = jnp.cumsum(begins, axis=-1, dtype=jnp.int32) - 1
        into = jnp.arange(batch)[:, None], jnp.where(begins, slot, slots)

        def collect(x: Array, empty: int) -> Array:
            return jnp.full((batch, slots), empty, jnp.int32).at[into].set(x, mode="drop")

        return cls(
            jnp.where(sparse, slot, slots),
            collect(documents.first, num_blocks),
            collect(documents.length, 0),
            collect(documents.tokens, 0),
        )

    @property
    def slots(self) -> int:
        """E."""
        return self.first.shape[-1]

    def count(self) -> Array:
        """Counts the sequences of each row: int32 [R]."""
        return (self.tokens > 0).sum(-1, dtype=jnp.int32)

    def rows(self, rows: Array) -> "PackedSpans":
        """Returns the given rows, int32 [n]."""
        return PackedSpans(
            *(x[rows] for x in (self.of_block, self.first, self.length, self.tokens))
        )

    def repeat(self, heads: int) -> "PackedSpans":
        """Returns each row `heads` times: rows b * Hq + h from batch entries b."""
        parts = self.of_block, self.first, self.length, self.tokens
        return PackedSpans(*(jnp.repeat(x, heads, axis=0) for x in parts))

    @property
    def inside(self) -> Array:
        """Whether a block belongs to any sequence: bool [R, NB]."""
        return self.of_block < self.slots

    @property
    def start(self) -> Array:
        """The first block of each block's sequence: int32 [R, NB]."""
        return self.spread(self.first)

    @property
    def blocks(self) -> Array:
        return jnp.arange(self.of_block.shape[-1], dtype=jnp.int32) - self.start

    def entries(self, size: int) -> Array:
        return self.blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)

    def per_row(self, x: Array) -> Array:
        return x[..., None]

    def spread(self, x: Array) -> Array:
        slot = jnp.minimum(self.of_block, self.slots - 1)
        lead = jnp.broadcast_shapes(x.shape[:-1], slot.shape[:-1])
        x = jnp.broadcast_to(x, (*lead, x.shape[-1]))
        return _take(x, jnp.broadcast_to(slot, (*lead, slot.shape[-1])))

    def sums(self, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        # One running sum for all parts; separate ones would be hundreds of kernels in a search.
        return tuple(self.total(jnp.stack(_sums(parts, 1))))

    def total(self, x: Array) -> Array:
        running = _shifted(jnp.cumsum(x, axis=-1, dtype=jnp.int32))

        def at(blocks: Array) -> Array:
            return _take(running, jnp.broadcast_to(blocks, (*x.shape[:-1], blocks.shape[-1])))

        return at(self.first + self.length) - at(self.first)

    def up_to(self, x: Array) -> Array:
        running = jnp.cumsum(x, axis=-1, dtype=jnp.int32)
        start = jnp.broadcast_to(self.start, x.shape)
        return running - _take(_shifted(running), start)

    def from_previous(self, x: Array) -> Array:
        return jnp.where(self.blocks == 0, jnp.zeros((), x.dtype), _shifted(x)[..., :-1])

    def at(self, x: Array, blocks: Array) -> Array:
        return _take(x, jnp.clip(self.start + blocks, 0, x.shape[-1] - 1))

    def of_first(self, x: Array, counts: Array) -> Array:
        running, base = _running(x), self.start * x.shape[-1]
        ends = jnp.broadcast_to(base[..., None] + counts, x.shape).reshape(x.shape[0], -1)
        sums = _take(running, jnp.clip(ends, 0, running.shape[-1] - 1)).reshape(x.shape)
        return sums - _take(running, base)[..., None]


Spans = OneSpan | PackedSpans


def _sums(parts: tuple[Array, ...], axes: int) -> tuple[Array, ...]:
    """Sums int32 arrays over the last axes, fused with their computation."""

    def add(x: tuple[Array, ...], y: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(x, y, strict=True))

    zeros = (jnp.zeros((), jnp.int32),) * len(parts)
    return lax.reduce(parts, zeros, add, tuple(range(parts[0].ndim - axes, parts[0].ndim)))


def _running(x: Array) -> Array:
    """Returns the sums of the first 0, 1, ... entries of rows int32 [R, NB, g]: [R, NB * g + 1]."""
    within = jnp.cumsum(x, axis=-1, dtype=jnp.int32)
    blocks = jnp.cumsum(within[..., -1], axis=-1, dtype=jnp.int32) - within[..., -1]
    return _shifted((blocks[..., None] + within).reshape(x.shape[0], -1))


def _shifted(x: Array) -> Array:
    """Prepends a zero: [..., n] to [..., n + 1]."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])


def _take(x: Array, indices: Array) -> Array:
    return jnp.take_along_axis(x, indices, axis=-1, mode="clip")
