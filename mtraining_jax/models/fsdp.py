"""Fully sharded data parallelism (FSDP) with minimal traffic.

Each weight is gathered once per pass in its compute dtype, and its gradient needs one
reduce-scatter, in fp32, for any number of token chunks.
"""

import functools
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
    function: Callable[..., Any],
    weights: Any,
    *arrays: Array | None,
    specs: Any,
    mesh: Mesh | None,
    dtype: jnp.dtype | None = None,
) -> Any:
    """Computes `function(weights, *arrays)` on every device, for its local tokens [B, S, ...].

    `function` gets full weights, with matrices in `dtype` (None: unchanged); `specs` shard them,
    each with at most one axis.
    """
    if mesh is None:
        return function(compute_weights(weights, dtype), *arrays)

    def apply_on_shard(weights: Any, *arrays: Any) -> Any:
        if all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(arrays)):
            weights, arrays = serialize_collectives(weights, arrays)
        # Not cast outside: gradients of the devices would be summed in the compute dtype.
        whole = jax.tree.map(functools.partial(_gather, dtype=dtype), weights, specs)
        return function(whole, *arrays)

    in_specs = specs, *[TOKENS] * len(arrays)
    return shard_map_remaining(apply_on_shard, mesh, in_specs, TOKENS)(weights, *arrays)


def gather_weight(shard: Array, spec: PartitionSpec) -> Array:
    """All-gathers a shard inside `shard_map`; the gradient is reduce-scattered in its dtype."""
    cut = _sharded_axis(spec)
    if cut is None:
        return shard
    return lax.all_gather(shard, spec[cut], axis=cut, tiled=True)


def _gather(shard: Array, spec: PartitionSpec, dtype: jnp.dtype | None) -> Array:
    """`gather_weight` in a dtype; the gradient is summed in that of the shard."""
    if dtype is None or shard.ndim < 2 or shard.dtype == dtype:
        return gather_weight(shard, spec)
    if _sharded_axis(spec) is None:
        return shard.astype(dtype)
    return _cast_and_gather(shard, spec, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _cast_and_gather(shard: Array, spec: PartitionSpec, dtype: jnp.dtype) -> Array:
    return gather_weight(shard.astype(dtype), spec)


def _cast_and_gather_bwd(spec, dtype, _, gradient):
    return (reduce_gradient(gradient.astype(jnp.float32), spec, ()),)


_cast_and_gather.defvjp(lambda x, *how: (_cast_and_gather(x, *how), None), _cast_and_gather_bwd)


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


def compute_weights(weights: Any, dtype: jnp.dtype | None) -> Any:
    """Casts matrices to the compute dtype, which halves gather traffic; vectors stay fp32."""
    if dtype is None:
        return weights
    return jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, weights)
