"""FlexPrefill: per head, blocks on columns and diagonals, or lists by pooled queries."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.cost_model.density import density_of_lists
from mtraining_jax.patterns.base import Pattern, blocks_of, most_documents
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.limits import (
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    UnitFraction,
    check_limits,
)

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class FlexPrefill(Pattern):
    """Per head, either whole blocks of columns and diagonals, or lists by pooled attention.

    P is the attention of the last `block_size` queries. Among the masses of columns, and of
    diagonals, n is the number of largest tokens that stay within `gamma`, plus one. The n // g + 1
    key blocks of largest mass and the same number of block diagonals are kept, between
    `min_budget` and `max_budget` tokens each, always including the first block and the main
    diagonal.

    A head is *query-aware* if the Jensen-Shannon distance (the root of the divergence, natural
    logarithm) between softmax(mean of the last queries . means of key blocks) and P's mass of key
    blocks is below `js_threshold`. It keeps `min_budget` of columns and diagonals, and the largest
    entries of all rows of softmax(means of query blocks . means of key blocks) together, while
    their sum stays within `gamma` of the total; the entry that crosses it is dropped. Its rows
    therefore have different lengths.

    Sequences of at most max(2 `block_size`, `min_budget`) tokens are dense. Ties go to the earlier
    block, the nearer diagonal or the earlier row.

    In packed sequences each non-dense document is treated as a sequence, with its own probe
    queries, head types and cuts.

    Causality: the last queries of the sequence determine the selection for all others; a
    query-aware head has one cut for the whole sequence.

    Source: FlexPrefill (arXiv 2502.20766), following its reference implementation. Differences: the
    reference pools and scales in 16 bits, here means and masses are fp32 and multiples of 2^-30; a
    mass of 0 adds nothing to the distance, while the reference gets NaN and therefore a head that
    is not query-aware; n is divided by `block_size`, in the reference by 128.

    Attributes:
        gamma: Attention mass to keep, as a fraction; rounded to 2^-15 for query-aware heads.
        js_threshold: Jensen-Shannon distance below which a head is query-aware (tau of the
            reference implementation); 0 disables query-aware heads.
        min_budget: Minimum number of tokens kept as columns, and as diagonals.
        max_budget: Maximum number of tokens kept as columns, and as diagonals; none for no limit.
        min_sparse_tokens: Documents shorter than this, including padding, use dense attention. Has no
            effect without documents.
        block_size: Block size in tokens (g).
    """

    by_rows = True
    reads_documents = True

    gamma: PositiveFraction = 0.9
    js_threshold: UnitFraction = 0.1
    min_budget: PositiveInt = 512
    max_budget: PositiveInt | None = None
    min_sparse_tokens: NonNegativeInt = 8192
    block_size: PositiveInt = 128

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_budget is not None and self.max_budget < self.min_budget:
            raise ValueError(
                f"max_budget={self.max_budget} must be at least min_budget={self.min_budget}"
            )

    def more_pairs(self) -> str:
        return f"increase sparsity.gamma = {self.gamma}"

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        """Selects lists, and reports the fraction of query-aware heads as `query_aware`.

        With documents it is a fraction of heads and non-dense documents.
        """
        import jax.numpy as jnp

        from mtraining_jax.selection.checks import check_selection
        from mtraining_jax.selection.rules.flex_cut import Rows
        from mtraining_jax.selection.scores import flex_steps
        from mtraining_jax.selection.spans import PackedSpans
        from pallas_kernels.index import BlockMaskIndex

        check_selection(q, k, context, self.block_size)
        rows, num_blocks, slots = context.block_ids, context.num_blocks, None
        documents = context.documents
        if documents is not None:
            least = max(self._blocks(self.min_sparse_tokens), self._dense_blocks() + 1)
            documents = documents.min_sparse_tokens(least)
            context = dataclasses.replace(context, documents=documents)
            slots = PackedSpans.of(documents, most_documents(num_blocks, least))
        elif num_blocks <= self._dense_blocks():
            shape = q.shape[0], q.shape[2]
            listed = jnp.ones((*shape, len(rows), num_blocks), bool)
            index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
            return Selection(index, {"query_aware": jnp.zeros(shape, jnp.float32)})
        found = flex_steps.last_attention(q, k, context, self.block_size, self.gamma, slots)
        aware = jnp.zeros(found.tokens.shape[1:], bool)
        if self.js_threshold:
            distance = flex_steps.distances(q, k, context, found, slots)
            aware = distance < self.js_threshold
        most = num_blocks if slots is None else slots.length[:, None]
        counts = self._counts(found.tokens, aware, most)
        listed = flex_steps.kept_blocks(found, counts, context, slots)
        if self.js_threshold:
            pooled = flex_steps.pooled_lists(q, k, context, self.gamma, slots)
            of_rows = aware[..., None] if slots is None else Rows(context, slots).spread(aware)
            listed = listed | (pooled & of_rows[..., None])
        if slots is None or documents is None:
            index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
            return Selection(index, {"query_aware": aware.astype(jnp.float32)})
        listed = listed | documents.of(rows).dense[:, None, :, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
        index = index.within_documents(*documents.spans(), rows)
        aware = (aware & (slots.tokens > 0)[:, None]).sum(-1, dtype=jnp.int32)
        share = aware.astype(jnp.float32) / jnp.maximum(slots.count(), 1)[:, None]
        return Selection(index, {"query_aware": share})

    def _counts(self, tokens: "Array", aware: "Array", num_blocks: "int | Array") -> "Array":
        """Returns the number of column blocks and of diagonals to keep per sequence."""
        import jax.numpy as jnp

        least, most = self._blocks(self.min_budget), num_blocks
        if self.max_budget is not None:
            most = jnp.minimum(self._blocks(self.max_budget), num_blocks)
        counts = jnp.clip(tokens // self.block_size + 1, least, most)
        return jnp.where(aware, least, counts)

    def _dense_blocks(self) -> int:
        """Sequences of at most this many blocks are dense."""
        return max(2, self._blocks(self.min_budget))

    def _blocks(self, tokens: int) -> int:
        return blocks_of(tokens, self.block_size)

    def describe(self) -> str:
        return f"FlexPrefill, gamma {self.gamma:g}, query-aware below {self.js_threshold:g}"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        # No published mean density of arXiv 2502.20766's settings is known.
        return density_of_lists(tokens), "assumed: as for patterns with lists per row of blocks"

    def scoring_share(self) -> float:
        # 1/g^2: one product per pair of blocks; the last queries are few.
        return 1 / self.block_size**2 if self.js_threshold else 0.0

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        # One bit per block; ranks share the rows.
        return num_blocks * -(-num_blocks // 32), 0
