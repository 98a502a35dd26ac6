"""How evenly a ring's work is spread: executed tiles per rank and per step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.parallel.ring.rank_plans import segment_pairs
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels.index import BlockMaskIndex, DenseIndex, VerticalSlashIndex, bits


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tiles", "columns"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Balance:
    """Work of a ring, summed over batch and query heads.

    The devices of a node wait for the slowest of them at every step, as keys go from one to the
    next; nodes wait for each other at the end of an outer step. A flat ring is one node. Where
    devices gather keys there is one inner step: the work on the keys of a whole node.

    Attributes:
        tiles: fp32 [N, L, outer steps, inner steps], g x g tiles that each rank executes.
        columns: fp32 [N, L], g x 1 tiles of gathered columns that each rank executes, all at once.
    """

    tiles: Array
    columns: Array

    @property
    def imbalance(self) -> Array:
        """Tiles of the busiest rank over those of the mean rank, in the whole layer."""
        return _over_mean(self.tiles.sum((2, 3)).max(), self.tiles.sum((2, 3)).mean())

    @property
    def step_imbalance(self) -> Array:
        """What the layer's time follows: tiles on the path of waits over those of the mean rank.

        The sum over outer steps of the slowest node's, which is the sum over inner steps of its
        slowest device's.
        """
        path = self.tiles.max(1).sum(2).max(0).sum()
        return _over_mean(path, self.tiles.sum((2, 3)).mean())

    @property
    def per_step(self) -> Array:
        """fp32 [outer steps, inner steps]: busiest over mean device, of the most uneven node.

        0 at steps without work.
        """
        return _over_mean(self.tiles.max(1), self.tiles.mean(1)).max(0)

    @property
    def column_imbalance(self) -> Array:
        """Column tiles of the busiest rank over the mean; 0 if there are none."""
        return _over_mean(self.columns.max(), self.columns.mean())


def _over_mean(work: Array, mean: Array) -> Array:
    return work / jnp.where(mean > 0, mean, 1)


def ring_balance(
    index: VerticalSlashIndex | DenseIndex | BlockMaskIndex, topology: RingTopology
) -> Balance:
    """Counts the work that an index gives to each rank at each step of a ring.

    Usable under `jax.jit`; outside `shard_map`, with the whole index.

    Args:
        index: global, with all rows; a dense one counts as one batch entry and one head.
        topology: of the ring.

    Returns:
        The counts, exact up to 2^24 tiles for each rank and step.
    """
    layout = topology.layout
    num_blocks = layout.num_blocks
    ranks, outer, inner = np.meshgrid(
        np.arange(layout.num_ranks), np.arange(topology.outer_size), np.arange(topology.inner_size),
        indexing="ij",
    )
    sources = topology.source(ranks, outer, inner)
    rows = layout.permutation()[:: layout.block_size] // layout.block_size
    columns = jnp.zeros(num_blocks)
    if isinstance(index, BlockMaskIndex):
        listed = bits.unpack(index.bits, num_blocks).sum((0, 1), dtype=jnp.float32)
        of_ranks = layout.num_ranks, layout.local_blocks
        tiles = listed[rows][:, rows].reshape(*of_ranks, *of_ranks).sum((1, 3))[ranks, sources]
        if index.column_marks is not None:
            free = jnp.tril(~bits.unpack(index.bits, num_blocks))
            columns = jnp.einsum(
                "bhrk,bhk->r", free.astype(jnp.float32),
                bits.count(index.column_marks).astype(jnp.float32),
                precision=lax.Precision.HIGHEST,
            )
    else:
        active, tokens = index.active_diagonals(num_blocks), index.column_tokens()
        heads_on = active.sum((0, 1), dtype=jnp.float32)
        if tokens is not None:
            columns = _columns_per_row(tokens // layout.block_size, active)
        queries, keys = layout.segments(ranks), layout.segments(sources)
        tiles = sum(_tiles(queries[i], keys[j], heads_on) for i, j in segment_pairs(layout))
    if topology.gathers:
        tiles = tiles.sum(-1, keepdims=True)
    by_rank = columns[rows].reshape(layout.num_ranks, -1).sum(1)
    return Balance(
        tiles=tiles.reshape(topology.outer_size, topology.inner_size, *tiles.shape[1:]),
        columns=by_rank.reshape(topology.outer_size, topology.inner_size),
    )


def _tiles(query, key, heads_on: Array) -> Array:
    """Tiles of each pair of a query and a key segment, whose first blocks are arrays."""
    size = query.num_blocks
    offsets = np.arange(1 - size, size)
    distance = (query.first_block - key.first_block)[..., None] + query.stride * offsets
    exists = (distance >= 0) & (distance < heads_on.size)
    heads = jnp.where(exists, heads_on[np.where(exists, distance, 0)], 0)
    return (heads * (size - np.abs(offsets))).sum(-1)


def _columns_per_row(column_blocks: Array, active: Array) -> Array:
    """fp32 [NB]: gathered columns that query block i computes outside of active tiles.

    A convolution of the columns in each key block, of which those past the last are padding, with
    the inactive diagonals; an FFT in fp32, rounded, is exact for the few thousand columns of a
    head.
    """
    num_blocks = active.shape[-1]

    def one_head(pair):
        blocks, active = pair
        in_block = jnp.zeros(num_blocks).at[blocks].add(1.0, mode="drop")
        spectra = (jnp.fft.rfft(x, 2 * num_blocks) for x in (in_block, 1.0 - active))
        product = functools.reduce(jnp.multiply, spectra)
        return jnp.round(jnp.fft.irfft(product, 2 * num_blocks)[:num_blocks])

    heads = active.shape[0] * active.shape[1]
    flat = (x.reshape(heads, -1) for x in (column_blocks, active.astype(jnp.float32)))
    return lax.map(one_head, tuple(flat)).sum(0)
