"""Scores of key columns and diagonals, estimated with the last queries of each document.

A key block is scored only by the queries of its own document, so the documents of a pack together
cost as much as one sequence. The scores must be bit-identical for any number of ranks; otherwise
ranks and runs would disagree about the index. Three rules ensure this:

- Logits are computed per key block, batched in chunks with a shape that depends only on the
  sequence length: the compiler sees the same matrix products for any number of ranks.
- Floats are only combined elementwise or by a maximum. A multiplication never feeds an addition,
  so contraction to a fused multiply-add cannot change a bit.
- Sums are integer sums (fixed point), exact in any order. The raw logits of fixed budgets, which
  have no known range, are summed in a fixed order instead.

If the backend has kernels for the estimate, two kernels replace the first rule and the sums within
a block: their code and order of additions are the same for every block. Sums over blocks are exact
there too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.segments import PackedSegments, Segments, sparse_segments
from pallas_kernels import backends
from pallas_kernels.interface import Estimate, ProbeCall

# Fixed-point one of a probability or mass is 2^30. A sum of masses with total one stays below 2^31
# even if each of 2^23 terms is rounded up.
MASS_BITS = 30
MASS_ONE = 1 << MASS_BITS

# The softmax normalizer is summed in two limbs: multiples of 2^-8, and the rest in 2^-24.
_HIGH_BITS = 8
_LOW_BITS = 16
MAX_BLOCKS = 1 << (32 - _LOW_BITS)
MAX_TOKENS = 1 << (31 - _HIGH_BITS)

_LIMB_BITS = MASS_BITS // 2


Scores = tuple[Array, Array, Array]


class Chunk(NamedTuple):
    """Some local key blocks.

    Attributes:
        ids: int32 [C], global numbers; NB for padding, which is after every query.
        slot: int32 [C, B], the document of each block; E for none. None if there is only one.
    """

    ids: Array
    slot: Array | None

    def own(self, x: Array) -> Array:
        """Looks up values [B or 1, E, ...] for the blocks' documents: [C or 1, B or 1, ...]."""
        if self.slot is None:
            return x[None, :, 0]
        return x[jnp.arange(len(x)), jnp.minimum(self.slot, x.shape[1] - 1)]


class KeyBlocks:
    """The local key blocks of a sequence, each to be scored by queries of its own document."""

    def __init__(
        self, k: Array, context: SelectionContext, segments: Segments | None = None
    ) -> None:
        """Reads [B, n, Hk, D], local keys; `segments` are the documents of each batch entry."""
        self.k, self.context = k, context
        self.block_size = k.shape[1] // context.block_ids.shape[0]
        self.segments = segments or sparse_segments(context, 1, self.block_size)
        self.slot = None
        if isinstance(self.segments, PackedSegments):
            self.slot = self.segments.slot_of_block[:, context.block_ids]  # [B, n]; E for none

    def map_logits(
        self,
        body: Callable[[Array, Chunk], tuple[Array, ...]],
        queries: Callable[[Chunk], Array],
        positions: Array,
        chunk: int | None = None,
    ) -> tuple[Array, ...]:
        """Applies `body` to the raw causal logits of every block, C = `chunk` blocks at a time.

        `queries` are [C or 1, B, Hq, u, D] at `positions`, int32 [B or 1, E, u]. `body` maps logits
        fp32 [C, B, Hq, u, g], -inf for keys after the query, to a tuple of arrays [C, B, Hq, ...];
        here they become [B, Hq, n/g, ...]. C must be the same for any number of ranks; the default
        is a sixteenth of the sequence, at most 64 blocks.
        """
        block_ids, num_blocks, _ = self.context.shards
        size, num_local = self.block_size, block_ids.shape[0]
        batch, _, kv_heads, head_dim = self.k.shape
        # Depends only on the length: about 16 steps at 128K tokens on one device. A rank with less
        # than a chunk computes padding, which is cheap.
        if chunk is None:
            chunk = min(max(num_blocks // 16, 1), 64)
        steps = -(-num_local // chunk)
        padding = steps * chunk - num_local
        ids = jnp.pad(block_ids, (0, padding), constant_values=num_blocks)
        slot = self.slot
        if slot is not None:
            slot = jnp.pad(slot.T, ((0, padding), (0, 0)), constant_values=self.segments.slots)
        k = jnp.pad(self.k, ((0, 0), (0, padding * size), (0, 0), (0, 0)))
        # bf16 products are exact in fp32; only fp32 inputs need the slower passes.
        precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None

        def queries_by_kv_head(of: Chunk) -> Array:
            q = queries(of)
            q = q.reshape(*q.shape[:2], kv_heads, -1, head_dim)
            return jnp.broadcast_to(q, (chunk, *q.shape[1:]))

        # Blocks are a batch dimension, so each block is a separate product and its bits cannot
        # depend on its position in the chunk. A single document has the same queries in every step.
        same = queries_by_kv_head(Chunk(ids[:chunk], None)) if slot is None else None

        def step(i: Array) -> tuple[Array, ...]:
            own_slot = None if slot is None else _part(slot, i, chunk)
            of = Chunk(_part(ids, i, chunk), own_slot)
            k_chunk = lax.dynamic_slice_in_dim(k, i * chunk * size, chunk * size, axis=1)
            k_chunk = k_chunk.reshape(batch, chunk, size, kv_heads, head_dim)
            logits = lax.dot_general(
                queries_by_kv_head(of) if same is None else same,
                k_chunk.transpose(1, 0, 3, 2, 4),
                (((4,), (4,)), ((0, 1, 2), (0, 1, 2))),
                precision=precision,
                preferred_element_type=jnp.float32,
            ).reshape(chunk, batch, -1, positions.shape[-1], size)
            seen_by = of.own(positions)
            if of.slot is not None:
                seen_by = jnp.where((of.slot < self.segments.slots)[..., None], seen_by, -1)
            key_positions = of.ids[:, None] * size + jnp.arange(size)
            causal = key_positions[:, None, None, None] <= seen_by[:, :, None, :, None]
            return body(jnp.where(causal, logits, -jnp.inf), of)

        def to_local(x: Array) -> Array:  # [steps, C, B, Hq, ...] -> [B, Hq, n/g, ...]
            x = x.reshape(steps * chunk, *x.shape[2:])[:num_local]
            return jnp.moveaxis(x, 0, 2)

        return tuple(map(to_local, lax.map(step, jnp.arange(steps))))

    def join(self, block_peak: Array, block_total: Array, scale: float) -> tuple[Array, Array]:
        """Combines per-block peaks and sums, fp32 [B, Hq, n, u], over the blocks of each document.

        Returns peaks and normalizers, fp32 [B, E, Hq, u], replicated; 1 for queries without keys.
        With packed documents an additional last slot collects blocks without one.
        """
        axes = self.context.axis_names
        if self.slot is None:
            peak = collectives.maximum(block_peak.max(2), axes)
            weight = relative_exp(block_peak, peak[:, :, None], scale)
            limbs = tuple(x.sum(2, dtype=jnp.uint32) for x in to_limbs(weight, block_total))
            peak, limbs = peak[:, None], tuple(x[:, None] for x in limbs)
        else:
            block_peak, block_total = block_peak.swapaxes(1, 2), block_total.swapaxes(1, 2)
            batch, _, heads, num_queries = block_peak.shape
            into = jnp.arange(batch)[:, None], self.slot

            def by_slot(start: Array) -> Any:
                shape = batch, self.segments.slots + 1, heads, num_queries
                return jnp.broadcast_to(start, shape).at[into]

            peak = by_slot(jnp.float32(-jnp.inf)).max(block_peak)
            peak = collectives.maximum(peak, axes)
            weight = relative_exp(block_peak, peak[into], scale)
            limbs = tuple(by_slot(jnp.uint32(0)).add(x) for x in to_limbs(weight, block_total))
        total = from_limbs(*collectives.exact_sum(limbs, axes))
        return peak, jnp.where(total > 0, total, 1.0)


def _part(x: Array, i: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, i * size, size)


def last_positions(segments: Segments, block_size: int, count: int) -> Array:
    """Returns the last `count` positions of each document: int32 [B or 1, E, count].

    The first ones precede a document with fewer tokens.
    """
    ends = segments.first * block_size + segments.tokens
    return ends[..., None] + jnp.arange(-count, 0, dtype=jnp.int32)


def queries_at(q: Array, positions: Array, context: SelectionContext) -> Array:
    """Gathers queries at positions int32 [B or 1, E, u]: [B, E, Hq, u, D], replicated."""
    if not context.documents.packed:
        rows = collectives.gather_rows(q, positions.reshape(-1), *context.shards)[:, None]
    else:

        def gather(x: Array, positions: Array) -> Array:
            return collectives.gather_rows(x[None], positions.reshape(-1), *context.shards)[0]

        rows = jax.vmap(gather)(q, positions)
        rows = rows.reshape(*positions.shape, *q.shape[2:])
    return rows.swapaxes(2, 3)


def last_queries(q: Array, context: SelectionContext, segments: Segments, count: int) -> Array:
    """Gathers the last `count` real queries of each document: [B, E, Hq, u, D], replicated.

    In shorter documents the first ones are arbitrary.
    """
    size = q.shape[1] // context.block_ids.shape[0]
    positions = last_positions(segments, size, count)
    return queries_at(q, jnp.clip(positions, 0, context.num_blocks * size - 1), context)


def softmax_scores(
    q_last: Array, k: Array, context: SelectionContext, segments: Segments | None = None
) -> Scores:
    """Computes the mean attention mass of local key columns, and of diagonals in local blocks.

    The softmax of the last u queries of each document runs over its keys on all ranks. XLA computes
    what the backend has no kernels for.

    Args:
        q_last: [B, E, Hq, u, D], replicated; the queries of `last_queries`.
        k: [B, n, Hk, D], local keys.
        context: the shards of the sequence.
        segments: the documents; may be omitted for a single one.

    Returns:
        (columns, own, tails), int32 [B, Hq, n/g, g], [B, Hq, n/g, g] and [B, Hq, n/g, u-1]. 2^30 is
        the total mass of a head; the columns of a document sum to it, up to rounding. The diagonals
        are complete after `join_diagonals`. 0 in blocks without a slot.
    """
    blocks = KeyBlocks(k, context, segments)
    kernels = backends.estimate_kernels(context.backend, q_last[:, 0], blocks.block_size)
    tiles = _XlaTiles(q_last, blocks)
    if kernels is not None:
        tiles = _KernelTiles(q_last, blocks, kernels)
    # Two passes over the logits are cheaper than storing them: at 128K tokens and 16 heads they
    # would need half a gigabyte. The results are [B, Hq, n/g, u].
    return tiles.masses(*blocks.join(*tiles.statistics(), tiles.scale))


def logit_scores(
    q_last: Array, k: Array, context: SelectionContext, segments: Segments | None = None
) -> Scores:
    """Sums raw logits over columns, and over diagonals of blocks, in fp32 like softmax scores.

    Columns not seen by all of the last queries get -inf, as in the reference implementation. The
    scale is omitted because it does not change the order.
    """

    def block_scores(logits: Array, _: Chunk) -> tuple[Array, Array]:
        seen = jnp.where(logits == -jnp.inf, 0.0, logits)
        return ordered_sum(logits), ordered_sum(_skew(seen))

    columns, diagonals = _XlaTiles(q_last, KeyBlocks(k, context, segments)).map(block_scores)
    return columns, *_own_and_tails(diagonals, columns)


@dataclasses.dataclass(frozen=True)
class _XlaTiles:
    """Tiles of logits computed by XLA, on any platform."""

    q: Array
    blocks: KeyBlocks

    @property
    def scale(self) -> float:
        return self.blocks.context.scale_for(self.q.shape[-1])

    def map(self, body: Callable) -> tuple[Array, ...]:
        """Applies the body of `map_logits` to the logits of the last queries."""
        positions = last_positions(self.blocks.segments, self.blocks.block_size, self.q.shape[3])
        return self.blocks.map_logits(body, lambda chunk: chunk.own(self.q), positions)

    def statistics(self) -> tuple[Array, Array]:
        """Returns peak and sum of exp((x - peak) * scale): fp32 [B, Hq, n/g, u] each."""
        peak, total = self.map(lambda logits, _: in_block(logits, self.scale))
        return peak, total

    def masses(self, peak: Array, normaliser: Array) -> Scores:
        """Computes mean masses of columns and diagonals, from peaks and normalizers by document.

        Tails are this block's contributions to the diagonals of the next block's first keys.
        """
        count = self.q.shape[3]
        to_mass = MASS_ONE / normaliser

        def body(logits: Array, chunk: Chunk) -> tuple[Array, Array]:  # [C, B, Hq, u, g]
            terms = relative_exp(logits, chunk.own(peak)[..., None], self.scale)
            mass = jnp.minimum(_round(terms * chunk.own(to_mass)[..., None]), MASS_ONE)
            return _mean_of_rows(mass, count), _mean_of_rows(_skew(mass), count)

        columns, diagonals = self.map(body)
        return columns, *_own_and_tails(diagonals, columns)


@dataclasses.dataclass(frozen=True)
class _KernelTiles(_XlaTiles):
    """Tiles of logits computed by a backend's kernels, with a fixed order of additions."""

    kernels: Estimate

    @property
    def call(self) -> ProbeCall:
        """Passes each block of a pack as a sequence, with its document's queries and end."""
        k, (block_ids, num_blocks, _) = self.blocks.k, self.blocks.context.shards
        segments, slot, size = self.blocks.segments, self.blocks.slot, self.blocks.block_size
        if slot is None or not isinstance(segments, PackedSegments):
            valid_len = None if isinstance(segments.tokens, int) else segments.tokens
            return ProbeCall(self.q[:, 0], k, block_ids, num_blocks, self.scale, valid_len)
        entry = jnp.arange(len(k), dtype=jnp.int32)[:, None]
        held = jnp.minimum(slot, segments.slots - 1)
        end = segments.tokens[entry, held] - (block_ids - segments.first[entry, held]) * size
        end = jnp.where(slot < segments.slots, end, 0)
        sets = self.q.reshape(-1, *self.q.shape[2:])
        keys = k.reshape(-1, size, *k.shape[2:])
        queries = (entry * segments.slots + held).reshape(-1)
        one = jnp.zeros(1, jnp.int32)
        return ProbeCall(sets, keys, one, 1, self.scale, end.reshape(-1), queries)

    def statistics(self) -> tuple[Array, Array]:
        peak, total = map(self._by_block, self.kernels.block_statistics(self.call))
        return peak, total

    def masses(self, peak: Array, normaliser: Array) -> Scores:
        heads, num_queries = self.q.shape[2:4]
        to_mean_mass = MASS_ONE // num_queries / normaliser
        slots = self.blocks.segments.slots
        by_set = (x[:, :slots].reshape(-1, heads, num_queries) for x in (peak, to_mean_mass))
        parts = self.kernels.block_masses(self.call, *by_set)
        columns, own, beyond = map(self._by_block, parts)
        return _round(columns), _round(own), _round(beyond[..., : num_queries - 1])

    def _by_block(self, x: Array) -> Array:
        """Returns results of `call` as [B, Hq, n/g, ...]."""
        if self.blocks.slot is None:
            return x
        return x.reshape(*self.blocks.slot.shape, *x[:, :, 0].shape[1:]).swapaxes(1, 2)


def _own_and_tails(diagonals: Array, columns: Array) -> tuple[Array, Array]:
    """Splits the diagonals [..., g + u - 1] of a block into its own keys' and the next block's."""
    size = columns.shape[-1]
    return diagonals[..., :size], diagonals[..., size:]


def to_limbs(weight: Array, total: Array) -> tuple[Array, Array]:
    """Splits products of weights <= 1 and totals into two uint32 limbs, summable in any order.

    The products of a row must sum to at most `MAX_TOKENS`, with at most `MAX_BLOCKS` terms. The low
    limb of the heaviest, of weight 1, is not rounded and below 2^16; so the sum does not overflow.
    """
    in_high_units = weight * (total * 2.0**_HIGH_BITS)
    low = lax.rem(in_high_units, jnp.ones_like(in_high_units)) * 2.0**_LOW_BITS
    return in_high_units.astype(jnp.uint32), _round(low).astype(jnp.uint32)


def from_limbs(high: Array, low: Array) -> Array:
    """Returns the fp32 sum of products from the sums of both limbs."""
    high, low = high.astype(jnp.float32), low.astype(jnp.float32)
    # The product is exact (a power of two), so contraction cannot change this sum.
    return (high + low * 2.0**-_LOW_BITS) * 2.0**-_HIGH_BITS


def in_block(logits: Array, scale: float) -> tuple[Array, Array]:
    """Returns peak and sum of terms of a block's logits [..., u, g]: fp32 [..., u] each."""
    # Keeps a block's sum of terms <= 1 within 2^30.
    term_one = float(1 << (MASS_BITS - (logits.shape[-1] - 1).bit_length()))
    peak = logits.max(-1)
    terms = relative_exp(logits, peak[..., None], scale)
    total = _round(terms * term_one).sum(-1, dtype=jnp.int32)
    return peak, total.astype(jnp.float32) * (1 / term_one)


def join_diagonals(own: Array, tails: Array) -> Array:
    """Adds the tails [..., NB, u - 1] of each block to the next block's [..., NB, g].

    Diagonal s is stored at the key that the last query sees at distance s: token V-1-s if that
    query is the last of V tokens.
    """
    lead = [(0, 0)] * (tails.ndim - 2)
    received = jnp.pad(tails[..., :-1, :], [*lead, (1, 0), (0, own.shape[-1] - tails.shape[-1])])
    return own + received


def _skew(x: Array) -> Array:
    """[..., u, g] -> [..., u, g+u-1]: shifts row u by (last row - u), so diagonals are columns."""
    rows, columns = x.shape[-2:]
    lead = x.shape[:-2]
    x = jnp.flip(x, -2)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows)])
    # With one column less, each row starts one position further right than the previous one.
    x = x.reshape(*lead, rows * (columns + rows))[..., : rows * (columns + rows - 1)]
    return x.reshape(*lead, rows, columns + rows - 1)


def _mean_of_rows(mass: Array, count: int) -> Array:
    """Returns floor(sum over rows / count) of masses int32 [..., u, g], without overflow."""
    high = (mass >> _LIMB_BITS).sum(-2, dtype=jnp.int32)
    low = (mass & ((1 << _LIMB_BITS) - 1)).sum(-2, dtype=jnp.int32)
    rest = (high % count << _LIMB_BITS) + low
    return (high // count << _LIMB_BITS) + rest // count


def ordered_sum(x: Array) -> Array:
    """Sums the rows of [..., u, g] by halving, in a fixed order of additions."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        odd = x[..., 2 * half :, :]
        x = jnp.concatenate([x[..., :half, :] + x[..., half : 2 * half, :], odd], axis=-2)
    return x[..., 0, :]


def _round(x: Array) -> Array:
    return jnp.round(x).astype(jnp.int32)


def relative_exp(x: Array, peak: Array, scale: float) -> Array:
    """Returns exp((x - peak) * scale) for x <= peak; 0 where x is -inf, even if the peak is.

    The minimum does not change the value; it separates the product from the additions inside exp,
    which could be contracted otherwise.
    """
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    return jnp.exp(jnp.minimum((x - peak) * scale, 0.0))
