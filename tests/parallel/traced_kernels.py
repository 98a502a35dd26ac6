"""A fake backend with kernels that can be found in a traced program: one equation per call.

Its results are meaningless, but every output depends on all inputs, as with real kernels.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.interface import Backend, Gradients

KERNELS = ("forward", "backward", "backward_rows", "backward_keys")


class TracedKernels(Backend):
    """A backend.

    Args:
        name: backend name.
        dq_apart: whether a backward call is two kernels, as in the mosaic_gpu backend.

    Attributes:
        planned: number of planned calls.
    """

    def __init__(self, name, dq_apart):
        self.name, self._dq_apart, self.planned = name, dq_apart, 0

    def unsupported(self, q, block_size):
        return None

    def plan(self, q, k, tiles, columns, *, single_call):
        self.planned += 1
        return tiles

    def forward(self, call):
        q = call.q
        shapes = [
            jax.ShapeDtypeStruct(q.shape, call.out_dtype),
            jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
        ]
        inputs = call.q, call.k, call.v, call.plan, call.column_kv, call.init
        return tuple(_kernel("forward", shapes, inputs))

    def backward(self, call):
        inputs = call[: call._fields.index("scale")]
        rows = [jax.ShapeDtypeStruct(call.q.shape, call.dq_dtype)]
        keys = [
            jax.ShapeDtypeStruct(x.shape, jnp.float32)
            for x in (call.k, call.v, *(call.column_kv or ()))
        ]
        if self._dq_apart:
            found = *_kernel("backward_rows", rows, inputs), *_kernel("backward_keys", keys, inputs)
        else:
            found = _kernel("backward", rows + keys, inputs)
        return Gradients(*found, *[None] * (5 - len(found)))

    def delta_of(self, out, dout):
        return jnp.sum(out * dout, axis=-1).swapaxes(1, 2)


def _kernel(name, shapes, inputs):
    """Returns arrays of the given shapes from a single equation of that name."""

    def kernel(inputs):
        leaves = jax.tree.leaves(inputs)
        total = sum(jnp.sum(x, dtype=jnp.float32) for x in leaves)
        return [jnp.full(x.shape, total.astype(x.dtype)) for x in shapes]

    kernel.__name__ = name
    return jax.jit(kernel)(inputs)


@functools.cache
def register():
    """Registers the backends "traced" and "traced_dq_apart" and returns the first."""
    traced = TracedKernels("traced", dq_apart=False)
    for backend in (traced, TracedKernels("traced_dq_apart", dq_apart=True)):
        backends.register(backend)
    return traced
