"""Key blocks by the exact attention of probe queries in each query block."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.base import most_documents
from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt, check_at_most

if TYPE_CHECKING:
    from jax import Array

    from pallas_kernels.index import BlockMaskIndex


@dataclasses.dataclass(frozen=True)
class SampledRows(RowPattern):
    """Key blocks by the exact mean softmax mass of probe queries in each block, over all keys.

    The r probe queries of a block of g are at offsets (i+1) g / r - 1, rounded down: evenly spaced,
    including the last query. Costs r / (2 g) of a dense forward pass. Keys that only other queries
    attend to are missed. If padding follows within a block, g is its number of real queries, so
    that the last queries of a prompt, which look for its answer, are included.

    A block list spends a whole block on a single important key. With `columns`, the distant keys
    with the most mass from 128 probe queries over the whole sequence are visible to all later
    queries, and block lists are selected by the remaining mass.

    Attributes:
        probe_queries_per_block: Number of probe queries per query block (r); at most block_size.
        columns: Maximum number of key columns per head, in addition to the block lists; 0
            disables. Multiples of 128 are most efficient.
    """

    probe_queries_per_block: PositiveInt = 16
    columns: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "probe_queries_per_block", "block_size")

    def scores(self, q: "Array", k: "Array", context: SelectionContext) -> "Array":
        return exact_masses(q, k, context, self.block_size, self.probe_queries_per_block)

    def index(self, q: "Array", k: "Array", context: SelectionContext) -> "BlockMaskIndex":
        if not self.columns:
            return super().index(q, k, context)
        if context.documents is not None:
            return self._index_of_documents(q, k, context)
        from mtraining_jax.selection.rules.row_rule import kept_blocks
        from mtraining_jax.selection.scores import row_columns
        from pallas_kernels.index import BlockMaskIndex

        rule = self.rule(context)
        tokens = row_columns.heaviest_columns(q, k, context, self.block_size, self.columns, rule)
        rows, places = samples(q, context, self.block_size, self.probe_queries_per_block)
        scores, beside = row_columns.masses_without(
            rows, k, places, tokens, context, self.block_size, like=q
        )
        bits = kept_blocks(scores, context.block_ids, rule, beside=beside)
        index = BlockMaskIndex(bits, context.num_blocks, self.block_size)
        return index.with_columns(tokens, context.block_ids)

    def _index_of_documents(
        self, q: "Array", k: "Array", context: SelectionContext
    ) -> "BlockMaskIndex":
        """Builds the index with up to `columns` columns for each non-dense document.

        They are found by its own queries and seen by its own rows. The capacity covers as many
        documents as may be sparse; kernels gather all of it.
        """
        from mtraining_jax.selection.rules.row_rule import kept_blocks
        from mtraining_jax.selection.scores import document_columns
        from mtraining_jax.selection.spans import PackedSpans
        from pallas_kernels.index import BlockMaskIndex

        rule, size, documents = self.rule(context), self.block_size, context.documents
        assert documents is not None
        rows, num_blocks = context.block_ids, context.num_blocks
        slots = PackedSpans.of(documents, most_documents(num_blocks, self._least_blocks()))
        tokens = document_columns.heaviest_columns(q, k, context, slots, size, self.columns, rule)
        queries, places = samples(q, context, size, self.probe_queries_per_block)
        scores, beside = document_columns.masses_without(
            queries, k, places, tokens, slots, context, size, like=q
        )
        bits = kept_blocks(scores, rows, rule, documents, beside)
        index = BlockMaskIndex(bits, num_blocks, size)
        index = index.with_columns(tokens.reshape(*tokens.shape[:2], -1), rows)
        index = dataclasses.replace(index, max_columns=self._document_columns(num_blocks))
        return index.columns_from(documents.of(rows).first[:, None])

    def scoring_share(self) -> float:
        # r / (2 g)
        return self.probe_queries_per_block / (2 * self.block_size)

    def softmax_share(self) -> float:
        return self.probe_queries_per_block / self.block_size

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        numbers, columns = super().capacities(num_blocks, documents)
        if self.columns:
            # One bit per token, and with documents a number per row.
            numbers += num_blocks * (-(-self.block_size // 32) + documents)
            columns = min(self.columns, num_blocks * self.block_size)
            columns = self._document_columns(num_blocks) if documents else columns
        return numbers, columns

    def _document_columns(self, num_blocks: int) -> int:
        slots = most_documents(num_blocks, self._least_blocks())
        return min(slots * self.columns, num_blocks * self.block_size)

    def describe(self) -> str:
        beside = f", up to {self.columns} columns per head" if self.columns else ""
        return (
            f"sampled rows: {self.probe_queries_per_block} probe queries per block, "
            f"{self.rule_in_words()}{beside}"
        )


def exact_masses(
    q: "Array", k: "Array", context: SelectionContext, block_size: int, sampled: int
) -> "Array":
    """Computes the mean softmax mass that probe queries of each block give to key blocks.

    Args:
        q, k, context: as in `RowPattern.scores`.
        block_size: tokens per block (g).
        sampled: r, number of probe queries per block, evenly spaced, including the last one. In a
            block that ends with padding only real queries are used; with fewer than r, some count
            several times.

    Returns:
        fp32 [B, Hq, n/g, NB].
    """
    from mtraining_jax.selection.scores import row_scores

    rows, places = samples(q, context, block_size, sampled)
    return row_scores.block_masses(
        rows,
        row_scores.by_blocks(k, block_size),
        places,
        context.first_blocks(context.block_ids),
        scale=context.scale_for(q.shape[-1]),
        like=q,
        backend=context.backend,
    )


def samples(
    q: "Array", context: SelectionContext, block_size: int, sampled: int
) -> "tuple[Array, Array]":
    """Gathers the probe queries of each block: [B, Hq, n/g, r, D]; arguments as in `exact_masses`.

    Also returns int32 [B or 1, n/g, r], their global positions; -1 for queries without keys.
    """
    import jax.numpy as jnp

    from mtraining_jax.selection.scores.row_scores import by_blocks

    numbers = jnp.arange(1, sampled + 1, dtype=jnp.int32)
    first = context.block_ids[:, None] * block_size
    real, ends = block_size, context.ends(context.block_ids, block_size)
    if ends is not None:
        real = jnp.clip(ends[..., None] - first, 0, block_size)
    # [B or 1, n/g, r]; -1 if a block has no real query, or fewer than r.
    within = jnp.broadcast_to(
        numbers * real // sampled - 1, (1 if ends is None else len(ends), len(first), sampled)
    )
    places = jnp.where(within < 0, -1, first + within)
    of_blocks = by_blocks(q, block_size)
    rows = jnp.take_along_axis(of_blocks, within[:, None, :, :, None], axis=3, mode="clip")
    return rows, places
