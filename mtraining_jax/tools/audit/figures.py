"""Per-head metrics of a selection, measured on sampled rows during training.

Attention over the computed pairs is compared with exact attention of the same queries, keys and
values. Sums run over rows and sequences before they are divided, so rows are weighted by their
contribution to the output or gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection.row_attention import Keys, RowAttention, attend_rows, query_gradients

_QUERY_BLOCKS = 256  # processed together; bounds memory
_KEY_BLOCKS = 64


def starved_keys(keys: Keys, num_heads: int) -> tuple[Array, Array]:
    """Finds local keys that no later query block computes, although one could: bool [B, Hq, n].

    Also returns bool [B or 1, 1, n], keys that are not padding and have a later block in their
    document. A key's own block is ignored, since every pattern keeps it.
    """
    # The last query of a block is checked: in most index types all of them compute the same keys.
    size, num_blocks = keys.block_size, keys.num_blocks
    num_local, batch = keys.block_ids.shape[0], keys.k.shape[0]
    width = min(_KEY_BLOCKS, num_local)
    depth = min(_QUERY_BLOCKS, num_blocks)

    def kept_keys(i):
        # The last chunk starts early enough to end with the last block.
        ids = lax.dynamic_slice_in_dim(
            keys.block_ids, jnp.minimum(i * width, num_local - width), width
        )

        def kept_by_queries(found, j):
            blocks = jnp.minimum(j * depth, num_blocks - depth) + jnp.arange(depth)
            kept = keys.index.computes(blocks * size + size - 1, ids)
            later = (ids < blocks[:, None]) & keys.documents.of(blocks).contain(ids)  # [B, Q, C]
            kept = (kept & later[:, None, :, :, None]).any(2)
            return found | jnp.broadcast_to(kept, found.shape), None

        none = jnp.zeros((batch, num_heads, width, size), bool)
        return lax.scan(kept_by_queries, none, jnp.arange(-(-num_blocks // depth)))[0]

    count = -(-num_local // width)
    chunks = jnp.moveaxis(lax.map(kept_keys, jnp.arange(count)), 0, 2)  # [B, Hq, count, C, g]
    last = chunks[:, :, -1, (count * width - num_local) :]
    first = chunks[:, :, :-1].reshape(batch, num_heads, (count - 1) * width, size)
    kept = jnp.concatenate([first, last], 2).reshape(batch, num_heads, -1)
    could = _could(keys)
    return could & ~kept, could


def _could(keys: Keys) -> Array:
    """Returns the keys that a later block may compute: bool [B or 1, 1, n]."""
    size = keys.block_size
    places = (keys.block_ids[:, None] * size + jnp.arange(size)).reshape(-1)
    own = keys.documents.of(keys.block_ids)
    ends = jnp.minimum(own.ends(), (own.first + own.length - 1) * size)
    return (places < jnp.repeat(jnp.where(own.length > 0, ends, 0), size, axis=-1))[:, None]


# The last queries, which several patterns use as probe queries for the whole sequence.
LAST = 64
GRADIENT_FIGURES = ("local_gradient_cosine", "local_gradient_ratio")


class AuditRows(NamedTuple):
    """The positions of the rows to measure, identical on every rank."""

    everywhere: Array  # int32 [R], from the whole sequence
    last: Array | None = None  # int32 [R'], among the last queries; for `index_gap` only

    @classmethod
    def draw(cls, key: Array, seq_len: int, count: int, *, last: bool) -> "AuditRows":
        """Samples `count` rows without repetition, a quarter from the last 64 queries if `last`."""
        last_key, everywhere_key = jax.random.split(key)
        near = min(LAST, seq_len)
        few = min(count // 4, near) if last else 0
        all_ = jax.random.choice(everywhere_key, seq_len, (count - few,), replace=False)
        if not few:
            return cls(all_.astype(jnp.int32))
        end = seq_len - 1 - jax.random.choice(last_key, near, (few,), replace=False)
        return cls(all_.astype(jnp.int32), end.astype(jnp.int32))


def forward_figures(
    q_BnHD: Array, rows: AuditRows, keys: Keys, batch_axes: Sequence[str] = ()
) -> tuple[dict[str, Array], RowAttention]:
    """Computes the error of attention's output. No gradient flows through it.

    - `recall`: fraction of exact attention's softmax mass on computed pairs, mean over rows.
    - `output_error`: sqrt(sum |o' - o|^2 / sum |o|^2), with o' the output over computed pairs.
    - `index_gap`: recall of the last rows minus that of the rows everywhere in the second half of
      the sequence (earlier rows see fewer keys and keep more). Only with last rows.
    - `starved_keys`: fraction of keys that no later query block computes.
    - `starved_mass`: fraction of a row's mass on such keys of earlier blocks, mean over rows.

    Returns these metrics, fp32 [Hq] each, replicated (NaN if all rows are padding), and the
    attention of the rows everywhere, for `gradient_figures`.
    """
    q_BnHD, k, v = lax.stop_gradient((q_BnHD, keys.k, keys.v))
    keys = keys._replace(k=k, v=v)
    positions = jnp.concatenate([x for x in rows if x is not None])
    starved, could = starved_keys(keys, q_BnHD.shape[2])
    found = attend_rows(keys.rows(q_BnHD, positions), positions, keys, starved)
    count = rows.everywhere.shape[0]

    everywhere = jnp.arange(positions.shape[0]) < count
    counts = keys.counts(positions)  # [B or 1, 1, R]
    shape = found.total.shape

    def mean(x: Array, some: Array) -> Array:
        counted = jnp.broadcast_to(counts & some, shape)
        sums = jnp.where(counted, x, 0).sum((0, 2)), counted.sum((0, 2), dtype=jnp.float32)
        total, number = _over_batch(sums, batch_axes)
        return total / number

    recall = found.share(found.kept)
    counted = (counts & everywhere)[..., None]
    assert found.out is not None and found.out_kept is not None and found.marked is not None
    error, norm = (
        jnp.where(counted, x**2, 0).sum((0, 2, 3)) for x in (found.out_kept - found.out, found.out)
    )
    error, norm = _over_batch((error, norm), batch_axes)
    could = jnp.broadcast_to(could, starved.shape)
    starved_and_all = keys.total(tuple(x.sum((0, 2), dtype=jnp.float32) for x in (starved, could)))
    num_starved, num_all = _over_batch(starved_and_all, batch_axes)
    figures = {
        "recall": mean(recall, everywhere),
        "output_error": jnp.sqrt(error / norm),
        "starved_keys": num_starved / num_all,
        "starved_mass": mean(found.share(found.marked), everywhere),
    }
    if rows.last is not None:
        late = everywhere & (positions >= keys.num_blocks * keys.block_size // 2)
        figures["index_gap"] = mean(recall, ~everywhere) - mean(recall, late)
    return figures, _first_rows(found, count)


def gradient_figures(
    found: RowAttention,
    d_out_BnHD: Array,
    positions: Array,
    keys: Keys,
    batch_axes: Sequence[str] = (),
) -> Array:
    """Computes the error of this layer's query gradients, given the gradient of the output.

    Returns fp32 [Hq, 2], in the order of `GRADIENT_FIGURES`: the cosine between the gradients of
    the rows everywhere through exact attention and through the computed pairs, and the norm of the
    latter over that of the former. NaN if exact attention has no gradient.
    """
    d_rows = keys.rows(d_out_BnHD, positions)
    # Only a direction and a ratio are needed; rescale so that squares do not underflow.
    largest = jnp.max(jnp.abs(d_rows)).astype(jnp.float32)
    largest = lax.pmax(largest, tuple(batch_axes)) if batch_axes else largest
    scaled = d_rows.astype(jnp.float32) / jnp.where(largest > 0, largest, 1)
    full, kept = query_gradients(found, scaled.astype(d_rows.dtype), positions, keys)
    counted = keys.counts(positions)[..., None]
    sums = tuple(
        jnp.where(counted, a * b, 0).sum((0, 2, 3))
        for a, b in ((full, kept), (full, full), (kept, kept))
    )
    dot, full_square, kept_square = _over_batch(sums, batch_axes)
    norms = jnp.sqrt(full_square), jnp.sqrt(kept_square)
    # A single pair has zero gradient, so nothing of the direction is kept.
    cosine = jnp.where(kept_square > 0, dot / jnp.where(kept_square > 0, norms[0] * norms[1], 1), 0)
    cosine = jnp.where(full_square > 0, cosine, jnp.nan)
    return jnp.stack([cosine, norms[1] / norms[0]], -1)


def _over_batch(sums, batch_axes: Sequence[str]):
    return lax.psum(sums, tuple(batch_axes)) if batch_axes else sums


def _first_rows(found: RowAttention, count: int) -> RowAttention:
    """Returns attention of the first rows only."""
    some = {name: x for name, x in found._asdict().items() if name != "q" and x is not None}
    return found._replace(q=found.q[:, :count], **{n: x[:, :, :count] for n, x in some.items()})
