"""Token order of sharded sequences."""

import itertools
import math
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

from mtraining_jax.attention.placement import Axes, Placement, as_axes, check_axes, take
from mtraining_jax.parallel.layout import KINDS, Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES
from mtraining_jax.parallel.ring import check_ring


def sequence_layout(
    seq_len: int,
    mesh: Mesh | AbstractMesh,
    *,
    kind: str = "striped",
    sequence: str | Axes = SEQUENCE_AXES,
    block_size: int = 128,
    ring: str = "gather",
) -> Layout:
    """Builds the token order for ring attention over some axes of a mesh.

    Args:
        seq_len: S.
        mesh: a mesh with the axes `sequence`.
        kind: "striped" (equal work for every pattern), "zigzag" (for dense attention) or
            "contiguous".
        block_size: block size of the pattern.
        sequence, ring: as in `Sharding`.

    Returns:
        A `Layout`, for `stripe`, `unstripe` and `Sharding.order`.

    Raises:
        ValueError: if an argument is invalid; the message suggests valid lengths.
    """
    axes = as_axes(sequence)
    check_axes({"sequence": axes}, mesh)
    check_ring(ring)
    sizes = tuple(mesh.shape[axis] for axis in axes)
    return layout_for_ring(kind, seq_len, sizes, block_size, ring)


def layout_for_ring(
    kind: str, seq_len: int, axis_sizes: tuple[int, ...], block_size: int, ring: str
) -> Layout:
    """Builds the token order for a ring over one or two axes of these sizes, slowest first."""
    # With a ring inside the node, adjacent blocks go to different nodes, for equal work.
    nodes = axis_sizes[0] if ring != "flat" and len(axis_sizes) == 2 and kind == "striped" else 1
    return Layout(kind, seq_len, math.prod(axis_sizes), block_size, nodes)


def ring_layout(
    order: Layout | str | ArrayLike | None,
    seq_len: int,
    block_size: int,
    placement: Placement,
    ring: str,
) -> Layout:
    """Returns the layout of a sharded sequence, from `Sharding.order`."""
    order = _checked(order, seq_len)
    sizes = tuple(placement.size((axis,)) for axis in placement.sequence)

    if isinstance(order, np.ndarray):
        units = placement.ranks * block_size
        kinds = [kind for kind in KINDS if kind != "zigzag" or seq_len % (2 * units) == 0]
        for kind, each in itertools.product(kinds, (ring, "flat")):
            candidate = layout_for_ring(kind, seq_len, sizes, block_size, each)
            if np.array_equal(candidate.permutation(), order):
                return candidate
        raise ValueError(
            f"sharding.order matches no {', '.join(kinds)} layout over {placement.ranks} devices "
            f"with block_size={block_size}; reorder q, k and v with stripe()"
        )
    if isinstance(order, str):
        return layout_for_ring(order, seq_len, sizes, block_size, ring)
    wanted = {"seq_len": seq_len, "num_ranks": placement.ranks, "block_size": block_size}
    for name, value in wanted.items():
        if getattr(order, name) != value:
            raise ValueError(
                f"sharding.order has {name}={getattr(order, name)}, but q, the pattern and "
                f"sharding.sequence need {value}"
            )
    return order


def global_order(
    order: Layout | str | ArrayLike | None, seq_len: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the permutation to sequence order and its inverse, or None if in order."""
    order = _checked(order, seq_len)
    if isinstance(order, str):  # one device has all blocks in sequence order
        return None
    if isinstance(order, Layout):
        if order.seq_len != seq_len:
            raise ValueError(
                f"sharding.order has seq_len={order.seq_len}, but q has {seq_len} tokens"
            )
        order = order.permutation()
    if np.array_equal(order, np.arange(seq_len)):
        return None
    return np.argsort(order), order


def _checked(order: Layout | str | ArrayLike | None, seq_len: int) -> Layout | str | np.ndarray:
    """Returns a layout, the kind of one, or the position of each token."""
    if order is None:
        return "contiguous"
    if isinstance(order, str):
        if order not in KINDS:
            raise ValueError(
                f"sharding.order={order!r} must be one of {', '.join(KINDS)}, a Layout or the "
                "positions of the tokens"
            )
        return order
    if isinstance(order, Layout):
        return order
    if isinstance(order, Tracer):
        raise ValueError(
            "sharding.order is a traced array; pass values known at trace time, such as a Layout "
            "or the NumPy array layout.permutation()"
        )
    positions = np.asarray(order)
    if positions.shape != (seq_len,) or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(
            f"sharding.order is {positions.dtype} {list(positions.shape)}; expected a Layout, or "
            f"integers [{seq_len}], one for each token of q"
        )
    if not np.array_equal(np.sort(positions), np.arange(seq_len)):
        raise ValueError(f"sharding.order must contain each of 0 .. {seq_len - 1} exactly once")
    return positions


def stripe(x: Any, layout: Layout, axis: int = 1) -> Any:
    """Reorders the tokens of an array, or of a pytree of arrays, from sequence order to a layout.

    NumPy arrays stay NumPy arrays, and x keeps its sharding if its type is Explicit. Raises
    ValueError if the length of `axis` differs from the layout's.
    """
    return _permute(x, layout, axis, inverse=False)


def unstripe(x: Any, layout: Layout, axis: int = 1) -> Any:
    """Reorders the tokens of an array from a layout to sequence order; inverse of `stripe`."""
    return _permute(x, layout, axis, inverse=True)


def _permute(x: Any, layout: Layout, axis: int, *, inverse: bool) -> Any:
    if not isinstance(layout, Layout):
        raise ValueError(f"layout={layout!r} must be a Layout; make one with sequence_layout()")
    order = layout.inverse() if inverse else layout.permutation()

    def permute_one(x: Array | np.ndarray) -> Array | np.ndarray:
        shape = np.shape(x)
        if not -len(shape) <= axis < len(shape) or shape[axis] != layout.seq_len:
            raise ValueError(
                f"x has shape {shape}; the layout needs {layout.seq_len} tokens along axis={axis}"
            )
        return np.take(x, order, axis) if isinstance(x, np.ndarray) else take(x, order, axis)

    return jax.tree.map(permute_one, x)
