"""Key blocks by the exact attention of probe queries in each query block."""

import dataclasses

from jax import Array

from mtraining_jax.patterns.options.rows import SampledRowsOptions
from mtraining_jax.patterns.row_pattern import Keys, RowPattern
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules.row_rule import kept_blocks
from mtraining_jax.selection.scores import probe_rows, row_columns
from mtraining_jax.selection.spans import sparse_spans
from mtraining_jax.utils.fields import options
from pallas_kernels import backends
from pallas_kernels.coded import CodedKeys, CodedScores, encode_keys
from pallas_kernels.index import BlockMaskIndex


@options
class SampledRows(RowPattern, SampledRowsOptions):
    """Key blocks by the mean softmax mass of probe queries in each block, over all keys.

    The r probe queries of a block of g are at offsets (i+1) g / r - 1, rounded down: evenly spaced,
    including the last query. Costs r / (2 g) of a dense forward pass. Keys that only other queries
    attend to are missed. If padding follows within a block, g is its number of real queries, so
    that the last queries of a prompt, which look for its answer, are included.

    Masses are exact where XLA or Triton compute them; the Hopper kernel estimates them from keys in
    8 bits and a part of the exponentials (`pallas_kernels.coded`).

    A block list spends a whole block on a single important key. With `columns`, the distant keys
    with the most mass from 128 probe queries over the whole sequence are visible to all later
    queries, and block lists are selected by the remaining mass. With packed documents, each
    document has columns of its own.
    """

    def keys(self, q: Array, k: Array, context: SelectionContext) -> Keys:
        kernels = backends.coded_score_kernels(context.backend, q, self.block_size)
        return k if kernels is None or self.columns else encode_keys(k)

    def scores(self, q: Array, k: Keys, context: SelectionContext) -> Array:
        count = self.probe_queries_per_block
        if isinstance(k, CodedKeys):
            return probe_rows.coded_masses(q, k, context, count, self._kernels(q, context))
        return probe_rows.block_masses(q, k, context, count)

    def bits(self, q: Array, k: Keys, context: SelectionContext) -> Array:
        count = self.probe_queries_per_block
        if isinstance(k, CodedKeys):
            kernels = self._kernels(q, context)
            if kernels.keeps(count, context.num_blocks):
                return probe_rows.coded_bits(q, k, context, count, self.rule(context), kernels)
        return super().bits(q, k, context)

    def rows_at_once(self, q: Array, k: Keys, context: SelectionContext) -> int:
        if not isinstance(k, CodedKeys):
            return super().rows_at_once(q, k, context)
        sizes = q.shape[0], q.shape[2], self.probe_queries_per_block
        blocks = context.block_ids.shape[0], context.num_blocks
        return self._kernels(q, context).rows_at_once(*sizes, *blocks)

    def _kernels(self, q: Array, context: SelectionContext) -> CodedScores:
        kernels = backends.coded_score_kernels(context.backend, q, self.block_size)
        assert kernels is not None
        return kernels

    def index(self, q: Array, k: Keys, context: SelectionContext) -> BlockMaskIndex:
        if not self.columns or isinstance(k, CodedKeys):
            return super().index(q, k, context)
        rule, rows, num_blocks = self.rule(context), context.block_ids, context.num_blocks
        probes = probe_rows.probe_rows(q, context, self.probe_queries_per_block)
        documents = context.documents
        spans = sparse_spans(context, self.most_documents(num_blocks), self.block_size)
        tokens = row_columns.heaviest_columns(q, k, context, spans, self.columns, rule)
        masses = row_columns.masses_without(*probes, k, tokens, spans, context, like=q)
        of_blocks, of_columns = masses
        bits = kept_blocks(of_blocks, rows, rule, documents, of_columns)
        index = BlockMaskIndex(bits, num_blocks, self.block_size)
        index = index.with_columns(tokens.reshape(*tokens.shape[:2], -1), rows)
        if not documents.packed:
            return index
        # The capacity covers as many documents as may be sparse; kernels gather all of it.
        index = dataclasses.replace(index, max_columns=self.document_columns(num_blocks))
        return index.columns_from(documents.of(rows).first[:, None])
