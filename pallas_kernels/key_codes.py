"""Blocks of a cache that a new token selects, by scores of keys in 4 bits."""

import functools
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels import backends
from pallas_kernels.checks import BLOCK_SIZE
from pallas_kernels.fp8_scores import TAU_BITS, WEIGHT_BLOCKS, KeepRule
from pallas_kernels.index import bits
from pallas_kernels.masses import LOG2E, MASS_BITS
from pallas_kernels.xla.products import dot

_LOWEST, _HIGHEST = -8, 7
_ROWS = 8  # query heads of a group are padded to a multiple


class KeyCodes(NamedTuple):
    """Keys in 4 bits a component, evenly between the smallest and largest one of a cache.

    The error of a score is that of a uniform quantizer with 15 steps per component. What is the
    same for all keys does not matter to a softmax, so that scores omit it.
    """

    codes: Array  # int8 [B, Hk, S, D / 2], component d + D/2 in the high 4 bits, d in the low ones
    middle: Array  # fp32 [B, Hk, 1, D], the number with code 0
    unit: Array  # fp32 [B, Hk, 1, D], the step between codes

    @classmethod
    def of(cls, k: Array, low: Array, high: Array) -> Self:
        """Codes keys [B, Hk, S, D] within `low` and `high` [B, Hk, 1, D]; others are clipped."""
        low, high = low.astype(jnp.float32), high.astype(jnp.float32)
        unit = (high - low) / (_HIGHEST - _LOWEST)
        unit = jnp.where(unit > 0, unit, 1.0)
        found = cls(jnp.zeros((), jnp.int8), low - _LOWEST * unit, unit)
        return found._replace(codes=found.code(k))

    def code(self, k: Array) -> Array:
        """Codes keys [B, Hk, T, D] of the same cache: int8 [B, Hk, T, D / 2], see `codes`."""
        code = jnp.round((k.astype(jnp.float32) - self.middle) / self.unit)
        low, high = jnp.split(jnp.clip(code, _LOWEST, _HIGHEST).astype(jnp.int8), 2, axis=-1)
        return (low - _LOWEST) | (high << 4)


def block_weights(
    q: Array, keys: KeyCodes, seen: Array, scale: float, backend: str | None = None
) -> Array:
    """Scores key blocks for one new token per sequence.

    Args:
        q: rotated, unscaled queries [B, Hq, D].
        keys: codes of NB blocks of 128 keys.
        seen: int32 [B or 1, NB, 2], the first key of each block that tokens see, and the end.
        scale: of the logits, positive.
        backend: as in `decode`.

    Returns:
        fp32 [B, Hk, NB, R], the base-2 logarithm of the sum of exp(logit) over the seen keys of a
        block, up to a constant per head; -inf if there are none. R is the number of query heads of
        a key/value head rounded up to a multiple of 8, with -inf in the rest.
    """
    batch, heads, dim = q.shape
    kv_heads = keys.codes.shape[1]
    group = heads // kv_heads
    rows = q.reshape(batch, kv_heads, group, dim).astype(jnp.float32)
    rows = rows * (keys.unit * (scale * LOG2E))
    rows *= jnp.where(jnp.arange(dim) < dim // 2, 1.0, 1 / 16)  # the high bits count 16-fold
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -group % _ROWS), (0, 0))).astype(q.dtype)
    kernels = backends.decoding_kernels(backend, q)
    if kernels is not None:
        return kernels.code_weights(rows, keys.codes, seen, group)
    low, high = jnp.split(rows, 2, axis=-1)
    product = functools.partial(dot, "bhgd,bhsd->bhsg")
    logits = product(low, (keys.codes & 15).astype(q.dtype))
    logits += product(high, (keys.codes & -16).astype(q.dtype))
    within = jnp.arange(BLOCK_SIZE)
    mask = (within >= seen[..., :1]) & (within < seen[..., 1:])
    mask = mask.reshape(len(mask), 1, -1, 1) & (jnp.arange(rows.shape[2]) < group)
    logits = jnp.where(mask, logits, -jnp.inf)
    return _log2_sum(logits.reshape(batch, kv_heads, -1, BLOCK_SIZE, rows.shape[2]), 3)


def kept_blocks(
    weights: Array, q: Array, rule: KeepRule, backend: str | None = None
) -> tuple[Array, Array]:
    """Lists the heaviest blocks, by the mean softmax mass of a group's heads, of `block_weights`.

    The rule is that of `Fp8Scores.kept` for one query block with R rows. Only shape and dtype of
    `q` [B, Hq, D] are read, and `rule.rows` is not. Returns `blocks` int32 [B, Hk, NB] and `counts`
    [B, Hk] of `DecodeCall`.
    """
    num_blocks, rule = weights.shape[2], rule._replace(rows=weights.shape[3])
    kernels = backends.decoding_kernels(backend, q)
    if kernels is None or num_blocks > kernels.most_blocks:
        words = bits.pack(_kept(weights, rule))
    else:
        padding = -num_blocks % WEIGHT_BLOCKS
        weights = jnp.pad(weights, ((0, 0), (0, 0), (0, padding), (0, 0)))
        words = kernels.kept_blocks(weights, None, rule)[:, :, 0, : bits.words_for(num_blocks)]
    return bits.listed(words, num_blocks)


def _kept(weights: Array, rule: KeepRule) -> Array:
    """Which blocks are kept, bool [B, Hk, NB]."""
    number = jnp.arange(weights.shape[2])
    valid = (number >= rule.first) & (number <= rule.own)
    forced = (number < rule.forced_end) | (number > rule.own - rule.local_blocks)
    totals = _log2_sum(jnp.where(valid[:, None, :, None], weights, -jnp.inf), 2)
    share = jnp.exp2(weights - jnp.where(totals > -jnp.inf, totals, 0.0)[:, :, None])
    share = (share * (float(1 << MASS_BITS) / weights.shape[3]) + 0.5).astype(jnp.int32)
    mass = jnp.where(valid[:, None], share.sum(3, dtype=jnp.int32), 0)
    free = jnp.where(forced[:, None], 0, mass)
    total = mass.sum(2, dtype=jnp.int32)
    high, low = total >> TAU_BITS, total & ((1 << TAU_BITS) - 1)
    target = high * rule.tau + ((low * rule.tau + ((1 << TAU_BITS) - 1)) >> TAU_BITS)
    missing = target - (total - free.sum(2, dtype=jnp.int32))
    order = jnp.argsort(-free, axis=2, stable=True)
    ordered = jnp.take_along_axis(free, order, 2)
    taken = jnp.cumsum(ordered, 2, dtype=jnp.int32) - ordered < missing[..., None]
    taken &= ordered >= rule.least
    taken = jnp.put_along_axis(jnp.zeros(free.shape, bool), order, taken, 2, inplace=False)
    return (taken | forced[:, None]) & valid[:, None]


def _log2_sum(x: Array, axis: int) -> Array:
    """The base-2 logarithm of the sum of 2^x."""
    peak = x.max(axis, keepdims=True)
    total = jnp.exp2(x - jnp.where(peak > -jnp.inf, peak, 0.0)).sum(axis)
    return jnp.squeeze(peak, axis) + jnp.log2(total)
