"""Lighthouse attention against its definition, token by token; and the benchmark of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import lighthouse

TOKENS, HEADS, DIM, POOLING, LEVELS, TOP_K, TILE = 64, 2, 4, 2, 3, 8, 4


def entries_of(q, k):
    """First and last token of the entries of a head, in causal order."""
    norms = [np.linalg.norm(x, axis=-1) for x in (q, k)]
    parts, found = TOP_K // TILE, []
    for part in range(parts):
        width = POOLING ** (LEVELS - 1)
        candidates = list(range(part * TOKENS // parts, (part + 1) * TOKENS // parts, width))
        while width:
            selected = []
            for norm in norms if width > 1 else ():
                rest = [x for x in candidates if x not in selected]
                rest.sort(key=lambda x, norm=norm, width=width: -norm[x : x + width].max())
                selected += rest[: TILE // 2]
            found += [(x, width, x in selected) for x in candidates]
            finer = width // POOLING
            candidates = [x + i * finer for x in selected for i in range(POOLING)]
            width = finer

    def place(entry):  # a selected entry comes after the finer ones within it
        start, width, selected = entry
        return (start + width, 0, width) if selected else (start, 1, 0)

    return [(start, width) for start, width, _ in sorted(found, key=place)]


def definition(q, k, v):
    """[S, D] of one head, in float64."""
    entries = entries_of(q, k)
    q, k, v = (np.stack([x[s : s + w].mean(0) for s, w in entries]) for x in (q, k, v))
    logits = np.where(np.tril(np.ones((len(q),) * 2, bool)), q @ k.T / DIM**0.5, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    means = weights / weights.sum(-1, keepdims=True) @ v
    out = np.zeros((TOKENS, DIM))
    for (start, width), mean in zip(entries, means, strict=True):
        out[start + width - 1 :][:width] += mean
    return out


def attend(q, k, v):
    return lighthouse.lighthouse(q, k, v, TOP_K, pooling=POOLING, levels=LEVELS, tile=TILE)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(1, TOKENS, n, DIM)).astype(np.float32) for n in (HEADS, 1, 1)]


def test_equals_its_definition():
    q, k, v = inputs()
    out = jax.jit(attend)(q, k, v)
    for head in range(HEADS):
        wanted = definition(*(np.float64(x[0, :, n]) for x, n in ((q, head), (k, 0), (v, 0))))
        np.testing.assert_allclose(out[0, :, head], wanted, rtol=1e-4, atol=1e-5)


def test_gradients_do_not_depend_on_the_future():
    q, k, v = inputs()
    slopes = jax.jit(jax.grad(lambda v, t: attend(q, k, v)[0, t].sum()))
    for token in (17, 40):
        used = np.abs(slopes(jnp.asarray(v), token)).max((0, 2, 3)) > 0
        assert used[:token].any() and not used[token + 1 :].any()


def test_a_table_compares_it_with_patterns():
    tiny = ["--heads", "1", "--kv-heads", "1", "--head-dim", "16", "--repeats", "1"]
    names = "dense", "Lighthouse, top_k=128"
    options = ["--seq-len", "2048", "--top-k", "128", "--patterns", "dense", *tiny]
    rows = [x.strip("| ").split(" | ") for x in lighthouse.main(options).splitlines()[-2:]]
    assert [row[:2] for row in rows] == [["2048", name] for name in names]
    assert rows[0][4:] == ["1.00", "1.00"]
    assert all(float(x) > 0 for row in rows for x in row[2:])
