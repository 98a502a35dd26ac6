"""Differentiable sparse attention over arrays of one device."""

import dataclasses
from typing import Any

import jax
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.chunks import PastChunks
from pallas_kernels.head_loop import HeadLoop, num_head_chunks
from pallas_kernels.index import Index, TiledIndex, TokenChunksIndex, WindowIndex
from pallas_kernels.interface import Plan
from pallas_kernels.ops import Pair, backward, forward, plan, scale_of
from pallas_kernels.schedule import Schedule, Triple, attend
from pallas_kernels.tiles import gather_columns

_Computed = TiledIndex | TokenChunksIndex | WindowIndex


@jax.numpy_rank_promotion("allow")
def attention(
    q: Array,
    k: Array,
    v: Array,
    index: Index,
    *,
    scale: float | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Array | Pair:
    """Computes attention over the pairs of an index, on one device; differentiable.

    Args:
        q: [B, Sq, Hq, D]; Sq a multiple of `index.block_size`.
        k, v: [B, Sk, Hk, D]; Sk a multiple of `index.block_size`, Hq a multiple of Hk. With a
            `WindowIndex` (of the keys) the queries are those of the last keys.
        index: computed pairs, as defined by its class. Not differentiated.
        scale: scale of the logits; defaults to 1/sqrt(D).
        backend: as in `plan`.
        return_lse: whether to also return the log-sum-exp of the logits.

    Returns:
        out [B, Sq, Hq, D] in the dtype of q. With `return_lse`, a pair of out and lse, fp32
        [B, Hq, Sq], natural logarithm, -inf for empty rows; gradients flow through both.

    Raises:
        ValueError: if shapes or the type of `index` are invalid, or the backend cannot run here.
    """
    if not isinstance(index, _Computed):
        allowed = "TiledIndex, a TokenChunksIndex or a WindowIndex"
        raise ValueError(f"index is a {type(index).__name__}; it must be a {allowed}")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v has {v.shape}; they must be equal")
    if index.causal and q.shape[1] != k.shape[1] and not isinstance(index, WindowIndex):
        raise ValueError(
            f"q has {q.shape[1]} tokens and k has {k.shape[1]}; causal attention needs equal "
            "lengths"
        )
    schedule = schedule_of(q, k, index, scale, backend)
    out, lse = attend(schedule, q, k, v, index)
    return (out, lse) if return_lse else out


def schedule_of(
    q: Array, k: Array, index: Index, scale: float | None, backend: str | None
) -> Schedule:
    """How attention of one device to the pairs of an index is carried out."""
    batch, num_queries, num_heads, _ = q.shape
    one = OneDevice(scale_of(scale, q), backend)
    if isinstance(index, TokenChunksIndex):
        return PastChunks(one, one.scale)
    blocks = num_queries // index.block_size
    parts = num_head_chunks(
        num_heads, k.shape[2], 0, batch * blocks**2 if index.sharded_by_query else 0
    )
    return HeadLoop(one, parts) if parts > 1 else one


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """One call of the kernels in each pass."""

    scale: float
    backend: str | None

    def prepare(self, q: Shaped, k: Shaped, index: TiledIndex | WindowIndex) -> Plan:
        tiles, columns = index.on_one_device(q.shape[0], q.shape[1], q.shape[2], k.shape[1])
        return plan(q, k, tiles, columns, single_call=True, backend=self.backend)

    def forward(self, q: Array, k: Array, v: Array, work: Plan) -> Pair:
        return forward(q, k, v, work, _column_kv(k, v, work), scale=self.scale)

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, work: Plan, lse: Array, delta: Array
    ) -> Triple:
        # Columns are gathered again; saving them would take memory until here.
        arrays, column_kv = (q, k, v, dout, lse, delta), _column_kv(k, v, work)
        how: Any = {"scale": self.scale, "dq_dtype": q.dtype, "key_dtype": k.dtype}
        grads = backward(*arrays, work, column_kv, **how)
        assert grads.dk is not None and grads.dv is not None  # an index always has tiles
        return grads.dq, grads.dk, grads.dv


def _column_kv(k: Array, v: Array, plan: Plan) -> Pair | None:
    if plan.columns is None:
        return None
    tokens = plan.columns.tokens
    return gather_columns(k, tokens), gather_columns(v, tokens)
