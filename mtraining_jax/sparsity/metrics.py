"""What a sparse index costs and what it keeps."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.row_attention import Keys, attend_rows
from pallas_kernels.index import Index, Rows


def causal_pairs(seq_len: int) -> int:
    """Number of pairs of dense causal attention."""
    return seq_len * (seq_len + 1) // 2


def pairs_to_share(
    seq_len: int, block_size: int, documents: DocumentBlocks | None = None
) -> float | Array:
    """The causal pairs that densities are shares of: those of the sequence, or of its documents.

    Args:
        seq_len: S.
        block_size: g.
        documents: of each sequence, or None if each is one.

    Returns:
        A number, or float [B, 1] with documents: pairs of a query and a key of one document,
        padding within its blocks included; at least 1.
    """
    if documents is None:
        return float(causal_pairs(seq_len))
    return jnp.maximum(documents.causal_pairs(block_size), 1)


def density(
    index: Index, seq_len: int, rows: Rows | None = None, documents: DocumentBlocks | None = None
) -> Array:
    """Share of the causal pairs that a causal index computes.

    Args:
        index: of any kind.
        seq_len: S, a multiple of the index's block size.
        rows: as in `Index.computed_pairs`.
        documents: of each sequence, of whose causal pairs it is then the share; None if each
            sequence is one.

    Returns:
        Float [B, Hq] in [0, 1], or [1, 1] where all heads compute the same pairs.
    """
    pairs = pairs_to_share(seq_len, index.block_size, documents)
    return index.computed_pairs(seq_len, rows) / pairs


def attention_flops(
    pairs: float | Array, head_dim: int
) -> tuple[float | Array, float | Array]:
    """FLOP of the two (forward) and five (backward) matrix products over some pairs of one head.

    Args:
        pairs: number or array of pairs: computed, executed or causal.
        head_dim: D.

    Returns:
        (forward, backward) = (4 D pairs, 10 D pairs).
    """
    return 4.0 * head_dim * pairs, 10.0 * head_dim * pairs


def attention_recall(
    q_BnHD: Array,
    k_BnHkD: Array,
    index: Index,
    positions: Array,
    *,
    block_ids: Array,
    axis_names: Sequence[str] = (),
    scale: float | None = None,
    documents: DocumentBlocks | None = None,
) -> Array:
    """Softmax mass, of some query rows, that lies on pairs the index computes.

    To be called like `choose_index`, with the same shards. No gradient flows through it.

    Args:
        q_BnHD: [B, n, Hq, D], local queries.
        k_BnHkD: [B, n, Hk, D], local keys.
        index: causal, of any kind; one `by_rows` holds the rows of the local blocks (all rows, in
            order, on one device).
        positions: int32 [R], global positions of the rows, the same on every rank.
        block_ids: int32 [n/g], global number of each local block.
        axis_names: mesh axes the sequence is sharded over.
        scale: of the logits; 1/sqrt(D) when None.
        documents: of each sequence, or None if each is one. Exact attention is then that within
            the row's document, and rows of padding do not count.

    Returns:
        fp32 [B, Hq] in [0, 1], mean over the rows, replicated. 1 is exact dense attention, and
        what a sequence has of which no row counts.

    Raises:
        ValueError: if the index is not causal.
    """
    q, k = lax.stop_gradient((q_BnHD, k_BnHkD))
    positions = jnp.asarray(positions, jnp.int32)
    keys = Keys.of(
        k, None, index, block_ids=block_ids, axis_names=axis_names, scale=scale,
        documents=documents,
    )
    rows = attend_rows(keys.rows(q, positions), positions, keys)
    counts = keys.counts(positions)
    count = counts.sum(-1)
    mean = jnp.where(counts, rows.share(rows.kept), 0).sum(-1) / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, 1)
