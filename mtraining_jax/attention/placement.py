"""Where the inputs of `sparse_attention` are: the mesh, the role of its axes, and token order."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DATA_AXIS, SEQUENCE_AXES
from mtraining_jax.parallel.replicas import remaining_axes, shard_map_remaining

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Where the inputs of `sparse_attention` are.

    Attributes:
        mesh: devices to run on, with axes of type Auto or Explicit. By default the mesh of q's
            sharding if q is sharded over Explicit axes, or the mesh of `jax.set_mesh` if one of
            the next three fields is given; otherwise the arrays belong to a single device or shard.
        sequence: one or two mesh axes of the sequence, slowest first, () for none. Defaults to the
            axes in q's sharding type, else ("node", "device").
        batch: mesh axes of the batch, () for none. Defaults to the axes in q's sharding type, else
            "data" if the mesh has it.
        heads: mesh axes of query and key/value heads. Defaults to the axes in q's sharding type,
            else none.
        order: token order of q, k, v and the result. None or "contiguous" is sequence order;
            "striped" and "zigzag" (see `stripe`), or a `Layout`, give devices equal work. Or int
            [S], the sequence position of each token of q, known at trace time (NumPy); on one
            device any permutation is allowed.
        ring: communication of keys and values. "gather": all-gather over the last sequence axis,
            ring over the first of two. "hierarchical": a ring over the second axis inside each
            step of the ring over the first. "flat": one ring over both axes.
    """

    mesh: Mesh | AbstractMesh | None = None
    sequence: str | Axes | None = None
    batch: str | Axes | None = None
    heads: str | Axes | None = None
    order: Layout | str | ArrayLike | None = None
    ring: str = "gather"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Mesh axes that shard the batch, the sequence (slowest first) and the heads.

    Attributes:
        mesh: None for a single device.
        types: the mesh in the types of the inputs, if it differs from `mesh`.
    """

    mesh: Mesh | AbstractMesh | None = None
    batch: Axes = ()
    sequence: Axes = ()
    heads: Axes = ()
    types: Mesh | AbstractMesh | None = None

    def size(self, axes: Axes) -> int:
        if self.mesh is None or not axes:
            return 1
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def ranks(self) -> int:
        return self.size(self.sequence)

    @property
    def other_axes(self) -> Axes:
        """The axes of other sequences and heads."""
        return self.batch + self.heads

    @property
    def axes(self) -> Axes:
        return self.other_axes + self.sequence

    def remaining(self) -> "Placement":
        """The placement inside `per_replica`; elsewhere the same."""
        batch, heads = remaining_axes(self.batch), remaining_axes(self.heads)
        return dataclasses.replace(self, batch=batch, heads=heads)

    def run(self, function: Callable, in_specs: Any, out_specs: Any, args: tuple) -> Any:
        """Runs a function on the shards of every device, or directly without a mesh.

        The specs are prefixes of the arguments and results. Explicit axes are made Auto around the
        call; an axis removed by `jax.vmap` may therefore be sharded too.
        """
        mesh = self.types or self.mesh
        if mesh is None or AxisType.Explicit not in mesh.axis_types:
            if self.mesh is not None:
                function = shard_map_remaining(function, self.mesh, in_specs, out_specs)
            return function(*args)
        arg_shardings, result_shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            (in_specs, out_specs),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        args = jax.tree.map(
            lambda to, tree: jax.tree.map(lambda x: jax.sharding.reshard(x, to), tree),
            arg_shardings,
            args,
        )
        if self.mesh is not None:
            function = jax.shard_map(
                function, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        return jax.sharding.auto_axes(function, out_sharding=result_shardings)(*args)


def take(x: Array, order: np.ndarray, axis: int = 1) -> Array:
    """Permutes the entries of an array and keeps its sharding over Explicit axes."""

    def permuted(x: Array) -> Array:
        return jnp.take(x, order, axis=axis, unique_indices=True, mode="clip")

    sharding = jax.typeof(x).sharding
    if all(entry is None for entry in sharding.spec):
        return permuted(x)
    return cast(Array, jax.sharding.auto_axes(permuted, out_sharding=sharding)(x))


def find_placement(q: Array, sharding: Sharding) -> Placement:
    """Resolves mesh and axes from the argument of `sparse_attention` and the type of q."""
    mesh = sharding.mesh
    fields = {name: getattr(sharding, name) for name in ("batch", "sequence", "heads")}
    given = {name: as_axes(value) for name, value in fields.items() if value is not None}
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise ValueError(f"sharding.mesh={mesh!r} must be a jax.sharding.Mesh, or None")
    if jax.typeof(q).manual_axis_type.varying:
        raise ValueError(
            "q is in a jax.shard_map with check_vma=True, which sparse_attention does not support; "
            "pass check_vma=False to that shard_map"
        )
    own_mesh, own_axes = _explicit_axes(q)
    named = [f"sharding.{name}={axes}" for name, axes in given.items() if axes]
    mesh = own_mesh if mesh is None else mesh
    if mesh is None and named:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"{' and '.join(named)} but no mesh: set sharding.mesh, or call inside jax.set_mesh"
            )
    if mesh is None:
        types = jax.typeof(q).sharding.mesh
        return Placement(types=None if types.empty else types)
    if own_axes is None:
        if "sequence" not in given and not set(SEQUENCE_AXES) <= set(mesh.axis_names):
            raise ValueError(
                f"the mesh has axes {mesh.axis_names}, without the default sharding.sequence="
                f"{SEQUENCE_AXES}; set sharding.sequence to the axes that shard the sequence, or "
                "to () for none"
            )
        data = (DATA_AXIS,) if DATA_AXIS in mesh.axis_names else ()
        own_axes = {"batch": data, "sequence": SEQUENCE_AXES, "heads": ()}
    axes = own_axes | given
    check_axes(axes, mesh, "sharding.")
    batch, sequence, heads = axes.values()
    if set(sequence) & set(jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError(
            f"sharding.sequence={sequence} are sharded by a jax.shard_map around this call; call "
            "sparse_attention outside of it, or without sharding to attend within each shard"
        )
    return Placement(mesh, batch, sequence, heads)


def as_axes(value: str | Axes) -> Axes:
    """Converts axis names to a tuple."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def check_axes(axes: dict[str, Axes], mesh: Mesh | AbstractMesh, prefix: str = "") -> None:
    """Checks that the axes exist and are used once, and that the sequence has at most two.

    Messages name them with the prefix.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh={mesh!r} must be a jax.sharding.Mesh")
    used: dict[str, str] = {}
    for name, value in axes.items():
        for axis in value:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{prefix}{name}={value} names {axis!r}, which is not an axis of the mesh; "
                    f"its axes are {mesh.axis_names}"
                )
            if axis in used:
                raise ValueError(
                    f"{prefix}{name}={value} and {prefix}{used[axis]} both name {axis!r}; a mesh "
                    "axis can shard only one axis of q"
                )
            used[axis] = name
    sequence = axes["sequence"]
    if len(sequence) > 2:
        raise ValueError(
            f"{prefix}sequence={sequence} has {len(sequence)} axes; one or two are supported"
        )


def _explicit_axes(q: Array) -> tuple[Mesh | AbstractMesh | None, dict[str, Axes] | None]:
    """Returns mesh and axes of q's sharding type, or None if q is not sharded."""
    sharding = jax.typeof(q).sharding
    entries = [() if entry is None else as_axes(entry) for entry in sharding.spec]
    if not any(entries):
        return None, None
    if entries[-1] or any(entries[1:-3]):
        raise ValueError(
            f"q is sharded as {sharding.spec}; only batch, tokens and heads can be sharded"
        )
    mesh = sharding.mesh if isinstance(q, Tracer) else cast(NamedSharding, q.sharding).mesh
    batch = entries[0] if q.ndim > 3 else ()
    return mesh, {"batch": batch, "sequence": entries[-3], "heads": entries[-2]}
