"""What the kernels do otherwise in Pallas' GPU interpreter than on a GPU, in one place.

The interpreter knows products with operands in shared memory only, no accumulator that starts from
a value or lives across products, and no asynchrony. Everything else of a kernel is the same code.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import ROWS, WARPGROUPS, product, tiled

# Adds the product of weights [64 keys, queries] and a tile [queries, D] to "dk" or "dv".
AddProduct = Callable[[str, Array, Any], None]


def product_plus(
    base: Callable[[], Array], a: Any, b: Any, shape: tuple[int, int], interpreted: bool
) -> Array:
    """base + a b, with the base as the accumulator's first value."""
    acc = plgpu.ACC(shape, jnp.float32)

    def run(ref: Any) -> Array:
        if not interpreted:
            ref[...] = base()
        plgpu.wgmma(ref, a, b)
        return ref[...]

    result = pl.run_scoped(run, acc)
    return result + base() if interpreted else result


def accumulate_keys(
    smem: dict[str, Any], warpgroup: Array, interpreted: bool,
    run: Callable[[AddProduct], Array],
) -> tuple[Array, Array, Array]:
    """Runs the steps of a compute warpgroup with accumulators for dk and dv.

    Returns:
        dk, dv [64, D] fp32, and what `run` returns.
    """
    shape = ROWS, smem["k"].shape[-1]
    if interpreted:
        for name in ("dk", "dv"):
            smem[name][warpgroup] = jnp.zeros(shape, jnp.float32)

        def add(name: str, weights: Array, tile: Any) -> None:
            smem["p"][warpgroup] = weights
            plgpu.commit_smem()
            smem[name][warpgroup] += product(smem["p"].at[warpgroup], tile, shape)

        end = run(add)
        return smem["dk"][warpgroup], smem["dv"][warpgroup], end

    def body(dk_ref: Any, dv_ref: Any) -> tuple[Array, Array, Array]:
        sums = {"dk": dk_ref, "dv": dv_ref}
        end = run(lambda name, weights, tile: plgpu.wgmma(sums[name], weights, tile))
        return dk_ref[...], dv_ref[...], end

    acc = plgpu.ACC(shape, jnp.float32)
    return pl.run_scoped(body, acc, acc)


def key_scratch(queries: int, head_dim: int, dtype: Any) -> dict[str, Any]:
    """Shared memory for what registers hold on a GPU: weights, dk and dv."""
    smem = {"p": tiled((WARPGROUPS, ROWS, queries), dtype)}
    for name in ("dk", "dv"):
        smem[name] = plgpu.SMEM((WARPGROUPS, ROWS, head_dim), jnp.float32)
    return smem
