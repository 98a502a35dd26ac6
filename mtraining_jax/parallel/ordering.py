"""One order of collectives for all virtual CPU devices of a process.

The devices of a process run a program on a shared pool of threads, and a collective blocks its
thread until all devices have come. XLA's CPU runtime does not order a collective outside a loop
against those inside, so some devices may wait in one and the rest in the other until no thread is
left: a deadlock. The functions here order collectives by making one depend on the data of another.
(An optimisation barrier does not help, as it has been removed by then.) Other platforms order
collectives when they compile, and nothing is done there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def after(tree: Any, token: Array) -> Any:
    """`tree`, made to depend on `token` on CPU, so that it cannot be used before `token` exists.

    Args:
        tree: arrays of any floating dtype.
        token: a floating array, not empty.
    """

    def wait(tree, token):
        first = token.reshape(-1)[0]
        never = (first - first) > 1  # false, also for NaN, but not to the compiler
        return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), tree)

    return lax.platform_dependent(tree, token, cpu=wait, default=lambda tree, _: tree)


def all_made(tree: Any) -> Any:
    """`tree`, of which no array can be used before all of them exist.

    Args:
        tree: floating arrays.
    """

    def on_cpu(tree: Any) -> Any:
        return after(tree, _all_of(tree))

    return lax.platform_dependent(tree, cpu=on_cpu, default=lax.optimization_barrier)


@jax.custom_vjp
def in_turn(weights: Any, arrays: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
    """Keeps collectives of weights apart from those that make or use some arrays.

    Weights are gathered after `arrays` are computed, and gradients of `arrays` are used after those
    of the weights have been sent.

    Args:
        weights: tree of floating arrays, of which collectives follow.
        arrays: floating arrays.

    Returns:
        Both, as they are.
    """
    return after(weights, _all_of(arrays)), arrays


def _in_turn_fwd(weights, arrays):
    return in_turn(weights, arrays), None


def _in_turn_bwd(_, gradients):
    d_weights, d_arrays = gradients
    return d_weights, after(d_arrays, _all_of(d_weights))


in_turn.defvjp(_in_turn_fwd, _in_turn_bwd)


def _all_of(tree: Any) -> Array:
    """A number that exists when all arrays of a tree do."""
    return sum(x.reshape(-1)[:1].astype(jnp.float32) for x in jax.tree.leaves(tree))
