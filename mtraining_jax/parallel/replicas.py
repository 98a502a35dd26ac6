"""Data-parallel replicas that run independently and communicate only where asked to.

The mesh axis 'data' replicates the model. `per_replica` runs a function once per replica, and
functions sharded inside it (`shard_map_remaining`) use the other axes only.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.mesh import DATA_AXIS


def per_replica(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Maps `function` over data-parallel replicas; returns it unchanged if there is only one.

    Inside, arrays have per-replica shapes, and XLA decides their sharding over the other axes.
    """
    if mesh.shape[DATA_AXIS] == 1:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={DATA_AXIS},
        check_vma=False,
    )


def remaining_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Drops 'data' from mesh axes inside `per_replica`; elsewhere keeps all axes."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in manual)


def shard_map_remaining(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Applies `jax.shard_map` over the remaining axes, with specs as outside `per_replica`."""
    axes = remaining_axes(mesh.axis_names)
    in_specs, out_specs = jax.tree.map(
        _remaining, (in_specs, out_specs), is_leaf=lambda x: isinstance(x, P)
    )
    return jax.shard_map(
        function,
        mesh=mesh if len(axes) == len(mesh.axis_names) else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def constrain(x: Array, mesh: Mesh, spec: P) -> Array:
    """Constrains the sharding of `x` to `spec`, over the remaining axes."""
    context = jax.sharding.get_abstract_mesh()
    return lax.with_sharding_constraint(
        x, NamedSharding(context if context.manual_axes else mesh, _remaining(spec))
    )


def _remaining(spec: P) -> P:
    """Drops the axes that do not shard arrays here from a spec."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return P(*(remaining_axes(entry) or None for entry in entries))
