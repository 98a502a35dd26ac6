"""Attention of one new token per sequence to listed key blocks of a cache."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import backends
from pallas_kernels.checks import BLOCK_SIZE
from pallas_kernels.interface import Pair
from pallas_kernels.xla.products import dot

# Keys per product with values, if they divide the cache. A single product over a long cache would
# have so few results that most of a GPU would be idle.
_CHUNK = 512


class DecodeCall(NamedTuple):
    """Queries of new tokens, and what they attend to; rotated and unscaled."""

    q: Array  # [B, Hq, D]
    k: Array  # [B, Hk, S, D], S a multiple of 128, Hq of Hk
    v: Array  # as k
    blocks: Array  # int32 [B or 1, Hk or 1, N], blocks of 128 keys, each listed at most once
    counts: Array  # int32 [B or 1, Hk or 1], how many entries of `blocks` count
    seen: Array  # int32 [B or 1, S / 128, 2], the first key of a block that tokens see, and the end
    scale: float  # of the logits


def decode(call: DecodeCall, backend: str | None = None) -> Pair:
    """Computes attention to the seen keys of the listed blocks, the same ones for a group of heads.

    Bits depend on the shapes and on the call's values only. XLA reads the whole cache; it runs
    where the backend has no kernel, and for heads of more than 128.

    Returns:
        out fp32 [B, Hq, D] and lse fp32 [B, Hq]; 0 and -inf if a token sees no key.

    Raises:
        ValueError: if the backend is unknown or cannot run here.
    """
    kernels = backends.decoding_kernels(backend, call.q)
    return _dense(call) if kernels is None else kernels.attend(call)


def _dense(call: DecodeCall) -> Pair:
    """Reads the whole cache, and masks what is not listed."""
    q, k, v, blocks, counts, seen, scale = call
    batch, heads, dim = q.shape
    kv_heads, tokens = k.shape[1:3]
    counted = jnp.arange(blocks.shape[-1]) < counts[..., None]
    rows = jnp.indices(blocks.shape, sparse=True)[:2]
    num_blocks = seen.shape[1]
    listed = jnp.zeros((*blocks.shape[:2], num_blocks), bool)
    listed = listed.at[*rows, jnp.where(counted, blocks, num_blocks)].set(True, mode="drop")
    within = jnp.arange(BLOCK_SIZE)
    inside = (within >= seen[..., :1]) & (within < seen[..., 1:])
    mask = listed[..., None] & inside[:, None]
    mask = mask.reshape(*mask.shape[:2], 1, tokens)
    logits = dot("bhgd,bhsd->bhgs", q.reshape(batch, kv_heads, -1, dim), k) * scale
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = logits.max(-1)
    weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None])
    total = weights.sum(-1)
    chunks = -1, math.gcd(tokens, _CHUNK)
    weights = weights.astype(v.dtype).reshape(*weights.shape[:3], *chunks)
    values = v.reshape(batch, kv_heads, *chunks, dim)
    out = dot("bhgcs,bhcsd->bhcgd", weights, values).sum(2)
    out /= jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(q.shape), (peak + jnp.log(total)).reshape(batch, heads)


def combine(out: Array, lse: Array, axis: int) -> Pair:
    """Combines attention to disjoint sets of keys: out [..., D] and lse [...], along an axis."""
    peak = lse.max(axis, keepdims=True)
    share = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = share.sum(axis)
    out = (out * share[..., None]).sum(axis) / jnp.where(total > 0, total, 1.0)[..., None]
    return out, jnp.squeeze(peak, axis) + jnp.log(total)
