"""Topology of a ring: which ranks meet at which step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.utils.errors import UserError

RINGS = ("hierarchical", "flat", "gather")


@dataclasses.dataclass(frozen=True)
class RingTopology:
    """Static description of a ring; usable inside `shard_map` over `axis_names`.

    In general two rings are nested: in each of `outer_size` steps, keys and values pass once
    around the inner axis while those of the next node travel along the outer axis.

    Attributes:
        layout: layout of the sequence; `layout.num_ranks` must be the product of the sizes.
        axis_names, axis_sizes: mesh axes of the sequence, slowest first.
        ring: "hierarchical": two nested rings (one ring with a single axis). "flat": one ring over
            all axes. "gather": a ring over the outer axis; in each step the devices along the inner
            axis all-gather their keys and values.
        scale: scale of the logits; None is 1/sqrt(D).
        backend: kernel backend; None is the fastest available one.
    """

    layout: Layout
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    ring: str = "gather"
    scale: float | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        check_ring(self.ring)
        if len(self.axis_names) != len(self.axis_sizes) or len(self.axis_names) > 2:
            raise ValueError(
                f"axis_names={self.axis_names} and axis_sizes={self.axis_sizes} must have the "
                "same length, at most 2"
            )
        if self.inner_size * self.outer_size != self.layout.num_ranks:
            raise ValueError(
                f"axis_sizes={self.axis_sizes} have product "
                f"{self.inner_size * self.outer_size}, but the layout has "
                f"num_ranks={self.layout.num_ranks}"
            )

    @property
    def nested(self) -> bool:
        """Whether each of two axes has its own ring."""
        return self.ring != "flat" and len(self.axis_names) == 2

    @property
    def gathers(self) -> bool:
        """Whether devices gather keys and values, which needs more than one device."""
        return self.ring == "gather" and self.inner_size > 1

    @property
    def outer_size(self) -> int:
        """Outer steps: nodes in a hierarchical ring, 1 in a flat one."""
        return self.axis_sizes[0] if self.nested else 1

    @property
    def inner_size(self) -> int:
        """Inner steps: devices of a node, or all ranks in a flat ring."""
        total = 1
        for size in self.axis_sizes[1:] if self.nested else self.axis_sizes:
            total *= size
        return total

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Mesh axes of the inner ring, or of the gather that replaces it."""
        return self.axis_names[1:] if self.nested else self.axis_names

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """Mesh axes of the outer ring; () if there is one outer step."""
        return self.axis_names[:1] if self.outer_size > 1 else ()

    def rank(self) -> Array | int:
        """Returns this device's rank (traced); 0 if there is only one."""
        return lax.axis_index(self.axis_names) if self.axis_names else 0

    def source(self, rank: Array | int, outer_step: Array | int, inner_step: Array | int):
        """Returns the rank that `rank`'s keys come from at a step (ints, NumPy or traced)."""
        node, device = rank // self.inner_size, rank % self.inner_size
        node = (node - outer_step) % self.outer_size
        return node * self.inner_size + (device - inner_step) % self.inner_size

    def node_ranks(self, rank: Array | int, outer_step: Array | int) -> Array:
        """Returns the ranks with keys that `rank` gathers at an outer step: int32 [inner_size]."""
        node = (rank // self.inner_size - outer_step) % self.outer_size
        return node * self.inner_size + jnp.arange(self.inner_size, dtype=jnp.int32)

    def every_row(self, x: Array) -> Array:
        """Gathers rows [B, H, rows, ...], one per block, of all ranks, in sequence order."""
        # One axis at a time, the inner one first: `jax.vmap` supports no other way.
        for name in reversed(self.axis_names):
            x = lax.all_gather(x, name, axis=2, tiled=True)
        size = self.layout.block_size
        return x[:, :, np.argsort(self.layout.permutation()[::size])]

    def shift_inner(self, tree):
        """Sends every array of `tree` to the next rank along the inner axis."""
        return _shift(tree, self.inner_axes, self.inner_size)

    def shift_outer(self, tree):
        """Sends every array of `tree` to the same device of the next node."""
        return _shift(tree, self.outer_axes, self.outer_size)


def check_ring(ring: str) -> None:
    """Raises UserError unless `ring` is one of `RINGS`."""
    if ring not in RINGS:
        raise UserError(f"ring={ring!r} is unknown; it must be one of {', '.join(RINGS)}")


def _shift(tree, axis_names: tuple[str, ...], size: int):
    permutation = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_names, permutation), tree)
