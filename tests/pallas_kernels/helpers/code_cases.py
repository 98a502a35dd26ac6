"""Key codes of small caches, and the keys that they mean, in float64."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.key_codes import KeyCodes
from pallas_kernels.mosaic_gpu.kernels.selected_blocks import padded_blocks
from tests.pallas_kernels.helpers.decode_cases import make_call

BLOCK, SCALE = 128, 0.2


def make_codes(*sizes: int) -> tuple[jnp.ndarray, KeyCodes, jnp.ndarray]:
    """Queries, codes of keys with outlying components, and limits; sizes as in `make_call`.

    The last query of the last sequence is 0.
    """
    call = make_call(*sizes)
    wide = jnp.where(jnp.arange(call.q.shape[-1]) % 5 == 0, 6.0, 1.0)
    k = (call.k * wide + 3 * (wide - 1)).astype(call.k.dtype)
    return call.q.at[-1, -1].set(0), KeyCodes.of(k, *moments(k)), call.seen


def moments(k: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
    k = k.astype(jnp.float32)
    return k.mean(2, keepdims=True), k.std(2, keepdims=True)


def decoded(keys: KeyCodes) -> np.ndarray:
    """The keys that codes mean, [B, Hk, S, D], by the places that `pack` states."""
    words = np.asarray(keys.codes).view(np.uint32)
    component = np.arange(keys.unit.shape[-1])
    m, t, b = component // 16, component % 16 // 4, component % 4
    j, e, h = m // 4, m // 2 % 2, m % 2
    codes = (words[..., 8 * j + 2 * t + e] >> (8 * b + 4 * h).astype(np.uint32)) % 16 - 8.0
    return codes * np.asarray(keys.unit, np.float64) + np.asarray(keys.middle, np.float64)


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


def check(
    found: tuple[jnp.ndarray, jnp.ndarray], q: jnp.ndarray, keys: KeyCodes, seen: jnp.ndarray
) -> None:
    """Compares weights and totals of `block_weights` with the reference."""
    wanted = reference(q, keys, seen)
    blocks, group = wanted.shape[2:]
    weights, parts = (np.asarray(x, np.float64)[..., :group] for x in found)
    weights = weights[:, :, :blocks]
    np.testing.assert_array_equal(np.isneginf(weights), np.isneginf(wanted))
    # Up to a constant per head; components of rows are rounded to 2^-15 of the largest one.
    first = np.isfinite(wanted).all((0, 1, 3)).argmax()
    constant = weights[:, :, [first]] - wanted[:, :, [first]]
    tolerance = 2e-4 * np.abs(wanted[np.isfinite(wanted)]).max()
    np.testing.assert_allclose(weights - constant, wanted, rtol=0, atol=tolerance)
    totals, all_blocks = (np.logaddexp2.reduce(x, axis=2) for x in (parts, wanted))
    np.testing.assert_allclose(totals - constant[:, :, 0], all_blocks, rtol=0, atol=tolerance)


def make_weights(
    batch: int, heads: int, kv_heads: int, blocks: int
) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
    """Weights with room for the kernel, totals of three parts, and forced blocks [B, NB].

    What is undefined is NaN. Some blocks have no keys; the last head of the last sequence has none
    if there are several.
    """
    rng, group = np.random.default_rng(1), heads // kv_heads
    known = rng.normal(size=(batch, kv_heads, blocks, group)) * 3 + 200
    known[:, :, blocks // 2 + 1 :: 7] = -np.inf
    if batch * kv_heads > 1:
        known[-1, -1] = -np.inf
    weights = np.full((batch, kv_heads, padded_blocks(blocks), -(-group // 8) * 8), np.nan)
    weights[:, :, :blocks, :group] = known
    totals = np.full((batch, kv_heads, 64, weights.shape[3]), -np.inf)
    for part, own in enumerate(np.array_split(known, 3, axis=2)):
        totals[:, :, part, :group] = np.logaddexp2.reduce(own, axis=2)
    forced = rng.uniform(size=(batch, blocks)) < 0.1
    return *(jnp.asarray(x, jnp.float32) for x in (weights, totals)), jnp.asarray(forced)


def check_selected(
    found: tuple[jnp.ndarray, jnp.ndarray], weights: jnp.ndarray, least: float, forced: jnp.ndarray
) -> None:
    """Compares with a float64 reference; masses within rounding of `least` may go either way."""
    lists, counts, must = (np.asarray(x) for x in (*found, forced))
    weights = np.asarray(weights, np.float64)
    totals = np.logaddexp2.reduce(weights, axis=2)
    mass = np.exp2(weights - np.where(totals > -np.inf, totals, 0)[:, :, None]).mean(3)
    near = np.abs(mass - least) < 1e-4 * least
    for place in np.ndindex(counts.shape):
        own = lists[place][: counts[place]]
        assert (np.diff(own) > 0).all()
        selected = np.isin(np.arange(mass.shape[2]), own)
        wanted = (mass[place] >= least) | must[place[0]]
        np.testing.assert_array_equal(selected | near[place], wanted | near[place])
    assert near.mean() < 0.01
