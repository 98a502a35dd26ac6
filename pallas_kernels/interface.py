"""The interface of backends: plans, both passes, and optionally kernels that select an index."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.fp8_scores import Fp8Scores
from pallas_kernels.masses import BlockScores
from pallas_kernels.tiles import Columns, Tiles, scatter_columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of one kernel call, from `pallas_kernels.plan`; a pytree."""

    work: Any  # work lists of the backend's kernels, a pytree
    columns: Columns | None  # the gathered columns to compute as well
    backend: str = jax.tree.static()  # name of the backend that made it and will run it
    block_size: int = jax.tree.static()  # g
    has_tiles: bool = jax.tree.static()  # whether there are tiles, or only columns
    query_shape: tuple[int, ...] = jax.tree.static()  # [B, nq, Hq, D]
    key_shape: tuple[int, ...] = jax.tree.static()  # [B, nk, Hk, D]


class Gradients(NamedTuple):
    """Gradients of one kernel call; None for inputs that the call did not have."""

    dq: Array  # [B, nq, Hq, D], fp32 by default
    dk: Array | None  # [B, nk, Hk, D], summed over the query heads of a group; fp32 by default
    dv: Array | None
    dk_columns: Array | None  # fp32 [B, Mv, Hq, D]; None if included in dk
    dv_columns: Array | None


def whole_keys(grads: Gradients, columns: Columns | None, dtype: jnp.dtype) -> Gradients:
    """Adds the gradients of gathered columns to dk and dv, and converts these to a dtype."""
    _, dk, dv, dk_columns, dv_columns = grads
    assert dk is not None and dv is not None, "without tiles there are no dk and dv"
    if columns is not None:
        assert dk_columns is not None and dv_columns is not None
        dk = scatter_columns(dk, dk_columns, columns.tokens)
        dv = scatter_columns(dv, dv_columns, columns.tokens)
    return Gradients(grads.dq, dk.astype(dtype), dv.astype(dtype), None, None)


Pair = tuple[Array, Array]
NUM_QUERIES = 64  # probe queries of the kernels


class ForwardCall(NamedTuple):
    """Arguments of `pallas_kernels.forward`, checked and with defaults filled in."""

    q: Array
    k: Array
    v: Array
    plan: Plan
    column_kv: Pair | None
    scale: float
    init: Pair | None
    out_dtype: jnp.dtype
    overlaps_collectives: bool


class BackwardCall(NamedTuple):
    """Arguments of `pallas_kernels.backward`, checked and with defaults filled in."""

    q: Array
    k: Array
    v: Array
    dout: Array
    lse: Array
    delta: Array
    plan: Plan
    column_kv: Pair | None
    scale: float
    dq_dtype: jnp.dtype
    key_dtype: jnp.dtype | None
    overlaps_collectives: bool


class ProbeCall(NamedTuple):
    """Probe queries, the last ones of a sequence, and the key blocks that they score."""

    q: Array  # [B, Hq, u, D]; with `queries`, any number of query sets
    k: Array  # [B, n, Hk, D], local keys; n a multiple of 128, Hq a multiple of Hk
    block_ids: Array  # int32 [n/128], global number of each local block of 128 keys
    num_blocks: int  # NB, blocks of the whole sequence
    scale: float  # of the logits
    valid_len: Array | None = None  # int32 scalar or [B], end of the queries; None is NB * 128
    queries: Array | None = None  # int32 [B], the query set that scores a batch entry's keys


class Estimate(abc.ABC):
    """Kernels that score key blocks by probe queries; a block's bits depend on no other block."""

    def unsupported(self, q: Shaped) -> str | None:
        """Why the kernels do not support probe queries q [B, Hq, u, D], or None."""
        if q.shape[2] == NUM_QUERIES:
            return None
        return f"{q.shape[2]} last queries (must be {NUM_QUERIES})"

    @abc.abstractmethod
    def block_statistics(self, call: ProbeCall) -> Pair:
        """Computes peak and normalizer of every (key block, query), for a softmax over all blocks.

        Returns (peak, total) fp32 [B, Hq, n/128, u]: the largest causal logit (unscaled), and the
        sum of exp((logit - peak) * scale); the lowest finite number and 0 for a query without keys.
        """

    @abc.abstractmethod
    def block_masses(
        self, call: ProbeCall, peak: Array, to_mass: Array
    ) -> tuple[Array, Array, Array]:
        """Sums weights exp((logit - peak) * scale) * to_mass over a block's columns and diagonals.

        `peak`, fp32 [B, Hq, u] or by query set, is the largest logit of each query over the whole
        sequence. Returns (columns, own, beyond), fp32 [B, Hq, n/128, 128] each. Entry t of `own` is
        the diagonal on which the last query sees key t of this block, entry t of `beyond` the one
        on which it sees key t of the next block (zero from u - 1 on).
        """


class Decoding(NamedTuple):
    """Kernels for new tokens: attention, and the selection of what they attend to."""

    attend: Callable[..., Pair]  # takes a `pallas_kernels.decode.DecodeCall`
    code_weights: Callable[..., Pair]  # see `pallas_kernels.key_codes.block_weights`
    selected_blocks: Callable[..., Pair]  # see `pallas_kernels.key_codes.selected_blocks`


class Backend(abc.ABC):
    """The kernels behind `pallas_kernels.plan`, `forward`, `backward` and `delta_of`."""

    name: str
    estimate: Estimate | None = None
    block_scores: BlockScores | None = None
    fp8_scores: Fp8Scores | None = None
    decoding: Decoding | None = None

    @abc.abstractmethod
    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        """Why a call is not supported here, or None; `block_size` is None without blocks."""

    @abc.abstractmethod
    def plan(
        self,
        q: Shaped,
        k: Shaped,
        tiles: Tiles | None,
        columns: Columns | None,
        *,
        single_call: bool,
    ) -> Any: ...

    @abc.abstractmethod
    def forward(self, call: ForwardCall) -> Pair: ...

    @abc.abstractmethod
    def backward(self, call: BackwardCall) -> Gradients: ...

    @abc.abstractmethod
    def delta_of(self, out: Array, dout: Array) -> Array: ...
