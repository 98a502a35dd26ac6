"""FlexPrefill: per head, blocks on columns and diagonals, or lists by pooled queries."""

from mtraining_jax.patterns.base import BlockPattern, BlockSize, MinSparseTokens
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveFraction, PositiveInt, UnitFraction


@options
class FlexPrefill(BlockPattern):
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
    """

    density_option = "gamma"

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

    def select(self, q, k, context):
        """Selects lists, and reports the fraction of query-aware heads as `query_aware`.

        With documents it is a fraction of heads and non-dense documents.
        """
        import jax.numpy as jnp

        from mtraining_jax.selection.context import Selection, with_dense_documents
        from mtraining_jax.selection.scores import flex_steps
        from mtraining_jax.selection.segments import sparse_segments
        from pallas_kernels.index import BlockMaskIndex

        rows, num_blocks, size = context.block_ids, context.num_blocks, self.block_size
        budget = self.blocks(self.min_budget)
        dense_blocks = max(2, budget)  # sequences of at most this many are dense
        least = max(self.blocks(self.min_sparse_tokens), dense_blocks + 1)
        context = with_dense_documents(q, k, context, size, least)
        documents = context.documents
        if not documents.packed and num_blocks <= dense_blocks:
            shape = q.shape[0], q.shape[2]
            listed = jnp.ones((*shape, len(rows), num_blocks), bool)
            index = BlockMaskIndex.from_block_mask(listed, size, rows)
            return Selection(index, {"query_aware": jnp.zeros(shape, jnp.float32)})
        segments = sparse_segments(context, max(num_blocks // least, 1), size)
        last = flex_steps.last_attention(q, k, context, segments, size, self.gamma)
        local = segments.local(rows)
        aware = jnp.zeros(last.tokens.shape[1:], bool)  # [B, Hq, E]
        if self.js_threshold:
            aware = flex_steps.distances(q, k, context, last, segments) < self.js_threshold
        most = local.length
        if self.max_budget is not None:
            most = jnp.minimum(self.blocks(self.max_budget), most)
        counts = jnp.where(aware, budget, jnp.clip(last.tokens // size + 1, budget, most))
        listed = flex_steps.kept_blocks(last, counts, context, segments)
        if self.js_threshold:
            pooled = flex_steps.pooled_lists(q, k, context, self.gamma, segments)
            listed = listed | (pooled & local.spread(aware)[..., None])
        if documents.packed:
            listed = listed | documents.of(rows).shorter_than(least)[:, None, :, None]
        index = BlockMaskIndex.from_block_mask(listed, size, rows)
        if documents.packed:
            index = index.within_documents(*documents.spans(), rows)
        aware = (aware & (local.tokens > 0)).sum(-1, dtype=jnp.float32)
        return Selection(index, {"query_aware": aware / jnp.maximum(local.count(), 1)})

    def describe(self) -> str:
        return f"FlexPrefill, gamma {self.gamma:g}, query-aware below {self.js_threshold:g}"
