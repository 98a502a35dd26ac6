"""Lists with valid entries before a count, and padding after."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def live(entries: Array, count: Array) -> Array:
    """Marks the first `count` [...] entries of each list [..., M]."""
    return jnp.arange(entries.shape[-1], dtype=jnp.int32) < count[..., None]


def marked(entries: Array, count: Array, size: int) -> Array:
    """Converts the first `count` [...] entries int32 [..., M] to a mask, bool [..., size]."""
    entries = jnp.where(live(entries, count), entries, size)
    leading = np.ogrid[tuple(slice(n) for n in count.shape)]
    table = jnp.zeros((*count.shape, size), bool)
    return table.at[(*(x[..., None] for x in leading), entries)].set(
        True, mode="drop", wrap_negative_indices=False
    )


def contains(entries: Array, count: Array, values: Array) -> Array:
    """Whether values int32 [n] or [..., n] are among the first `count` entries, which ascend."""
    if entries.shape[-1] == 0:
        return jnp.zeros((*count.shape, values.shape[-1]), bool)
    past = jnp.iinfo(jnp.int32).max
    entries = jnp.where(live(entries, count), entries, past)
    leading = jnp.broadcast_shapes(entries.shape[:-1], values.shape[:-1])
    entries = jnp.broadcast_to(entries, (*leading, entries.shape[-1]))
    values = jnp.broadcast_to(values, (*leading, values.shape[-1]))
    search = jnp.vectorize(jnp.searchsorted, signature="(m),(n)->(n)")
    place = jnp.minimum(search(entries, values), entries.shape[-1] - 1)
    return (jnp.take_along_axis(entries, place, axis=-1) == values) & (values < past)
