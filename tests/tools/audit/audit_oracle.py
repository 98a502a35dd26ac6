"""Audit metrics in plain NumPy, fp64, one head and one row at a time."""

import numpy as np


def figures(q, k, v, d_out, mask, rows, last, block_size, scale, lengths=None):
    """Computes all metrics of one layer.

    Args:
        q: [B, S, Hq, D]; k, v: [B, S, Hk, D]; d_out: [B, S, Hq, D].
        mask: bool [B, Hq, S, S], computed pairs.
        rows: positions of the rows sampled everywhere; last: of those from the end.
        block_size: tokens per block (g).
        scale: scale of the logits.
        lengths: tokens of the documents of each sequence, each starting at a new block; None
            without documents.

    Returns:
        fp64 [Hq] each, by name.
    """
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    batch, seq_len, heads, _ = q.shape
    group = heads // k.shape[2]
    visible = np.stack([seen(seq_len, block_size, lengths and lengths[b]) for b in range(batch)])
    found = {
        name: np.zeros(heads)
        for name in (
            "recall",
            "output_error",
            "index_gap",
            "starved_keys",
            "starved_mass",
            "local_gradient_cosine",
            "local_gradient_ratio",
        )
    }
    block = np.arange(seq_len) // block_size
    for h in range(heads):
        recalls, recalls_late, recalls_last, masses = [], [], [], []
        error = norm = dot = full = part = 0.0
        starved_count = key_count = 0
        for b in range(batch):
            keys, values = k[b, :, h // group], v[b, :, h // group]
            real = visible[b].diagonal()
            beyond = visible[b] & (block[:, None] > block)  # pairs of different blocks
            # A later block sees a key even if some of its last rows are padding.
            could = (
                same_document(seq_len, block_size, lengths and lengths[b])
                & (block[:, None] > block)
            ).any(0) & real
            kept_later = (
                mask[b, h]
                & same_document(seq_len, block_size, lengths and lengths[b])
                & (block[:, None] > block)
            ).any(0)
            starved = could & ~kept_later
            starved_count += starved.sum()
            key_count += could.sum()
            for name, some in (("all", rows), ("last", last)):
                for i in some:
                    if not real[i]:
                        continue
                    weights = np.where(visible[b, i], np.exp(keys @ q[b, i, h] * scale), 0)
                    p = weights / weights.sum()
                    kept = np.where(mask[b, h, i], weights, 0)
                    r = kept.sum() / weights.sum()
                    (recalls if name == "all" else recalls_last).append(r)
                    if name == "last":
                        continue
                    if i >= seq_len // 2:
                        recalls_late.append(r)
                    masses.append(p[starved & beyond[i]].sum())
                    p_kept = kept / max(kept.sum(), 1e-300)
                    out, out_kept = p @ values, p_kept @ values
                    error += ((out_kept - out) ** 2).sum()
                    norm += (out**2).sum()
                    d = d_out[b, i, h]
                    dq = scale * (p * (values @ d - out @ d)) @ keys
                    dq_kept = scale * (p_kept * (values @ d - out_kept @ d)) @ keys
                    dot, full, part = dot + dq @ dq_kept, full + dq @ dq, part + dq_kept @ dq_kept
        found["recall"][h] = np.mean(recalls)
        found["index_gap"][h] = np.nan
        if recalls_last:
            found["index_gap"][h] = np.mean(recalls_last) - np.mean(recalls_late)
        found["output_error"][h] = np.sqrt(error / norm)
        found["starved_keys"][h] = starved_count / key_count
        found["starved_mass"][h] = np.mean(masses)
        found["local_gradient_cosine"][h] = dot / np.sqrt(full * part)
        found["local_gradient_ratio"][h] = np.sqrt(part / full)
    return found


def same_document(seq_len, block_size, lengths):
    """Bool [S, S], queries by keys; padding within the last block belongs to its document."""
    if lengths is None:
        return np.ones((seq_len, seq_len), bool)
    name, start = np.full(seq_len, -1), 0
    for number, length in enumerate(lengths):
        blocks = -(-length // block_size)
        name[start : start + blocks * block_size] = number
        start += blocks * block_size
    return (name[:, None] == name) & (name >= 0)


def seen(seq_len, block_size, lengths):
    """Bool [S, S]: what exact attention of a real token sees; nothing for padding rows."""
    real = np.ones(seq_len, bool)
    if lengths is not None:
        real, start = np.zeros(seq_len, bool), 0
        for length in lengths:
            real[start : start + length] = True
            start += -(-length // block_size) * block_size
    causal = np.tril(same_document(seq_len, block_size, lengths))
    return causal & real[:, None]
