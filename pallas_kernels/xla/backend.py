"""The XLA implementation of `pallas_kernels.backends.Backend`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.gradients import Gradients
from pallas_kernels.tiles import Columns, Tiles
from pallas_kernels.xla.backward import backward
from pallas_kernels.xla.forward import forward
from pallas_kernels.xla.walk import XlaWork, xla_work


class Xla:
    """Runs every call on every platform."""

    name = "xla"
    estimate = None
    block_scores = None

    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        del q, block_size
        return None

    def plan(
        self, q: Shaped, k: Shaped, tiles: Tiles | None, columns: Columns | None, *, whole: bool
    ) -> XlaWork:
        del columns, whole
        return xla_work(tiles, q.shape[1], k.shape[1])

    def forward(self, *args, beside_transfers: bool, **options) -> tuple[Array, Array]:
        del beside_transfers
        return forward(*args, **options)

    def backward(self, *args, beside_transfers: bool, **options) -> Gradients:
        del beside_transfers
        return backward(*args, **options)

    def delta_of(self, out: Array, dout: Array) -> Array:
        product = out.astype(jnp.float32) * dout.astype(jnp.float32)
        return jnp.sum(product, axis=-1).swapaxes(1, 2)
