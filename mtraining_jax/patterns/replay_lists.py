"""Replayed block lists: random key blocks of a given density, for speed measurements."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.hashing import mixed

if TYPE_CHECKING:
    from jax import Array

    from pallas_kernels.index import Index


@dataclasses.dataclass(frozen=True)
class ReplayLists(Pattern):
    """A random list of key blocks per row of blocks, the same for all batches; a pytree.

    The first block and the nearest ones are always listed, every other causal block with the
    head's probability, by a hash of the head's salt and the block's position. A rank computes the
    rows of its own blocks, and only two numbers per head are stored. Listed blocks are distributed
    uniformly; those of a trained model are more clustered. In packed sequences, each document has
    its own first block, and blocks of other documents are not listed.

    Attributes:
        thresholds: uint32 [Hq], the probability of a block that is not forced, in 2^-32.
        salts: uint32 [Hq], drawn with the run's seed.
        estimate: pattern that selects an index before the replayed one is used, so that a step
            includes selection cost; None to skip.
        sink_blocks: number of first blocks, always listed.
        local_blocks: number of nearest blocks, always listed, including a row's own.
        block_size: g, tokens per block.
    """

    arrays = ("thresholds", "salts")
    by_rows = True
    reads_documents = True
    selects = False

    thresholds: "Array | np.ndarray"
    salts: "Array | np.ndarray"
    estimate: Pattern | None
    sink_blocks: int
    local_blocks: int
    block_size: int

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        """Returns the replayed lists, and the density of the index selected by `estimate`.

        The lists depend on the selected index as in `Replay.select`.
        """
        import jax.numpy as jnp

        from pallas_kernels.index import BlockMaskIndex

        num_blocks = context.num_blocks
        statistics, never = {}, jnp.zeros((q.shape[0], q.shape[2]), bool)
        if self.estimate is not None:
            selected, statistics = estimated(self.estimate, q, k, context)
            # A count is at least 0, which the compiler does not know.
            never = selected.budgets()["blocks"] < 0
        rows, blocks = context.block_ids[:, None], jnp.arange(num_blocks, dtype=jnp.int32)
        sinks, documents = blocks < self.sink_blocks, context.documents
        if documents is not None:
            first = documents.of(context.block_ids).first[:, None, :, None]
            sinks = blocks - first < self.sink_blocks
        forced = sinks | (rows - blocks < self.local_blocks)
        places = (rows * num_blocks + blocks).astype(jnp.uint32)
        drawn = mixed(places ^ self.salts[:, None, None]) < self.thresholds[:, None, None]
        listed = (forced | drawn) ^ never[:, :, None, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, context.block_ids)
        if documents is not None:
            own = documents.causal_blocks(context.block_ids, num_blocks)
            index = dataclasses.replace(index, bits=index.bits & own)
        return Selection(index, statistics)


def estimated(
    pattern: Pattern, q: "Array", k: "Array", context: SelectionContext
) -> "tuple[Index, dict[str, Array]]":
    """Selects an index, and returns it with the statistic of its density."""
    import jax.numpy as jnp

    from mtraining_jax.selection.collectives import rows_of
    from mtraining_jax.selection.metrics import density

    index = pattern.select(q, k, context).index
    rows = rows_of(context.block_ids, context.axis_names)
    share = density(index, context.num_blocks * index.block_size, rows, context.documents)
    return index, {"estimated_density": share.mean(dtype=jnp.float32)}


def probabilities(
    targets: np.ndarray, num_blocks: int, block_size: int, sink_blocks: int, local_blocks: int
) -> np.ndarray:
    """Returns the probability of a block that is not forced, fp64 [n], for targets fp64 [n].

    Heads with a target below the density of forced blocks get only these; the others are made
    slightly sparser, so that the mean density is unchanged.

    Raises:
        UserError: if the forced blocks exceed the mean.
    """
    rows = np.arange(num_blocks)
    # Forced key blocks before a row's own: nearest ones, and sinks that are not near.
    near = np.minimum(rows, local_blocks - 1)
    forced = near + np.minimum(sink_blocks, rows - near)
    seq_len = num_blocks * block_size
    causal = seq_len * (seq_len + 1) / 2
    # A row's own block has no pairs above the diagonal.
    least = (num_blocks * block_size * (block_size + 1) / 2 + forced.sum() * block_size**2) / causal
    if targets.mean() < least:
        raise UserError(
            f"sparsity.replay_density = {targets.mean():g} is below the density of the blocks that "
            f"are always listed, {least:.3%} (sparsity.sink_blocks = {sink_blocks}, "
            f"sparsity.local_blocks = {local_blocks}, data.seq_len = {seq_len}); use a longer "
            "sequence, smaller blocks (sparsity.block_size) or a higher density"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        factor = (low + high) / 2
        if np.maximum(factor * targets, least).mean() > targets.mean():
            high = factor
        else:
            low = factor
    free = (rows - forced).sum() * block_size**2 / causal
    return np.clip((np.maximum(high * targets, least) - least) / max(free, 1e-30), 0, 1)


def make_replay_lists(
    targets: np.ndarray,
    *,
    num_blocks: int,
    block_size: int,
    sink_blocks: int,
    local_blocks: int,
    estimate: Pattern | None,
    seed: int,
) -> ReplayLists:
    """Draws the lists of all layers, the same on every machine.

    Returns a pattern of arrays [L, Hq] on the host, for the density of each head, fp64 [L, Hq].

    Raises:
        UserError: if the forced blocks exceed the mean density.
    """
    sizes = num_blocks, block_size, sink_blocks, local_blocks
    shares = probabilities(targets.reshape(-1), *sizes)
    thresholds = np.minimum(np.round(shares * 2.0**32), 2.0**32 - 1)
    salts = np.random.default_rng(seed).integers(2**32, size=targets.shape, dtype=np.uint32)
    return ReplayLists(
        thresholds=thresholds.astype(np.uint32).reshape(targets.shape),
        salts=salts,
        estimate=estimate,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        block_size=block_size,
    )
