"""Scores of key columns and diagonals, estimated with the last queries of a sequence.

The scores must be bit-identical for any number of ranks; otherwise ranks and runs would disagree
about the index. Three rules ensure this:

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

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from pallas_kernels.backends import estimate_kernels
from pallas_kernels.interface import Estimate, ProbeCall

# Fixed-point one of a probability or mass is 2^30. A sum of masses with total one stays below 2^31
# even if each of 2^23 terms is rounded up.
MASS_BITS = 30
MASS_ONE = 1 << MASS_BITS

# The softmax normalizer is summed in two limbs: multiples of 2^-8, and the rest in 2^-24.
_HIGH_BITS = 8
_LOW_BITS = 16
MAX_BLOCKS = 1 << (31 - _LOW_BITS)
MAX_TOKENS = 1 << (31 - _HIGH_BITS)

_LIMB_BITS = MASS_BITS // 2


def softmax_scores(
    q_BHuD: Array, k_BnHD: Array, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Computes the mean attention mass of local key columns, and of diagonals in local blocks.

    The softmax of the last u queries, replicated, runs over all keys of all ranks. XLA computes
    what the backend has no kernels for.

    Returns:
        (columns, own, tails), int32 [B, Hq, n/g, g], [B, Hq, n/g, g] and [B, Hq, n/g, u-1]. 2^30 is
        the total mass of a head; the columns of the whole sequence sum to it, up to rounding. The
        diagonals are complete after `join_diagonals`.
    """
    block_size = k_BnHD.shape[1] // context.block_ids.shape[0]
    kernels = estimate_kernels(context.backend, q_BHuD, block_size)
    tiles = XlaTiles(q_BHuD, k_BnHD, context)
    if kernels is not None:
        tiles = _KernelTiles(q_BHuD, k_BnHD, context, kernels)
    # Two passes over the logits are cheaper than storing them: at 128K tokens and 16 heads they
    # would need half a gigabyte. The results are [B, Hq, n/g, u].
    block_peak, block_total = tiles.statistics()
    peak = collectives.maximum(block_peak.max(2), context.axis_names)
    scale = context.scale_for(q_BHuD.shape[-1])
    weight = relative_exp(block_peak, peak[:, :, None], scale)
    limbs = tuple(x.sum(2, dtype=jnp.int32) for x in to_limbs(weight, block_total))
    normaliser = from_limbs(*collectives.exact_sum(limbs, context.axis_names))
    if context.valid_len is not None:  # queries before the start of a short prompt see nothing
        normaliser = jnp.where(normaliser > 0, normaliser, 1.0)
    return tiles.masses(peak, normaliser)


def to_limbs(weight: Array, total: Array) -> tuple[Array, Array]:
    """Splits products of weights <= 1 and totals into two integer limbs, summable in any order.

    The products of a row must sum to less than `MAX_TOKENS`, with at most `MAX_BLOCKS` terms.
    """
    in_high_units = weight * (total * 2.0**_HIGH_BITS)
    low = lax.rem(in_high_units, jnp.ones_like(in_high_units)) * 2.0**_LOW_BITS
    return in_high_units.astype(jnp.int32), _round(low)


def from_limbs(high: Array, low: Array) -> Array:
    """Returns the fp32 sum of products from the sums of both limbs."""
    high, low = high.astype(jnp.float32), low.astype(jnp.float32)
    # The product is exact (a power of two), so contraction cannot change this sum.
    return (high + low * 2.0**-_LOW_BITS) * 2.0**-_HIGH_BITS


@dataclasses.dataclass(frozen=True)
class XlaTiles:
    """Tiles of logits computed by XLA, on any platform."""

    q: Array
    k: Array
    context: SelectionContext

    @property
    def scale(self) -> float:
        return self.context.scale_for(self.q.shape[-1])

    def map(self, body: Callable) -> tuple[Array, ...]:
        """Applies the body of `map_logits` to the logits of the last queries."""
        context, end = self.context, self.context.valid_len
        if end is None:
            end = context.num_blocks * (self.k.shape[1] // context.block_ids.shape[0])
        positions = last_positions(self.q.shape[2], end)
        return map_logits(body, self.q, positions, self.k, context.block_ids, context.num_blocks)

    def statistics(self) -> tuple[Array, Array]:
        """Returns peak and sum of exp((x - peak) * scale): fp32 [B, Hq, n/g, u] each."""
        peak, total = self.map(lambda logits, _: in_block(logits, self.scale))
        return peak, total

    def masses(self, peak: Array, normaliser: Array) -> tuple[Array, Array, Array]:
        """Computes mean masses of columns and diagonals, from peaks and normalizers [B, Hq, u].

        Tails are this block's contributions to the diagonals of the next block's first keys.
        """
        count = self.q.shape[2]
        to_mass = MASS_ONE / normaliser

        def body(logits: Array, _: Array) -> tuple[Array, Array]:  # [C, B, Hq, u, g]
            terms = relative_exp(logits, peak[..., None], self.scale)
            mass = jnp.minimum(_round(terms * to_mass[..., None]), MASS_ONE)
            return _mean_of_rows(mass, count), _mean_of_rows(_skew(mass), count)

        columns, diagonals = self.map(body)
        block_size = columns.shape[-1]
        return columns, diagonals[..., :block_size], diagonals[..., block_size:]


@dataclasses.dataclass(frozen=True)
class _KernelTiles(XlaTiles):
    """Tiles of logits computed by a backend's kernels, with a fixed order of additions."""

    kernels: Estimate

    @property
    def call(self) -> ProbeCall:
        context = self.context
        where = context.block_ids, context.num_blocks
        return ProbeCall(self.q, self.k, *where, self.scale, context.valid_len)

    def statistics(self) -> tuple[Array, Array]:
        return self.kernels.block_statistics(self.call)

    def masses(self, peak: Array, normaliser: Array) -> tuple[Array, Array, Array]:
        num_queries = self.q.shape[2]
        to_mean_mass = MASS_ONE // num_queries / normaliser
        columns, own, beyond = self.kernels.block_masses(self.call, peak, to_mean_mass)
        return _round(columns), _round(own), _round(beyond[..., : num_queries - 1])


def logit_scores(
    q_BHuD: Array, k_BnHD: Array, context: SelectionContext
) -> tuple[Array, Array, Array]:
    """Sums raw logits over columns, and over diagonals of blocks: as `softmax_scores`, in fp32.

    Columns not seen by all of the last queries get -inf, as in the reference implementation. The
    scale is omitted because it does not change the order.
    """
    block_size = k_BnHD.shape[1] // context.block_ids.shape[0]

    def block_scores(logits: Array, _: Array) -> tuple[Array, Array]:
        seen = jnp.where(logits == -jnp.inf, 0.0, logits)
        return ordered_sum(logits), ordered_sum(_skew(seen))

    columns, diagonals = XlaTiles(q_BHuD, k_BnHD, context).map(block_scores)
    return columns, diagonals[..., :block_size], diagonals[..., block_size:]


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


def last_positions(count: int, end: int | Array) -> Array:
    """Returns the last positions before `end`, int32 [count]; negative if there are too few."""
    return end + jnp.arange(-count, 0, dtype=jnp.int32)


def map_logits(
    body: Callable,
    q_BHuD: Array,
    query_positions: Array,
    k_BnHD: Array,
    block_ids: Array,
    num_blocks: int,
    chunk: int | None = None,
) -> tuple[Array, ...]:
    """Applies `body` to the raw causal logits of every local block, C = `chunk` blocks at a time.

    It maps logits fp32 [C, B, Hq, u, g] (-inf for keys after the query at `query_positions`, int32
    [u]) and the global numbers of the blocks, int32 [C], to a tuple of arrays [C, B, Hq, ...]; here
    they become [B, Hq, n/g, ...]. Blocks numbered NB are padding, after every query. C must be the
    same for any number of ranks; the default is a sixteenth of the sequence, at most 64 blocks.
    """
    batch, _, kv_heads, head_dim = k_BnHD.shape
    num_heads, num_queries = q_BHuD.shape[1:3]
    num_local = block_ids.shape[0]
    block_size = k_BnHD.shape[1] // num_local
    # Depends only on the length: about 16 steps at 128K tokens on one device. A rank with less
    # than a chunk computes padding, which is cheap.
    if chunk is None:
        chunk = min(max(num_blocks // 16, 1), 64)
    steps = -(-num_local // chunk)
    padding = steps * chunk - num_local
    ids = jnp.pad(block_ids, (0, padding), constant_values=num_blocks)
    k = jnp.pad(k_BnHD, ((0, 0), (0, padding * block_size), (0, 0), (0, 0)))
    # Blocks are a batch dimension, so each block is a separate product and its bits cannot depend
    # on its position in the chunk.
    q = q_BHuD.reshape(1, batch, kv_heads, -1, head_dim)
    q = jnp.broadcast_to(q, (chunk, *q.shape[1:]))
    # bf16 products are exact in fp32; only fp32 inputs need the slower passes.
    precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None

    def step(i):
        tokens = chunk * block_size
        k_chunk = lax.dynamic_slice_in_dim(k, i * tokens, tokens, axis=1)
        k_chunk = k_chunk.reshape(batch, chunk, block_size, kv_heads, head_dim)
        logits = lax.dot_general(
            q,
            k_chunk.transpose(1, 0, 3, 2, 4),
            (((4,), (4,)), ((0, 1, 2), (0, 1, 2))),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).reshape(chunk, batch, num_heads, num_queries, block_size)
        chunk_ids = lax.dynamic_slice_in_dim(ids, i * chunk, chunk)
        key_positions = chunk_ids[:, None] * block_size + jnp.arange(block_size)
        causal = key_positions[:, None, None, None] <= query_positions[:, None]
        return body(jnp.where(causal, logits, -jnp.inf), chunk_ids)

    def to_local(x: Array) -> Array:  # [steps, C, B, Hq, ...] -> [B, Hq, n/g, ...]
        x = x.reshape(steps * chunk, *x.shape[2:])[:num_local]
        return jnp.moveaxis(x, 0, 2)

    return tuple(map(to_local, lax.map(step, jnp.arange(steps))))


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
