"""What a sparse index costs and what it keeps."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity import exchange
from mtraining_jax.sparsity.estimate import map_logits, relative_exp
from pallas_kernels.index import VerticalSlashIndex


def computed_pairs(index: VerticalSlashIndex, seq_len: int) -> Array:
    """Number of (query, key) pairs that the index computes, by the contract of the index.

    Args:
        index: over a sequence of `seq_len` tokens, a multiple of its block size.
        seq_len: S.

    Returns:
        Float [B, Hq] (fp64 under x64). Rounded, since it may exceed 2^31, but not accumulated in
        floats.
    """
    size = index.block_size
    main, far_tiles, blocks_below, own_rows = _count(index, seq_len)
    to_float = jnp.result_type(float)
    triangles = main * (seq_len // size)
    return (
        triangles.astype(to_float) * (size * (size + 1) // 2)
        + far_tiles.astype(to_float) * (size * size)
        + blocks_below.sum(-1, dtype=jnp.int32).astype(to_float) * size
        + own_rows.sum(-1, dtype=jnp.int32).astype(to_float)
    )


def executed_pairs(index: VerticalSlashIndex, seq_len: int) -> Array:
    """Number of pairs in the tiles that kernels execute: g x g blocks, and g x 1 columns.

    A tile that the causal diagonal cuts counts as a whole. This is the convention of executed
    FLOP in the benchmark tables.

    Args:
        index: over a sequence of `seq_len` tokens, a multiple of its block size.
        seq_len: S.

    Returns:
        Float [B, Hq], rounded as in `computed_pairs`.
    """
    size = index.block_size
    main, far_tiles, blocks_below, own_rows = _count(index, seq_len)
    to_float = jnp.result_type(float)
    tiles = main * (seq_len // size) + far_tiles
    columns = (blocks_below + (own_rows > 0)).sum(-1, dtype=jnp.int32)
    return tiles.astype(to_float) * (size * size) + columns.astype(to_float) * size


def causal_pairs(seq_len: int) -> int:
    """Number of pairs of dense causal attention."""
    return seq_len * (seq_len + 1) // 2


def density(index: VerticalSlashIndex, seq_len: int) -> Array:
    """Share of the causal pairs that the index computes: float [B, Hq] in (0, 1]."""
    return computed_pairs(index, seq_len) / float(causal_pairs(seq_len))


def attention_flops(pairs, head_dim: int) -> tuple:
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
    index: VerticalSlashIndex,
    positions: Array,
    *,
    block_ids: Array,
    axis_names: Sequence[str] = (),
    scale: float | None = None,
) -> Array:
    """Softmax mass, of some query rows, that lies on pairs the index computes.

    To be called like `choose_index`, with the same shards. No gradient flows through it.

    Args:
        q_BnHD: [B, n, Hq, D], local queries.
        k_BnHkD: [B, n, Hk, D], local keys.
        index: the index, replicated.
        positions: int32 [R], global positions of the rows, the same on every rank.
        block_ids: int32 [n/g], global number of each local block.
        axis_names: mesh axes the sequence is sharded over.
        scale: of the logits; 1/sqrt(D) when None.

    Returns:
        fp32 [B, Hq] in [0, 1], mean over the rows, replicated. 1 is exact dense attention.
    """
    q, k = lax.stop_gradient((q_BnHD, k_BnHkD))
    block_ids, positions = block_ids.astype(jnp.int32), jnp.asarray(positions, jnp.int32)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    num_ranks = lax.axis_size(tuple(axis_names)) if axis_names else 1
    num_blocks = block_ids.shape[0] * num_ranks
    rows = exchange.gather_rows(q, positions, block_ids, num_blocks, axis_names)
    active = _active_diagonals(index, num_blocks)
    chosen = _chosen_columns(index, num_blocks)

    def block_mass(logits, ids):
        distance = positions // index.block_size - ids[:, None]  # [C, R]
        by_block = active[:, :, jnp.maximum(distance, 0)] & (distance >= 0)
        by_column = chosen[:, :, jnp.minimum(ids, num_blocks - 1)]
        computed = by_block[..., None] | by_column[..., None, :]
        peak = logits.max(-1)
        terms = relative_exp(logits, peak[..., None], scale)
        kept = jnp.where(jnp.moveaxis(computed, 2, 0), terms, 0)
        return peak, terms.sum(-1), kept.sum(-1)

    block_peak, block_all, block_kept = map_logits(
        block_mass, rows.transpose(0, 2, 1, 3), positions, k, block_ids, num_blocks
    )
    peak = exchange.maximum(block_peak.max(2), axis_names)
    weight = relative_exp(block_peak, peak[:, :, None], scale)
    mass = ((block_all * weight).sum(2), (block_kept * weight).sum(2))
    total, kept = lax.psum(mass, tuple(axis_names)) if axis_names else mass
    return (kept / total).mean(-1)


def _active_diagonals(index: VerticalSlashIndex, num_blocks: int) -> Array:
    """Bool [B, Hq, NB]: whether each block diagonal is on."""
    return _marked(index.slash_blocks, index.slash_count, num_blocks)


def _chosen_columns(index: VerticalSlashIndex, num_blocks: int) -> Array:
    """Bool [B, Hq, NB, g]: whether each key column is on."""
    seq_len = num_blocks * index.block_size
    marked = _marked(index.vertical_tokens, index.vertical_count, seq_len)
    return marked.reshape(*marked.shape[:2], num_blocks, index.block_size)


def _marked(entries: Array, count: Array, size: int) -> Array:
    """Bool [B, Hq, size], true at the first `count` of the entries [B, Hq, M]."""
    entries = jnp.where(_valid(entries, count), entries, size)
    batch, heads = jnp.ogrid[: entries.shape[0], : entries.shape[1]]
    marked = jnp.zeros((*entries.shape[:2], size), bool)
    return marked.at[batch[..., None], heads[..., None], entries].set(True, mode="drop")


def _valid(entries: Array, count: Array) -> Array:
    return jnp.arange(entries.shape[-1]) < count[..., None]


def _count(index: VerticalSlashIndex, seq_len: int) -> tuple[Array, Array, Array, Array]:
    """Counts that all measures are made of; integers that cannot overflow.

    Returns:
        main: int32 [B, Hq], 1 if the main block diagonal is on.
        far_tiles: int32 [B, Hq], blocks on the other active diagonals.
        blocks_below: int32 [B, Hq, Mv], for each column, query blocks below its own that no
            active diagonal computes; 0 at padding.
        own_rows: int32 [B, Hq, Mv], rows of its own block that the column adds.
    """
    size = index.block_size
    num_blocks = seq_len // size
    active = _active_diagonals(index, num_blocks)
    far = active.at[..., 0].set(False)
    far_tiles = jnp.where(far, num_blocks - jnp.arange(num_blocks), 0).sum(-1, dtype=jnp.int32)
    # Entry i: inactive diagonals among 1..i.
    inactive = (~active).at[..., 0].set(False)
    inactive_up_to = jnp.cumsum(inactive, axis=-1, dtype=jnp.int32)
    valid = _valid(index.vertical_tokens, index.vertical_count)
    tokens = jnp.where(valid, index.vertical_tokens, 0)
    below = jnp.take_along_axis(inactive_up_to, num_blocks - 1 - tokens // size, axis=-1)
    own = jnp.where(active[..., :1], 0, size - tokens % size)
    return (
        active[..., 0].astype(jnp.int32),
        far_tiles,
        jnp.where(valid, below, 0),
        jnp.where(valid, own, 0),
    )
