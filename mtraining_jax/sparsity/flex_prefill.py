"""FlexPrefill: per head, blocks on columns and diagonals, or lists by pooled queries."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity.assumed_density import density_of_lists
from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards, blocks_of, most_documents

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
        dense_below: Documents shorter than this, including padding, use dense attention. Has no
            effect without documents.
        block_size: Block size in tokens (g).

    Raises:
        ValueError: if a field is invalid; the message names it.
    """

    by_rows = True
    reads_documents = True

    gamma: limited(float, gt=0, le=1) = 0.9
    js_threshold: limited(float, ge=0, le=1) = 0.1
    min_budget: limited(int, ge=1) = 512
    max_budget: limited(int, ge=1) | None = None
    dense_below: limited(int, ge=0) = 8192
    block_size: limited(int, ge=1) = 128

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_budget is not None and self.max_budget < self.min_budget:
            raise ValueError(
                f"max_budget={self.max_budget} must be at least min_budget={self.min_budget}"
            )

    def more_pairs(self) -> str:
        return f"increase sparsity.gamma = {self.gamma}"

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Selects lists, and reports the fraction of query-aware heads as `query_aware`."""
        import jax.numpy as jnp

        from mtraining_jax.sparsity import flex_steps
        from mtraining_jax.sparsity.checks import check_choice
        from pallas_kernels.index import BlockMaskIndex

        check_choice(q, k, shards, self.block_size)
        if shards.documents is not None:
            return self._choose_for_documents(q, k, shards)
        num_blocks, size = shards.num_blocks, self.block_size
        rows, blocks = shards.block_ids[:, None], jnp.arange(num_blocks, dtype=jnp.int32)
        heads = q.shape[0], q.shape[2]
        if num_blocks <= self._dense_blocks():
            listed = jnp.ones((*heads, len(shards.block_ids), num_blocks), bool)
            aware = jnp.zeros(heads, bool)
        else:
            found = flex_steps.last_attention(q, k, shards, size, self.gamma)
            aware = jnp.zeros(heads, bool)
            if self.js_threshold:
                distance = flex_steps.distances(q, k, shards, found.masses[0])
                aware = distance < self.js_threshold
            counts = self._counts(found.tokens, aware, num_blocks)
            columns, diagonals = flex_steps.largest(found.masses, counts)
            lag = rows - blocks
            listed = columns[:, :, None] | diagonals[:, :, jnp.maximum(lag, 0)]
            if self.js_threshold:
                pooled = flex_steps.pooled_lists(q, k, shards, self.gamma)
                listed = listed | (pooled & aware[:, :, None, None])
        index = BlockMaskIndex.from_block_mask(listed, size, shards.block_ids)
        return Choice(index, {"query_aware": aware.astype(jnp.float32)})

    def _choose_for_documents(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Selects lists per document; dense documents do not count in `query_aware`."""
        import jax.numpy as jnp

        from mtraining_jax.sparsity import document_flex, document_scores, flex_steps
        from mtraining_jax.sparsity.flex_cut import Rows
        from mtraining_jax.sparsity.spans import PackedSpans
        from pallas_kernels.index import BlockMaskIndex

        least = max(self._blocks(self.dense_below), self._dense_blocks() + 1)
        documents = shards.documents.dense_below(least)
        shards = dataclasses.replace(shards, documents=documents)
        slots = PackedSpans.of(documents, most_documents(shards.num_blocks, least))
        q_last = document_scores.last_queries(q, slots, shards, self.block_size)
        found = document_flex.last_attention(q_last, k, slots, shards, self.gamma)
        aware = jnp.zeros(found.tokens.shape[1:], bool)  # [B, Hq, E]
        if self.js_threshold:
            distance = document_flex.distances(q_last, k, slots, shards, found.masses[0])
            aware = distance < self.js_threshold
        counts = self._counts(found.tokens, aware, slots.length[:, None])
        listed = document_flex.kept_blocks(found, counts, slots, shards)
        if self.js_threshold:
            pooled = flex_steps.pooled_lists(q, k, shards, self.gamma, slots)
            listed = listed | (pooled & Rows(shards, slots).spread(aware)[..., None])
        listed = listed | documents.of(shards.block_ids).dense[:, None, :, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, shards.block_ids)
        index = index.within_documents(*documents.spans(), shards.block_ids)
        aware = (aware & (slots.tokens > 0)[:, None]).sum(-1, dtype=jnp.int32)
        share = aware.astype(jnp.float32) / jnp.maximum(slots.count(), 1)[:, None]
        return Choice(index, {"query_aware": share})

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
