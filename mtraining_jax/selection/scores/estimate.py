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
from mtraining_jax.selection.collectives import AxisNames
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
    q_BHuD: Array,
    k_BnHD: Array,
    *,
    scale: float,
    block_ids: Array,
    num_blocks: int,
    axis_names: AxisNames,
    backend: str | None = None,
    valid_len: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Computes the mean attention mass of local key columns, and of diagonals in local blocks.

    The softmax of the last queries runs over all keys of all ranks.

    Args:
        q_BHuD: the last queries, replicated.
        k_BnHD: local keys.
        scale, block_ids, num_blocks, axis_names, backend, valid_len: as in `SelectionContext`; XLA computes
            what the backend has no kernels for.

    Returns:
        (columns, own, tails), int32 [B, Hq, n/g, g], [B, Hq, n/g, g] and [B, Hq, n/g, num_probe_queries-1].
        2^30 is the total mass of a head; the columns of the whole sequence sum to it, up to
        rounding. The diagonals are complete after `join_diagonals`.
    """
    block_size = k_BnHD.shape[1] // block_ids.shape[0]
    kernels = estimate_kernels(backend, q_BHuD, block_size)
    if kernels is None:
        tiles = XlaTiles(
            q_BHuD,
            k_BnHD,
            scale=scale,
            block_ids=block_ids,
            num_blocks=num_blocks,
            valid_len=valid_len,
        )
    else:
        call = ProbeCall(q_BHuD, k_BnHD, block_ids, num_blocks, scale, valid_len)
        tiles = _KernelTiles(kernels, call)
    # Two passes over the logits are cheaper than storing them: at 128K tokens and 16 heads they
    # would need half a gigabyte. The results are [B, Hq, n/g, num_probe_queries].
    block_peak, block_total = tiles.statistics()
    peak = collectives.maximum(block_peak.max(2), axis_names)
    weight = relative_exp(block_peak, peak[:, :, None], scale)
    limbs = tuple(x.sum(2, dtype=jnp.int32) for x in to_limbs(weight, block_total))
    normaliser = from_limbs(*collectives.exact_sum(limbs, axis_names))
    if valid_len is not None:  # queries before the start of a short prompt see nothing
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
class _KernelTiles:
    """Tiles of logits computed by a backend's kernels, with a fixed order of additions."""

    kernels: Estimate
    call: ProbeCall

    def statistics(self) -> tuple[Array, Array]:
        return self.kernels.block_statistics(self.call)

    def masses(self, peak: Array, normaliser: Array) -> tuple[Array, Array, Array]:
        num_queries = self.call.q.shape[2]
        to_mean_mass = MASS_ONE // num_queries / normaliser
        columns, own, beyond = self.kernels.block_masses(self.call, peak, to_mean_mass)
        return _round(columns), _round(own), _round(beyond[..., : num_queries - 1])


@dataclasses.dataclass(frozen=True)
class XlaTiles:
    """Tiles of logits computed by XLA, on any platform."""

    q: Array
    k: Array
    _: dataclasses.KW_ONLY
    scale: float
    block_ids: Array
    num_blocks: int
    valid_len: Array | None

    @property
    def _logits(self) -> tuple:
        """Returns the arguments of `map_logits` after the body."""
        seq_len = self.num_blocks * (self.k.shape[1] // self.block_ids.shape[0])
        end = seq_len if self.valid_len is None else self.valid_len
        positions = last_positions(self.q.shape[2], end)
        return self.q, positions, self.k, self.block_ids, self.num_blocks

    def statistics(self) -> tuple[Array, Array]:
        """Returns peak and sum of exp((x - peak) * scale): fp32 [B, Hq, n/g, u] each."""
        block_size = self.k.shape[1] // self.block_ids.shape[0]
        # Keeps a block's sum of terms <= 1 within 2^30.
        term_one = float(1 << (MASS_BITS - (block_size - 1).bit_length()))

        def body(logits, _):
            peak = logits.max(-1)
            terms = relative_exp(logits, peak[..., None], self.scale)
            return peak, _round(terms * term_one).sum(-1, dtype=jnp.int32)

        peak, total = map_logits(body, *self._logits)
        return peak, total.astype(jnp.float32) * (1 / term_one)

    def masses(self, peak: Array, normaliser: Array) -> tuple[Array, Array, Array]:
        """Computes mean masses of columns and diagonals, from peaks and normalizers [B, Hq, u].

        Tails are this block's contributions to the diagonals of the next block's first keys.
        """
        num_probe_queries = self.q.shape[2]
        to_mass = MASS_ONE / normaliser

        def body(logits, _):  # [C, B, Hq, u, g]
            terms = relative_exp(logits, peak[..., None], self.scale)
            mass = jnp.minimum(_round(terms * to_mass[..., None]), MASS_ONE)
            return _mean_of_rows(mass, num_probe_queries), _mean_of_rows(
                _skew(mass), num_probe_queries
            )

        columns, diagonals = map_logits(body, *self._logits)
        block_size = columns.shape[-1]
        return columns, diagonals[..., :block_size], diagonals[..., block_size:]


def logit_scores(
    q_BHuD: Array,
    k_BnHD: Array,
    *,
    block_ids: Array,
    num_blocks: int,
    valid_len: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Sums raw logits over columns, and over diagonals of blocks, without softmax or scale.

    Columns not seen by all of the last queries get -inf, as in the reference implementation. The
    scale is omitted because it does not change the order. Arguments and results as in
    `softmax_scores`, in fp32.
    """
    block_size = k_BnHD.shape[1] // block_ids.shape[0]

    def block_scores(logits, _):
        seen = jnp.where(logits == -jnp.inf, 0.0, logits)
        return ordered_sum(logits), ordered_sum(_skew(seen))

    end = num_blocks * block_size if valid_len is None else valid_len
    queries = (q_BHuD, last_positions(q_BHuD.shape[2], end))
    columns, diagonals = map_logits(block_scores, *queries, k_BnHD, block_ids, num_blocks)
    return columns, diagonals[..., :block_size], diagonals[..., block_size:]


def join_diagonals(own: Array, tails: Array) -> Array:
    """Adds the tails [..., NB, num_probe_queries - 1] of each block to the next block's [..., NB, g].

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
    """Applies `body` to the raw causal logits of every local block, in chunks of blocks.

    Args:
        body: maps logits fp32 [C, B, Hq, u, g] (-inf for keys after the query) and the global
            numbers of the chunk's blocks, int32 [C], to a tuple of arrays [C, B, Hq, ...]. Blocks
            numbered NB are padding, after every query.
        q_BHuD: some queries, at `query_positions` int32 [u].
        k_BnHD, block_ids, num_blocks: as in `softmax_scores`.
        chunk: C, the same for any number of ranks; None for a sixteenth of the sequence, at most 64
            blocks.

    Returns:
        The tuple, with arrays [B, Hq, n/g, ...].
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

    def to_local(x):  # [steps, C, B, Hq, ...] -> [B, Hq, n/g, ...]
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
