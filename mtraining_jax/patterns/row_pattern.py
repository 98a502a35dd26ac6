"""Common base of patterns that select the key blocks with most mass for each row of blocks."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.options.rows import RowOptions
from mtraining_jax.selection import collectives
from mtraining_jax.selection.checks import check_selection
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.rules.row_rule import RowRule, kept_blocks
from pallas_kernels.coded import CodedKeys
from pallas_kernels.index import BlockMaskIndex
from pallas_kernels.index import bits as sets

Keys = Array | CodedKeys

_MASS_BYTES = 1 << 26  # of fp32 masses at a time


class RowPattern(Pattern, RowOptions):
    """Per head and row of blocks, the heaviest key blocks until a fraction of their mass is kept.

    Subclasses define how blocks are scored. All share one rule (`row_rule.RowRule`): forced blocks
    first, then the others in descending order while the mass kept so far is below `tau` of the
    row's mass. No row is ever empty.

    The keys of all ranks are gathered before the selection. The rest needs no communication, and
    each rank keeps its own rows of the index (`BlockMaskIndex`). Scores of some rows of blocks at a
    time become bits, so memory grows with the length of the sequence, not with its square.

    Causality: the blocks that a row of blocks computes depend on all queries of that row. Through
    the selection, a query can be influenced by up to `block_size` - 1 later tokens of its own
    block, and by nothing beyond it.
    """

    def keys(self, q: Array, k: Array, context: SelectionContext) -> Keys:
        """Returns what `scores` needs of the local keys [B, n, Hk, D], before they are gathered."""
        return k

    def scores(self, q: Array, k: Keys, context: SelectionContext) -> Array:
        """Scores each key block for each local row of blocks.

        Args:
            q: [B, n, Hq, D], local queries.
            k: [B, S, Hk, D], all keys, in sequence order, or what `keys` makes of them.
            context: the shards of the sequence.

        Returns:
            fp32 [B, Hq, n/g, NB], at least 0, in any unit. Must be bit-identical for a row of
            blocks whatever other rows are on the rank. Covers the row's document; entries of other
            blocks are ignored.
        """
        raise NotImplementedError(f"{type(self).__name__}.scores")

    def rule(self, context: SelectionContext) -> RowRule:
        """Returns the rule with these options; `context.mass_fraction` overrides `tau`."""
        return RowRule(
            self.tau if context.mass_fraction is None else context.mass_fraction,
            self.sink_blocks,
            self.local_blocks,
            self.min_block_mass,
            self.blocks(self.dense_prefix_tokens),
            self.random_block_prob,
            self._dense_suffix_rows(context) if self.dense_suffix_tokens else None,
        )

    def _dense_suffix_rows(self, context: SelectionContext) -> Array:
        """Whether each local row is in a dense suffix, bool [B or 1, n]; not in dense documents."""
        size, ends = self.block_size, context.ends(context.block_ids, self.block_size)
        if ends is None:
            ends = context.num_blocks * size
        first = context.block_ids[None] * size
        return (first < ends) & (first + size > ends - (self.dense_suffix_tokens or 0))

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        check_selection(q, k, context, self.block_size)
        documents = context.documents.dense_below(self.blocks(self.min_sparse_tokens))
        context = dataclasses.replace(context, documents=documents)
        keys = self.keys(q, k, context)
        keys = jax.tree.map(lambda x: collectives.all_blocks(x, *context.shards), keys)
        return Selection(self.index(q, keys, context))

    def index(self, q: Array, k: Keys, context: SelectionContext) -> BlockMaskIndex:
        """Builds the index of the local rows of blocks; arguments as in `scores`."""
        size, num_local = self.block_size, context.block_ids.shape[0]
        count = self.rows_at_once(q, k, context)

        def bits(first: Array | int) -> Array:
            ids = lax.dynamic_slice_in_dim(context.block_ids, first, count)
            part = dataclasses.replace(context, block_ids=ids)
            return self.bits(lax.dynamic_slice_in_dim(q, first * size, count * size, 1), k, part)

        if count >= num_local:
            return BlockMaskIndex(bits(0), context.num_blocks, size)

        def add(i: Array, found: Array) -> Array:
            # The last part starts early enough to end with the last row.
            first = jnp.minimum(i * count, num_local - count)
            return lax.dynamic_update_slice_in_dim(found, bits(first), first, axis=2)

        words = sets.words_for(context.num_blocks)
        found = jnp.zeros((q.shape[0], q.shape[2], num_local, words), jnp.uint32)
        found = lax.fori_loop(0, -(-num_local // count), add, found)
        return BlockMaskIndex(found, context.num_blocks, size)

    def bits(self, q: Array, k: Keys, context: SelectionContext) -> Array:
        """Returns the bits of the index; arguments as in `scores`."""
        scores, rule = self.scores(q, k, context), self.rule(context)
        return kept_blocks(scores, context.block_ids, rule, context.documents)

    def rows_at_once(self, q: Array, k: Keys, context: SelectionContext) -> int:
        """Returns how many local rows of blocks are scored at a time."""
        bytes_per_row = 4 * q.shape[0] * q.shape[2] * context.num_blocks
        return max(min(_MASS_BYTES // bytes_per_row, context.block_ids.shape[0]), 1)
