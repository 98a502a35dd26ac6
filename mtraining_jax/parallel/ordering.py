"""A fixed order of collectives on the virtual CPU devices of a process.

The devices of a process share a thread pool, and a collective blocks its thread until all devices
have joined. XLA's CPU runtime does not order a collective outside a loop relative to those inside,
so devices may wait in different collectives until no thread is left: a deadlock. Data dependencies
order them here; optimization barriers are removed too early. Other platforms need nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def depend_on(tree: Any, token: Array) -> Any:
    """Makes floating arrays depend on `token`, a non-empty floating array, on CPU."""

    def wait(tree, token):
        first = token.reshape(-1)[0]
        never = (first - first) > 1  # always false, even for NaN, but not constant-folded
        return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), tree)

    return lax.platform_dependent(tree, token, cpu=wait, default=lambda tree, _: tree)


def join(tree: Any) -> Any:
    """Makes every floating array of a tree depend on all of them, on CPU."""
    return lax.platform_dependent(
        tree, cpu=lambda tree: depend_on(tree, _all_of(tree)), default=lax.optimization_barrier
    )


@jax.custom_vjp
def serialize_collectives(weights: Any, arrays: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
    """Returns both unchanged; weights are gathered after `arrays` are computed.

    In the backward pass, gradients of `arrays` are used after weight gradients have been sent.
    """
    return depend_on(weights, _all_of(arrays)), arrays


def _serialize_fwd(weights, arrays):
    return serialize_collectives(weights, arrays), None


def _serialize_bwd(_, gradients):
    d_weights, d_arrays = gradients
    return d_weights, depend_on(d_arrays, _all_of(d_weights))


serialize_collectives.defvjp(_serialize_fwd, _serialize_bwd)


def _all_of(tree: Any) -> Array:
    """Returns a scalar that depends on all arrays of a tree."""
    return jnp.asarray(sum(x.reshape(-1)[:1].astype(jnp.float32) for x in jax.tree.leaves(tree)))
