"""Common base of patterns that select columns and diagonals with the last queries."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.options.probes import ProbeOptions
from mtraining_jax.selection.checks import check_selection
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.scores import last_queries
from mtraining_jax.selection.scores.last_queries import Probed
from mtraining_jax.selection.spans import Spans, sparse_spans


class ProbePattern(Pattern, ProbeOptions):
    """Per head, columns and diagonals by scores from the last queries of a sequence or document.

    Subclasses define which of the scores are kept, with `keys` and `nearest`.

    With documents, each one of at least `min_sparse_tokens` tokens gets the same selection as on
    its own, from its own last real queries and its own keys, except for one limit: all documents of
    a sequence share the room of 2 `max_verticals` columns in proportion to their lengths. Diagonals
    are then stored as bits and have no such limit. Shorter documents are dense.

    Attributes:
        by_logits: whether scores are sums of raw logits instead of softmax mass.
    """

    by_logits: ClassVar[bool] = False

    def keys(self, probed: Probed) -> tuple[Array, top_p.Rule]:
        """Returns selection keys, and how many of the largest to keep.

        Returns:
            Keys uint32 [2, R, NB, g], and a rule with fields that broadcast with [2, R, E].
        """
        raise NotImplementedError(f"{type(self).__name__}.keys")

    def nearest(self, slash_count: Array, spans: Spans) -> int | Array:
        """Returns how many nearest block diagonals are always kept, given int32 diagonals kept."""
        del slash_count, spans
        return 1

    def statistics(self, saved: Array) -> dict[str, Array]:
        """Reports on fp32 or int32 [B, Hq], the fraction of sequences with `Kept.saved`."""
        del saved
        return {}

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        """Selects a `VerticalSlashIndex`, or with documents a `BlockMaskIndex` with columns."""
        for name in self.arrays:
            if (shape := np.shape(getattr(self, name))) != (q.shape[2],):
                raise ValueError(
                    f"{name} has shape {shape}, but there are {q.shape[2]} query heads"
                )
        check_selection(q, k, context, self.block_size)
        num_blocks, sizes = context.num_blocks, (q.shape[0], q.shape[2])
        documents = context.documents.dense_below(self.blocks(self.min_sparse_tokens))
        context = dataclasses.replace(context, documents=documents)
        spans = sparse_spans(context, self.most_documents(num_blocks), self.block_size)
        probed = last_queries.probe(q, k, context, spans, self.num_probe_queries, self.by_logits)
        keys, rule = self.keys(probed)
        kept = last_queries.each_kind(keys, rule, self.nearest, probed.spans)
        if not documents.packed:
            capacities = self.list_capacities(num_blocks)
            index, saved = last_queries.lists(kept, capacities, sizes, context)
            return Selection(index, self.statistics(saved))
        room = self.document_columns(num_blocks)
        index, saved = last_queries.marks(kept, probed.spans, room, sizes, context)
        return Selection(index, self.statistics(saved / jnp.maximum(spans.count(), 1)[:, None]))

    def most_columns(self, spans: Spans) -> Array:
        """Returns the column limit of each document: int32 [R, E], or [1, 1] for single ones."""
        room, num_blocks = 2 * self.max_verticals, spans.num_blocks
        # In two parts, since the product of room and blocks may overflow.
        share = room // num_blocks * spans.length + room % num_blocks * spans.length // num_blocks
        return jnp.clip(share, self.least_columns(), self.max_verticals)
