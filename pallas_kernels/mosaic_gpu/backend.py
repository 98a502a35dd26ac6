"""The Hopper backend behind the contract of `pallas_kernels.ops`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.gradients import Gradients, whole_keys
from pallas_kernels.mosaic_gpu.backward import backward_kernel
from pallas_kernels.mosaic_gpu.backward_keys import backward_keys_kernel
from pallas_kernels.mosaic_gpu.backward_rows import backward_rows_kernel
from pallas_kernels.mosaic_gpu.backward_schedule import BackwardWork, backward_work
from pallas_kernels.mosaic_gpu.backward_step import BackwardConfig
from pallas_kernels.mosaic_gpu.common import ROWS, TILE
from pallas_kernels.mosaic_gpu.configs import Configs, configs_for
from pallas_kernels.mosaic_gpu.delta import delta_kernel
from pallas_kernels.mosaic_gpu.forward import forward_kernel
from pallas_kernels.mosaic_gpu.schedule import key_work, query_work
from pallas_kernels.tiles import (
    DiagonalTiles,
    SegmentedDiagonals,
    Tiles,
    VerticalColumns,
    scatter_columns,
)

HEAD_DIMS = (64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
_PARTS_BESIDE_TRANSFERS = 8  # thread blocks for each multiprocessor


def unsupported(q: Array, block_size: int | None) -> str | None:
    """Why these kernels cannot run a call, or None if they can."""
    if jnp.dtype(q.dtype) not in [jnp.dtype(d) for d in DTYPES]:
        return f"dtype {q.dtype} (bfloat16 or float16 is needed)"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head dim {q.shape[-1]} (64 or 128 is needed)"
    if block_size not in (None, TILE):
        return f"block_size {block_size} (128 is needed)"
    return None


def forward(
    q: Array, k: Array, v: Array, tiles: Tiles | None, verticals: VerticalColumns | None,
    *, scale: float, init: tuple[Array, Array] | None, out_dtype: jnp.dtype,
    beside_transfers: bool = False, configs: Configs | None = None, interpret: Any = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.ops.forward`."""
    configs = configs or configs_for(q.shape[-1])
    work = query_work(tiles, verticals, *_sizes(q, k))
    if init is not None:
        init = tuple(x.astype(jnp.float32) for x in init)
    return forward_kernel(
        q, k, v, work, verticals, init, scale=scale, out_dtype=out_dtype,
        config=configs.forward, num_blocks=_thread_blocks(beside_transfers, interpret),
        interpret=interpret,
    )


def backward(
    q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array,
    tiles: Tiles | None, verticals: VerticalColumns | None, *, scale: float,
    dq_dtype: jnp.dtype = jnp.float32, key_dtype: jnp.dtype | None = None,
    beside_transfers: bool = False,
    configs: Configs | None = None, interpret: Any = False,
) -> Gradients:
    """See `pallas_kernels.ops.backward`.

    One kernel computes everything where `fused_config` gives it a configuration. Everywhere else
    two kernels run, one for dq and one for dk and dv. The fused kernel ignores `beside_transfers`:
    it has a thread block for each item of work anyway.
    """
    configs = configs or configs_for(q.shape[-1])
    sizes = _sizes(q, k)
    dout = dout.astype(q.dtype)
    base = jnp.where(lse > -jnp.inf, lse / -scale, -jnp.inf)  # what logits start from
    config = fused_config(q, tiles, configs, whole=key_dtype is not None)
    if config is not None:
        work = fused_work(tiles, verticals, *sizes, config=config, interpret=interpret)

        # `jax.vmap` runs one entry after another: arrays that a kernel adds to in place
        # (`jax.new_ref`) cannot be mapped over.
        @jax.custom_batching.sequential_vmap
        def fused(q, k, v, dout, base, minus_delta, work, verticals):
            dq = jnp.zeros(q.shape, jnp.float32)
            return backward_kernel(
                q, k, v, dout, base, minus_delta, dq, work, verticals, scale=scale,
                config=config, interpret=interpret,
            )

        dq, *key_gradients = fused(q, k, v, dout, base, -delta, work, verticals)
        if key_dtype is not None:
            key_gradients = *whole_keys(*key_gradients, verticals, key_dtype), None, None
        return Gradients(dq.astype(dq_dtype), *key_gradients)
    whole = key_dtype is not None
    keys, columns = backward_keys_kernel(
        q, k, v, dout, base, -delta, key_work(tiles, verticals, *sizes), verticals,
        scale=scale, config=configs.keys, interpret=interpret, one_array=whole,
    )
    if whole:
        dk, dv = _whole_keys(keys, columns, verticals, key_dtype)
        columns = None
        # First these, then dq: what they come from in fp32, one array, fits in dq's memory.
        q, dk, dv = lax.optimization_barrier((q, dk, dv))
    else:
        dk, dv = keys
    dq = backward_rows_kernel(
        q, k, v, dout, base, delta, query_work(tiles, verticals, *sizes), verticals,
        scale=scale, out_dtype=dq_dtype, config=configs.rows,
        num_blocks=_thread_blocks(beside_transfers, interpret), interpret=interpret,
    )
    if tiles is None:
        dk = dv = None
    return Gradients(dq, dk, dv, *(columns or (None, None)))


def delta_of(out: Array, dout: Array, *, interpret: Any = False) -> Array:
    """See `pallas_kernels.ops.delta_of`."""
    rows = out.shape[1]
    padding = ((0, 0), (0, -rows % ROWS), (0, 0), (0, 0))  # of length 0 for blocks of 128
    out, dout = jnp.pad(out, padding), jnp.pad(dout, padding)
    return delta_kernel(out, dout, interpret=interpret)[..., :rows]


def fused_config(
    q: Array, tiles: Tiles | None, configs: Configs, whole: bool
) -> BackwardConfig | None:
    """The configuration of the fused backward kernel where it runs, else None.

    It runs over dense diagonals, and over others where a call gives whole gradients (`whole`) and
    dq in fp32, which it holds beside them, is as small as the head dim's configuration asks. On
    part of a ring's keys the lists of sparse diagonals are short, and what an item does before
    and after them weighs too much.
    """
    if not isinstance(tiles, DiagonalTiles | SegmentedDiagonals):
        return None
    small = q.size * 4 <= configs.fused_sparse_bytes
    sparse = whole and isinstance(tiles, DiagonalTiles) and small
    return configs.fused if tiles.dense or sparse else None


def fused_work(
    tiles: DiagonalTiles | SegmentedDiagonals, verticals: VerticalColumns | None, *sizes: int,
    config: BackwardConfig, interpret: Any = False,
) -> BackwardWork:
    """What the fused backward kernel walks; `sizes` as in `backward_work`."""
    return backward_work(
        tiles, verticals, *sizes, item_heads=config.item_heads,
        wave=_multiprocessors(interpret) if config.waves else 0,
    )


def _whole_keys(
    keys: Array, columns: Array | None, verticals: VerticalColumns | None, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """`whole_keys` of dk and dv in one array [2, B, ...]: a batch twice as large."""
    pair = keys.reshape(-1, *keys.shape[2:])
    if verticals is not None:
        columns = columns.reshape(-1, *columns.shape[2:])
        tokens = jnp.concatenate([verticals.tokens] * 2)
        pair = scatter_columns(pair, columns, tokens)
    dk, dv = pair.reshape(keys.shape)
    return dk.astype(dtype), dv.astype(dtype)


def _sizes(q: Array, k: Array) -> tuple[int, int, int, int, int]:
    """Batch, query heads, query blocks, key blocks, key/value heads."""
    return q.shape[0], q.shape[2], q.shape[1] // TILE, k.shape[1] // TILE, k.shape[2]


def _thread_blocks(beside_transfers: bool, interpret: Any) -> int:
    """Thread blocks of the persistent kernels: one for each multiprocessor.

    A collective that runs at the same time keeps some multiprocessors from starting theirs, whose
    fixed share of the work would then come late. With more blocks the hardware starts each
    where there is room.
    """
    return _multiprocessors(interpret) * (_PARTS_BESIDE_TRANSFERS if beside_transfers else 1)


def _multiprocessors(interpret: Any) -> int:
    """Multiprocessors of the GPU that is compiled for."""
    if interpret:
        return 2
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.num_cores:
        return abstract.num_cores
    return jax.devices("gpu")[0].core_count
