"""Checks of kernels that score key blocks with 8-bit keys, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8_scores import Fp8Keys, Fp8Scores, KeepRule, encode_keys, encode_rows
from pallas_kernels.index import bits as sets
from tests.pallas_kernels.helpers.block_masses import expected

SIZE = 128
# Each as one program, instead of dozens.
encode_keys, encode_rows = jax.jit(encode_keys), jax.jit(encode_rows)


def estimated(q, keys: Fp8Keys, places, scale, first_blocks=None):
    """Masses [B, Hq, n, NB] by the estimate of `Fp8Scores.weights`, in fp64."""
    batch, blocks, rows, heads, dim = q.shape
    group = heads // keys.codes.shape[2]
    codes, units = encode_rows(q.reshape(batch, -1, heads, dim))
    wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    of_keys = wide(keys.codes) * np.repeat(np.asarray(keys.units), SIZE, axis=1)[..., None]
    of_keys, means = (np.repeat(x, group, axis=2) for x in (of_keys, wide(keys.means)))
    of_rows = wide(codes) * np.asarray(units).swapaxes(1, 2)[..., None]
    products = np.einsum("brhe,bshe->bhrs", of_rows, of_keys)
    products = products.reshape(*products.shape[:3], -1, 16, 8)
    offsets = np.einsum("brhe,bnhe->bhrn", wide(q.reshape(of_rows.shape)), means)
    numbers = np.arange(keys.codes.shape[1])
    last = places.reshape(places.shape[0], -1)[..., None]
    seen = numbers <= last
    if first_blocks is not None:
        seen &= numbers >= np.repeat(first_blocks * SIZE, rows, axis=1)[..., None]
    seen = np.broadcast_to(seen, (batch, *seen.shape[1:]))
    seen = seen.reshape(batch, 1, seen.shape[1], -1, 16, 8)
    logits = (products + offsets[..., None, None]) * scale
    terms = np.where(seen, np.exp(logits - logits.max((3, 4, 5), keepdims=True)), 0.0)
    few, top = terms[..., ::4, :], terms.max(-2)
    inside = few.max(-2) == top
    more = np.where(inside, (few.sum(-2) - top) * (15 / 3), few.sum(-2) * (15 / 4))
    whole = seen.all((-2, -1))
    sums = np.where(whole, (top + more).sum(-1), terms.sum((-2, -1)))
    total = sums.sum(-1, keepdims=True)
    masses = sums / np.where(total > 0, total, 1)
    return masses.reshape(batch, heads, blocks, rows, -1).mean(3)


def problem(rng, batch, blocks, first, heads, kv_heads, dim, rows=16):
    """Queries and keys with large biases, and the places of rows."""
    q = rng.normal(size=(batch, blocks, rows, heads, dim)) * 3
    k = rng.normal(size=(batch, (first + blocks) * SIZE, kv_heads, dim))
    q[..., 7] += 5
    k[..., 7] += 200 * np.cos(np.arange(k.shape[1]) / 500)[:, None]  # as rotated biases are
    k[..., 40] -= 30
    own = np.arange(first, first + blocks)[:, None]
    places = own * SIZE + (np.arange(rows) + 1) * SIZE // rows - 1
    as_bf16 = (jnp.asarray(x, jnp.bfloat16) for x in (q, k))
    return *as_bf16, np.broadcast_to(places, (batch, blocks, rows)).copy()


def visible(places, num_blocks):
    return np.arange(num_blocks) <= places.max(-1)[:, None, :, None] // SIZE


def check_fp8_masses(kernels: Fp8Scores, blocks: int, first: int, dim: int) -> None:
    """Checks masses of rows from block `first` on."""
    q, k, places = problem(np.random.default_rng(0), 1, blocks, first, 2, 1, dim)
    places[:, -1, 8:] = -1  # padding
    keys, scale = encode_keys(k), dim**-0.5
    masses = jax.jit(functools.partial(kernels.block_masses, scale=scale))
    found = np.asarray(masses(q, keys, jnp.asarray(places, jnp.int32)))
    seen = np.broadcast_to(visible(places, first + blocks), found.shape)
    wanted = estimated(q, keys, places, scale)
    error = np.abs(found - wanted)[seen]
    assert error.mean() < 1e-3 and error.max() < 0.05, (error.mean(), error.max())
    exact = expected(
        q.transpose(0, 3, 1, 2, 4),
        k.reshape(1, -1, SIZE, 1, dim).transpose(0, 3, 1, 2, 4),
        places,
        scale,
    )
    assert np.abs(found - exact)[seen].mean() < 0.02


def check_fp8_masses_are_independent(kernels: Fp8Scores) -> None:
    """Checks that other rows, and the position of a document, change no bit."""
    blocks, dim = 20, 64
    q, k, places = problem(np.random.default_rng(1), 2, blocks, 0, 1, 1, dim)
    starts = [0, 1, 7, 8, 9], [0, 5, 18]
    first = np.stack([np.repeat(x, np.diff([*x, blocks])) for x in starts])
    masses = jax.jit(functools.partial(kernels.block_masses, scale=dim**-0.5))
    as_int = functools.partial(jnp.asarray, dtype=jnp.int32)
    found = np.asarray(masses(q, encode_keys(k), as_int(places), as_int(first)))
    numbers = np.arange(blocks)
    seen = visible(places, blocks) & (numbers >= first[:, None, :, None])
    seen = np.broadcast_to(seen, found.shape)
    wanted = estimated(q, encode_keys(k), places, dim**-0.5, first)
    assert np.abs(found - wanted)[seen].max() < 0.05
    # A document on its own, every other row of blocks of it.
    own = k[1:, 5 * SIZE : 18 * SIZE], q[1:, 5:18:2], places[1:, 5:18:2] - 5 * SIZE
    alone = np.asarray(masses(own[1], encode_keys(own[0]), as_int(own[2])))
    seen = visible(own[2], 13)
    np.testing.assert_array_equal(
        np.where(seen, found[1:, :, 5:18:2, 5:18], 0), np.where(seen, alone, 0)
    )


def check_kept_blocks(kernels: Fp8Scores, sizes, tau=0.9, local=1, least=1, *, packed, ties):
    """Compares the kept blocks of random weights with a rule in NumPy, for all bits."""
    batch, heads, num_blocks, count, rows = sizes
    rng = np.random.default_rng(num_blocks)
    own = np.sort(rng.choice(num_blocks, count, replace=False))[None].astype(np.int32)
    first = np.zeros((1, count), np.int32)
    if packed:  # some rows are outside of documents
        first = np.minimum(rng.integers(0, num_blocks, (batch, count)), own)
        first = np.where(rng.random(first.shape) < 0.2, num_blocks, first).astype(np.int32)
    forced_end = first + rng.integers(0, 3, first.shape, np.int32)
    padded, width = -(-num_blocks // 64) * 64, count * rows
    weights = rng.normal(size=(batch, heads, padded, -(-width // 256) * 256)) * 3
    weights = np.round(weights / 3) if ties else weights
    weights[:, 0, 0] += 20  # in this head, forced blocks have enough mass where there is no `first`
    weights = weights.astype(np.float16)
    seen = np.arange(padded)[:, None] <= np.repeat(own[0], rows)
    totals = np.full((batch, heads, weights.shape[-1]), -np.inf, np.float32)
    of_rows = np.where(seen, np.exp2(weights[..., :width].astype(np.float64)), 0)
    totals[..., :width] = np.log2(of_rows.sum(2))
    share = np.full((1, count), round(tau * 2**15), np.int32)
    rule = KeepRule(*map(jnp.asarray, (own, first, forced_end, share)), local, least, rows)
    found = jax.jit(lambda *weights: kernels.kept(*weights, rule))(weights, totals)
    found = np.asarray(sets.unpack(found, num_blocks))
    numbers = np.arange(num_blocks)
    for b, h, n in np.ndindex(batch, heads, count):
        begin, end, forced_to = (x[b % len(x), n] for x in (first, own, forced_end))
        at = slice(n * rows, (n + 1) * rows)
        logs = weights[b, h, :num_blocks, at].astype(np.float32) - totals[b, h, at]
        mass = np.exp2(logs) * np.float32(2**30 / rows) + np.float32(0.5)
        visible = (numbers >= begin) & (numbers <= end)
        mass = np.where(visible, mass.astype(np.int64).sum(1), 0)
        kept = visible & ((numbers < forced_to) | (numbers > end - local))
        target, reached = -(-mass.sum() * share[0, n] // 2**15), mass[kept].sum()
        for block in sorted(numbers[visible & ~kept], key=lambda x: (-mass[x], x)):
            if reached >= target or mass[block] < least:
                break
            kept[block], reached = True, reached + mass[block]
        np.testing.assert_array_equal(found[b, h, n], kept)
