"""The XLA implementation of `pallas_kernels.interface.Backend`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.interface import Backend, BackwardCall, ForwardCall, Gradients, Pair
from pallas_kernels.tiles import Columns, Tiles
from pallas_kernels.xla.backward import backward
from pallas_kernels.xla.forward import forward
from pallas_kernels.xla.walk import XlaWork, xla_work


class Xla(Backend):
    name = "xla"

    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        return None

    def plan(
        self,
        q: Shaped,
        k: Shaped,
        tiles: Tiles | None,
        columns: Columns | None,
        *,
        single_call: bool,
    ) -> XlaWork:
        return xla_work(tiles, q.shape[1], k.shape[1])

    def forward(self, call: ForwardCall) -> Pair:
        return forward(call)

    def backward(self, call: BackwardCall) -> Gradients:
        return backward(call)

    def delta_of(self, out: Array, dout: Array) -> Array:
        product = out.astype(jnp.float32) * dout.astype(jnp.float32)
        return jnp.sum(product, axis=-1).swapaxes(1, 2)
