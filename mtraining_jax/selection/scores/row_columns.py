"""Key columns in addition to block lists, and the row mass that they leave.

Each document of a pack has as many columns as a separate sequence. Scores follow the rules of
`estimate.py`, so they are bit-identical for any number of ranks.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.rules.row_rule import RowRule, kept_blocks
from mtraining_jax.selection.scores import estimate, row_scores
from mtraining_jax.selection.scores.probe_rows import by_heads, probe_rows
from mtraining_jax.selection.segments import PackedSegments, Segments, sparse_segments
from pallas_kernels.index import BlockMaskIndex
from pallas_kernels.tiles import gather_columns

# Probe queries for columns, evenly spaced over each document.
_QUERIES = 128
# A step launches a few kernels, which take a few microseconds on a GPU however small they are: so
# there are few steps. With several ranks each computes at least one step, and at most this fraction
# of one device's work.
_LEAST_STEPS = 4
_STEP_BYTES = 1 << 27  # of logits or gathered keys in memory at a time


def index_with_columns(
    q: Array,
    k: Array,
    context: SelectionContext,
    rule: RowRule,
    num_probes: int,
    count: int,
    most_documents: int,
    max_columns: int,
) -> BlockMaskIndex:
    """Builds the index of `SampledRows` with columns.

    Args:
        q, k, context: as in `RowPattern.scores`.
        rule: for the blocks.
        num_probes: probe queries of each block.
        count: columns of each document, at most.
        most_documents: non-dense documents of a sequence, at most.
        max_columns: room for the columns of all documents of a sequence.
    """
    rows, num_blocks, documents = context.block_ids, context.num_blocks, context.documents
    size = q.shape[1] // rows.shape[0]
    probes = probe_rows(q, context, num_probes)
    segments = sparse_segments(context, most_documents, size)
    tokens = heaviest_columns(q, k, context, segments, count, rule)
    block_masses, column_mass = masses_without(*probes, k, tokens, segments, context, like=q)
    bits = kept_blocks(block_masses, rows, rule, documents, column_mass)
    index = BlockMaskIndex(bits, num_blocks, size)
    index = index.with_columns(tokens.reshape(*tokens.shape[:2], -1), rows)
    if not documents.packed:
        return index
    # The capacity covers as many documents as may be sparse; kernels gather all of it.
    index = dataclasses.replace(index, max_columns=max_columns)
    return index.columns_from(documents.of(rows).first[:, None])


def heaviest_columns(
    q: Array, k: Array, context: SelectionContext, segments: Segments, count: int, rule: RowRule
) -> Array:
    """Selects the keys outside forced blocks with the most mass from evenly spaced probe queries.

    `rule` defines the forced blocks; q, k and the context are those of `RowPattern.scores`. Returns
    int32 [B, Hq, E, C = `count`] for the documents in `segments`, ascending, padded with S,
    replicated. Columns without mass are dropped.
    """
    batch, heads, seq_len, num_blocks = q.shape[0], q.shape[2], k.shape[1], context.num_blocks
    masses = _far_masses(q, k, context, segments, rule).reshape(batch * heads, num_blocks, -1)
    segments = segments.repeat(heads)
    most = jnp.full_like(segments.length, min(count, seq_len))
    kept, _ = top_p.kept_entries(masses.astype(jnp.uint32), top_p.Rule(0, most), segments)
    kept &= (masses > 0) & segments.inside[..., None]
    number = top_p.numbered(kept, segments) + segments.slot_of_block[..., None] * count
    number = jnp.where(kept, number, segments.slots * count)
    tokens = top_p.scattered(number, segments.slots * count, seq_len)
    return tokens.reshape(batch, heads, segments.slots, count)


def _far_masses(
    q: Array, k: Array, context: SelectionContext, segments: Segments, rule: RowRule
) -> Array:
    """Computes the mass of keys outside forced blocks: int32 [B, Hq, NB, g]; total 2^30."""
    num_blocks, seq_len = context.num_blocks, k.shape[1]
    size, scale = seq_len // num_blocks, context.scale_for(q.shape[-1])
    count = min(_QUERIES, seq_len)
    within = jnp.arange(1, count + 1, dtype=jnp.int32) * jnp.asarray(segments.tokens)[..., None]
    within = jnp.maximum(within // count - 1, 0)
    positions = segments.first[..., None] * size + within  # [B or 1, E, u]
    queries = _queries_of(q, jnp.clip(positions, 0, seq_len - 1), context)
    all_blocks = dataclasses.replace(
        context, block_ids=jnp.arange(num_blocks, dtype=jnp.int32), axis_names=()
    )
    blocks = estimate.KeyBlocks(k, all_blocks, segments)
    chunk = _blocks_per_step(num_blocks, 4 * q.shape[0] * q.shape[2] * count * size)
    where = queries, positions, chunk
    block_peak, block_total = blocks.map_logits(
        lambda logits, _: estimate.in_block(logits, scale), *where
    )
    peak, total = blocks.join(block_peak, block_total, scale)  # [B, E, Hq, u]
    to_mass = float(estimate.MASS_ONE // count) / total

    def masses(logits: Array, chunk: estimate.Chunk) -> tuple[Array]:
        distance = chunk.own(positions) // size - chunk.ids[:, None, None]  # [C, B or 1, u]
        number = chunk.ids[:, None] - chunk.own(segments.first)  # [C, B or 1]
        counts = (distance >= rule.local_blocks) & (number >= rule.sink_blocks)[..., None]
        terms = estimate.relative_exp(logits, chunk.own(peak)[..., None], scale)
        mass = jnp.round(terms * chunk.own(to_mass)[..., None]).astype(jnp.int32)
        return (jnp.where(counts[:, :, None, :, None], mass, 0).sum(-2, dtype=jnp.int32),)

    return blocks.map_logits(masses, *where)[0]


def _queries_of(
    q: Array, positions: Array, context: SelectionContext
) -> Callable[[estimate.Chunk], Array]:
    """Looks up the queries at positions int32 [B or 1, E, u] for blocks: [C or 1, B, Hq, u, D].

    On one device those of a pack are read in place: the queries of all slots, most of them possibly
    empty, would need at least as much memory as q.
    """
    if context.axis_names or not context.documents.packed:
        queries = estimate.queries_at(q, positions, context)
        return lambda chunk: chunk.own(queries)
    size = q.shape[1] // context.num_blocks
    local = collectives.local_index(context.block_ids, context.num_blocks)[positions // size]
    tokens, entries = local * size + positions % size, jnp.arange(len(q))[:, None]
    return lambda chunk: q[entries, chunk.own(tokens)].swapaxes(2, 3)


def masses_without(
    rows: Array,
    positions: Array,
    k: Array,
    tokens: Array,
    segments: Segments,
    context: SelectionContext,
    *,
    like: Array,
) -> tuple[Array, Array]:
    """Splits the mass of query rows between key blocks and columns.

    Args:
        rows, positions: from `probe_rows.probe_rows`.
        k: [B, S, Hk, D], all keys, in sequence order.
        tokens: int32 [B, Hq, E, C], the columns of each document in `segments`; S for padding.
        segments, context: the documents and the shards of the sequence.
        like: [B, n, Hq, D], the queries of the attention.

    Returns:
        fp32 [B, Hq, n, NB], mass of key blocks without columns, and fp32 [B, Hq, n], mass of the
        columns. Their sum is the result of `row_scores.block_masses`.
    """
    rows, block_size = by_heads(rows), k.shape[1] // context.num_blocks
    masses, levels = row_scores.block_masses_and_levels(
        rows,
        row_scores.by_blocks(k, block_size),
        positions,
        context.first_blocks(context.block_ids),
        scale=context.scale_for(rows.shape[-1]),
        like=like,
        backend=context.backend,
    )
    if isinstance(segments, PackedSegments):
        held = jnp.append(tokens, jnp.full_like(tokens[:, :, :1], k.shape[1]), axis=2)
        slot = segments.slot_of_block[:, context.block_ids]  # [B, n]; the last for none
        tokens = jax.vmap(lambda tokens, slot: tokens[:, slot])(held, slot)  # [B, Hq, n, C]
    column_masses = _column_masses(rows, positions, k, levels, tokens, context)
    batch, heads, num_local, _ = column_masses.shape
    rows_of = jnp.ogrid[:batch, :heads, :num_local, :1][:3]
    blocks = jnp.broadcast_to(tokens // block_size, column_masses.shape)
    held = jnp.zeros((batch, heads, num_local, context.num_blocks), jnp.int32)
    held = held.at[(*rows_of, blocks)].add(column_masses, mode="drop")
    one = 1 / estimate.MASS_ONE
    left = jnp.maximum(masses - held.astype(jnp.float32) * one, 0.0)
    return left, column_masses.sum(-1, dtype=jnp.int32).astype(jnp.float32) * one


def _blocks_per_step(num_blocks: int, bytes_per_block: int) -> int:
    """Returns the number of blocks per step, as a function of the whole sequence only."""
    return max(min(-(-num_blocks // _LEAST_STEPS), _STEP_BYTES // max(bytes_per_block, 1)), 1)


def _column_masses(
    rows: Array, positions: Array, k: Array, levels: Array, tokens: Array, context: SelectionContext
) -> Array:
    """Computes the masses of columns [B, Hq, n or 1, C]: int32 [B, Hq, n, C]; total 2^30.

    Some rows of blocks at a time.
    """
    batch, heads, num_local, num_rows, dim = rows.shape
    row_bytes = batch * heads * tokens.shape[3] * max(4 * num_rows, rows.dtype.itemsize * dim)
    chunk = _blocks_per_step(context.num_blocks, row_bytes)
    steps = -(-num_local // chunk)
    padding = steps * chunk - num_local
    same = not context.documents.packed
    precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    product = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )
    if same:  # gathered once, and one product for all rows
        keys = gather_columns(k, tokens[:, :, 0]).swapaxes(1, 2)  # [B, Hq, C, D]
    else:
        # A single flat index lets XLA fuse the gather. Padding may read any key: it is masked.
        flat, (_, length, kv_heads, _) = k.reshape(-1, dim), k.shape
        at = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None] * length + tokens % length
        kv_head = jnp.arange(heads, dtype=jnp.int32)[:, None, None] // (heads // kv_heads)
        in_keys = at * kv_heads + kv_head

    def padded(x: Array, axis: int, value: int = 0) -> Array:
        widths = [(0, padding if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    rows, levels, positions = padded(rows, 2), padded(levels, 2), padded(positions, 1, -1)
    if not same:
        tokens, in_keys = padded(tokens, 2), padded(in_keys, 2)
    scale = context.scale_for(dim)
    one = float(estimate.MASS_ONE // num_rows)

    def step(i: Array) -> Array:
        def part(x: Array, axis: int) -> Array:
            return lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=axis)

        if same:
            columns, flat_rows = tokens, part(rows, 2).reshape(batch, heads, -1, dim)
            logits = product(flat_rows, keys, (((3,), (3,)), ((0, 1), (0, 1))))
            logits = logits.reshape(batch, heads, chunk, num_rows, -1)
        else:  # keys of these blocks only: most slots may be empty
            columns = part(tokens, 2)
            own = flat.at[part(in_keys, 2)].get(mode="promise_in_bounds")  # [B, Hq, chunk, C, D]
            logits = product(part(rows, 2), own, (((4,), (4,)), ((0, 1, 2), (0, 1, 2))))
        seen = part(positions, 1)[:, None, ..., None] >= columns[:, :, :, None]
        masked = jnp.where(seen, logits, -jnp.inf)
        mass = estimate.relative_exp(masked, part(levels, 2)[..., None], scale)
        return jnp.round(mass * one).astype(jnp.int32).sum(-2, dtype=jnp.int32)

    masses = lax.map(step, jnp.arange(steps))
    masses = jnp.moveaxis(masses, 0, 2).reshape(batch, heads, steps * chunk, -1)
    return masses[:, :, :num_local]
