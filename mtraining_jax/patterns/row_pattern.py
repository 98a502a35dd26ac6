"""Common base of patterns that select the key blocks with most mass for each row of blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from mtraining_jax.patterns.base import BlockPattern, BlockSize, MinSparseTokens, NewTokens
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import (
    Ge,
    Lt,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    UnitFraction,
)

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.context import SelectionContext
    from mtraining_jax.selection.rules.row_rule import RowRule
    from mtraining_jax.selection.scores.probe_rows import Keys
    from pallas_kernels.index import BlockMaskIndex

# Tokens at the end of a prompt that attend to all of it: room for a question. One or two blocks.
PROMPT_END = 128
_TAU_BITS = 15  # of the rule and its kernel
_NEW_TOKEN_BLOCK = 128  # the only block size of new tokens
_NEW_TOKEN_SHARE = 5.0  # times 1 - tau: see `NewTokens.share`
_MASS_BYTES = 1 << 26  # of fp32 masses at a time


@options
class RowPattern(BlockPattern):
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

    density_option = "tau"

    tau: PositiveFraction = 0.9
    """Attention mass to keep per row of blocks, as a fraction of the estimated mass, rounded to
    2^-15. The block that reaches it is kept."""
    sink_blocks: NonNegativeInt = 1
    """Number of first key blocks that are always kept."""
    local_blocks: PositiveInt = 2
    """Number of nearest key blocks that are always kept, including the query's own."""
    min_block_mass: UnitFraction = 0.0
    """Minimum block mass, as a fraction of the row's mass: blocks below it are skipped even if
    `tau` is not reached. With tau 1 it is the only criterion; 0 disables."""
    dense_prefix_tokens: NonNegativeInt = 0
    """Dense prefix: queries of the first N tokens of each sequence or document attend to all of
    their keys, rounded up to whole blocks."""
    dense_suffix_tokens: NonNegativeInt | None = None
    """Dense suffix: queries of the last N tokens of each sequence or document, without padding,
    attend to all of their keys, rounded up to whole blocks. A question at the end of a prompt looks
    for single blocks, which a few probe queries can miss. none uses 128 for prompts and 0 in
    training."""
    random_block_prob: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability of keeping a block that was not selected, by a hash of head and block positions.
    Pairs skipped in one row are then trained in another."""
    min_sparse_tokens: MinSparseTokens = 8192
    block_size: BlockSize = 128

    def keys(self, q: Array, k: Array, context: SelectionContext) -> Keys:
        """Returns what `scores` needs of the local keys [B, n, Hk, D], before they are gathered."""
        del q, context
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
        """Returns the rule with these options, or with the `tau` of each sequence."""
        from mtraining_jax.selection.rules.row_rule import RowRule

        return RowRule(
            context.overrides.get("tau", self.tau),
            self.sink_blocks,
            self.local_blocks,
            self.min_block_mass,
            self.blocks(self.dense_prefix_tokens),
            self.random_block_prob,
            self._dense_rows(context),
        )

    def _dense_rows(self, context: SelectionContext) -> Array | None:
        """Whether each local row is in a short document or a dense suffix, bool [B or 1, n]."""
        short = None
        if context.documents.packed:
            short = context.documents.of(context.block_ids).shorter_than(context.dense_below)
        if not self.dense_suffix_tokens:
            return short
        size, ends = self.block_size, context.ends(context.block_ids)
        if ends is None:
            ends = context.num_blocks * size
        first = context.block_ids[None] * size
        suffix = (first < ends) & (first + size > ends - self.dense_suffix_tokens)
        return suffix if short is None else short | suffix

    def select(self, q, k, context):
        import jax

        from mtraining_jax.selection.collectives import all_blocks
        from mtraining_jax.selection.context import Selection, with_dense_documents

        least = self.blocks(self.min_sparse_tokens)
        context = with_dense_documents(q, k, context, self.block_size, least)
        keys = jax.tree.map(lambda x: all_blocks(x, *context.shards), self.keys(q, k, context))
        return Selection(self.index(q, keys, context))

    def index(self, q: Array, k: Keys, context: SelectionContext) -> BlockMaskIndex:
        """Builds the index of the local rows of blocks; arguments as in `scores`."""
        import jax.numpy as jnp
        from jax import lax

        from pallas_kernels.index import BlockMaskIndex
        from pallas_kernels.index.bits import words_for

        size, num_local = self.block_size, context.block_ids.shape[0]
        count = self.rows_at_once(q, k, context)

        def part(first: Array | int) -> Array:
            ids = lax.dynamic_slice_in_dim(context.block_ids, first, count)
            rows = lax.dynamic_slice_in_dim(q, first * size, count * size, 1)
            return self.bits(rows, k, dataclasses.replace(context, block_ids=ids))

        def add(i: Array, found: Array) -> Array:
            # The last part starts early enough to end with the last row.
            first = jnp.minimum(i * count, num_local - count)
            return lax.dynamic_update_slice_in_dim(found, part(first), first, axis=2)

        if count >= num_local:
            return BlockMaskIndex(part(0), context.num_blocks, size)
        shape = q.shape[0], q.shape[2], num_local, words_for(context.num_blocks)
        found = jnp.zeros(shape, jnp.uint32)
        found = lax.fori_loop(0, -(-num_local // count), add, found)
        return BlockMaskIndex(found, context.num_blocks, size)

    def bits(self, q: Array, k: Keys, context: SelectionContext) -> Array:
        """Returns the bits of the index; arguments as in `scores`."""
        from mtraining_jax.selection.rules.row_rule import kept_blocks

        scores, rule = self.scores(q, k, context), self.rule(context)
        return kept_blocks(scores, context.block_ids, rule, context.documents)

    def rows_at_once(self, q: Array, k: Keys, context: SelectionContext) -> int:
        """Returns how many local rows of blocks are scored at a time."""
        del k
        bytes_per_row = 4 * q.shape[0] * q.shape[2] * context.num_blocks
        return max(min(_MASS_BYTES // bytes_per_row, context.block_ids.shape[0]), 1)

    def for_prompts(self):
        if self.dense_suffix_tokens is not None:
            return self
        return dataclasses.replace(self, dense_suffix_tokens=PROMPT_END)

    def for_new_tokens(self):
        size = self.block_size
        if size != _NEW_TOKEN_BLOCK:
            return None
        first, last = self.sink_blocks * size, self.local_blocks * size
        share = _NEW_TOKEN_SHARE * (1 - self.tau)
        return NewTokens(share, first, last, self.min_block_mass, self.min_sparse_tokens)

    def overridable(self):
        return {"tau": _TAU_BITS}

    def more_pairs(self) -> str:
        least = self.min_block_mass
        smaller = f" or decrease sparsity.min_block_mass = {least}" if least else ""
        return super().more_pairs() + smaller

    def rule_in_words(self) -> str:
        """Describes the rule, for `describe`."""
        words = [f"{100 * self.tau:g} % of attention mass per row of blocks"]
        if self.min_block_mass:
            words.append(f"minimum block mass {100 * self.min_block_mass:g} %")
        if self.dense_prefix_tokens:
            words.append(f"dense prefix of {self.dense_prefix_tokens:,} tokens")
        if self.dense_suffix_tokens:
            words.append(f"dense suffix of {self.dense_suffix_tokens:,} tokens")
        if self.random_block_prob:
            words.append(f"{100 * self.random_block_prob:g} % of others at random")
        return ", ".join(words)
