"""Arrays in host memory, copied to the device for one layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax, memory


def is_on_host(x: Array) -> bool:
    """Whether an array, also a traced one, is in host memory."""
    return jax.typeof(x).memory_space == memory.Space.Host


def to_device(x: Array) -> Array:
    """Copies an array in host memory to the device; its gradient is copied back."""
    return jax.device_put(x, memory.Space.Device) if is_on_host(x) else x


def move_to(x: Array, like: Array) -> Array:
    """Moves an array on the device to the memory of another."""
    return jax.device_put(x, memory.Space.Host) if is_on_host(like) else x


def by_memory(arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Splits arrays into those on the device and those in host memory."""
    there = {name: x for name, x in arrays.items() if is_on_host(x)}
    return {name: x for name, x in arrays.items() if name not in there}, there


def map_layers(function: Callable[[Any], Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """Applies a function to the arrays [L, ...] of one layer at a time."""
    if not arrays:
        return {}
    return lax.scan(lambda _, x: (None, function(x)), None, arrays)[1]


def over_layers(function: Callable[..., Any], updated: Any, read: Any) -> Any:
    """Replaces `updated` by `function(updated, read)`, in place and for one layer at a time.

    Both are trees of arrays [L, ...]; the function gets and returns those of a layer on the device.
    """

    def one_layer(arrays: Any, layer: Array) -> tuple[Any, None]:
        def get(x: Array) -> Array:
            return to_device(lax.dynamic_index_in_dim(x, layer, keepdims=False))

        def put(x: Array, new: Array) -> Array:
            return lax.dynamic_update_index_in_dim(x, move_to(new, x), layer, axis=0)

        return jax.tree.map(put, arrays, function(*jax.tree.map(get, (arrays, read)))), None

    if not (leaves := jax.tree.leaves(updated)):
        return updated
    return lax.scan(one_layer, updated, jax.numpy.arange(len(leaves[0])))[0]
