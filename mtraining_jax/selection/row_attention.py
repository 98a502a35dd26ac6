"""Exact attention of sampled query rows, over all keys and over the keys in an index.

One pass over the keys of each rank, in chunks of blocks, and sums over ranks. Serves as the
reference for measuring a selection during training.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.documents import Documents
from mtraining_jax.selection import collectives
from mtraining_jax.selection.scores.estimate import relative_exp
from pallas_kernels.index import Index


class Keys(NamedTuple):
    """Keys that rows are measured against, and the index; other fields as in `SelectionContext`."""

    k: Array  # [B, n, Hk, D], local keys
    v: Array | None  # local values; None if no output is needed
    index: Index  # causal, with all of its rows in sequence order
    block_ids: Array
    num_blocks: int
    axis_names: tuple[str, ...]
    scale: float
    documents: Documents

    @classmethod
    def of(
        cls,
        k: Array,
        v: Array | None,
        index: Index,
        *,
        block_ids: Array,
        axis_names: Sequence[str] = (),
        scale: float | None = None,
        documents: Documents | None = None,
    ) -> "Keys":
        """Builds it from local shards; a `sharded_by_query` index has the local rows.

        Raises:
            ValueError: if the index is not causal.
        """
        if not index.causal:
            raise ValueError(
                "recall is measured against causal attention, but the index is not causal"
            )
        axes = tuple(axis_names)
        block_ids = block_ids.astype(jnp.int32)
        num_blocks = block_ids.shape[0] * (lax.axis_size(axes) if axes else 1)
        index = collectives.all_rows(index, block_ids, num_blocks, axes)
        scale = 1.0 / math.sqrt(k.shape[3]) if scale is None else scale
        documents = documents or Documents.whole(num_blocks, index.block_size)
        return cls(k, v, index, block_ids, num_blocks, axes, scale, documents)

    @property
    def block_size(self) -> int:
        """Tokens per block (g)."""
        return self.index.block_size

    def rows(self, x_BnHD: Array, positions: Array) -> Array:
        """Gathers rows of an array sharded like the keys: [B, R, H, D], replicated."""
        return collectives.gather_rows(
            x_BnHD, positions, self.block_ids, self.num_blocks, self.axis_names
        )

    def total(self, tree):
        """Sums over ranks."""
        return lax.psum(tree, self.axis_names) if self.axis_names else tree

    def counts(self, positions: Array) -> Array:
        """Whether each row is a real token: bool [B or 1, 1, R]."""
        row_documents = self.documents.of(positions // self.block_size)
        return (positions < row_documents.ends())[:, None]


class RowAttention(NamedTuple):
    """Attention of some rows, replicated; sums are of exp((logit - peak) * scale)."""

    q: Array  # [B, R, Hq, D]
    peak: Array  # fp32 [B, Hq, R], the largest raw logit
    total: Array  # fp32 [B, Hq, R], sum over all keys that a row sees
    kept: Array  # fp32 [B, Hq, R], sum over computed pairs
    marked: Array | None = None  # fp32 [B, Hq, R], sum over marked keys of earlier blocks
    out: Array | None = None  # fp32 [B, Hq, R, D], of exact attention; None without values
    out_kept: Array | None = None  # the same over computed pairs; 0 for a row without any

    def share(self, part: Array) -> Array:
        """Returns a sum as a fraction of the row's mass; 1 for a row that sees nothing."""
        return jnp.where(self.total > 0, part / jnp.where(self.total > 0, self.total, 1), 1)


def attend_rows(
    q_BRHD: Array, positions: Array, keys: Keys, marks_BHn: Array | None = None
) -> RowAttention:
    """Computes exact attention of some rows, and attention over the pairs in an index.

    The queries are replicated, at global positions int32 [R]. The mass of marked local keys is
    summed separately.
    """
    batch, num_rows, num_heads, width = q_BRHD.shape
    v = keys.v
    zero = jnp.zeros((batch, num_heads, num_rows), jnp.float32)
    outs = () if v is None else (jnp.zeros((*zero.shape, width), jnp.float32),) * 2
    marked = () if marks_BHn is None else (zero,)
    start = (jnp.full_like(zero, -jnp.inf), (zero, zero, *marked), outs)

    def step(carry, chunk: _Chunk):
        peak, sums, outs = carry
        logits, listed = chunk.logits(q_BRHD, positions), chunk.listed(positions, num_heads)
        higher = jnp.maximum(peak, logits.max(-1))
        old = relative_exp(peak, higher, keys.scale)
        terms = relative_exp(logits, higher[..., None], keys.scale)
        kept = jnp.where(listed, terms, 0)
        parts = [terms, kept]
        if marks_BHn is not None:
            behind = chunk.blocks < (positions // keys.block_size)[:, None]
            parts.append(jnp.where(chunk.take(marks_BHn, 2)[:, :, None] & behind, terms, 0))
        sums = tuple(s * old + p.sum(-1) for s, p in zip(sums, parts, strict=True))
        if v is not None:
            outs = tuple(
                o * old[..., None] + chunk.weighted(p, v)
                for o, p in zip(outs, (terms, kept), strict=True)
            )
        return higher, sums, outs

    peak, sums, outs = _over_chunks(step, start, keys)
    whole = collectives.maximum(peak, keys.axis_names)
    factor = relative_exp(peak, whole, keys.scale)
    sums = tuple(s * factor for s in sums)
    outs = tuple(o * factor[..., None] for o in outs)
    (total, kept, *marked), outs = keys.total((sums, outs))
    if outs:
        outs = tuple(
            o / jnp.where(s > 0, s, 1)[..., None] for o, s in zip(outs, (total, kept), strict=True)
        )
    return RowAttention(
        q_BRHD, whole, total, kept, marked[0] if marked else None, *(outs or (None, None))
    )


def query_gradients(
    rows: RowAttention, d_out_BRHD: Array, positions: Array, keys: Keys
) -> tuple[Array, Array]:
    """Computes each row's query gradient through exact attention and through the kept pairs.

    dq = scale * sum over keys j of p_j (dO . v_j - dO . o) k_j, with p and o of the respective
    attention. `rows` are the result of `attend_rows`, with outputs. Returns fp32 [B, Hq, R, D]
    each.
    """
    num_heads, v = rows.q.shape[2], keys.v
    assert v is not None and rows.out is not None and rows.out_kept is not None
    d_rows = d_out_BRHD.astype(jnp.float32).transpose(0, 2, 1, 3)
    deltas = [(d_rows * o).sum(-1)[..., None] for o in (rows.out, rows.out_kept)]
    sums = [jnp.where(s > 0, s, 1)[..., None] for s in (rows.total, rows.kept)]

    def step(carry, chunk: _Chunk):
        logits, listed = chunk.logits(rows.q, positions), chunk.listed(positions, num_heads)
        terms = relative_exp(logits, rows.peak[..., None], keys.scale)
        d_weights = chunk.products(d_out_BRHD, v)
        parts = terms, jnp.where(listed, terms, 0)
        return tuple(
            sum_ + chunk.weighted(part / total * (d_weights - delta), keys.k)
            for sum_, part, total, delta in zip(carry, parts, sums, deltas, strict=True)
        )

    start = (jnp.zeros_like(rows.out),) * 2
    full, kept = keys.total(_over_chunks(step, start, keys))
    return full * keys.scale, kept * keys.scale


def _over_chunks(step: Callable, start, keys: Keys):
    """Carries `step(carry, chunk)` over chunks of local blocks."""
    size = keys.block_size
    num_local = keys.block_ids.shape[0]
    count = min(max(keys.num_blocks // 16, 1), 64, num_local)
    steps = -(-num_local // count)

    def body(carry, i):
        # The last chunk starts early enough to end with the last block; blocks that it repeats are
        # treated as after every query.
        first = jnp.minimum(i * count, num_local - count)
        again = jnp.arange(count) < i * count - first
        chosen = jnp.where(
            again, keys.num_blocks, lax.dynamic_slice_in_dim(keys.block_ids, first, count)
        )
        return step(carry, _Chunk(keys, first * size, chosen)), None

    return lax.scan(body, start, jnp.arange(steps))[0]


class _Chunk(NamedTuple):
    """A chunk of local blocks: first block, and global numbers [C]."""

    keys: Keys
    start: Array
    ids: Array

    @property
    def tokens(self) -> int:
        return self.ids.shape[0] * self.keys.block_size

    @property
    def blocks(self) -> Array:
        """The block of each key: int32 [C g]."""
        return jnp.repeat(self.ids, self.keys.block_size)

    def take(self, x: Array, axis: int = 1) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start, self.tokens, axis)

    def products(self, x_BRHD: Array, y_BnHkD: Array) -> Array:
        """Multiplies rows with local keys or values: fp32 [B, Hq, R, C g]."""
        batch, num_rows, num_heads, width = x_BRHD.shape
        y = self.take(y_BnHkD)
        x = x_BRHD.reshape(batch, num_rows, y.shape[2], -1, width)
        logits = jnp.einsum(
            "brkgd,btkd->bkgrt", x, y, precision=_precision(y), preferred_element_type=jnp.float32
        )
        return logits.reshape(batch, num_heads, num_rows, -1)

    def weighted(self, weights_BHRt: Array, y_BnHkD: Array) -> Array:
        """Sums local keys or values with weights, rounded to their dtype: fp32 [B, Hq, R, D]."""
        y = self.take(y_BnHkD)
        batch, num_heads, num_rows, tokens = weights_BHRt.shape
        weights = weights_BHRt.astype(y.dtype).reshape(batch, y.shape[2], -1, num_rows, tokens)
        sums = jnp.einsum(
            "bkgrt,btkd->bkgrd",
            weights,
            y,
            precision=_precision(y),
            preferred_element_type=jnp.float32,
        )
        return sums.reshape(batch, num_heads, num_rows, -1)

    def logits(self, q_BRHD: Array, positions: Array) -> Array:
        """Computes raw logits, -inf where a row does not see a key."""
        size = self.keys.block_size
        key_positions = (self.ids[:, None] * size + jnp.arange(size)).reshape(-1)
        same = self.keys.documents.of(positions // size).contain(self.ids)  # [B, R, C]
        seen = (key_positions <= positions[:, None]) & jnp.repeat(same, size, axis=-1)
        return jnp.where(seen[:, None], self.products(q_BRHD, self.keys.k), -jnp.inf)

    def listed(self, positions: Array, num_heads: int) -> Array:
        """Whether the index lists each pair: bool [B, Hq, R, C g]."""
        listed = self.keys.index.computes(positions, self.ids)
        shape = self.keys.k.shape[0], num_heads, positions.shape[0], self.ids.shape[0]
        listed = jnp.broadcast_to(listed, (*shape, self.keys.block_size))
        return listed.reshape(*shape[:3], -1)


def _precision(x: Array) -> jax.lax.Precision | None:
    """Selects the product precision: bf16 is exact in fp32, only fp32 needs the slower passes."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
