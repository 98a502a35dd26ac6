"""Topology of a ring: how each mesh axis of the sequence brings keys to a rank, and when."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.utils.errors import UserError

# What the keys do on each axis of the sequence, slowest first. The last entry is the policy of a
# single axis. "flat" joins both axes to one.
RINGS = {"hierarchical": ("rotate", "rotate"), "flat": ("rotate",), "gather": ("rotate", "gather")}


class RingAxis(NamedTuple):
    """One or more mesh axes over which keys and values rotate, or are gathered."""

    names: tuple[str, ...]
    size: int
    stride: int  # distance of the ranks of adjacent positions

    def shift(self, tree: Any) -> Any:
        """Sends every array of `tree` to the next position."""
        permutation = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.names, permutation), tree)


@dataclasses.dataclass(frozen=True)
class RingTopology:
    """Static description of a ring, by the arguments of `ring_attention`.

    Two rotating axes are nested: in each step of the first one, keys and values pass once around
    the second, while those of the next node travel along the first.
    """

    layout: Layout
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    ring: str = "gather"
    scale: float | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        check_ring(self.ring)
        if math.prod(self.axis_sizes) != self.layout.num_ranks:
            raise ValueError(
                f"axis_sizes={self.axis_sizes} have product {math.prod(self.axis_sizes)}, but the "
                f"layout has num_ranks={self.layout.num_ranks}"
            )

    @functools.cached_property
    def _axes(self) -> list[tuple[str, RingAxis]]:
        """The policy and axis of each turn, without axes of size 1."""
        policies = RINGS[self.ring]
        if len(policies) == 1:
            axes = [RingAxis(self.axis_names, self.layout.num_ranks, 1)]
        else:
            strides = (math.prod(self.axis_sizes[i + 1 :]) for i in range(len(self.axis_sizes)))
            names = ((name,) for name in self.axis_names)
            axes = list(map(RingAxis, names, self.axis_sizes, strides))
        policies = policies[len(policies) - len(axes) :]
        return [pair for pair in zip(policies, axes, strict=True) if pair[1].size > 1]

    @functools.cached_property
    def rotating(self) -> tuple[RingAxis, ...]:
        """The axes around which keys and values rotate, slowest first."""
        return tuple(axis for policy, axis in self._axes if policy == "rotate")

    @functools.cached_property
    def gathered(self) -> RingAxis | None:
        """The axis over which each step gathers keys and values."""
        return next((axis for policy, axis in self._axes if policy == "gather"), None)

    @property
    def group_size(self) -> int:
        """Number of ranks with keys that one step visits."""
        return self.gathered.size if self.gathered else 1

    @property
    def local_first(self) -> bool:
        """Whether the work on a rank's own keys is separate from that on the rest of its group."""
        # In the striped layout the residue of a diagonal identifies it; in others it does not.
        return self.gathered is not None and self.layout.kind == "striped"

    def rank(self) -> Array | int:
        """Returns this device's rank (traced); 0 if there is only one."""
        return lax.axis_index(self.axis_names) if self.axis_names else 0

    def sources(self, rank: Any, *steps: Any) -> Array:
        """Returns the ranks that `rank` visits at a step of each rotating axis: int32 [..., n]."""
        ranks = rank
        for axis, step in zip(self.rotating, steps, strict=True):
            position = rank // axis.stride % axis.size
            ranks = ranks + ((position - step) % axis.size - position) * axis.stride
        ranks = jnp.asarray(ranks, jnp.int32)[..., None]
        if self.gathered is None:
            return ranks
        stride, size = self.gathered.stride, self.gathered.size
        first = ranks - ranks // stride % size * stride
        return first + stride * jnp.arange(size, dtype=jnp.int32)

    def every_row(self, x: Array) -> Array:
        """Gathers rows [B, H, rows, ...], one per block, of all ranks, in sequence order."""
        # One axis at a time, the inner one first: `jax.vmap` supports no other way.
        for name in reversed(self.axis_names):
            x = lax.all_gather(x, name, axis=2, tiled=True)
        return x[:, :, np.argsort(self.layout.block_order())]


def check_ring(ring: str, name: str = "ring") -> None:
    """Raises UserError unless `ring` is one of `RINGS`."""
    if ring not in RINGS:
        raise UserError(f"{name}={ring!r} is unknown; it must be one of {', '.join(RINGS)}")
