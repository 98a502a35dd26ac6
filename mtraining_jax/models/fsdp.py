"""Fully sharded data parallelism (FSDP) with minimal traffic.

Each weight is gathered once per pass in its compute dtype, and its gradient needs one
reduce-scatter, for any number of token chunks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from mtraining_jax.parallel.mesh import DATA_AXIS, TOKENS
from mtraining_jax.parallel.ordering import serialize_collectives
from mtraining_jax.parallel.replicas import shard_map_remaining


def fsdp_apply(
    function: Callable[..., Any], weights: Any, *arrays: Array, specs: Any, mesh: Mesh | None
) -> Any:
    """Computes `function(weights, *arrays)` on every device, for its local tokens [B, S, ...].

    `function` gets full weights; `specs` shard them, each with at most one axis.
    """
    if mesh is None:
        return function(weights, *arrays)

    def apply_on_shard(weights: Any, *arrays: Array) -> Any:
        if all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
            weights, arrays = serialize_collectives(weights, arrays)
        return function(jax.tree.map(gather_weight, weights, specs), *arrays)

    in_specs = specs, *[TOKENS] * len(arrays)
    return shard_map_remaining(apply_on_shard, mesh, in_specs, TOKENS)(weights, *arrays)


def gather_weight(shard: Array, spec: PartitionSpec) -> Array:
    """All-gathers a shard inside `shard_map`; the gradient is reduce-scattered in its dtype."""
    cut = _sharded_axis(spec)
    if cut is None:
        return shard
    return lax.all_gather(shard, spec[cut], axis=cut, tiled=True)


def reduce_gradient(gradient: Array, spec: PartitionSpec, axes: tuple[str, ...]) -> Array:
    """Sums a gradient over mesh axes and shards it as its weight; inside `shard_map`."""
    cut = _sharded_axis(spec)
    if cut is None:
        return lax.psum(gradient, axes)
    gradient = lax.psum_scatter(gradient, spec[cut], scatter_dimension=cut, tiled=True)
    return lax.psum(gradient, DATA_AXIS) if DATA_AXIS in axes else gradient


def _sharded_axis(spec: PartitionSpec) -> int | None:
    """The axis of an array that `spec` shards; None if it is replicated."""
    return next((axis for axis, names in enumerate(spec) if names is not None), None)


def compute_weights(weights: Any, dtype: jnp.dtype) -> Any:
    """Casts matrices to the compute dtype, which halves gather traffic; vectors stay fp32."""
    return jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, weights)
