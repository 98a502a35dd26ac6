"""Groups of devices that work on batches of their own, and meet only when they are asked to.

The axis 'data' replicates a model over groups. `in_groups` runs a function once in each group, and
functions that are sharded inside it (`map_shards`) are sharded over the other axes only. So nothing
inside waits for another group, unless it names 'data' itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.mesh import DATA_AXIS


def in_groups(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` on the share of each group; as it is where there is one group.

    Inside, arrays have the sizes of a group, and 'data' is an axis for collectives. How they lie
    on the other axes is XLA's affair, as under `jax.jit`.

    Args:
        function: from arrays to arrays.
        mesh: axes ('data', 'node', 'device'), of type Auto.
        in_specs: for each argument a tree of specs, which name 'data' or nothing.
        out_specs: the same of its result.
    """
    if mesh.shape[DATA_AXIS] == 1:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={DATA_AXIS},
        check_vma=False,
    )  # fmt: skip


def shared_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of some axes of a mesh that shard arrays here: inside `in_groups`, all but 'data'."""
    taken = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in taken)


def map_shards(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without checks of replication, over the axes that shard arrays here.

    Args:
        function: from shards to shards.
        mesh: whose devices share the work.
        in_specs, out_specs: trees of specs, as they are outside of `in_groups`.
    """
    axes = shared_axes(mesh.axis_names)
    if len(axes) == len(mesh.axis_names):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    in_specs, out_specs = (
        jax.tree.map(_shared, specs, is_leaf=lambda x: isinstance(x, P))
        for specs in (in_specs, out_specs)
    )
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
    )


def constrain(x: Array, mesh: Mesh, spec: P) -> Array:
    """`x`, told to lie as `spec` says on the axes that shard arrays here."""
    context = jax.sharding.get_abstract_mesh()
    return lax.with_sharding_constraint(
        x, NamedSharding(context if context.manual_axes else mesh, _shared(spec))
    )


def _shared(spec: P) -> P:
    """The same without axes that do not shard arrays here."""

    def left(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if entry is None:
            return None
        return shared_axes((entry,) if isinstance(entry, str) else entry) or None

    return P(*map(left, spec))
