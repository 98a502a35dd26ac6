"""Brute force in NumPy: dense attention in fp64, and selection by sorting."""

import numpy as np


def last_logits(q, k, num_probe_queries, scale):
    """Causal logits fp64 [B, Hq, probes, S] of the last queries; -inf after the query."""
    group = q.shape[2] // k.shape[2]
    q = np.asarray(q, np.float64)[:, -num_probe_queries:]
    k = np.repeat(np.asarray(k, np.float64), group, axis=2)
    logits = np.einsum("buhd,bkhd->bhuk", q, k) * scale
    rows, columns = last_positions(k.shape[1], num_probe_queries)
    return np.where(columns <= rows, logits, -np.inf)


def last_positions(seq_len, num_probe_queries):
    return np.arange(seq_len - num_probe_queries, seq_len)[:, None], np.arange(seq_len)[None, :]


def softmax(logits):
    terms = np.exp(logits - logits.max(-1, keepdims=True))
    return terms / terms.sum(-1, keepdims=True)


def diagonal_sums(x):
    """Sums of x [B, H, probes, S] over the causal pairs of each token distance: [B, H, S]."""
    batch, heads, num_probe_queries, seq_len = x.shape
    rows, columns = last_positions(seq_len, num_probe_queries)
    distance = rows - columns
    sums = np.zeros((batch, heads, seq_len))
    for s in range(seq_len):
        sums[..., s] = x[..., distance == s].sum(-1)
    return sums


def descending(scores, forced=()):
    """Entries in order of selection: forced first, then by score, then by number."""
    return sorted(range(len(scores)), key=lambda i: (i not in forced, -int(scores[i]), i))


def top_p(scores, target, *, minimum, maximum, keep_crossing, forced=()):
    """Set of entries kept of integer scores [n], added one at a time by definition."""
    kept, mass = [], 0
    for entry in descending(scores, forced):
        score = int(scores[entry])
        reached = mass >= target if keep_crossing else mass + score >= target
        if len(kept) == maximum or (reached and len(kept) >= minimum):
            break
        kept.append(entry)
        mass += score
    return set(kept)


def block_diagonals(slashes, block_size, num_blocks):
    """Block diagonals that contain a pair at one of the token distances."""
    near = {s // block_size for s in slashes}
    far = {-(-s // block_size) for s in slashes}
    return {d for d in near | far if d < num_blocks}


def entries(padded, count):
    """The listed entries, after checking that they ascend and that padding is above them."""
    listed = np.asarray(padded)[: int(count)].tolist()
    assert listed == sorted(set(listed))
    assert all(value > max(listed, default=-1) for value in np.asarray(padded)[int(count) :])
    return listed


def mask(diagonals, verticals, seq_len, block_size):
    """The computed pairs, bool [S, S]."""
    q, k = np.arange(seq_len)[:, None], np.arange(seq_len)[None, :]
    by_block = np.isin(q // block_size - k // block_size, list(diagonals))
    return (k <= q) & (by_block | np.isin(k, list(verticals)))
