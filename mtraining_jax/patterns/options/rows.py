"""Options of the patterns that select key blocks for each row of blocks."""

import dataclasses
from typing import Annotated

from mtraining_jax.patterns.options.base import (
    BlockSize,
    MassFraction,
    MinSparseTokens,
    PatternOptions,
)
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import (
    Ge,
    Lt,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    UnitFraction,
    check_at_most,
)

# Tokens at the end of a prompt that attend to all of it: room for a question. One or two blocks.
PROMPT_END = 128


class BlockOptions(PatternOptions):
    """Options of patterns with an index of rows of blocks: each rank holds its own rows."""

    supports_documents = True

    def row_sharded(self, documents: bool) -> bool:
        return True


@options
class RowOptions(BlockOptions):
    """Options of the patterns that select key blocks by mass for each row of blocks."""

    budget_field = "tau"

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

    def for_prompts(self) -> "RowOptions":
        if self.dense_suffix_tokens is not None:
            return self
        return dataclasses.replace(self, dense_suffix_tokens=PROMPT_END)

    def mass_fraction(self) -> MassFraction:
        return MassFraction("tau", 15)

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


@options
class SampledRowsOptions(RowOptions):
    """Key blocks by the exact attention of probe queries in each query block."""

    pattern_class = "mtraining_jax.patterns.sampled_rows:SampledRows"

    probe_queries_per_block: PositiveInt = 16
    """Number of probe queries per query block (r); at most block_size."""
    columns: NonNegativeInt = 0
    """Maximum number of key columns per head, in addition to the block lists; 0 disables. Multiples
    of 128 are most efficient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "probe_queries_per_block", "block_size")

    def document_columns(self, num_blocks: int) -> int:
        """Returns the room for the columns of all documents of a sequence of NB blocks."""
        return min(self.most_documents(num_blocks) * self.columns, num_blocks * self.block_size)

    def describe(self) -> str:
        columns = f", up to {self.columns} columns per head" if self.columns else ""
        return (
            f"sampled rows: {self.probe_queries_per_block} probe queries per block, "
            f"{self.rule_in_words()}{columns}"
        )


@options
class XAttentionOptions(RowOptions):
    """Key blocks by sums along antidiagonals."""

    pattern_class = "mtraining_jax.patterns.xattention:XAttention"

    stride: PositiveInt = 8
    """Antidiagonal stride in tokens (s); must divide block_size. Useful values are 4, 8 and 16:
    larger is cheaper and coarser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size % self.stride:
            raise ValueError(f"stride={self.stride} must divide block_size={self.block_size}")

    def describe(self) -> str:
        return f"XAttention, stride {self.stride}, {self.rule_in_words()}"


@options
class FlexPrefillOptions(BlockOptions):
    """Per head, blocks on columns and diagonals, or lists by pooled queries."""

    pattern_class = "mtraining_jax.patterns.flex_prefill:FlexPrefill"
    budget_field = "gamma"

    gamma: PositiveFraction = 0.9
    """Attention mass to keep, as a fraction; rounded to 2^-15 for query-aware heads."""
    js_threshold: UnitFraction = 0.1
    """Jensen-Shannon distance below which a head is query-aware (tau of the reference
    implementation); 0 disables query-aware heads."""
    min_budget: PositiveInt = 512
    """Minimum number of tokens kept as columns, and as diagonals."""
    max_budget: PositiveInt | None = None
    """Maximum number of tokens kept as columns, and as diagonals; none for no limit."""
    min_sparse_tokens: MinSparseTokens = 8192
    block_size: BlockSize = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_budget is not None and self.max_budget < self.min_budget:
            raise ValueError(
                f"max_budget={self.max_budget} must be at least min_budget={self.min_budget}"
            )

    def describe(self) -> str:
        return f"FlexPrefill, gamma {self.gamma:g}, query-aware below {self.js_threshold:g}"


@options
class MoBAOptions(BlockOptions):
    """Per query, key chunks by their means."""

    pattern_class = "mtraining_jax.patterns.moba:MoBA"
    budget_field = "top_k"

    chunk_size: PositiveInt = 4096
    """Chunk size in tokens; a multiple of block_size."""
    top_k: PositiveInt = 12
    """Maximum number of chunks per query, including its own."""
    block_size: PositiveInt = 128
    """Block size of the kernels in tokens (g)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size={self.chunk_size} must be a multiple of block_size={self.block_size}"
            )

    @property
    def min_sparse_tokens(self) -> int:
        """Documents shorter than this, including padding, are dense in any case."""
        return self.top_k * self.chunk_size + 1

    def describe(self) -> str:
        return f"MoBA, {self.top_k} chunks of {self.chunk_size} tokens per query"


@options
class BlockTopKOptions(BlockOptions):
    """A fixed number of key blocks per query block, by products of means."""

    pattern_class = "mtraining_jax.patterns.block_topk:BlockTopK"
    budget_field = "top_blocks"

    top_blocks: PositiveInt = 32
    """Maximum number of key blocks per query block, including its own."""
    block_size: BlockSize = 128

    @property
    def min_sparse_tokens(self) -> int:
        """Documents shorter than this, including padding, are dense in any case."""
        return self.top_blocks * self.block_size + 1

    def describe(self) -> str:
        return f"block top-k, {self.top_blocks} key blocks per query block, scored by block means"
