"""Work on each device's own tokens, with weights that are spread over the devices.

This is fully sharded data parallelism (FSDP), written out so that it costs no more than it must:
each weight is gathered once per pass in the dtype it is used in, and its gradient leaves by one
reduce-scatter, however many chunks of tokens the work in between has.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from mtraining_jax.parallel.groups import map_shards
from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.parallel.ordering import in_turn


def on_own_tokens(
    function: Callable[..., Any],
    weights: Any,
    *arrays: Array,
    specs: Any,
    mesh: Mesh | None,
) -> Any:
    """`function(weights, *arrays)` on every device, for the tokens that it holds.

    Args:
        function: from whole weights and local arrays to local arrays.
        weights: pytree of arrays, in the dtype that `function` wants.
        arrays: [B, S, ...] each, B over 'data' and S over ('node', 'device').
        specs: how each of `weights` lies: a tree of `PartitionSpec` with at most one axis cut,
            over ('node', 'device').
        mesh: axes ('data', 'node', 'device'); None: everything is on one device.

    Returns:
        Arrays [B, S, ...], spread as `arrays` are.
    """
    if mesh is None:
        return function(weights, *arrays)

    def local(weights: Any, *arrays: Array) -> Any:
        if all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
            weights, arrays = in_turn(weights, arrays)
        return function(jax.tree.map(gather, weights, specs), *arrays)

    in_specs = specs, *[TOKENS] * len(arrays)
    return map_shards(local, mesh, in_specs, TOKENS)(weights, *arrays)


def gather(shard: Array, spec: PartitionSpec) -> Array:
    """The whole of an array that `spec` cuts; inside `shard_map`.

    The gradient flows back by a reduce-scatter, in the dtype of `shard`.
    """
    cut = cut_axis(spec)
    if cut is None:
        return shard
    return lax.all_gather(shard, spec[cut], axis=cut, tiled=True)


def reduce_scatter(whole: Array, spec: PartitionSpec) -> Array:
    """The sum of `whole` over the mesh axes of `spec`, cut as it says; inside `shard_map`."""
    cut = cut_axis(spec)
    if cut is None:
        return whole
    return lax.psum_scatter(whole, spec[cut], scatter_dimension=cut, tiled=True)


def cut_axis(spec: PartitionSpec) -> int | None:
    """The axis of an array that `spec` cuts, None if it is whole everywhere."""
    return next((axis for axis, names in enumerate(spec) if names is not None), None)


def num_chunks(tokens: int, chunk_size: int) -> int:
    """The fewest equal chunks of `tokens` that have at most `chunk_size` each."""
    count = -(-tokens // chunk_size)
    while tokens % count:
        count += 1
    return count


def first_chunks(tokens: int, chunk_size: int, chunks: int) -> int:
    """How many tokens the first `chunks` of `num_chunks` have; all of them if there are fewer."""
    count = num_chunks(tokens, chunk_size)
    return min(chunks, count) * (tokens // count)


def compute_weights(weights: Any, dtype: jnp.dtype) -> Any:
    """Matrices in the compute dtype, so that half the bytes travel; vectors stay fp32."""
    return jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, weights)
