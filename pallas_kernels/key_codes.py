"""Blocks of a cache that a new token selects, by scores of keys in 4 bits."""

import functools
import operator
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels import backends
from pallas_kernels.checks import BLOCK_SIZE
from pallas_kernels.index import bits
from pallas_kernels.masses import LOG2E
from pallas_kernels.xla.products import dot

DEVIATIONS = 2.6  # standard deviations of keys within the range of codes
_LOWEST, _HIGHEST = -8, 7
_ROWS = 8  # query heads of a group are padded to a multiple
ROW_UNIT = 1 / (127 * 256)  # of integers of 16 bits, for a row with a largest number of 1
_COMPONENTS = 64  # codes of a multiple of this many components fill words


class KeyCodes(NamedTuple):
    """Keys in 4 bits a component, evenly within `DEVIATIONS` of a cache's mean.

    The error of a score is that of a uniform quantizer with 15 steps per component. What is the
    same for all keys does not matter to a softmax, so that scores omit it.
    """

    codes: Array  # int32 [B, Hk, S, D' / 8], eight components in each word, see `pack`
    middle: Array  # fp32 [B, Hk, 1, D], the number with code 0
    unit: Array  # fp32 [B, Hk, 1, D], the step between codes

    @classmethod
    def of(cls, k: Array, mean: Array, deviation: Array) -> Self:
        """Codes keys [B, Hk, S, D], by mean and standard deviation, fp32 [B, Hk, 1, D].

        Keys outside of the range are clipped.
        """
        unit = 2 * DEVIATIONS * deviation / (_HIGHEST - _LOWEST)
        found = cls(jnp.zeros((), jnp.int32), mean + unit / 2, jnp.where(unit > 0, unit, 1.0))
        return found._replace(codes=found.code(k))

    def code(self, k: Array) -> Array:
        """Codes keys [B, Hk, T, D] of the same cache: int32 [B, Hk, T, D' / 8], see `codes`."""
        code = jnp.round((k.astype(jnp.float32) - self.middle) / self.unit)
        return pack(jnp.clip(code, _LOWEST, _HIGHEST).astype(jnp.int32))


def pack(codes: Array) -> Array:
    """Packs integers [..., D] from -8 to 7 into words [..., D' / 8], of 4 bits plus 8.

    D' is D rounded up to a multiple of 64.

    Tensor cores take an operand of 64 rows of bytes from the registers of 128 threads: thread t of
    a row has components 16 m + 4 t + b of each m. With m = 4 j + 2 e + h these are bits 8 b + 4 h
    of word 8 j + 2 t + e, which the thread can read together with the next word.
    """
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % _COMPONENTS)]
    parts = jnp.pad(codes, padding) - _LOWEST
    parts = parts.reshape(*codes.shape[:-1], -1, 2, 2, 4, 4)  # j, e, h, t, b
    parts = jnp.moveaxis(parts, (-2, -4, -1, -3), (-4, -3, -2, -1))  # j, t, e, b, h
    parts = parts.reshape(*codes.shape[:-1], -1, 8)
    # Not a sum, so that it is computed where words are written.
    return functools.reduce(operator.or_, (parts[..., i] << 4 * i for i in range(8)))


def unpack(words: Array) -> Array:
    """Returns the 4 bits of each component of packed words: [..., D'], from 0 to 15."""
    parts = (words[..., None] >> (4 * jnp.arange(8))) & 15
    parts = parts.reshape(*words.shape[:-1], -1, 4, 2, 4, 2)  # j, t, e, b, h
    parts = jnp.moveaxis(parts, (-4, -3, -2, -1), (-2, -4, -1, -3))
    return parts.reshape(*words.shape[:-1], -1)


def in_two_bytes(rows: Array) -> tuple[Array, Array]:
    """Rounds rows fp32 [..., R, D] to integers of 16 bits.

    Returns int8 [..., 2 R, D], the high bytes of all rows and then the low ones, and fp32 [..., R],
    the largest absolute number of each row; times `ROW_UNIT` it is the unit of its integers.
    """
    largest = jnp.abs(rows).max(-1)
    unit = jnp.maximum(largest * ROW_UNIT, jnp.finfo(jnp.float32).tiny)
    whole = jnp.round(rows / unit[..., None]).astype(jnp.int32)
    high = (whole + 128) >> 8
    return jnp.concatenate([high, whole - 256 * high], -2).astype(jnp.int8), largest


def block_weights(
    q: Array, keys: KeyCodes, seen: Array, scale: float, backend: str | None = None
) -> tuple[Array, Array]:
    """Scores key blocks for one new token per sequence.

    Args:
        q: rotated, unscaled queries [B, Hq, D].
        keys: codes of NB blocks of 128 keys.
        seen: int32 [B or 1, NB, 2], the first key of each block that tokens see, and the end.
        scale: of the logits, positive.
        backend: as in `decode`.

    Returns:
        Base-2 logarithms, fp32: `weights` [B, Hk, NB', R] of the sum of exp(logit) over the seen
        keys of a block, up to a constant per head, -inf if there are none, and `totals`
        [B, Hk, P, R] of P parts of the blocks. R is the number of query heads of a key/value head
        rounded up to a multiple of 8; other heads, and blocks from NB on, are undefined.
    """
    batch, heads, dim = q.shape
    kv_heads = keys.codes.shape[1]
    rows = q.reshape(batch, kv_heads, -1, dim).astype(jnp.float32) * (keys.unit * (scale * LOG2E))
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % _ROWS), (0, 0)))
    kernels = backends.decoding_kernels(backend, q)
    if kernels is not None:
        return kernels.code_weights(*in_two_bytes(rows), keys.codes, seen)
    logits = dot("bhgd,bhsd->bhsg", rows, unpack(keys.codes)[..., :dim].astype(jnp.float32))
    within = jnp.arange(BLOCK_SIZE)
    mask = (within >= seen[..., :1]) & (within < seen[..., 1:])
    logits = jnp.where(mask.reshape(len(mask), 1, -1, 1), logits, -jnp.inf)
    logits = logits.reshape(batch, kv_heads, -1, BLOCK_SIZE, rows.shape[2])
    weights = _log2_sum(logits, 3)
    return weights, _log2_sum(weights, 2)[:, :, None]


def selected_blocks(
    weights: Array, totals: Array, q: Array, forced: Array, least: Array, backend: str | None = None
) -> tuple[Array, Array]:
    """Lists the blocks that a new token selects, by the weights of `block_weights`.

    These are the blocks with at least `least` of the softmax mass of all blocks, on average over
    the query heads of a key/value head. If that is (1 - tau) / n, for n blocks, at least tau of the
    mass is selected.

    Args:
        weights, totals: of `block_weights`; totals may have parts from other ranks as well.
        q: the queries [B, Hq, D]; only their shape and dtype are read.
        forced: bool [B or 1, NB], blocks that are selected in any case.
        least: fp32 [B or 1].
        backend: as in `decode`.

    Returns:
        `blocks` int32 [B, Hk, NB] and `counts` [B, Hk] of `DecodeCall`.
    """
    group, num_blocks = q.shape[1] // weights.shape[1], forced.shape[1]
    kernels = backends.decoding_kernels(backend, q)
    if kernels is not None:
        return kernels.selected_blocks(weights, totals, group, forced, least)
    weights, totals = weights[:, :, :num_blocks, :group], _log2_sum(totals[..., :group], 2)
    totals = jnp.where(totals > -jnp.inf, totals, 0.0)
    mass = jnp.exp2(weights - totals[:, :, None]).mean(3)
    kept = forced[:, None] | (mass >= least[:, None, None])
    return bits.listed(bits.pack(kept), num_blocks)


def _log2_sum(x: Array, axis: int) -> Array:
    """The base-2 logarithm of the sum of 2^x."""
    peak = x.max(axis, keepdims=True)
    total = jnp.exp2(x - jnp.where(peak > -jnp.inf, peak, 0.0)).sum(axis)
    return jnp.squeeze(peak, axis) + jnp.log2(total)
