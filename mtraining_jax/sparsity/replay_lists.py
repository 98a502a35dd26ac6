"""Replayed lists of key blocks: random ones of a density given beforehand, for measuring speed."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.hashing import mixed
from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class ReplayLists(Pattern):
    """For each row of blocks a random list of key blocks, the same for all batches; a pytree.

    The first block and the nearest ones are always listed, every other causal block with the
    head's probability. Which ones is a hash of the head's salt and the block's place: a rank makes
    the rows of its own blocks, and nothing but two numbers a head is kept. The listed blocks lie
    everywhere alike; those of a real model lie closer together. Where documents are packed, each
    has its own first block, and blocks of other documents are not listed.

    Attributes:
        thresholds: uint32 [Hq], the probability of a block that is not forced, in 2^-32.
        salts: uint32 [Hq], drawn by the run's seed.
        estimate: also choose an index by this pattern before the replayed one is used, so that a
            step takes as long as one that chooses; None leaves that out.
        sink_blocks: first blocks, always listed.
        local_blocks: nearest blocks, always listed, a row's own among them.
        block_size: g, tokens on a side of a block.
    """

    arrays = ("thresholds", "salts")
    by_rows = True
    chooses = False

    thresholds: "Array"
    salts: "Array"
    estimate: Pattern | None
    sink_blocks: int
    local_blocks: int
    block_size: int

    def for_documents(self) -> "ReplayLists":
        """The pattern itself."""
        return self

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """The replayed lists, and the density of the index that `estimate` chooses.

        The lists are made to depend on the chosen index, in a way that changes none of their bits
        and that no compiler can remove: attention starts when the choice is made.
        """
        import jax.numpy as jnp

        from mtraining_jax.sparsity.exchange import rows_of
        from mtraining_jax.sparsity.metrics import density
        from pallas_kernels.index import BlockMaskIndex

        batch, num_blocks = q.shape[0], shards.num_blocks
        statistics, never = {}, jnp.zeros((batch, q.shape[2]), bool)
        if self.estimate is not None:
            estimate = self.estimate
            if shards.documents is not None:
                estimate = estimate.for_documents()
            chosen = estimate.choose(q, k, shards).index
            rows = rows_of(shards.block_ids, shards.axis_names)
            share = density(chosen, num_blocks * self.block_size, rows, shards.documents)
            statistics["estimated_density"] = share.mean(dtype=jnp.float32)
            # A number of blocks is 0 or more, which the compiler does not know.
            never = chosen.budgets()["blocks"] < 0
        rows, blocks = shards.block_ids[:, None], jnp.arange(num_blocks, dtype=jnp.int32)
        sinks, documents = blocks < self.sink_blocks, shards.documents
        if documents is not None:
            first = documents.of(shards.block_ids).first[:, None, :, None]
            sinks = blocks - first < self.sink_blocks
        forced = sinks | (rows - blocks < self.local_blocks)
        places = (rows * num_blocks + blocks).astype(jnp.uint32)
        drawn = mixed(places ^ self.salts[:, None, None]) < self.thresholds[:, None, None]
        listed = (forced | drawn) ^ never[:, :, None, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, shards.block_ids)
        if documents is not None:
            own = documents.causal_blocks(shards.block_ids, num_blocks)
            index = dataclasses.replace(index, bits=index.bits & own)
        return Choice(index, statistics)


def probabilities(
    targets: np.ndarray, num_blocks: int, block_size: int, sink_blocks: int, local_blocks: int
) -> np.ndarray:
    """The probability of a block that is not forced, for each head.

    Heads that should be sparser than what is forced get that and no more; the others are then made
    a little sparser, so that the mean density stays.

    Args:
        targets: fp64 [n], densities of computed over causal pairs, in the mean over drawings.
        num_blocks: NB.
        block_size: g.
        sink_blocks: as in `ReplayLists`, like `local_blocks`.
        local_blocks: see there.

    Returns:
        fp64 [n], in [0, 1].

    Raises:
        UserError: if what is forced is more than the mean.
    """
    rows = np.arange(num_blocks)
    # Key blocks before a row's own that are forced: nearest ones, and sinks that are not near.
    near = np.minimum(rows, local_blocks - 1)
    forced = near + np.minimum(sink_blocks, rows - near)
    seq_len = num_blocks * block_size
    causal = seq_len * (seq_len + 1) / 2
    # A row's own block lacks the pairs above the diagonal.
    least = (num_blocks * block_size * (block_size + 1) / 2 + forced.sum() * block_size**2) / causal
    if targets.mean() < least:
        raise UserError(
            f"sparsity.replay_density = {targets.mean():g} is less than the blocks that are always "
            f"listed, {least:.3%} of the causal pairs (sparsity.sink_blocks = {sink_blocks}, "
            f"sparsity.local_blocks = {local_blocks}, data.seq_len = {seq_len}); a longer "
            "sequence, smaller blocks (sparsity.block_size) or a higher density would do"
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
    targets: np.ndarray, *, num_blocks: int, block_size: int, sink_blocks: int,
    local_blocks: int, estimate: Pattern | None, seed: int,
) -> ReplayLists:
    """Lists of all layers, the same on every machine.

    Args:
        targets: fp64 [L, Hq], the density of each head.
        num_blocks: NB.
        block_size: g.
        sink_blocks: as in `ReplayLists`, like the next two.
        local_blocks: see there.
        estimate: see there.
        seed: of the drawing.

    Returns:
        A pattern of arrays [L, Hq] on the host.

    Raises:
        UserError: as `probabilities`.
    """
    sizes = num_blocks, block_size, sink_blocks, local_blocks
    shares = probabilities(targets.reshape(-1), *sizes)
    thresholds = np.minimum(np.round(shares * 2.0**32), 2.0**32 - 1)
    salts = np.random.default_rng(seed).integers(2**32, size=targets.shape, dtype=np.uint32)
    return ReplayLists(
        thresholds=thresholds.astype(np.uint32).reshape(targets.shape), salts=salts,
        estimate=estimate, sink_blocks=sink_blocks, local_blocks=local_blocks,
        block_size=block_size,
    )
