"""The rule by which new tokens select blocks, once more in NumPy and float64."""

import numpy as np

from mtraining_jax.patterns.sampled_rows import SampledRows


def weights_of(q, k, kv_head, scale):
    """Softmax of the query heads [Hq, D] of a group over all keys [S, Hk, D]: [G, S]."""
    group = len(q) // k.shape[1]
    rows = q[kv_head * group : (kv_head + 1) * group].astype(np.float64)
    logits = rows @ k[:, kv_head].astype(np.float64).T * scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def selected_blocks(q, k, scale, *, min_sparse_tokens=0, **options):
    """Returns the blocks of 128 keys that a query [Hq, D] selects of keys [S, Hk, D]: [Hk, NB].

    Options are those of `SampledRows`, which states the rule for the engine.
    """
    pattern, length = SampledRows(min_sparse_tokens=min_sparse_tokens, **options), len(k)
    rule, position, count = pattern.for_new_tokens(), np.arange(length), -(-length // 128)
    forced = (position < rule.first_tokens) | (length - 1 - position < rule.last_tokens)
    forced |= length < rule.dense_below
    least = max(rule.share / count, rule.least_mass)
    kept = np.zeros((k.shape[1], count), bool)
    for head, block in np.ndindex(kept.shape):
        part = slice(128 * block, 128 * (block + 1))
        mass = weights_of(q, k, head, scale)[:, part].sum(1).mean()
        kept[head, block] = forced[part].any() or mass >= least
    return kept


def attended(q, k, v, kept, scale):
    """Attention of a query [Hq, D] to the keys and values of its blocks: [Hq, D]."""
    out = []
    for head, blocks in enumerate(kept):
        weights = weights_of(q, k, head, scale) * np.repeat(blocks, 128)[: len(k)]
        out.append(weights / weights.sum(-1, keepdims=True) @ v[:, head].astype(np.float64))
    return np.concatenate(out)
