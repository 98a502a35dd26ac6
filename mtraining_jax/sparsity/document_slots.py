"""The documents of a pack that are chosen for, numbered; and their last queries' scores of keys.

Documents do not overlap, so the scores of all of them cost what those of one sequence do: each key
block is looked at by the last queries of its own document alone. The rules of `estimate.py` hold:
products block by block in chunks that depend on the length of the sequence alone, and sums of
integers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity import estimate, exchange
from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.pattern import Shards
from pallas_kernels import backends


class DocumentSlots(NamedTuple):
    """The documents of each sequence that are not dense, in their order.

    Attributes:
        of_block: int32 [B, NB], the slot of each block's document; E for a block of a dense
            document or of none.
        first: int32 [B, E], the first block of the document; NB for an empty slot.
        blocks: int32 [B, E], its blocks; 0 for an empty slot.
        tokens: int32 [B, E], its real tokens, which come first; 0 for an empty slot.
    """

    of_block: Array
    first: Array
    blocks: Array
    tokens: Array

    @classmethod
    def of(cls, documents: DocumentBlocks, slots: int) -> "DocumentSlots":
        """Those of some documents.

        Args:
            documents: of whole sequences.
            slots: E, at least as many as any sequence has documents that are not dense.
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
            jnp.where(sparse, slot, slots), collect(documents.first, num_blocks),
            collect(documents.length, 0), collect(documents.tokens, 0),
        )

    def count(self) -> Array:
        """Int32 [B], documents in slots."""
        return (self.tokens > 0).sum(-1, dtype=jnp.int32)


def last_queries(q: Array, slots: DocumentSlots, shards: Shards, count: int) -> Array:
    """The last real queries of each document, the same on all ranks.

    Args:
        q: [B, n, Hq, D], local queries.
        slots: the documents.
        shards: where the queries lie.
        count: u, queries of a document. Where it has fewer, the first ones are any.

    Returns:
        [B, E, Hq, u, D].
    """
    block_size = q.shape[1] // shards.block_ids.shape[0]
    ends = slots.first * block_size + slots.tokens
    positions = ends[..., None] + jnp.arange(-count, 0, dtype=jnp.int32)
    positions = jnp.clip(positions, 0, shards.num_blocks * block_size - 1)

    def gather(x: Array, own: Array) -> Array:
        where = shards.block_ids, shards.num_blocks, shards.axis_names
        return exchange.gather_rows(x[None], own.reshape(-1), *where)[0]

    rows = jax.vmap(gather)(q, positions)
    return rows.reshape(*positions.shape, *q.shape[2:]).transpose(0, 1, 3, 2, 4)


def softmax_scores(
    q_last: Array, k: Array, slots: DocumentSlots, shards: Shards
) -> tuple[Array, Array, Array]:
    """As `estimate.softmax_scores`, of each document by its own last queries over its own keys.

    In XLA on every backend: kernels for the estimate take one set of queries for all keys.

    Args:
        q_last: [B, E, Hq, u, D], as `last_queries` gives them.
        k: [B, n, Hk, D], local keys.
        slots: the documents.
        shards: where the keys lie.

    Returns:
        (columns, own, tails), int32 [B, Hq, n/g, g], [B, Hq, n/g, g] and [B, Hq, n/g, u-1]; 2^30 is
        all the mass of a document. 0 in blocks of no slot.
    """
    backends.leave_estimate_to_xla(
        shards.backend, q_last[:, 0], k.shape[1] // shards.block_ids.shape[-1],
        "packed documents (its kernels take one set of queries for all keys)",
    )
    scale = shards.scale_for(q_last.shape[-1])
    tiles = _OwnTiles(q_last, k, slots, shards, scale)
    block_peak, block_total = tiles.map(lambda tile, *_: tile.statistics())
    # Slot E collects what belongs to none.
    batch, num_slots, heads, num_queries = q_last.shape[:4]
    into = jnp.arange(batch)[:, None], tiles.slot

    def by_slot(x: Array, start: Array) -> Array:  # [B, n, Hq, u] to [B, E + 1, Hq, u]
        return jnp.broadcast_to(start, (batch, num_slots + 1, heads, num_queries)).at[into]

    peak = by_slot(block_peak, jnp.float32(-jnp.inf)).max(block_peak)
    peak = exchange.maximum(peak, shards.axis_names)
    weight = estimate.relative_exp(block_peak, peak[into], scale)
    limbs = tuple(
        by_slot(x, jnp.int32(0)).add(x) for x in estimate.to_limbs(weight, block_total)
    )
    normaliser = estimate.from_limbs(*exchange.exact_sum(limbs, shards.axis_names))
    normaliser = jnp.where(normaliser > 0, normaliser, 1.0)  # of queries that there are not

    def masses(tile: estimate.XlaTiles, slot: Array, entry: Array) -> tuple[Array, ...]:
        return tile.masses(peak[entry, slot][None], normaliser[entry, slot][None])

    return tuple(x.swapaxes(1, 2) for x in tiles.map(masses))


class _OwnTiles:
    """A tile of logits for each local block: its keys, and its document's last queries."""

    def __init__(
        self, q_last: Array, k: Array, slots: DocumentSlots, shards: Shards, scale: float
    ) -> None:
        num_local = shards.block_ids.shape[0]
        self._q, self._scale, self._size = q_last, scale, k.shape[1] // num_local
        self._chunk = min(max(shards.num_blocks // 16, 1), 64)
        self._k = k.reshape(k.shape[0], num_local, self._size, *k.shape[2:])
        self.slot = slots.of_block[:, shards.block_ids]  # [B, n]
        held = jnp.minimum(self.slot, slots.first.shape[1] - 1)
        first, tokens = (
            jnp.take_along_axis(x, held, axis=1) for x in (slots.first, slots.tokens)
        )
        # Where the document ends, counted from the block; what ends before it sees nothing of it.
        ends = tokens - (shards.block_ids - first) * self._size
        self._ends = jnp.where(self.slot == held, ends, 0)

    def map(self, of_tile) -> tuple[Array, ...]:
        """Results [B, n/g, Hq, ...] of a function of (tile, slot, batch entry).

        The function gives arrays [1, Hq, 1, ...], as a tile of one sequence of one block does.
        """
        batch, num_local = self.slot.shape
        padding = -num_local % self._chunk
        k, slot, ends = (
            jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)).swapaxes(0, 1)
            for x in (self._k, self.slot, self._ends)
        )

        def one(k: Array, slot: Array, end: Array, entry: Array) -> tuple[Array, ...]:
            tile = estimate.XlaTiles(
                self._q[entry, slot][None], k[None], scale=self._scale,
                block_ids=jnp.zeros(1, jnp.int32), num_blocks=1, valid_len=end,
            )
            return tuple(x[0, :, 0] for x in of_tile(tile, slot, entry))

        entries = jnp.arange(batch)
        found = lax.map(
            lambda x: jax.vmap(one)(*x, entries), (k, slot, ends), batch_size=self._chunk
        )
        return tuple(x[:num_local].swapaxes(0, 1) for x in found)
