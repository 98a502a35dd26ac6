"""Block diagonals of shards.

Between query blocks a + s*i and key blocks c + s*j, diagonal d occurs iff d = a - c modulo s, at
local offset i - j = (d - (a - c)) / s. Sorting once by residue is enough for every shard pair.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.index.protocol import Segment, ShardTiles
from pallas_kernels.tiles import NO_DIAGONAL, DiagonalTiles, SegmentedDiagonals


@dataclasses.dataclass(frozen=True)
class ToeplitzShards(ShardTiles):
    """Block diagonals of a sequence, sorted by residue modulo the stride."""

    diagonals: Array  # int32 [B, Hq, M], M >= 1, sorted by (d mod stride, d); then padding
    bounds: Array  # int32 [B, Hq, stride + 1]; residue x is at bounds[x] .. bounds[x + 1] - 1
    stride: int  # of all segments
    block_size: int
    dense: bool = False  # whether all diagonals are present

    @classmethod
    def every(
        cls, batch: int, num_heads: int, stride: int, num_blocks: int, block_size: int
    ) -> Self:
        diagonals = np.arange(num_blocks, dtype=np.int32).reshape(-1, stride).T.reshape(-1)
        bounds = np.arange(stride + 1, dtype=np.int32) * (num_blocks // stride)
        shape = batch, num_heads
        return cls(
            jnp.broadcast_to(diagonals, (*shape, diagonals.size)),
            jnp.broadcast_to(bounds, (*shape, bounds.size)),
            stride,
            block_size,
            dense=True,
        )

    @classmethod
    def listed(
        cls, diagonals: Array, count: Array, stride: int, num_blocks: int, block_size: int
    ) -> Self:
        """Builds it from diagonals int32 [B, Hq, M], M >= 1, of which the first `count` ascend."""
        if stride == 1:
            bounds = jnp.stack([jnp.zeros_like(count), count], axis=-1)
            return cls(diagonals, bounds, stride, block_size)
        live = jnp.arange(diagonals.shape[-1], dtype=jnp.int32) < count[..., None]
        keys = diagonals % stride * num_blocks + diagonals
        keys = jnp.sort(jnp.where(live, keys, stride * num_blocks), axis=-1)
        edges = jnp.arange(stride + 1, dtype=jnp.int32) * num_blocks
        bounds = jnp.sum(keys[..., None, :] < edges[:, None], axis=-1, dtype=jnp.int32)
        return cls(keys % num_blocks, bounds, stride, block_size)

    def pair(self, query: Segment, key: Segment) -> DiagonalTiles:
        lag = jnp.asarray(query.first_block - key.first_block, jnp.int32)
        diagonal = jnp.where(lag % self.stride == 0, -(lag // self.stride), NO_DIAGONAL)
        start, stop = self._runs((lag % self.stride)[None])
        offsets = (self.diagonals - lag) // self.stride
        return DiagonalTiles(
            offsets, start[..., 0], stop[..., 0], diagonal, self.block_size, self.dense
        )

    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> SegmentedDiagonals:
        stride, count = self.stride, keys.shape[0]
        lags = jnp.asarray(query.first_block, jnp.int32) - keys
        residues = lags % stride
        # Nearest first. The queries' own segment, with the causal diagonal, has residue 0.
        order = jnp.argsort(residues).astype(jnp.int32)
        # The segment that each diagonal meets, and its distance.
        number = jnp.zeros(stride, jnp.int32).at[residues].set(jnp.arange(count, dtype=jnp.int32))
        lag = jnp.zeros(stride, jnp.int32).at[residues].set(lags)
        residue = self.diagonals % stride
        offsets = (self.diagonals - lag[residue]) // stride - number[residue] * query.num_blocks
        diagonal = jnp.where(lags[order[0]] == 0, -order[0] * query.num_blocks, NO_DIAGONAL)
        if skip_own:
            order, diagonal = order[1:], jnp.asarray(NO_DIAGONAL)
        start, stop = self._runs(residues[order])
        return SegmentedDiagonals(
            offsets, start, stop, order, diagonal, count, self.block_size, self.dense
        )

    def _runs(self, residues: Array) -> tuple[Array, Array]:
        start = jnp.take(self.bounds, residues, axis=-1, mode="clip")
        return start, jnp.take(self.bounds, residues + 1, axis=-1, mode="clip")


@dataclasses.dataclass(frozen=True)
class DocumentShards(ShardTiles):
    """All block diagonals, each block restricted to its document."""

    every: ToeplitzShards  # all diagonals of the sequence
    first: Array  # int32 [B, 1, NB], as in `DenseIndex`
    end: Array

    def pair(self, query: Segment, key: Segment) -> DiagonalTiles:
        first = self._first_keys(query, key.first_block)
        end = self._end_queries(query.first_block, key.blocks())
        tiles = self.every.pair(query, key)
        return dataclasses.replace(tiles, first_keys=first, end_queries=end)

    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> SegmentedDiagonals:
        tiles = self.every.gathered(query, keys, skip_own)
        starts = keys[tiles.segment][:, None]
        steps = self.every.stride * jnp.arange(query.num_blocks, dtype=jnp.int32)
        first = self._first_keys(query, starts)
        end = self._end_queries(query.first_block, starts + steps)
        return dataclasses.replace(tiles, first_keys=first, end_queries=end)

    def _first_keys(self, query: Segment, start: int | Array) -> Array:
        first = self.first[..., query.blocks()]
        if jnp.ndim(start):
            first = first[:, :, None]
        return -((start - first) // self.every.stride)

    def _end_queries(self, start: int | Array, blocks: Array) -> Array:
        return -((start - self.end[..., blocks]) // self.every.stride)
