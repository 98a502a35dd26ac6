"""FlexPrefill: per head, blocks on columns and diagonals, or lists by pooled queries."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.options.rows import FlexPrefillOptions
from mtraining_jax.selection.checks import check_selection
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.scores import flex_steps
from mtraining_jax.selection.spans import sparse_spans
from mtraining_jax.utils.fields import options
from pallas_kernels.index import BlockMaskIndex


@options
class FlexPrefill(Pattern, FlexPrefillOptions):
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

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        """Selects lists, and reports the fraction of query-aware heads as `query_aware`.

        With documents it is a fraction of heads and non-dense documents.
        """
        check_selection(q, k, context, self.block_size)
        rows, num_blocks = context.block_ids, context.num_blocks
        if not context.documents.packed and num_blocks <= self._dense_blocks():
            shape = q.shape[0], q.shape[2]
            listed = jnp.ones((*shape, len(rows), num_blocks), bool)
            index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
            return Selection(index, {"query_aware": jnp.zeros(shape, jnp.float32)})
        least = max(self.blocks(self.min_sparse_tokens), self._dense_blocks() + 1)
        documents = context.documents.dense_below(least)
        context = dataclasses.replace(context, documents=documents)
        spans = sparse_spans(context, max(num_blocks // least, 1), self.block_size)
        last = flex_steps.last_attention(q, k, context, spans, self.block_size, self.gamma)
        local = spans.local(rows)
        aware = jnp.zeros(last.tokens.shape[1:], bool)  # [B, Hq, E]
        if self.js_threshold:
            aware = flex_steps.distances(q, k, context, last, spans) < self.js_threshold
        counts = self._counts(last.tokens, aware, local.length)
        listed = flex_steps.kept_blocks(last, counts, context, spans)
        if self.js_threshold:
            pooled = flex_steps.pooled_lists(q, k, context, self.gamma, spans)
            listed = listed | (pooled & local.spread(aware)[..., None])
        if documents.packed:
            listed = listed | documents.of(rows).dense[:, None, :, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
        if documents.packed:
            index = index.within_documents(*documents.spans(), rows)
        aware = (aware & (local.tokens > 0)).sum(-1, dtype=jnp.float32)
        return Selection(index, {"query_aware": aware / jnp.maximum(local.count(), 1)})

    def _counts(self, tokens: Array, aware: Array, num_blocks: Array) -> Array:
        """Returns the number of column blocks and of diagonals to keep in each document."""
        least, most = self.blocks(self.min_budget), num_blocks
        if self.max_budget is not None:
            most = jnp.minimum(self.blocks(self.max_budget), num_blocks)
        counts = jnp.clip(tokens // self.block_size + 1, least, most)
        return jnp.where(aware, least, counts)

    def _dense_blocks(self) -> int:
        """Sequences of at most this many blocks are dense."""
        return max(2, self.blocks(self.min_budget))
