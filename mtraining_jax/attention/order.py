"""The order of tokens: dealt to the devices of a sequence, and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from mtraining_jax.attention.placement import (
    Axes,
    Placement,
    as_axes,
    check_axes,
    keeping_sharding,
)
from mtraining_jax.parallel.layout import KINDS, Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES
from mtraining_jax.parallel.ring import check_ring


def sequence_layout(
    seq_len: int,
    mesh: Mesh,
    *,
    kind: str = "striped",
    sequence_axes: str | Axes = SEQUENCE_AXES,
    block_size: int = 128,
    ring: str = "gather",
) -> Layout:
    """The order of tokens for a ring over some axes of a mesh.

    Args:
        seq_len: S.
        mesh: has `sequence_axes`.
        kind: "striped" (equal work for every pattern), "zigzag" (for dense attention) or
            "contiguous".
        sequence_axes: as given to `sparse_attention`.
        block_size: that of the pattern.
        ring: as given to `sparse_attention`.

    Returns:
        A `Layout`, for `stripe`, `unstripe` and `sparse_attention`.

    Raises:
        ValueError: naming the argument; if S is not divisible, with the nearest lengths that are.
    """
    axes = as_axes(sequence_axes)
    check_axes({"sequence_axes": axes}, mesh)
    check_ring(ring)
    placement = Placement(mesh, sequence=axes)
    sizes = tuple(placement.mesh.shape[axis] for axis in axes)
    return layout_for_ring(kind, seq_len, sizes, block_size, ring)


def layout_for_ring(
    kind: str, seq_len: int, axis_sizes: tuple[int, ...], block_size: int, ring: str
) -> Layout:
    """The order of tokens for a ring over axes of these sizes, slowest first.

    Args:
        kind, seq_len, block_size, ring: as in `sequence_layout`.
        axis_sizes: of the one or two axes of the sequence.

    Raises:
        UserError: if S is not divisible, with the nearest lengths that are.
    """
    # With a ring inside the node, neighbouring blocks go to different nodes, for equal work.
    nodes = axis_sizes[0] if ring != "flat" and len(axis_sizes) == 2 and kind == "striped" else 1
    return Layout(kind, seq_len, math.prod(axis_sizes), block_size, nodes)


def ring_layout(
    layout: Layout | str | None,
    positions: ArrayLike | None,
    seq_len: int,
    block_size: int,
    placement: Placement,
    ring: str,
) -> Layout:
    """The layout of a sharded sequence, from `layout` or `positions`.

    Raises:
        ValueError: if they are of another sequence, pattern or mesh, or contradict one another.
    """
    positions = _known_positions(positions, seq_len)

    def build(kind: str, ring: str = ring) -> Layout:
        return sequence_layout(
            seq_len, placement.mesh, kind=kind, sequence_axes=placement.sequence,
            block_size=block_size, ring=ring,
        )

    if layout is None and positions is not None:
        units = placement.ranks * block_size
        kinds = [kind for kind in KINDS if kind != "zigzag" or seq_len % (2 * units) == 0]
        for found in (build(kind, way) for kind in kinds for way in (ring, "flat")):
            if np.array_equal(found.permutation(), positions):
                return found
        raise ValueError(
            f"positions are not those of the {', '.join(kinds)} layout over {placement.ranks} "
            f"devices with block_size={block_size}; put q, k and v in such an order with stripe()"
        )
    if not isinstance(layout, Layout):
        layout = build("contiguous" if layout is None else layout)
    wanted = {"seq_len": seq_len, "num_ranks": placement.ranks, "block_size": block_size}
    for name, value in wanted.items():
        if getattr(layout, name) != value:
            raise ValueError(
                f"layout has {name}={getattr(layout, name)}, but {value} is needed for q, the "
                "pattern and sequence_axes"
            )
    _check_agreement(layout, positions)
    return layout


def global_order(
    layout: Layout | str | None, positions: ArrayLike | None, seq_len: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """How to bring an unsharded sequence in order, and back; None if it is in order.

    Raises:
        ValueError: as `ring_layout`.
    """
    positions = _known_positions(positions, seq_len)
    if isinstance(layout, Layout):
        if layout.seq_len != seq_len:
            raise ValueError(f"layout has seq_len={layout.seq_len}, but q has {seq_len} tokens")
        _check_agreement(layout, positions)
        positions = layout.permutation()
    elif layout is not None and layout not in KINDS:
        raise ValueError(f"layout={layout!r} must be one of {', '.join(KINDS)}, or a Layout")
    if positions is None or np.array_equal(positions, np.arange(seq_len)):
        return None
    return np.argsort(positions), positions


def _known_positions(positions: ArrayLike | None, seq_len: int) -> np.ndarray | None:
    if positions is None:
        return None
    if isinstance(positions, jax.core.Tracer):
        raise ValueError(
            "positions are a traced array: they must be known when tracing, such as the NumPy "
            "array layout.permutation(); or say the order with layout="
        )
    positions = np.asarray(positions)
    if positions.shape != (seq_len,) or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(
            f"positions are {positions.dtype} {list(positions.shape)}: integers [{seq_len}], one "
            "for each token of q, are needed"
        )
    if not np.array_equal(np.sort(positions), np.arange(seq_len)):
        raise ValueError(
            f"positions must hold each of 0 .. {seq_len - 1} once: the tokens of one sequence"
        )
    return positions


def _check_agreement(layout: Layout, positions: np.ndarray | None) -> None:
    if positions is not None and not np.array_equal(layout.permutation(), positions):
        raise ValueError(
            f"positions are not those of layout={layout}; give one of the two"
        )


def stripe(x: Any, layout: Layout, axis: int = 1) -> Any:
    """Puts the tokens of an array in the order of a layout.

    Args:
        x: an array, or a pytree of arrays, with S tokens along `axis`: token ids, positions or
            activations. NumPy arrays stay NumPy arrays.
        layout: from `sequence_layout`.
        axis: of the tokens.

    Returns:
        The same shapes, with the sharding of x where its type says.

    Raises:
        ValueError: if the axis has another length than the layout.
    """
    return _permute(x, layout, axis, layout.permutation())


def unstripe(x: Any, layout: Layout, axis: int = 1) -> Any:
    """Puts the tokens of an array back in the order of the sequence; undoes `stripe`.

    Arguments, result and errors are those of `stripe`.
    """
    return _permute(x, layout, axis, layout.inverse())


def _permute(x, layout: Layout, axis: int, order: np.ndarray):
    def one(x):
        if not -x.ndim <= axis < x.ndim or x.shape[axis] != layout.seq_len:
            raise ValueError(
                f"x has shape {x.shape}: {layout.seq_len} tokens, as in the layout, are needed "
                f"along axis={axis}"
            )
        if isinstance(x, np.ndarray):
            return np.take(x, order, axis=axis)
        return keeping_sharding(
            lambda x: jnp.take(x, order, axis=axis, unique_indices=True, mode="clip"), x
        )

    return jax.tree.map(one, x)
