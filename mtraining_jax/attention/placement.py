"""Where the inputs of `sparse_attention` lie: the mesh, and which of its axes shard what."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mtraining_jax.parallel.groups import map_shards
from mtraining_jax.parallel.mesh import DATA_AXIS, SEQUENCE_AXES

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The axes of the mesh that shard the batch, the sequence and the heads.

    Attributes:
        mesh: devices that share the work; None for none.
        batch, sequence, heads: axes of the mesh, those of the sequence slowest first.
        types: the mesh in the types of the inputs, where it is not `mesh`.
    """

    mesh: Mesh | AbstractMesh | None = None
    batch: Axes = ()
    sequence: Axes = ()
    heads: Axes = ()
    types: Mesh | AbstractMesh | None = None

    def size(self, axes: Axes) -> int:
        """Devices on some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if axes else 1

    @property
    def ranks(self) -> int:
        """W, devices that share a sequence."""
        return self.size(self.sequence)

    @property
    def explicit(self) -> Mesh | AbstractMesh | None:
        """The mesh in the types of the inputs, if it has Explicit axes."""
        mesh = self.types or self.mesh
        return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None

    def reshard(self, args: tuple, specs: tuple) -> tuple:
        """Trees of arrays, sharded by one spec each where axes are Explicit."""
        if self.explicit is None:
            return args
        shardings = (NamedSharding(self.explicit, spec) for spec in specs)
        return tuple(
            jax.tree.map(lambda x, sharding=sharding: jax.sharding.reshard(x, sharding), arg)
            for arg, sharding in zip(args, shardings, strict=True)
        )

    def run(self, function: Callable, in_specs: tuple, out_specs: tuple, args: tuple):
        """`function(*args)` on the shards of every device, or as it is without a mesh.

        Explicit axes are made Auto around it and its results sharded by `out_specs`; so an axis
        that `jax.vmap` took away may be sharded too.
        """
        if self.mesh is not None and not self.explicit:
            function = map_shards(function, self.mesh, in_specs, out_specs)
        if self.explicit:
            if self.mesh is not None:
                function = jax.shard_map(
                    function, in_specs=in_specs, out_specs=out_specs, check_vma=False
                )
            shardings = jax.tree.map(
                lambda spec: NamedSharding(self.explicit, spec), out_specs,
                is_leaf=lambda x: isinstance(x, PartitionSpec),
            )
            function = jax.sharding.auto_axes(function, out_sharding=shardings)
        return function(*args)

    def take(self, x: Array, order: np.ndarray, axis: int = 1) -> Array:
        """`x` with the entries of an unsharded axis in another order."""
        return keeping_sharding(
            lambda x: jnp.take(x, order, axis=axis, unique_indices=True, mode="clip"), x
        )


def keeping_sharding(function: Callable[[Array], Array], x: Array) -> Array:
    """`function(x)`, which moves entries only; sharded over Explicit axes just as x is."""
    sharding = jax.typeof(x).sharding
    if all(entry is None for entry in sharding.spec):
        return function(x)
    return jax.sharding.auto_axes(function, out_sharding=sharding)(x)


def find_placement(
    q: Array,
    mesh: Mesh | AbstractMesh | None,
    batch_axis: str | Axes | None,
    sequence_axes: str | Axes | None,
    head_axis: str | Axes | None,
) -> Placement:
    """The placement that the arguments of `sparse_attention`, or else the type of q, say.

    Raises:
        ValueError: naming the argument, the axes there are and what would be right.
    """
    given = {
        "batch_axis": as_axes(batch_axis),
        "sequence_axes": as_axes(sequence_axes),
        "head_axis": as_axes(head_axis),
    }
    own_mesh, own_axes = _explicit_axes(q)
    named = [f"{name}={axes}" for name, axes in given.items() if axes]
    if mesh is None:
        mesh = own_mesh
    if mesh is None and named:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"mesh is not given, but {' and '.join(named)}: pass mesh=, or enter one with "
                "jax.set_mesh"
            )
    if mesh is None:
        types = jax.typeof(q).sharding.mesh
        return Placement(types=None if types.empty else types)
    known = own_axes or {
        "batch_axis": (DATA_AXIS,) if DATA_AXIS in mesh.axis_names else (),
        "sequence_axes": SEQUENCE_AXES if set(SEQUENCE_AXES) <= set(mesh.axis_names) else None,
        "head_axis": (),
    }
    axes = {name: known[name] if value is None else value for name, value in given.items()}
    if axes["sequence_axes"] is None:
        raise ValueError(
            f"sequence_axes must name the axes of the mesh that shard the sequence, out of "
            f"{mesh.axis_names}, or be () for none: the mesh does not have the default "
            f"{SEQUENCE_AXES}"
        )
    check_axes(axes, mesh)
    return Placement(mesh, axes["batch_axis"], axes["sequence_axes"], axes["head_axis"])


def as_axes(value: str | Axes | None) -> Axes | None:
    """Names of axes as a tuple; None stays None."""
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def check_axes(axes: dict[str, Axes], mesh: Mesh | AbstractMesh) -> None:
    """Checks that a mesh has the axes, that each is used once, and that two at most are sequence's.

    Raises:
        ValueError: naming the argument and the axes there are.
    """
    used: dict[str, str] = {}
    for name, value in axes.items():
        for axis in value:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{name}={value} names {axis!r}, which the mesh does not have; its axes are "
                    f"{mesh.axis_names}"
                )
            if axis in used:
                raise ValueError(
                    f"{name}={value} names {axis!r}, which {used[axis]} names too; an axis of "
                    "the mesh can shard one axis of q"
                )
            used[axis] = name
    if len(axes["sequence_axes"]) > 2:
        raise ValueError(
            f"sequence_axes={axes['sequence_axes']} are {len(axes['sequence_axes'])} axes: one or "
            "two are possible"
        )


def _explicit_axes(q: Array) -> tuple[Mesh | AbstractMesh | None, dict[str, Axes] | None]:
    """Mesh and axes that q is sharded over by its type; None if it is not."""
    sharding = jax.typeof(q).sharding
    entries = [as_axes(entry) or () for entry in sharding.spec]
    if not any(entries):
        return None, None
    if entries[-1] or any(entries[1:-3]):
        raise ValueError(
            f"q is sharded as {sharding.spec}: only its batch, tokens and heads can be"
        )
    mesh = sharding.mesh
    if not isinstance(q, jax.core.Tracer):
        mesh = q.sharding.mesh
    return mesh, {
        "batch_axis": entries[0] if q.ndim > 3 else (),
        "sequence_axes": entries[-3],
        "head_axis": entries[-2],
    }
