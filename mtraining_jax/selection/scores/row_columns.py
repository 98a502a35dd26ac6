"""Key columns in addition to block lists, and the row mass that they leave.

Scores follow the rules of `estimate.py`, so they are bit-identical for any number of ranks.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.rules.row_rule import RowRule
from mtraining_jax.selection.scores import estimate, row_scores
from pallas_kernels.tiles import gather_columns

# Probe queries for columns, evenly spaced over the sequence.
_QUERIES = 128
# A step launches a few kernels, which take a few microseconds on a GPU however small they are: so
# there are few steps. With several ranks each computes at least one step, and at most this fraction
# of one device's work.
_LEAST_STEPS = 4
_STEP_BYTES = 1 << 27  # of logits or gathered keys in memory at a time


def heaviest_columns(
    q: Array, k: Array, context: SelectionContext, count: int, rule: RowRule
) -> Array:
    """Selects the keys outside forced blocks with the most mass from evenly spaced probe queries.

    `rule` defines the forced blocks; q, k and the context are those of `RowPattern.scores`. Returns
    int32 [B, Hq, C = `count`], ascending, padded with S, replicated. Columns without mass are
    dropped.
    """
    num_blocks, seq_len = context.num_blocks, k.shape[1]
    end = seq_len if context.valid_len is None else context.valid_len
    positions = spread_positions(seq_len, end)
    rows = collectives.gather_rows(
        q, positions, context.block_ids, num_blocks, context.axis_names
    ).transpose(0, 2, 1, 3)
    masses = _far_masses(rows, positions, k, num_blocks, rule, context.scale_for(q.shape[-1]))
    most = min(count, seq_len)
    kept, _ = top_p.kept_entries(masses.astype(jnp.uint32), top_p.Rule(0, most))
    tokens = top_p.ascending_entries(kept & (masses > 0), most, seq_len)
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, count - most)), constant_values=seq_len)


def spread_positions(seq_len: int, end: int | Array) -> Array:
    """Returns evenly spaced query positions before `end`: int32 [u] or [..., u]."""
    queries = min(_QUERIES, seq_len)
    numbers = jnp.arange(1, queries + 1, dtype=jnp.int32)
    return jnp.maximum(numbers * end // queries - 1, 0).astype(jnp.int32)


def key_masses(logits: Array, counts: Array, peak: Array, total: Array, scale: float) -> Array:
    """Computes the mass of the keys of C blocks: int32 [C, B, Hq, g]; the total is 2^30.

    `counts`, bool [C, u], is whether to count a query's mass in a block; `peak` and `total`, fp32
    [B, Hq, u], are those of whole rows.
    """
    to_mass = float(estimate.MASS_ONE // logits.shape[-2]) / jnp.where(total > 0, total, 1.0)
    terms = estimate.relative_exp(logits, peak[..., None], scale)
    mass = jnp.round(terms * to_mass[..., None]).astype(jnp.int32)
    return jnp.where(counts[:, None, None, :, None], mass, 0).sum(-2, dtype=jnp.int32)


def _far_masses(
    rows: Array, positions: Array, k: Array, num_blocks: int, rule: RowRule, scale: float
) -> Array:
    """Computes the mass that rows [B, Hq, u, D] give to keys: int32 [B, Hq, NB, g]; total 2^30."""
    block_size = k.shape[1] // num_blocks
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    block_bytes = 4 * rows.shape[0] * rows.shape[1] * rows.shape[2] * block_size
    where = rows, positions, k, blocks, num_blocks, _blocks_per_step(num_blocks, block_bytes)
    block_peak, block_total = estimate.map_logits(
        lambda logits, _: estimate.in_block(logits, scale), *where
    )  # [B, Hq, NB, u]
    peak = block_peak.max(2)
    weight = estimate.relative_exp(block_peak, peak[:, :, None], scale)
    limbs = (x.sum(2, dtype=jnp.int32) for x in estimate.to_limbs(weight, block_total))
    total = estimate.from_limbs(*limbs)

    def masses(logits: Array, blocks: Array) -> tuple[Array]:
        distance = positions // block_size - blocks[:, None]  # [C, u]
        counts = (distance >= rule.local_blocks) & (blocks >= rule.sink_blocks)[:, None]
        return (key_masses(logits, counts, peak, total, scale),)

    return estimate.map_logits(masses, *where)[0]


def masses_without(
    rows: Array,
    positions: Array,
    k: Array,
    tokens: Array,
    context: SelectionContext,
    *,
    like: Array,
) -> tuple[Array, Array]:
    """Splits the mass of query rows between key blocks and columns.

    Args:
        rows, positions: from `probe_rows.probe_rows`.
        k: [B, S, Hk, D], all keys, in sequence order.
        tokens: int32 [B, Hq, C], the columns; S for padding.
        context: the shards of the sequence.
        like: [B, n, Hq, D], the queries of the attention.

    Returns:
        fp32 [B, Hq, n, NB], mass of key blocks without columns, and fp32 [B, Hq, n], mass of the
        columns. Their sum is the result of `row_scores.block_masses`.
    """
    keys = gather_columns(k, tokens).swapaxes(1, 2)  # [B, Hq, C, D]
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None

    def logits(rows: Array, start: Array, size: int) -> Array:
        del start, size  # all rows of blocks have the same columns
        batch, heads, *_, dim = rows.shape
        return lax.dot_general(
            rows.reshape(batch, heads, -1, dim),
            keys,
            (((3,), (3,)), ((0, 1), (0, 1))),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).reshape(*rows.shape[:-1], -1)

    return left_over(rows, positions, k, tokens[:, :, None], logits, context, like=like)


def left_over(
    rows: Array,
    positions: Array,
    k: Array,
    tokens: Array,
    logits: Callable[[Array, Array, int], Array],
    context: SelectionContext,
    *,
    like: Array,
    first_blocks: Array | None = None,
) -> tuple[Array, Array]:
    """Splits masses like `masses_without`, with columns [B, Hq, n or 1, C] of each row of blocks.

    `logits` computes those of rows [B, Hq, size, r, D] with their columns, for `size` local blocks
    from a given one on: fp32 [B, Hq, size, r, C]. No row sees blocks before `first_blocks`.
    """
    block_size = k.shape[1] // context.num_blocks
    masses, levels = row_scores.block_masses_and_levels(
        rows,
        row_scores.by_blocks(k, block_size),
        positions,
        first_blocks,
        scale=context.scale_for(rows.shape[-1]),
        like=like,
        backend=context.backend,
    )
    column_masses = _column_masses(rows, positions, levels, tokens, logits, context)
    batch, heads, num_local, _ = column_masses.shape
    rows_of = jnp.ogrid[:batch, :heads, :num_local, :1][:3]
    blocks = jnp.broadcast_to(tokens // block_size, column_masses.shape)
    held = jnp.zeros((batch, heads, num_local, context.num_blocks), jnp.int32)
    held = held.at[(*rows_of, blocks)].add(column_masses, mode="drop")
    one = 1 / estimate.MASS_ONE
    left = jnp.maximum(masses - held.astype(jnp.float32) * one, 0.0)
    return left, column_masses.sum(-1, dtype=jnp.int32).astype(jnp.float32) * one


def steps_of(rows: Array, num_columns: int, num_blocks: int) -> tuple[int, int]:
    """Returns the number of steps, and of rows of blocks per step, for any number of ranks."""
    batch, heads, num_local, num_rows, dim = rows.shape
    row_bytes = batch * heads * num_columns * max(4 * num_rows, rows.dtype.itemsize * dim)
    size = _blocks_per_step(num_blocks, row_bytes)
    return -(-num_local // size), size


def _blocks_per_step(num_blocks: int, bytes_per_block: int) -> int:
    """Returns the number of blocks per step, as a function of the whole sequence only."""
    return max(min(-(-num_blocks // _LEAST_STEPS), _STEP_BYTES // max(bytes_per_block, 1)), 1)


def _column_masses(
    rows: Array,
    positions: Array,
    levels: Array,
    tokens: Array,
    logits: Callable[[Array, Array, int], Array],
    context: SelectionContext,
) -> Array:
    """Computes column masses, some rows of blocks at a time: int32 [B, Hq, n, C]; total 2^30."""
    batch, heads, num_local, num_rows, dim = rows.shape
    steps, chunk = steps_of(rows, tokens.shape[3], context.num_blocks)
    padding = steps * chunk - num_local
    rows, levels = (
        jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3)) for x in (rows, levels)
    )
    positions = jnp.pad(positions, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    same = tokens.shape[2] == 1
    if not same:
        tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, padding), (0, 0)))
    scale = context.scale_for(dim)
    one = float(estimate.MASS_ONE // num_rows)

    def part(x: Array, i: Array, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=axis)

    def step(i: Array) -> Array:
        columns = tokens if same else part(tokens, i, 2)
        seen = part(positions, i, 1)[:, None, ..., None] >= columns[:, :, :, None]
        masked = jnp.where(seen, logits(part(rows, i, 2), i * chunk, chunk), -jnp.inf)
        mass = estimate.relative_exp(masked, part(levels, i, 2)[..., None], scale)
        return jnp.round(mass * one).astype(jnp.int32).sum(-2, dtype=jnp.int32)

    masses = lax.map(step, jnp.arange(steps))
    masses = jnp.moveaxis(masses, 0, 2).reshape(batch, heads, steps * chunk, -1)
    return masses[:, :, :num_local]
