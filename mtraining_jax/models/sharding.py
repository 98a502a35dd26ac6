"""Sharding of parameters: one table from logical axes to mesh axes.

The table for activations is in `mtraining_jax.parallel.mesh`.
"""

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtraining_jax.models.parameters import LAYERS, Parameter, Table
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.parallel.mesh import SEQUENCE_AXES

# Mesh axes that fully sharded data parallelism (FSDP) shards a logical axis over; None replicates
# it. The first divisible axis of a parameter is sharded, because leading axes gather without a
# transpose. Vectors are too small to be worth a gather.
FSDP_AXES: dict[str, tuple[str, ...] | None] = {
    "layers": None,
    "vector": None,
    "vocab": SEQUENCE_AXES,
    "heads": SEQUENCE_AXES,
    "kv_heads": SEQUENCE_AXES,
    "mlp": SEQUENCE_AXES,
    "embed": SEQUENCE_AXES,
}


def parameter_spec(parameter: Parameter, mesh: Mesh, fsdp: bool) -> PartitionSpec:
    """Returns the partition of one parameter.

    Args:
        parameter: its shape and axis names.
        mesh: from `mtraining_jax.parallel.mesh.make_mesh`.
        fsdp: shard the first divisible axis; otherwise replicate.
    """
    if not fsdp:
        return PartitionSpec()
    for axis, (logical, size) in enumerate(zip(parameter.axes, parameter.shape, strict=True)):
        mesh_axes = FSDP_AXES[logical]
        if mesh_axes is None:
            continue
        parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes)
        if size % parts == 0:
            return PartitionSpec(*[None] * axis, mesh_axes)
    return PartitionSpec()


def parameter_names(state: Any) -> Any:
    """Returns the dotted name of every parameter, e.g. "layers.self_attn.q_proj.weight".

    Args:
        state: `nnx.State` or pure dict of a model.

    Returns:
        A tree of the same structure with strings as leaves.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _dotted(path), state)


def state_shardings(state: nnx.State, table: Table, mesh: Mesh, fsdp: bool) -> nnx.State:
    """Returns the sharding of every parameter.

    Args:
        state: state of a `Transformer`, arrays or `jax.ShapeDtypeStruct`.
        table: its parameters by dotted name.
        mesh: axes ('data', 'node', 'device'), of type Auto.
        fsdp: shard divisible matrices over ('node', 'device'); otherwise replicate everything.

    Returns:
        A state of the same structure with `NamedSharding` leaves.
    """
    return jax.tree.map(
        lambda name: NamedSharding(mesh, parameter_spec(table[name], mesh, fsdp)),
        parameter_names(state),
    )


def layer_specs(layers: nnx.State, table: Table, mesh: Mesh, fsdp: bool) -> nnx.State:
    """Returns the partitions of one layer's parameters, without the leading layer axis.

    Args:
        layers: state of the stacked layers, [L, ...].
        table: all parameters by dotted name.
        mesh: axes ('data', 'node', 'device').
        fsdp: see `state_shardings`.

    Returns:
        A state of the same structure with `PartitionSpec` leaves.
    """
    return jax.tree.map(
        lambda name: PartitionSpec(*parameter_spec(table[LAYERS + name], mesh, fsdp)[1:]),
        parameter_names(layers),
    )


def lm_head_spec(spec: ModelSpec, mesh: Mesh, fsdp: bool) -> PartitionSpec:
    """Returns the partition of the output matrix [V, E]: that of the embedding if tied."""
    name = "embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    return parameter_spec(spec.parameters[name], mesh, fsdp)


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
