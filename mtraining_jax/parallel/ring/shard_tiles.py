"""Which tiles a pair of shards computes."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.parallel.layout import Layout, Segment
from pallas_kernels.index import VerticalSlashIndex
from pallas_kernels.tiles import NO_DIAGONAL, DiagonalTiles, SegmentedDiagonals


def segment_pairs(layout: Layout) -> list[tuple[int, int]]:
    """Pairs (query segment, key segment) that can have causal work for some pair of ranks.

    Segment i of any rank lies before segment i + 1 of any rank, so later key segments have none.
    """
    count = len(layout.segments(0))
    return [(i, j) for i in range(count) for j in range(i + 1)]


class StepTiles:
    """The tiles of every (query segment, key segment) pair of a layer, from one sort.

    Query block i of a segment with first block a is global block a + s*i, key block j of one with
    first block c is c + s*j, s the stride. Block diagonal d lies in the pair iff
    d = a - c modulo s, as local offset i - j = (d - (a - c)) / s.

    Args:
        layout: gives the stride, and the blocks of a segment.
        index: the global index; None for all causal pairs.
        batch, num_heads: shape of the lists when `index` is None.
    """

    def __init__(
        self, layout: Layout, index: VerticalSlashIndex | None, batch: int, num_heads: int
    ):
        segment = layout.segments(0)[0]
        self._stride, self._num_blocks = segment.stride, segment.num_blocks
        self._block_size, self._dense = layout.block_size, index is None
        if index is None:
            every = _every_diagonal(self._stride, layout.num_blocks)
            self._diagonals, self._bounds = (
                jnp.broadcast_to(x, (batch, num_heads, x.size)) for x in every
            )
        else:
            self._diagonals, self._bounds = _by_residue(index, self._stride, layout.num_blocks)

    def pair(self, query: Segment, key: Segment) -> DiagonalTiles:
        """The tiles of queries in one segment and keys in another (first blocks may be traced).

        Both have the stride of the layout; the key segment may be longer than those of a rank.
        """
        lag = jnp.asarray(query.first_block - key.first_block, jnp.int32)
        diagonal = jnp.where(lag % self._stride == 0, -(lag // self._stride), NO_DIAGONAL)
        start, stop = self._runs((lag % self._stride)[None])
        offsets = (self._diagonals - lag) // self._stride
        return DiagonalTiles(
            offsets, start[..., 0], stop[..., 0], diagonal, self._block_size, self._dense
        )

    def gathered(self, query: Segment, keys: Array, skip_first: bool) -> SegmentedDiagonals:
        """The tiles of queries in one segment and keys in several, one after another.

        For the striped layout, where the first blocks of ranks all have different residues.

        Args:
            query: the queries.
            keys: int32 [n], first blocks of the key segments, each as long as the query's.
            skip_first: whether to leave out the segment with the nearest keys. Where the
                queries' own is among the segments, that is the one.
        """
        stride, count = self._stride, keys.shape[0]
        lags = jnp.asarray(query.first_block, jnp.int32) - keys
        residues = lags % stride
        # Nearest first. The queries' own segment, and with it the causal diagonal, has residue 0.
        order = jnp.argsort(residues).astype(jnp.int32)
        # The segment that each diagonal meets, and how far away it is.
        number = jnp.zeros(stride, jnp.int32).at[residues].set(jnp.arange(count, dtype=jnp.int32))
        lag = jnp.zeros(stride, jnp.int32).at[residues].set(lags)
        residue = self._diagonals % stride
        offsets = (self._diagonals - lag[residue]) // stride - number[residue] * self._num_blocks
        diagonal = jnp.where(lags[order[0]] == 0, -order[0] * self._num_blocks, NO_DIAGONAL)
        if skip_first:
            order, diagonal = order[1:], jnp.asarray(NO_DIAGONAL)
        start, stop = self._runs(residues[order])
        return SegmentedDiagonals(
            offsets, start, stop, order, diagonal, count, self._block_size, self._dense
        )

    def _runs(self, residues: Array) -> tuple[Array, Array]:
        """Where the diagonals of some residues begin and end: int32 [B, Hq, n] twice."""
        start = jnp.take(self._bounds, residues, axis=-1, mode="clip")
        return start, jnp.take(self._bounds, residues + 1, axis=-1, mode="clip")


def _every_diagonal(stride: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """All block diagonals, as `_by_residue` gives those of an index."""
    diagonals = np.arange(num_blocks, dtype=np.int32).reshape(-1, stride).T.reshape(-1)
    return diagonals, np.arange(stride + 1, dtype=np.int32) * (num_blocks // stride)


def _by_residue(
    index: VerticalSlashIndex, stride: int, num_blocks: int
) -> tuple[Array, Array]:
    """The slash blocks sorted by (d mod stride, d), and where each residue begins.

    Returns:
        diagonals: int32 [B, Hq, max(Ms, 1)]; entries past the last bound are padding.
        bounds: int32 [B, Hq, stride + 1]; residue x is at bounds[x] .. bounds[x + 1] - 1.
    """
    diagonals = DiagonalTiles.from_index(index).offsets  # at least one entry
    if stride == 1:
        zero = jnp.zeros_like(index.slash_count)
        return diagonals, jnp.stack([zero, index.slash_count], axis=-1)
    live = jnp.arange(diagonals.shape[-1], dtype=jnp.int32) < index.slash_count[..., None]
    keys = diagonals % stride * num_blocks + diagonals
    keys = jnp.sort(jnp.where(live, keys, stride * num_blocks), axis=-1)
    edges = jnp.arange(stride + 1, dtype=jnp.int32) * num_blocks
    bounds = jnp.sum(keys[..., None, :] < edges[:, None], axis=-1, dtype=jnp.int32)
    return keys % num_blocks, bounds
