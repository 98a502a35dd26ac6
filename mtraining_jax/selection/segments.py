"""The documents in which entries are selected: one per row, or several packed in a row.

Columns and diagonals are selected per document. One pass over the blocks of a pack processes all of
its documents: sums run over the blocks of each, and limits are looked up per block. Documents
consist of whole blocks, so no block has entries of two.

Arrays of blocks are [..., R, NB] and of entries [..., R, NB, g], with R rows. A result per document
is [..., R, E]; E is 1 for single documents. Each document numbers its blocks and entries from 0.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection.context import SelectionContext


@dataclasses.dataclass(frozen=True)
class OneSegment:
    """One document per row.

    Attributes:
        num_blocks: NB.
        tokens: valid tokens of each document: a number for all of them, or int32 scalar.
    """

    num_blocks: int
    tokens: int | Array

    @property
    def slots(self) -> int:
        """E, the most documents of a row."""
        return 1

    @property
    def slot_of_block(self) -> Array:
        """The document slot of each block: int32 [NB], or [R, NB] if packed."""
        return jnp.zeros(self.num_blocks, jnp.int32)

    @property
    def first(self) -> Array:
        """The first block of each document: int32 [1, 1], or [R, E] if packed."""
        return jnp.zeros((1, 1), jnp.int32)

    @property
    def length(self) -> Array:
        """The number of blocks of each document: int32 [1, 1], or [R, E] if packed."""
        return jnp.full((1, 1), self.num_blocks, jnp.int32)

    @property
    def inside(self) -> Array:
        """Whether a block belongs to any document: bool [NB], or [R, NB] if packed."""
        return jnp.ones(self.num_blocks, bool)

    @property
    def blocks(self) -> Array:
        """The number of each block: int32 [NB], or [R, NB] if packed."""
        return jnp.arange(self.num_blocks, dtype=jnp.int32)

    def count(self) -> Array:
        """Counts the documents of each row: int32 [1], or [R] if packed."""
        return jnp.ones(1, jnp.int32)

    def entries(self, size: int) -> Array:
        """Numbers the entries from 0, with g per block: int32 [NB, g], or [R, NB, g] if packed."""
        return jnp.arange(self.num_blocks * size, dtype=jnp.int32).reshape(-1, size)

    def rows(self, rows: Array) -> "OneSegment":
        """Returns the given rows, int32 [n]."""
        del rows
        return self

    def repeat(self, heads: int) -> "OneSegment":
        """Returns each row `heads` times: rows b * Hq + h from batch entries b."""
        del heads
        return self

    def local(self, block_ids: Array) -> "OneSegment":
        """Returns the documents of local blocks, to broadcast from [B, ...] to [B, Hq, ...]."""
        del block_ids
        return self

    def spread(self, x: Array) -> Array:
        """Looks up per-document values for each block: broadcasts with [..., R, NB]."""
        return jnp.atleast_1d(x)

    def sums(self, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        """Sums int32 [..., R, NB, g] over the entries of each document, all arrays in one pass."""
        return tuple(x[..., None] for x in _sums(parts, 2))

    def total(self, x: Array) -> Array:
        """Sums int32 [..., R, NB] over the blocks of each document."""
        return x.sum(-1, keepdims=True, dtype=jnp.int32)

    def highest(self, x: Array) -> Array:
        """Returns the largest entry of fp32 [R, NB] in each document."""
        return x.max(-1, keepdims=True)

    def up_to(self, x: Array) -> Array:
        """Sums int32 [..., R, NB] over the blocks of the same document up to and including each."""
        return jnp.cumsum(x, axis=-1, dtype=jnp.int32)

    def from_previous(self, x: Array) -> Array:
        """Returns the previous block's entry of [..., R, NB]; 0 or False for the first block."""
        return _shifted(x)[..., :-1]


@dataclasses.dataclass(frozen=True)
class PackedSegments:
    """Several documents of whole blocks per row, at any position; methods as in `OneSegment`.

    Sums are differences of sums over the whole row. These may wrap around, but their differences
    are correct: those of one document fit in int32.

    Attributes:
        slot_of_block: int32 [R, NB], slot of the document; E for none, with undefined results.
        first: int32 [R, E], the first block; NB for an empty slot.
        length: int32 [R, E], number of blocks; 0 for an empty slot.
        tokens: int32 [R, E], number of tokens; 0 for an empty slot.
    """

    slot_of_block: Array
    first: Array
    length: Array
    tokens: Array

    @property
    def num_blocks(self) -> int:
        return self.slot_of_block.shape[-1]

    @property
    def slots(self) -> int:
        return self.first.shape[-1]

    def rows(self, rows: Array) -> "PackedSegments":
        return PackedSegments(*(x[rows] for x in self._fields))

    def repeat(self, heads: int) -> "PackedSegments":
        return PackedSegments(*(jnp.repeat(x, heads, axis=0) for x in self._fields))

    def local(self, block_ids: Array) -> "PackedSegments":
        slot_of_block, *others = self._fields
        return PackedSegments(slot_of_block[:, None, block_ids], *(x[:, None] for x in others))

    @property
    def _fields(self) -> tuple[Array, ...]:
        return self.slot_of_block, self.first, self.length, self.tokens

    @property
    def inside(self) -> Array:
        return self.slot_of_block < self.slots

    def count(self) -> Array:
        return (self.tokens > 0).sum(-1, dtype=jnp.int32)

    @property
    def start(self) -> Array:
        """The first block of each block's document: int32 [R, NB]."""
        return self.spread(self.first)

    @property
    def blocks(self) -> Array:
        return jnp.arange(self.slot_of_block.shape[-1], dtype=jnp.int32) - self.start

    def entries(self, size: int) -> Array:
        return self.blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)

    def spread(self, x: Array) -> Array:
        slot = jnp.minimum(self.slot_of_block, self.slots - 1)
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

    def highest(self, x: Array) -> Array:
        lowest = jnp.full((len(x), self.slots + 1), -jnp.inf)
        row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
        return lowest.at[row, self.slot_of_block].max(x)[:, :-1]

    def up_to(self, x: Array) -> Array:
        running = jnp.cumsum(x, axis=-1, dtype=jnp.int32)
        start = jnp.broadcast_to(self.start, x.shape)
        return running - _take(_shifted(running), start)

    def from_previous(self, x: Array) -> Array:
        return jnp.where(self.blocks == 0, jnp.zeros((), x.dtype), _shifted(x)[..., :-1])


Segments = OneSegment | PackedSegments


def sparse_segments(context: SelectionContext, slots: int, block_size: int) -> Segments:
    """Returns the non-dense documents of each batch entry (R is B), in order.

    There must be at most `slots` (E) of them in any packed sequence.
    """
    documents, num_blocks = context.documents, context.num_blocks
    if not documents.packed:
        # A number rather than an array without padding, so that nothing is moved or masked.
        whole = documents.is_whole
        return OneSegment(num_blocks, num_blocks * block_size if whole else documents.tokens[0, 0])
    batch = documents.first.shape[0]
    numbers = jnp.arange(num_blocks, dtype=jnp.int32)
    sparse = (documents.length > 0) & ~documents.shorter_than(context.dense_below)
    begins = sparse & (documents.first == numbers)
    slot = jnp.cumsum(begins, axis=-1, dtype=jnp.int32) - 1
    into = jnp.arange(batch)[:, None], jnp.where(begins, slot, slots)

    def collect(x: Array, empty: int) -> Array:
        return jnp.full((batch, slots), empty, jnp.int32).at[into].set(x, mode="drop")

    return PackedSegments(
        jnp.where(sparse, slot, slots),
        collect(documents.first, num_blocks),
        collect(documents.length, 0),
        collect(documents.tokens, 0),
    )


def _sums(parts: tuple[Array, ...], axes: int) -> tuple[Array, ...]:
    """Sums int32 arrays over the last axes, fused with their computation."""

    def add(x: tuple[Array, ...], y: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(x, y, strict=True))

    zeros = (jnp.zeros((), jnp.int32),) * len(parts)
    return lax.reduce(parts, zeros, add, tuple(range(parts[0].ndim - axes, parts[0].ndim)))


def _shifted(x: Array) -> Array:
    """Prepends a zero: [..., n] to [..., n + 1]."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])


def _take(x: Array, indices: Array) -> Array:
    return jnp.take_along_axis(x, indices, axis=-1, mode="clip")
