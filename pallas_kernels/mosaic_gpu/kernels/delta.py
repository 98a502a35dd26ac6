"""Hopper kernel for delta in a fixed order of additions; XLA's depends on the program around."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import COMPILER_PARAMS, ROWS


def delta_kernel(out: Array, dout: Array, *, interpret: Any = False) -> Array:
    """Sums out * dout, [B, n, H, D], over D in fp32: [B, H, n]; n a multiple of 64, D of 32."""
    batch, rows, heads, _ = out.shape

    def attention_delta(out_ref: Any, dout_ref: Any, delta_ref: Any) -> None:
        b, tile = lax.axis_index("batch"), lax.axis_index("tile")
        # Adjacent thread blocks read adjacent memory: all heads of some rows.
        tile_rows, head = pl.ds(lax.div(tile, heads) * ROWS, ROWS), lax.rem(tile, heads)
        x, y = (
            # Four lanes together read 64 bytes of a row, 16 each.
            plgpu.load(
                ref.at[b, tile_rows, head], layout=plgpu.Layout.WGMMA_UPCAST_4X, optimized=False
            ).astype(jnp.float32)
            for ref in (out_ref, dout_ref)
        )
        delta_ref.at[b, head, tile_rows][...] = (x * y).sum(axis=1)

    return plgpu.kernel(
        attention_delta,
        out_type=jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32),
        grid=(batch, rows // ROWS * heads),
        grid_names=("batch", "tile"),
        num_threads=1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )(out, dout)
