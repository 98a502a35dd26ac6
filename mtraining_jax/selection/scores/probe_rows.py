"""Attention of a few queries of each query block."""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules.row_rule import RowRule
from mtraining_jax.selection.scores import row_scores
from pallas_kernels import backends
from pallas_kernels.fp8_scores import Fp8Keys, Fp8Scores, encode_keys
from pallas_kernels.index import bits as sets

Keys = Array | Fp8Keys


def coded(q: Array, k: Array, context: SelectionContext) -> Keys:
    """Returns the local keys in 8 bits where a kernel scores these."""
    return k if _kernels(q, context) is None else encode_keys(k)


def block_masses(q: Array, k: Keys, context: SelectionContext, count: int) -> Array:
    """Computes the mean softmax mass that probe queries of each block give to key blocks.

    With 8-bit keys an estimate, undefined for blocks that a row does not see.

    Args:
        q, k, context: as in `RowPattern.scores`.
        count: r, number of probe queries per block.

    Returns:
        fp32 [B, Hq, n/g, NB].
    """
    rows, positions = probe_rows(q, context, count)
    first, scale = context.first_blocks(context.block_ids), context.scale_for(q.shape[-1])
    if isinstance(k, Fp8Keys):
        return _coded_kernels(q, context).block_masses(rows, k, positions, first, scale=scale)
    return row_scores.block_masses(
        by_heads(rows),
        row_scores.by_blocks(k, k.shape[1] // context.num_blocks),
        positions,
        first,
        scale=scale,
        like=q,
        backend=context.backend,
    )


def fp8_bits(
    q: Array, k: Keys, context: SelectionContext, count: int, rule: RowRule
) -> Array | None:
    """Applies a rule to `block_masses` with a kernel, if there is one: bits as in `kept_blocks`."""
    if not isinstance(k, Fp8Keys):
        return None
    kernels = _coded_kernels(q, context)
    if not kernels.keeps(count, context.num_blocks):
        return None
    rows, positions = probe_rows(q, context, count)
    first, scale = context.first_blocks(context.block_ids), context.scale_for(q.shape[-1])
    kernel_rule = rule.kernel_rule(context.block_ids, context.documents, count)
    bits = kernels.kept(*kernels.score(rows, k, positions, first, scale), kernel_rule)
    bits = bits[..., : sets.words_for(context.num_blocks)]
    if not rule.random_block_prob:
        return bits
    return bits | rule.drawn(context.block_ids, context.documents, q.shape[2], context.num_blocks)


def fp8_at_once(q: Array, k: Keys, context: SelectionContext, count: int) -> int | None:
    """Returns how many rows of blocks the kernel for 8-bit keys scores at a time, if it runs."""
    if not isinstance(k, Fp8Keys):
        return None
    sizes = q.shape[0], q.shape[2], count, context.block_ids.shape[0], context.num_blocks
    return _coded_kernels(q, context).rows_at_once(*sizes)


def _kernels(q: Array, context: SelectionContext) -> Fp8Scores | None:
    block_size = q.shape[1] // context.block_ids.shape[0]
    return backends.fp8_score_kernels(context.backend, q, block_size)


def _coded_kernels(q: Array, context: SelectionContext) -> Fp8Scores:
    kernels = _kernels(q, context)
    assert kernels is not None
    return kernels


def probe_rows(q: Array, context: SelectionContext, count: int) -> tuple[Array, Array]:
    """Gathers r = `count` probe queries of each block, evenly spaced, including the last one.

    In a block that ends with padding only real queries are used; with fewer than r, some count
    several times.

    Returns:
        [B, n/g, r, Hq, D], and int32 [B or 1, n/g, r], their global positions; -1 for queries
        without keys.
    """
    block_size = q.shape[1] // context.block_ids.shape[0]
    numbers = jnp.arange(1, count + 1, dtype=jnp.int32)
    first = context.block_ids[:, None] * block_size
    real, ends = block_size, context.ends(context.block_ids)
    if ends is not None:
        real = jnp.clip(ends[..., None] - first, 0, block_size)
    # [B or 1, n/g, r]; -1 if a block has no real query, or fewer than r.
    within = jnp.broadcast_to(
        numbers * real // count - 1, (1 if ends is None else len(ends), len(first), count)
    )
    positions = jnp.where(within < 0, -1, first + within)
    blocks = q.reshape(q.shape[0], -1, block_size, *q.shape[2:])
    rows = jnp.take_along_axis(blocks, within[..., None, None], axis=2, mode="clip")
    return rows, positions


def by_heads(rows: Array) -> Array:
    """Reorders [B, n/g, r, Hq, D] to [B, Hq, n/g, r, D]."""
    return rows.transpose(0, 3, 1, 2, 4)
