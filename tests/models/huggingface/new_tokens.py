"""The rule by which new tokens select blocks, once more in NumPy and float64."""

import numpy as np


def weights_of(q, k, kv_head, scale):
    """Softmax of the query heads [Hq, D] of a group over all keys [S, Hk, D]: [G, S]."""
    group = len(q) // k.shape[1]
    rows = q[kv_head * group : (kv_head + 1) * group].astype(np.float64)
    logits = rows @ k[:, kv_head].astype(np.float64).T * scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def selected_blocks(q, k, scale, *, tau, sink_blocks=1, local_blocks=2, min_block_mass=0.0):
    """Returns the blocks of 128 keys that a query [Hq, D] selects of keys [S, Hk, D]: [Hk, NB]."""
    count = -(-len(k) // 128)
    kept = np.zeros((k.shape[1], count), bool)
    for head in range(k.shape[1]):
        mass = weights_of(q, k, head, scale).mean(0)
        mass = np.array([mass[128 * n : 128 * (n + 1)].sum() for n in range(count)])
        kept[head, :sink_blocks] = True
        kept[head, -local_blocks:] = True
        for block in np.argsort(-mass, kind="stable"):
            if mass[kept[head]].sum() >= tau or mass[block] < min_block_mass:
                break
            kept[head, block] = True
    return kept


def attended(q, k, v, kept, scale):
    """Attention of a query [Hq, D] to the keys and values of its blocks: [Hq, D]."""
    out = []
    for head, blocks in enumerate(kept):
        weights = weights_of(q, k, head, scale) * np.repeat(blocks, 128)[: len(k)]
        out.append(weights / weights.sum(-1, keepdims=True) @ v[:, head].astype(np.float64))
    return np.concatenate(out)
