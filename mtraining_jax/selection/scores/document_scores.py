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

    def gather(x: Array, own: Array) -> Array:
        where = context.block_ids, context.num_blocks, context.axis_names
        return collectives.gather_rows(x[None], own.reshape(-1), *where)[0]

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
        every = queries_at(q, positions, context)
        return lambda entry, slot: every[entry, slot]
    block_size = q.shape[1] // context.block_ids.shape[0]
    local = collectives.local_index(context.block_ids, context.num_blocks)[positions // block_size]
    places = local * block_size + positions % block_size
    return lambda entry, slot: q[entry, places[entry, slot]].swapaxes(0, 1)


def softmax_scores(
    q_last: Array, k: Array, slots: PackedSpans, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Variant of `estimate.softmax_scores` per document, with its own last queries and keys.

    If the backend has kernels for the estimate, each key block is passed as a sequence, with the
    queries of its document and the document's end relative to the block.

    Args:
        q_last: [B, E, Hq, u, D], from `last_queries`.
        k, context: as in `Pattern.select`.
        slots: the documents.

    Returns:
        (columns, own, tails) as in `estimate.softmax_scores`; 0 in blocks without a slot.
    """
    block_size = k.shape[1] // context.block_ids.shape[0]
    kernels = backends.estimate_kernels(context.backend, q_last[:, 0], block_size)
    if kernels is not None:
        return _by_kernels(kernels, q_last, k, slots, context)
    scale, num_slots = context.scale_for(q_last.shape[-1]), q_last.shape[1]
    blocks = OwnBlocks(k, slots, context)

    def tile(k: Array, slot: Array, place: Array, entry: Array) -> estimate.XlaTiles:
        end = _end(slots, slot, place, entry, k.shape[0])
        return estimate.XlaTiles(
            q_last[entry, slot][None],
            k[None],
            scale=scale,
            block_ids=jnp.zeros(1, jnp.int32),
            num_blocks=1,
            valid_len=end,
        )

    block_peak, block_total = blocks.map(lambda *block: _of_one(tile(*block).statistics()))
    peak, normaliser = joined(
        block_peak, block_total, blocks.slot, num_slots, scale, context.axis_names
    )
    normaliser = jnp.where(normaliser > 0, normaliser, 1.0)  # of nonexistent queries

    def masses(k: Array, slot: Array, place: Array, entry: Array) -> tuple[Array, ...]:
        own = peak[entry, slot][None], normaliser[entry, slot][None]
        return _of_one(tile(k, slot, place, entry).masses(*own))

    return _by_head(blocks.map(masses))


def _by_kernels(
    kernels: Estimate, q_last: Array, k: Array, slots: PackedSpans, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Computes `softmax_scores` with a backend's kernels."""
    batch, num_slots, heads, num_queries, dim = q_last.shape
    num_local = context.block_ids.shape[0]
    slot, place = OwnBlocks(k, slots, context).places
    entry = jnp.arange(batch, dtype=jnp.int32)[:, None]
    held = jnp.minimum(slot, num_slots - 1)
    end = _end(slots, slot, place, entry, k.shape[1] // num_local)
    sets = q_last.reshape(-1, heads, num_queries, dim)
    blocks = k.reshape(batch * num_local, -1, *k.shape[2:])
    scale = context.scale_for(dim)
    queries = (entry * num_slots + held).reshape(-1)
    own = jnp.zeros(1, jnp.int32)
    call = ProbeCall(sets, blocks, own, 1, scale, end.reshape(-1), queries)

    def by_block(x: Array) -> Array:
        return x.reshape(batch, num_local, *x[:, :, 0].shape[1:])

    block_peak, block_total = map(by_block, kernels.block_statistics(call))
    peak, normaliser = joined(block_peak, block_total, slot, num_slots, scale, context.axis_names)
    normaliser = jnp.where(normaliser > 0, normaliser, 1.0)  # of nonexistent queries
    to_mean_mass = estimate.MASS_ONE // num_queries / normaliser
    of_sets = (x[:, :-1].reshape(-1, heads, num_queries) for x in (peak, to_mean_mass))
    columns, own, beyond = kernels.block_masses(call, *of_sets)
    found = columns, own, beyond[..., : num_queries - 1]
    return _by_head(tuple(jnp.round(by_block(x)).astype(jnp.int32) for x in found))


def logit_scores(
    q_last: Array, k: Array, slots: PackedSpans, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Variant of `estimate.logit_scores` per document; arguments as in `softmax_scores`.

    In blocks without a slot diagonals are 0 and columns -inf.
    """

    def sums(k: Array, slot: Array, place: Array, entry: Array) -> tuple[Array, ...]:
        end = _end(slots, slot, place, entry, k.shape[0])
        found = estimate.logit_scores(
            q_last[entry, slot][None],
            k[None],
            block_ids=jnp.zeros(1, jnp.int32),
            num_blocks=1,
            valid_len=end,
        )
        return _of_one(found)

    return _by_head(OwnBlocks(k, slots, context).map(sums))


def _end(slots: PackedSpans, slot: Array, place: Array, entry: Array, block_size: int) -> Array:
    """Returns the end of a block's document relative to the block; 0 without a document."""
    num_slots = slots.slots
    end = slots.tokens[entry, jnp.minimum(slot, num_slots - 1)] - place * block_size
    return jnp.where(slot < num_slots, end, 0)


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
    there = spans.inside[..., None] & (distance < tokens[..., None])
    return jnp.where(there, jnp.stack([vertical, slash]), 0)


def _by_head(found: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Moves heads before blocks: [B, n, Hq, ...] to [B, Hq, n, ...]."""
    columns, own, tails = (x.swapaxes(1, 2) for x in found)
    return columns, own, tails


def _of_one(found: tuple[Array, ...]) -> tuple[Array, ...]:
    """Drops the batch and block axes of a single block: [1, Hq, 1, ...] to [Hq, ...]."""
    return tuple(x[0, :, 0] for x in found)


def joined(
    block_peak: Array,
    block_total: Array,
    slot: Array,
    num_slots: int,
    scale: float,
    axis_names: collectives.AxisNames,
) -> tuple[Array, Array]:
    """Combines per-block peaks and sums over all blocks of each document.

    Args:
        block_peak, block_total: fp32 [B, n, Hq, u], as from `estimate.XlaTiles.statistics`.
        slot: int32 [B, n], slot of each block; E for none.
        num_slots: E.
        scale: scale of the logits.
        axis_names: mesh axes that blocks are sharded over.

    Returns:
        Two fp32 [B, E + 1, Hq, u], replicated; the last slot collects blocks without a document.
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


class OwnBlocks:
    """The local key blocks, each to be processed with queries of its own document.

    Attributes:
        slot: int32 [B, n], slot of each block's document; E for none.
    """

    def __init__(self, k: Array, slots: PackedSpans, context: SelectionContext) -> None:
        num_local, num_slots = context.block_ids.shape[0], slots.slots
        self._chunk = min(max(context.num_blocks // 16, 1), 64)
        self._k = k.reshape(k.shape[0], num_local, -1, *k.shape[2:])
        self.slot = slots.of_block[:, context.block_ids]
        held = jnp.minimum(self.slot, num_slots - 1)
        self._place = context.block_ids - jnp.take_along_axis(slots.first, held, axis=1)

    @property
    def places(self) -> tuple[Array, Array]:
        """Returns the slot of each block and its number in its document: int32 [B, n] each."""
        return self.slot, self._place

    def map(self, of_block: Callable[..., tuple[Array, ...]]) -> tuple[Array, ...]:
        """Maps a function over single blocks; returns [B, n, Hq, ...].

        Its arguments are keys [g, Hk, D], slot, block number in the document, and batch entry; it
        returns arrays [Hq, ...]. Results of blocks without a slot are undefined.
        """
        batch, num_local = self.slot.shape
        padding = -num_local % self._chunk
        blocks = tuple(
            jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)).swapaxes(0, 1)
            for x in (self._k, self.slot, self._place)
        )
        entries = jnp.arange(batch)
        found = lax.map(lambda x: jax.vmap(of_block)(*x, entries), blocks, batch_size=self._chunk)
        return tuple(x[:num_local].swapaxes(0, 1) for x in found)
