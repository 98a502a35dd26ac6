"""An emulated striped ring on one device: rank r of R holds global blocks r, r + R, ..."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import Columns, DiagonalTiles, SegmentedDiagonals, VerticalSlashIndex
from pallas_kernels.index import Segment
from pallas_kernels.tiles import NO_DIAGONAL
from tests.pallas_kernels.helpers.cases import Size


def striped_step(index: VerticalSlashIndex, rank: int, source: int, ranks: int) -> DiagonalTiles:
    """The tiles of one striped ring step: queries of `rank`, keys of `source`.

    Local block j of rank r is global block j * ranks + r, so block diagonal d occurs in the pair
    iff d = rank - source (mod ranks), at local offset (d - (rank - source)) / ranks. Every list
    holds all diagonals, sorted by residue; start and stop select the step's.
    """
    slashes, count = np.array(index.slash_blocks), np.asarray(index.slash_count)
    start, stop = np.zeros_like(count), np.zeros_like(count)
    shift = rank - source
    for at in np.ndindex(*count.shape):
        live = sorted(slashes[at][: count[at]], key=lambda d: (d % ranks, d))
        residues = [d % ranks for d in live]
        start[at] = sum(r < shift % ranks for r in residues)
        stop[at] = start[at] + residues.count(shift % ranks)
        slashes[at][: count[at]] = live
    return DiagonalTiles(
        jnp.asarray((slashes - shift) // ranks, jnp.int32),
        jnp.asarray(start),
        jnp.asarray(stop),
        jnp.int32(0 if rank == source else NO_DIAGONAL),
        index.block_size,
    )


def segmented_step(
    index: VerticalSlashIndex, rank: int, sources: list[int], ranks: int, segment_blocks: int
) -> SegmentedDiagonals:
    """Queries of `rank` against the concatenated keys of several ranks, as one list.

    A run holds the offsets of `striped_step` for one source, relative to the concatenated keys.
    Runs are ordered by the distance of their keys, without gaps in the lists.
    """
    order = sorted(range(len(sources)), key=lambda n: (rank - sources[n]) % ranks)
    steps = [striped_step(index, rank, sources[n], ranks) for n in order]
    count = np.asarray(index.slash_count)
    offsets = np.zeros_like(np.asarray(index.slash_blocks))
    start, stop = np.zeros((2, *count.shape, len(sources)), np.int32)
    for at in np.ndindex(*count.shape):
        end = 0
        for run, (n, step) in enumerate(zip(order, steps, strict=True)):
            live = np.asarray(step.offsets)[at][int(step.start[at]) : int(step.stop[at])]
            start[*at, run], stop[*at, run] = end, end + live.size
            offsets[at][end : end + live.size] = live - n * segment_blocks
            end += live.size
    diagonal = -sources.index(rank) * segment_blocks if rank in sources else NO_DIAGONAL
    return SegmentedDiagonals(
        *map(jnp.asarray, (offsets, start, stop)),
        jnp.asarray(order, jnp.int32),
        jnp.int32(diagonal),
        len(sources),
        index.block_size,
    )


@functools.partial(jax.jit, static_argnames=("ranks", "num_blocks"))
def seen_by(rank: int, index: VerticalSlashIndex, ranks: int, num_blocks: int) -> Columns:
    """The columns as seen by the striped queries of a rank."""
    return index.columns(Segment(rank, ranks, num_blocks // ranks), num_blocks)


# With NumPy; JAX would compile each step for each shape.
def split(x: Array, ranks: int, size: Size) -> list[np.ndarray]:
    """Splits [B, S, ...] into stripes of one block: rank r gets blocks r, r + ranks, ..."""
    x = np.asarray(x)
    blocks = x.reshape(x.shape[0], -1, ranks, size.block_size, *x.shape[2:])
    return [blocks[:, :, r].reshape(x.shape[0], -1, *x.shape[2:]) for r in range(ranks)]


def collect(shards: list[Array], size: Size) -> np.ndarray:
    """The inverse of `split`."""
    shards = [np.asarray(x) for x in shards]
    batch, rest = shards[0].shape[0], shards[0].shape[2:]
    blocks = [x.reshape(batch, -1, 1, size.block_size, *rest) for x in shards]
    return np.concatenate(blocks, axis=2).reshape(batch, -1, *rest)
