"""Density and recall of a sparse index."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.documents import Documents
from mtraining_jax.selection.row_attention import Keys, attend_rows
from pallas_kernels.index import Index, Rows


def causal_pairs(seq_len: int) -> int:
    """Returns the number of pairs of dense causal attention."""
    return seq_len * (seq_len + 1) // 2


def pairs_to_share(
    seq_len: int, block_size: int, documents: Documents | None = None
) -> float | Array:
    """Returns the causal pairs in the sequence, or float [B, 1] in its documents: at least 1.

    Pairs within documents include padding within their blocks.
    """
    if documents is None or not documents.packed:
        return float(causal_pairs(seq_len))
    return jnp.maximum(documents.causal_pairs(), 1)


def density(
    index: Index, seq_len: int, rows: Rows | None = None, documents: Documents | None = None
) -> Array:
    """Returns the density of a causal index: computed pairs over causal pairs.

    Args:
        index: any causal index.
        seq_len: S, a multiple of the index's block size.
        rows: as in `Index.computed_pairs`.
        documents: if given, density is relative to causal pairs within documents.

    Returns:
        float [B, Hq] in [0, 1], or [1, 1] if all heads compute the same pairs.
    """
    pairs = pairs_to_share(seq_len, index.block_size, documents)
    return index.computed_pairs(seq_len, rows) / pairs


def attention_recall(
    q_BnHD: Array,
    k_BnHkD: Array,
    index: Index,
    positions: Array,
    *,
    block_ids: Array,
    axis_names: Sequence[str] = (),
    scale: float | None = None,
    documents: Documents | None = None,
) -> Array:
    """Returns the softmax mass of the given query rows on pairs that the index computes.

    Takes the local shards of a sequence. No gradient flows through it.

    Args:
        q_BnHD: local queries.
        k_BnHkD: local keys.
        index: any causal index; a `sharded_by_query` one has the local rows of blocks (on one
            device, all rows in order).
        positions: int32 [R], global positions of the rows, replicated.
        block_ids, axis_names, scale, documents: as in `SelectionContext`. Exact attention stays
            within the row's document, and padding rows are ignored.

    Returns:
        fp32 [B, Hq] in [0, 1], mean over the rows, replicated. 1 for dense attention, and for
        sequences without valid rows.

    Raises:
        ValueError: if the index is not causal.
    """
    q, k = lax.stop_gradient((q_BnHD, k_BnHkD))
    positions = jnp.asarray(positions, jnp.int32)
    keys = Keys.of(
        k, None, index, block_ids=block_ids, axis_names=axis_names, scale=scale, documents=documents
    )
    rows = attend_rows(keys.rows(q, positions), positions, keys)
    counts = keys.counts(positions)
    count = counts.sum(-1)
    mean = jnp.where(counts, rows.share(rows.kept), 0).sum(-1) / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, 1)
