"""FlexPrefill's selection for each document of a pack, over all ranks.

The steps are those of `flex_steps`, applied per document instead of per sequence: its last queries,
its key blocks, one head type and one cut each. Selected columns and diagonals are stored by blocks
of the pack, diagonal d of a document at its d-th block.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity import document_scores, estimate, exchange, flex_steps
from mtraining_jax.sparsity.document_scores import by_distance
from mtraining_jax.sparsity.last_queries import on_diagonals
from mtraining_jax.sparsity.pattern import Shards
from mtraining_jax.sparsity.spans import PackedSpans


def last_attention(
    q_last: Array, k: Array, slots: PackedSpans, shards: Shards, gamma: float
) -> flex_steps.LastAttention:
    """Computes masses of columns and diagonals of each document from its last queries.

    Args:
        q_last: [B, E, Hq, g, D], from `document_scores.last_queries`.
        k: [B, n, Hk, D], local keys.
        slots: the documents, of at least g tokens each.
        shards: the shards of the sequence.
        gamma: fraction of the mass up to which tokens are counted.

    Returns:
        The result of `flex_steps.counted`.
    """
    batch, _, heads, size, _ = q_last.shape
    passes = flex_steps.passes_of(size)
    count = size // passes
    # Each pass has the queries before an earlier end of each document.
    tokens = [jnp.maximum(slots.tokens - i * count, 0) for i in range(passes)]
    parts = []
    for number, ends in enumerate(tokens):
        own = q_last[:, :, :, size - (number + 1) * count : size - number * count]
        parts += document_scores.softmax_scores(
            own, k, dataclasses.replace(slots, tokens=ends), shards
        )
    where = shards.block_ids, shards.num_blocks, shards.axis_names
    whole, _ = exchange.to_heads(parts, *where)
    entries = exchange.entries_of(batch, heads, shards.axis_names)
    spans = slots.rows(entries)
    masses = 0
    for number, ends in enumerate(tokens):
        columns, own, tails = whole[3 * number : 3 * number + 3]
        of_pass = dataclasses.replace(spans, tokens=ends[entries])
        scores = by_distance(columns, estimate.join_diagonals(own, tails), of_pass)
        masses += scores // passes
    return flex_steps.counted(masses, gamma, spans, (batch, heads), shards.axis_names)


def distances(
    q_last: Array, k: Array, slots: PackedSpans, shards: Shards, block_masses: Array
) -> Array:
    """Variant of `flex_steps.distances` for each document: fp32 [B, Hq, E].

    Args:
        q_last, k, slots, shards: as in `last_attention`.
        block_masses: int32 [B, Hq, NB], masses of key blocks by their documents' last queries.
    """
    size, dim = q_last.shape[-2:]
    means = estimate.ordered_sum(q_last.astype(jnp.float32)) / jnp.float32(size)  # [B, E, Hq, D]
    held = jnp.minimum(slots.of_block, slots.slots - 1)
    own = jax.vmap(lambda means, slot: means[slot])(means, held)  # [B, NB, Hq, D]
    keys = flex_steps.key_means(k, shards).swapaxes(1, 2)  # [B, NB, Hk, D]
    # Each block is a separate product, with the last queries of its document only.
    logits = (
        lax.dot_general(
            own.reshape(*keys.shape[:3], -1, dim),
            keys,
            (((4,), (3,)), ((0, 1, 2), (0, 1, 2))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        .reshape(*own.shape[:3])
        .swapaxes(1, 2)
    )
    rows = logits.reshape(-1, logits.shape[-1])
    spans = slots.repeat(logits.shape[1])
    lowest = jnp.full((rows.shape[0], slots.slots + 1), -jnp.inf)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    peaks = spans.spread(lowest.at[row, spans.of_block].max(rows)[:, :-1])
    terms = estimate.relative_exp(rows, peaks, shards.scale_for(dim))
    found = flex_steps.distance(terms, block_masses.reshape(rows.shape), spans)
    return found.reshape(*logits.shape[:2], -1)


def kept_blocks(
    found: flex_steps.LastAttention, counts: Array, slots: PackedSpans, shards: Shards
) -> Array:
    """Returns the blocks on each document's columns and diagonals of largest mass.

    Args:
        found: from `last_attention`.
        counts: int32 [2, B, Hq, E], number of column blocks and of diagonals; at least 1.
        slots: the documents.
        shards: the shards of the sequence.

    Returns:
        bool [B, Hq, n, NB] of the local rows; undefined for rows without a slot and for blocks of
        other documents than the row's.
    """
    _, batch, heads, num_blocks = found.masses.shape
    spans = slots.repeat(heads)
    flat = found.masses.reshape(2, -1, num_blocks), counts.reshape(2, batch * heads, -1)
    kept = flex_steps.largest(*flat, spans).reshape(found.masses.shape)
    columns, diagonals = kept
    first = shards.first_blocks(shards.block_ids)
    return columns[:, :, None] | on_diagonals(diagonals, first, shards.block_ids)
