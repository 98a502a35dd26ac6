"""Common base of patterns that select the key blocks with most mass for each row of blocks."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from mtraining_jax.cost_model.density import density_of_lists
from mtraining_jax.patterns.base import KeptShare, Pattern, blocks_of
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.limits import (
    Ge,
    Lt,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    UnitFraction,
    check_limits,
)

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.rules.row_rule import RowRule
    from pallas_kernels.index import BlockMaskIndex

# Tokens at the end of a prompt that attend to all of it: room for a question. One or two blocks.
PROMPT_END = 128


@dataclasses.dataclass(frozen=True)
class RowPattern(Pattern):
    """Per head and row of blocks, the heaviest key blocks until a fraction of their mass is kept.

    Subclasses define how blocks are scored (`scores`), or which are kept (`keep`). All share one
    rule (`row_rule.RowRule`): forced blocks first, then the others in descending order while the
    mass kept so far is below `tau` of the row's mass. No row is ever empty.

    The keys of all ranks are gathered before the selection. The rest needs no communication, and
    each rank keeps its own rows of the index (`BlockMaskIndex`).

    Causality: the blocks that a row of blocks computes depend on all queries of that row. Through
    the selection, a query can be influenced by up to `block_size` - 1 later tokens of its own
    block, and by nothing beyond it.

    Attributes:
        tau: Attention mass to keep per row of blocks, as a fraction of the estimated mass, rounded
            to 2^-15. The block that reaches it is kept.
        sink_blocks: Number of first key blocks that are always kept.
        local_blocks: Number of nearest key blocks that are always kept, including the query's own.
        min_block_mass: Minimum block mass, as a fraction of the row's mass: blocks below it are
            skipped even if `tau` is not reached. With tau 1 it is the only criterion; 0 disables.
        dense_prefix_tokens: Dense prefix: queries of the first N tokens of each sequence or document
            attend to all of their keys, rounded up to whole blocks.
        dense_suffix_tokens: Dense suffix: queries of the last N tokens of each sequence or document, without
            padding, attend to all of their keys, rounded up to whole blocks. A question at the end
            of a prompt looks for single blocks, which a few probe queries can miss. none uses 128
            for prompts and 0 in training.
        random_block_prob: Probability of keeping a block that was not selected, by a hash of head and
            block positions. Pairs skipped in one row are then trained in another.
        min_sparse_tokens: Documents shorter than this, including padding, use dense attention, since
            selection would save little. Has no effect without documents.
        block_size: Block size in tokens (g).
    """

    by_rows = True
    reads_documents = True

    tau: PositiveFraction = 0.9
    sink_blocks: NonNegativeInt = 1
    local_blocks: PositiveInt = 2
    min_block_mass: UnitFraction = 0.0
    dense_prefix_tokens: NonNegativeInt = 0
    dense_suffix_tokens: NonNegativeInt | None = None
    random_block_prob: Annotated[float, Ge(0), Lt(1)] = 0.0
    min_sparse_tokens: NonNegativeInt = 8192
    block_size: PositiveInt = 128

    def __post_init__(self) -> None:
        check_limits(self)

    def more_pairs(self) -> str:
        least = self.min_block_mass
        smaller = f" or decrease sparsity.min_block_mass = {least}" if least else ""
        return f"increase sparsity.tau = {self.tau}{smaller}"

    def scores(self, q: "Array", k: "Array", context: SelectionContext) -> "Array":
        """Scores each key block for each local row of blocks.

        Args:
            q: [B, n, Hq, D], local queries.
            k: [B, S, Hk, D], all keys, in sequence order.
            context: the shards of the sequence.

        Returns:
            fp32 [B, Hq, n/g, NB], at least 0, in any unit. Must be bit-identical for a row of
            blocks whatever other rows are on the rank. Covers the row's document; entries of other
            blocks are ignored.
        """
        raise NotImplementedError(f"{type(self).__name__}.scores")

    def keep(self, q: "Array", k: "Array", context: SelectionContext) -> "Array":
        """Selects the key blocks of each local row of blocks by its `scores`.

        Returns uint32 [B, Hq, n/g, ceil(NB/32)], bits as in `BlockMaskIndex`.
        """
        from mtraining_jax.selection.rules.row_rule import kept_blocks

        scores = self.scores(q, k, context)
        return kept_blocks(scores, context.block_ids, self.rule(context), context.documents)

    def rule(self, context: SelectionContext) -> "RowRule":
        """Returns the rule with these settings; `context.shares` override `tau`."""
        from mtraining_jax.selection.rules.row_rule import RowRule

        return RowRule(
            self.tau if context.shares is None else context.shares,
            self.sink_blocks,
            self.local_blocks,
            self.min_block_mass,
            blocks_of(self.dense_prefix_tokens, self.block_size),
            self.random_block_prob,
            self._rows_at_end(context) if self.dense_suffix_tokens else None,
        )

    def _rows_at_end(self, context: SelectionContext) -> "Array":
        """Whether each local row is in a dense suffix, bool [B or 1, n]; not in dense documents."""
        size, ends = self.block_size, context.ends(context.block_ids, self.block_size)
        if ends is None:
            ends = context.num_blocks * size
        first = context.block_ids[None] * size
        return (first < ends) & (first + size > ends - (self.dense_suffix_tokens or 0))

    def for_prompts(self) -> "RowPattern":
        """Returns the variant with a dense suffix, unless `dense_suffix_tokens` is set."""
        if self.dense_suffix_tokens is not None:
            return self
        return dataclasses.replace(self, dense_suffix_tokens=PROMPT_END)

    def kept_share(self) -> KeptShare:
        return KeptShare("tau", 15)

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        """Selects the blocks returned by `keep`."""
        from mtraining_jax.selection import collectives
        from mtraining_jax.selection.checks import check_selection

        check_selection(q, k, context, self.block_size)
        if context.documents is not None:
            documents = context.documents.min_sparse_tokens(self._least_blocks())
            context = dataclasses.replace(context, documents=documents)
        where = context.block_ids, context.num_blocks, context.axis_names
        return Selection(self.index(q, collectives.all_blocks(k, *where), context))

    def index(self, q: "Array", k: "Array", context: SelectionContext) -> "BlockMaskIndex":
        """Builds the index of the local rows of blocks; arguments as in `keep`."""
        from pallas_kernels.index import BlockMaskIndex

        return BlockMaskIndex(self.keep(q, k, context), context.num_blocks, self.block_size)

    def _least_blocks(self) -> int:
        return blocks_of(self.min_sparse_tokens, self.block_size)

    def rule_in_words(self) -> str:
        """Describes the rule, for `describe`."""
        least = (
            f", minimum block mass {100 * self.min_block_mass:g} %" if self.min_block_mass else ""
        )
        start = (
            f", dense prefix of {self.dense_prefix_tokens:,} tokens"
            if self.dense_prefix_tokens
            else ""
        )
        end = (
            f", dense suffix of {self.dense_suffix_tokens:,} tokens"
            if self.dense_suffix_tokens
            else ""
        )
        drawn = (
            f", {100 * self.random_block_prob:g} % of others at random"
            if self.random_block_prob
            else ""
        )
        return f"{100 * self.tau:g} % of attention mass per row of blocks{least}{start}{end}{drawn}"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        chosen = density_of_lists(tokens, self.tau)
        drawn = self.random_block_prob * (1 - chosen)
        return chosen + drawn, "assumed by length, as measured with SmolLM2-135M"

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        # One bit per block; ranks share the rows.
        return num_blocks * -(-num_blocks // 32), 0
