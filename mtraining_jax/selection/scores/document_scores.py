"""Scores of keys by the last queries of their own documents.

Each key block is scored only by the last queries of its own document, so all documents together
cost as much as one sequence. The rules of `estimate.py` apply: products per block in chunks that
depend only on the sequence length, and integer sums.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import estimate
from mtraining_jax.selection.spans import PackedSpans
from pallas_kernels import backends
from pallas_kernels.interface import Estimate, ProbeCall


def last_queries(q: Array, slots: PackedSpans, context: SelectionContext, count: int) -> Array:
    """Gathers the last `count` real queries of each document: [B, E, Hq, u, D], replicated.

    In shorter documents the first ones are arbitrary.
    """
    block_size = q.shape[1] // context.block_ids.shape[0]
    ends = slots.first * block_size + slots.tokens
    positions = ends[..., None] + jnp.arange(-count, 0, dtype=jnp.int32)
    positions = jnp.clip(positions, 0, context.num_blocks * block_size - 1)
    return queries_at(q, positions, context)


def queries_at(q: Array, positions: Array, context: SelectionContext) -> Array:
    """Gathers queries at positions int32 [B, E, u]: [B, E, Hq, u, D], replicated."""

    def gather(x: Array, positions: Array) -> Array:
        where = context.block_ids, context.num_blocks, context.axis_names
        return collectives.gather_rows(x[None], positions.reshape(-1), *where)[0]

    rows = jax.vmap(gather)(q, positions)
    return rows.reshape(*positions.shape, *q.shape[2:]).transpose(0, 1, 3, 2, 4)


def queries_of(
    q: Array, positions: Array, context: SelectionContext
) -> Callable[[Array, Array], Array]:
    """Returns `queries_at` as a function of batch entry and slot to [Hq, u, D].

    On one device it reads the queries in place: those of all slots, most of them possibly empty,
    would need at least as much memory as q.
    """
    if context.axis_names:
        queries = queries_at(q, positions, context)
        return lambda entry, slot: queries[entry, slot]
    block_size = q.shape[1] // context.block_ids.shape[0]
    local = collectives.local_index(context.block_ids, context.num_blocks)[positions // block_size]
    tokens = local * block_size + positions % block_size
    return lambda entry, slot: q[entry, tokens[entry, slot]].swapaxes(0, 1)


class KeyBlocks:
    """The local key blocks, each to be processed with queries of its own document.

    Attributes:
        slot: int32 [B, n], slot of each block's document; E for none.
        number: int32 [B, n], number of each block in its document.
    """

    def __init__(self, k: Array, slots: PackedSpans, context: SelectionContext) -> None:
        self._chunk = min(max(context.num_blocks // 16, 1), 64)
        self._k = k.reshape(k.shape[0], context.block_ids.shape[0], -1, *k.shape[2:])
        self._slots = slots
        self.slot = slots.of_block[:, context.block_ids]
        first = jnp.take_along_axis(slots.first, self.held, axis=1)
        self.number = context.block_ids - first

    @property
    def held(self) -> Array:
        """The slot of each block, or the last one for none: int32 [B, n]."""
        return jnp.minimum(self.slot, self._slots.slots - 1)

    def end(self, slot: Array, number: Array, entry: Array) -> Array:
        """Returns the end of a block's document relative to the block; 0 without a document."""
        num_slots, block_size = self._slots.slots, self._k.shape[2]
        end = self._slots.tokens[entry, jnp.minimum(slot, num_slots - 1)] - number * block_size
        return jnp.where(slot < num_slots, end, 0)

    def map(self, of_block: Callable[..., tuple[Array, ...]]) -> tuple[Array, ...]:
        """Maps a function over single blocks; returns [B, n, Hq, ...].

        Its arguments are keys [g, Hk, D], slot, block number in the document, and batch entry; it
        returns arrays [Hq, ...]. Results of blocks without a slot are undefined.
        """
        batch, num_local = self.slot.shape
        padding = -num_local % self._chunk
        blocks = tuple(
            jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)).swapaxes(0, 1)
            for x in (self._k, self.slot, self.number)
        )
        entries = jnp.arange(batch)
        results = lax.map(lambda x: jax.vmap(of_block)(*x, entries), blocks, batch_size=self._chunk)
        return tuple(x[:num_local].swapaxes(0, 1) for x in results)


def softmax_scores(
    q_last: Array, k: Array, slots: PackedSpans, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Computes `estimate.softmax_scores` of each document; 0 in blocks without a slot.

    If the backend has kernels for the estimate, each key block is passed as a sequence, with the
    queries of its document, [B, E, Hq, u, D] from `last_queries`, and the document's end relative
    to the block.
    """
    num_slots = slots.slots
    block_size = k.shape[1] // context.block_ids.shape[0]
    blocks, scale = KeyBlocks(k, slots, context), context.scale_for(q_last.shape[-1])
    kernels = backends.estimate_kernels(context.backend, q_last[:, 0], block_size)
    if kernels is not None:
        return _by_kernels(kernels, q_last, k, blocks, context)

    def tile(k: Array, slot: Array, number: Array, entry: Array) -> estimate.XlaTiles:
        block = _one_block(blocks.end(slot, number, entry), context)
        return estimate.XlaTiles(q_last[entry, slot][None], k[None], block)

    block_peak, block_total = blocks.map(lambda *block: _of_one(tile(*block).statistics()))
    peak, normaliser = joined(
        block_peak, block_total, blocks.slot, num_slots, scale, context.axis_names
    )
    normaliser = jnp.where(normaliser > 0, normaliser, 1.0)  # of nonexistent queries

    def masses(k: Array, slot: Array, number: Array, entry: Array) -> tuple[Array, ...]:
        totals = peak[entry, slot][None], normaliser[entry, slot][None]
        return _of_one(tile(k, slot, number, entry).masses(*totals))

    return _by_head(blocks.map(masses))


def _by_kernels(
    kernels: Estimate, q_last: Array, k: Array, blocks: KeyBlocks, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Computes `softmax_scores` with a backend's kernels."""
    batch, num_slots, heads, num_queries, dim = q_last.shape
    num_local = context.block_ids.shape[0]
    entry = jnp.arange(batch, dtype=jnp.int32)[:, None]
    held = blocks.held
    end = blocks.end(blocks.slot, blocks.number, entry)
    sets = q_last.reshape(-1, heads, num_queries, dim)
    keys = k.reshape(batch * num_local, -1, *k.shape[2:])
    scale = context.scale_for(dim)
    queries = (entry * num_slots + held).reshape(-1)
    block_ids = jnp.zeros(1, jnp.int32)
    call = ProbeCall(sets, keys, block_ids, 1, scale, end.reshape(-1), queries)

    def by_block(x: Array) -> Array:
        return x.reshape(batch, num_local, *x[:, :, 0].shape[1:])

    block_peak, block_total = map(by_block, kernels.block_statistics(call))
    peak, normaliser = joined(
        block_peak, block_total, blocks.slot, num_slots, scale, context.axis_names
    )
    normaliser = jnp.where(normaliser > 0, normaliser, 1.0)  # of nonexistent queries
    to_mean_mass = estimate.MASS_ONE // num_queries / normaliser
    of_sets = (x[:, :-1].reshape(-1, heads, num_queries) for x in (peak, to_mean_mass))
    columns, own, beyond = kernels.block_masses(call, *of_sets)
    parts = columns, own, beyond[..., : num_queries - 1]
    return _by_head(tuple(jnp.round(by_block(x)).astype(jnp.int32) for x in parts))


def logit_scores(
    q_last: Array, k: Array, slots: PackedSpans, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Computes `estimate.logit_scores` of each document; arguments as in `softmax_scores`.

    In blocks without a slot diagonals are 0 and columns -inf.
    """
    blocks = KeyBlocks(k, slots, context)

    def sums(k: Array, slot: Array, number: Array, entry: Array) -> tuple[Array, ...]:
        block = _one_block(blocks.end(slot, number, entry), context)
        return _of_one(estimate.logit_scores(q_last[entry, slot][None], k[None], block))

    return _by_head(blocks.map(sums))


def _one_block(end: Array, context: SelectionContext) -> SelectionContext:
    """Returns the context of a single block as a sequence with `end` valid tokens."""
    return SelectionContext(jnp.zeros(1, jnp.int32), 1, scale=context.scale, valid_len=end)


def by_distance(vertical: Array, slash: Array, spans: PackedSpans) -> Array:
    """Orders the scores of each document: columns by token, diagonals by distance.

    Args:
        vertical: int32 or fp32 [R, NB, g], scores of columns.
        slash: int32 or fp32 [R, NB, g], scores of diagonals, at the key that the last query sees.
        spans: the documents; the last query is that of their last token.

    Returns:
        [2, R, NB, g], distance i of a document at its token i; 0 after its tokens.
    """
    num_blocks, size = vertical.shape[-2:]
    start, tokens = spans.start * size, spans.spread(spans.tokens)
    # Distance i is stored at the i-th token before the last one.
    distance = spans.entries(size)
    held_by = jnp.clip((start + tokens - 1)[..., None] - distance, 0, num_blocks * size - 1)
    slash = jnp.take_along_axis(
        slash.reshape(len(slash), -1), held_by.reshape(len(slash), -1), axis=1
    ).reshape(slash.shape)
    exists = spans.inside[..., None] & (distance < tokens[..., None])
    return jnp.where(exists, jnp.stack([vertical, slash]), 0)


def _by_head(blocks: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Moves heads before blocks: [B, n, Hq, ...] to [B, Hq, n, ...]."""
    columns, own, tails = (x.swapaxes(1, 2) for x in blocks)
    return columns, own, tails


def _of_one(block: tuple[Array, ...]) -> tuple[Array, ...]:
    """Drops the batch and block axes of a single block: [1, Hq, 1, ...] to [Hq, ...]."""
    return tuple(x[0, :, 0] for x in block)


def joined(
    block_peak: Array,
    block_total: Array,
    slot: Array,
    num_slots: int,
    scale: float,
    axis_names: collectives.AxisNames,
) -> tuple[Array, Array]:
    """Combines per-block peaks and sums, fp32 [B, n, Hq, u], over the blocks of each document.

    Returns two fp32 [B, E + 1, Hq, u], replicated; the last slot collects blocks without one.
    """
    batch, _, heads, num_queries = block_peak.shape
    into = jnp.arange(batch)[:, None], slot

    def by_slot(start: Array) -> Any:
        return jnp.broadcast_to(start, (batch, num_slots + 1, heads, num_queries)).at[into]

    peak = by_slot(jnp.float32(-jnp.inf)).max(block_peak)
    peak = collectives.maximum(peak, axis_names)
    weight = estimate.relative_exp(block_peak, peak[into], scale)
    limbs = tuple(by_slot(jnp.int32(0)).add(x) for x in estimate.to_limbs(weight, block_total))
    return peak, estimate.from_limbs(*collectives.exact_sum(limbs, axis_names))
