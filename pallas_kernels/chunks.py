"""Attention of single queries to chunks of keys, composed from calls over other indices.

Queries are sorted by chunk, so each tile sees a single whole chunk. The partial results of a query
are combined by their softmax weights. Source: MoBA (arXiv 2502.13189).
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import ops
from pallas_kernels.checks import Shaped
from pallas_kernels.index import BlockSparseIndex
from pallas_kernels.index import bits as sets
from pallas_kernels.index.token_chunks import TokenChunksIndex
from pallas_kernels.interface import Pair, Plan
from pallas_kernels.schedule import Schedule, Triple


class QueriesByChunk(NamedTuple):
    """Slots of the gathered copies of queries that see past chunks."""

    tokens: Array  # int32 [B, Hq, P], the query of each slot; arbitrary where not live
    live: Array  # bool [B, Hq, P]
    places: Array  # int32 [B, Hq, n, T], slots of the copies of each query; else arbitrary
    counts: Array  # int32 [B, Hq, n], number of copies
    index: BlockSparseIndex  # non-causal, of slots and all keys


class Blocks(Protocol):
    """Which blocks of queries and keys a device holds; static and hashable."""

    def rows(self, count: int) -> Array:
        """The global numbers of its blocks, int32 [count]."""
        ...

    def all(self, x_BnHD: Array) -> Array:
        """Gathers keys or values of the whole sequence, in order."""
        ...

    def local(self, x_BSHD: Array) -> Array:
        """The transpose, of fp32 gradients: sums them over devices, and returns the local ones."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeSequence:
    """All blocks, in order."""

    def rows(self, count: int) -> Array:
        return jnp.arange(count, dtype=jnp.int32)

    def all(self, x_BnHD: Array) -> Array:
        return x_BnHD

    def local(self, x_BSHD: Array) -> Array:
        return x_BSHD


class ChunksWork(NamedTuple):
    """What both passes share."""

    index: TokenChunksIndex
    rows: Array  # int32 [n/g], global number of each block of queries
    own: Any  # work of the attention to own chunks


@dataclasses.dataclass(frozen=True)
class PastChunks:
    """Attention to a query's own chunk by an inner schedule, then to past ones."""

    inner: Schedule
    scale: float
    blocks: Blocks = WholeSequence()

    @property
    def backend(self) -> str | None:
        return self.inner.backend

    def prepare(self, q: Shaped, k: Shaped, index: TokenChunksIndex) -> ChunksWork:
        rows = self.blocks.rows(q.shape[1] // index.block_size)
        index.check(q.shape[0], q.shape[2], rows.shape[0])
        return ChunksWork(index, rows, self.inner.prepare(q, k, index.own(rows)))

    @jax.numpy_rank_promotion("allow")
    def forward(self, q: Array, k: Array, v: Array, work: ChunksWork) -> Pair:
        index, rows = work.index, work.rows
        out_own, lse_own = self.inner.forward(q, k, v, work.own)
        if index.most == 1:
            return out_own, lse_own
        where = gather_queries(index, rows)
        copies, k, v = _take(q, where.tokens), self.blocks.all(k), self.blocks.all(v)
        out, lse = ops.forward(copies, k, v, self._plan(copies, k, where), scale=self.scale)
        slots = range(index.most - 1)
        found = [
            jnp.where(slot < where.counts, _at(where.places[..., slot], lse), -jnp.inf)
            for slot in slots
        ]
        # A query without a document sees nothing: its parts are -inf, and so must be their sum.
        peak = functools.reduce(jnp.maximum, found, lse_own)
        peak = jnp.where(peak == -jnp.inf, 0.0, peak)
        weight = jnp.exp(lse_own - peak)
        total, summed = weight, _times(out_own, weight)
        for slot in slots:
            weight = jnp.exp(found[slot] - peak)
            total += weight
            summed += _times(_take(out, where.places[..., slot]), weight)
        share = 1 / jnp.where(total > 0, total, 1.0)
        return _times(summed, share).astype(q.dtype), peak + jnp.log(total)

    @jax.numpy_rank_promotion("allow")
    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, work: ChunksWork, lse: Array, delta: Array
    ) -> Triple:
        index, rows = work.index, work.rows
        dq, dk, dv = self.inner.backward(q, k, v, dout, work.own, lse, delta)
        if index.most == 1:
            return dq, dk, dv
        where = gather_queries(index, rows)
        copies = _take(q, where.tokens)
        live_BnH = jnp.swapaxes(where.live, 1, 2)[..., None]
        # With this lse, slots without a copy get weight 0 and contribute nothing.
        dout_of = jnp.where(live_BnH, _take(dout, where.tokens), 0)
        lse_of = jnp.where(where.live, _at(where.tokens, lse), 1e30)
        delta_of = jnp.where(where.live, _at(where.tokens, delta), 0.0)
        all_k, all_v = self.blocks.all(k), self.blocks.all(v)
        arrays = copies, all_k, all_v, dout_of, lse_of, delta_of
        planned = self._plan(copies, all_k, where)
        grads = ops.backward(*arrays, planned, scale=self.scale, dq_dtype=q.dtype)
        # Sums a query's copies one by one; a scatter on a GPU would add them in arbitrary order.
        assert grads.dk is not None and grads.dv is not None  # the plan has tiles
        sum_dq = dq.astype(jnp.float32)
        for slot in range(index.most - 1):
            copy = _take(grads.dq, where.places[..., slot]).astype(jnp.float32)
            sum_dq += jnp.where(jnp.swapaxes(slot < where.counts, 1, 2)[..., None], copy, 0.0)
        dk, dv = (
            (x.astype(jnp.float32) + self.blocks.local(past)).astype(x.dtype)
            for x, past in ((dk, grads.dk), (dv, grads.dv))
        )
        return sum_dq.astype(q.dtype), dk, dv

    def _plan(self, copies: Array, k: Array, where: QueriesByChunk) -> Plan:
        return ops.plan(copies, k, where.index.tiles(), backend=self.backend)


def gather_queries(index: TokenChunksIndex, rows: Array) -> QueriesByChunk:
    """Sorts queries of blocks `rows`, int32 [n/g], by past chunk, in whole tiles per chunk."""
    size, slots, num_chunks = index.block_size, index.most - 1, index.num_chunks
    past = index.past(rows)
    batch, heads, blocks = past.shape[:3]
    count = blocks * size  # n
    words = past.reshape(batch, heads, count, -1)
    lists, counts = sets.listed(words, slots)
    valid = jnp.arange(slots, dtype=jnp.int32) < counts[..., None]
    chunks = jnp.where(valid, lists, num_chunks).reshape(batch, heads, -1)
    # Entries in order of chunk, then of query.
    numbers = jnp.broadcast_to(jnp.arange(chunks.shape[-1], dtype=jnp.int32), chunks.shape)
    _, order = lax.sort((chunks, numbers), dimension=-1, num_keys=1, is_stable=True)
    marked = sets.unpack(words, num_chunks)
    queries_per_chunk = marked.sum(2, dtype=jnp.int32)  # [B, Hq, NC]
    start = jnp.cumsum(queries_per_chunk, -1, dtype=jnp.int32) - queries_per_chunk
    tiles = -(-queries_per_chunk // size)
    first_tile = jnp.cumsum(tiles, -1, dtype=jnp.int32) - tiles
    # Room for all copies, and for one partially filled tile per chunk.
    num_tiles = -(-count * slots // size) + num_chunks
    numbers_of_tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    begun = (first_tile[..., None, :] <= numbers_of_tiles[:, None]).sum(-1, dtype=jnp.int32)
    # The last chunk that has begun: chunks without queries begin where the next one does.
    chunk_of_tile = begun - 1
    at = _at(chunk_of_tile, tiles)
    tile_in_chunk = numbers_of_tiles - _at(chunk_of_tile, first_tile)
    used = tile_in_chunk < at
    place = tile_in_chunk[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    live = used[..., None] & (place < _at(chunk_of_tile, queries_per_chunk)[..., None])
    entry = jnp.where(live, place + _at(chunk_of_tile, start)[..., None], 0)
    entry = entry.reshape(batch, heads, -1)
    tokens = _at(entry, order) // slots
    # The inverse: the slot of each entry.
    sorted_place = jnp.put_along_axis(jnp.zeros_like(order), order, numbers, axis=-1, inplace=False)
    safe = jnp.minimum(chunks, num_chunks - 1)
    places = _at(safe, first_tile) * size + sorted_place - _at(safe, start)
    places = jnp.clip(places, 0, num_tiles * size - 1)
    return QueriesByChunk(
        tokens,
        live.reshape(batch, heads, -1),
        places.reshape(batch, heads, count, slots),
        counts,
        _lists(index, index.starts(rows), chunk_of_tile, used, first_tile, tiles, blocks),
    )


def _lists(
    index: TokenChunksIndex,
    starts: Array,
    chunk_of_tile: Array,
    used: Array,
    first_tile: Array,
    tiles: Array,
    most_tiles: int,
) -> BlockSparseIndex:
    width, num_blocks = index.chunk_blocks, index.num_blocks
    starts = jnp.broadcast_to(starts, tiles.shape)
    keys = _at(chunk_of_tile, starts)[..., None] + jnp.arange(width, dtype=jnp.int32)
    keys = jnp.minimum(keys, num_blocks - 1)
    slots = jnp.arange(most_tiles, dtype=jnp.int32)
    queries = jnp.minimum(first_tile[..., None] + slots, chunk_of_tile.shape[-1] - 1)
    # The chunk of a block is number block // width, or the previous one if that begins within.
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    near = jnp.broadcast_to(blocks // width, (*tiles.shape[:2], num_blocks))
    chunk = near - (_at(near, starts) > blocks).astype(jnp.int32)
    safe = jnp.maximum(chunk, 0)
    inside = (chunk >= 0) & (blocks < _at(safe, starts) + width)
    return BlockSparseIndex(
        key_blocks=keys,
        key_count=jnp.where(used, width, 0),
        query_blocks=jnp.take_along_axis(queries, safe[..., None], 2, mode="promise_in_bounds"),
        query_count=jnp.where(inside, _at(safe, tiles), 0),
        block_size=index.block_size,
        causal=False,
    )


def _at(places: Array, x: Array) -> Array:
    return jnp.take_along_axis(x, places, axis=-1, mode="promise_in_bounds")


def _take(x_BnHD: Array, tokens: Array) -> Array:
    """Gathers rows [B, p, H, D] of an array [B, n, H, D] at indices int32 [B, H, p] per head."""
    places = jnp.swapaxes(tokens, 1, 2)[..., None]
    return jnp.take_along_axis(x_BnHD, places, axis=1, mode="promise_in_bounds")


def _times(x_BnHD: Array, factor_BHn: Array) -> Array:
    return x_BnHD.astype(jnp.float32) * jnp.swapaxes(factor_BHn, 1, 2)[..., None]
