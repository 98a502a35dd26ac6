"""Key columns in addition to block lists, for each document of a pack; see `row_columns`.

Each document has as many columns as a separate sequence would. Its key blocks are scored only by
its own queries, so all documents together cost as much as one sequence.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.rules.row_rule import RowRule
from mtraining_jax.selection.scores import document_scores, estimate, row_columns
from mtraining_jax.selection.spans import PackedSpans


def heaviest_columns(
    q: Array, k: Array, context: SelectionContext, slots: PackedSpans, count: int, rule: RowRule
) -> Array:
    """Selects C = `count` columns of each document, as in `row_columns`: int32 [B, Hq, E, C]."""
    batch, heads, num_blocks = q.shape[0], q.shape[2], context.num_blocks
    num_slots, seq_len, block_size = slots.slots, k.shape[1], k.shape[1] // num_blocks
    within = row_columns.spread_positions(seq_len, slots.tokens[..., None])  # [B, E, u]
    positions = slots.first[..., None] * block_size + within
    rows_of = document_scores.queries_of(q, jnp.clip(positions, 0, seq_len - 1), context)
    all_blocks = dataclasses.replace(
        context, block_ids=jnp.arange(num_blocks, dtype=jnp.int32), axis_names=()
    )
    blocks = document_scores.KeyBlocks(k, slots, all_blocks)
    scale = context.scale_for(q.shape[-1])

    def of_block(
        body: Callable, k: Array, slot: Array, number: Array, entry: Array
    ) -> tuple[Array, ...]:
        """Applies a body of `estimate.map_logits` to one block of keys."""
        seen_by = jnp.where(slot < num_slots, within[entry, slot] - number * block_size, -1)
        one = jnp.zeros(1, jnp.int32)
        rows = rows_of(entry, jnp.minimum(slot, num_slots - 1))
        results = estimate.map_logits(body, rows[None], seen_by, k[None], one, 1)
        return tuple(x[0, :, 0] for x in results)

    def statistics(k: Array, slot: Array, number: Array, entry: Array) -> tuple[Array, ...]:
        return of_block(lambda logits, _: estimate.in_block(logits, scale), k, slot, number, entry)

    block_peak, block_total = blocks.map(statistics)
    peak, total = document_scores.joined(block_peak, block_total, blocks.slot, num_slots, scale, ())

    def masses(k: Array, slot: Array, number: Array, entry: Array) -> tuple[Array, ...]:
        distance = within[entry, slot] // block_size - number
        counts = (distance >= rule.local_blocks) & (number >= rule.sink_blocks)

        def body(logits: Array, _: Array) -> tuple[Array]:
            of_rows = peak[entry, slot][None], total[entry, slot][None]
            return (row_columns.key_masses(logits, counts[None], *of_rows, scale),)

        return of_block(body, k, slot, number, entry)

    mass = blocks.map(masses)[0].swapaxes(1, 2).reshape(batch * heads, num_blocks, block_size)
    spans = slots.repeat(heads)
    kept, _ = top_p.kept_entries(
        mass.astype(jnp.uint32), top_p.Rule(0, jnp.full_like(spans.tokens, count)), spans
    )
    kept &= (mass > 0) & spans.inside[..., None]
    number = top_p.numbered(kept, spans) + spans.of_block[..., None] * count
    number = jnp.where(kept, number, num_slots * count)
    tokens = top_p.scattered(number, num_slots * count, seq_len)
    return tokens.reshape(batch, heads, num_slots, count)


def masses_without(
    rows: Array,
    positions: Array,
    k: Array,
    tokens: Array,
    slots: PackedSpans,
    context: SelectionContext,
    *,
    like: Array,
) -> tuple[Array, Array]:
    """Splits masses like `row_columns.masses_without`, with columns [B, Hq, E, C] by document."""
    batch, heads, num_slots, count = tokens.shape
    slot = slots.of_block[:, context.block_ids]  # [B, n]
    held = jnp.minimum(slot, num_slots - 1)
    entries = jnp.arange(batch)[:, None]
    columns = tokens.swapaxes(1, 2)[entries, held]  # [B, n, Hq, C]
    columns = jnp.where((slot < num_slots)[..., None, None], columns, k.shape[1])
    columns = columns.swapaxes(1, 2)

    def logits(rows: Array, start: Array, size: int) -> Array:
        """Computes logits of some local blocks: [B, Hq, size, r, D] to [B, Hq, size, r, C].

        Gathers keys for these blocks only: most slots may be empty.
        """
        of_rows = lax.dynamic_slice_in_dim(rows_in_keys, start, size, axis=2)
        keys = flat.at[of_rows].get(mode="promise_in_bounds")  # [B, Hq, size, C, D]
        precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
        return lax.dot_general(
            rows,
            keys,
            (((4,), (4,)), ((0, 1, 2), (0, 1, 2))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    steps, size = row_columns.steps_of(rows, count, context.num_blocks)
    padding = steps * size - slot.shape[1]
    # A single flat index lets XLA fuse the gather. Padding may read any key: it is masked.
    flat, (_, length, kv_heads, _) = k.reshape(-1, k.shape[-1]), k.shape
    at = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None] * length + columns % length
    kv_head = jnp.arange(heads, dtype=jnp.int32)[:, None, None] // (heads // kv_heads)
    rows_in_keys = jnp.pad(at * kv_heads + kv_head, ((0, 0), (0, 0), (0, padding), (0, 0)))
    return row_columns.left_over(
        rows,
        positions,
        k,
        columns,
        logits,
        context,
        like=like,
        first_blocks=context.first_blocks(context.block_ids),
    )
