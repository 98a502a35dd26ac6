"""Key codes of small caches, and the keys that they mean, in float64."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8_scores import KeepRule
from pallas_kernels.key_codes import KeyCodes
from tests.pallas_kernels.helpers.decode_cases import make_call

BLOCK, SCALE = 128, 0.2


def make_codes(*sizes: int) -> tuple[jnp.ndarray, KeyCodes, jnp.ndarray]:
    """Queries, codes of keys with outlying components, and limits; sizes as in `make_call`."""
    call = make_call(*sizes)
    wide = jnp.where(jnp.arange(call.q.shape[-1]) % 5 == 0, 6.0, 1.0)
    k = (call.k * wide + 3 * (wide - 1)).astype(call.k.dtype)
    return call.q, KeyCodes.of(k, *ends(k)), call.seen


def ends(k: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
    return k.min(2, keepdims=True), k.max(2, keepdims=True)


def decoded(keys: KeyCodes) -> np.ndarray:
    """The keys that codes mean, [B, Hk, S, D]."""
    codes = np.asarray(keys.codes).astype(int)
    both = np.concatenate([codes % 16 - 8, codes // 16], axis=-1)
    return both * np.asarray(keys.unit, np.float64) + np.asarray(keys.middle, np.float64)


def reference(q: jnp.ndarray, keys: KeyCodes, seen: jnp.ndarray) -> np.ndarray:
    """Base-2 logarithms of the weights of blocks, float64 [B, Hk, NB, G], with their constant."""
    k, limits = decoded(keys), np.asarray(seen)
    batch, kv_heads, tokens, dim = k.shape
    rows = np.asarray(q, np.float64).reshape(batch, kv_heads, -1, dim)
    logits = np.einsum("bhgd,bhsd->bhsg", rows, k) * SCALE
    within = np.arange(BLOCK)
    mask = (within >= limits[..., :1]) & (within < limits[..., 1:])
    logits = np.where(mask.reshape(len(mask), 1, -1, 1), logits, -np.inf)
    logits = logits.reshape(batch, kv_heads, tokens // BLOCK, BLOCK, -1)
    return np.logaddexp.reduce(logits, axis=3) / np.log(2)


def check(weights: jnp.ndarray, q: jnp.ndarray, keys: KeyCodes, seen: jnp.ndarray) -> None:
    wanted, found = reference(q, keys, seen), np.asarray(weights, np.float64)
    group = wanted.shape[-1]
    assert np.isneginf(found[..., group:]).all()
    found = found[..., :group]
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(wanted))
    some = np.isfinite(wanted).all((0, 1, 3))
    found, wanted = found[:, :, some], wanted[:, :, some]
    # Queries times the units of components are rounded to bfloat16.
    error = (found - found[:, :, :1]) - (wanted - wanted[:, :, :1])
    assert np.abs(error).max() < 0.01 * np.abs(wanted - wanted[:, :, :1]).max()


def keep_rule(num_blocks: int, tau: float, forced_end: int, local: int = 0) -> KeepRule:
    numbers = num_blocks - 1, 0, forced_end, round(tau * 2**15)
    return KeepRule(*(jnp.full((1, 1), x, jnp.int32) for x in numbers), local, 1, 0)


def kept_sets(weights: np.ndarray, tau: float, forced: set[int]) -> list[list[int]]:
    """The blocks to keep, ascending, by key/value head of each sequence."""
    found = []
    for of_head in weights.reshape(-1, *weights.shape[2:]):
        share = np.exp2(of_head - np.logaddexp2.reduce(of_head, axis=0))
        mass = share.mean(1)
        kept = set(forced)
        for block in sorted(set(range(len(mass))) - forced, key=lambda x: -mass[x]):
            if mass[list(kept)].sum() >= tau:
                break
            if mass[block] > 0:
                kept.add(block)
        found.append(sorted(kept))
    return found
