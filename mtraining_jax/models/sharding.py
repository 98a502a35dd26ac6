"""Sharding of parameters over the mesh; for activations see `mtraining_jax.parallel.mesh`."""

import functools
import logging
import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mtraining_jax.models.parameters import LAYERS, Parameter, ParamTable
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.parallel.mesh import DATA_AXIS, SEQUENCE_AXES

# Logical axes that fully sharded data parallelism (FSDP) shards over the ranks of a sequence. The
# first divisible one of a parameter is sharded, because leading axes gather without a transpose.
# Vectors are too small to be worth a gather.
FSDP_AXES = ("vocab", "experts", "heads", "kv_heads", "mlp", "embed")

_log = logging.getLogger(__name__)


def parameter_spec(parameter: Parameter, mesh: Mesh, fsdp: bool) -> PartitionSpec:
    """Shards the first axis of a parameter that the devices divide, or replicates it."""
    if not fsdp:
        return PartitionSpec()
    ranks = _ranks(mesh)
    for axis, (logical, size) in enumerate(zip(parameter.axes, parameter.shape, strict=True)):
        if logical in FSDP_AXES and size % ranks == 0:
            return PartitionSpec(*[None] * axis, SEQUENCE_AXES)
    return PartitionSpec()


def _ranks(mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in SEQUENCE_AXES)


def over_replicas(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Shards what FSDP shards over data-parallel replicas as well, if they divide it."""
    mesh, spec = sharding.mesh, sharding.spec
    axis = next((axis for axis, names in enumerate(spec) if names is not None), None)
    if axis is None or shape[axis] % (_ranks(mesh) * mesh.shape[DATA_AXIS]):
        return sharding
    # Each device has a part of its own shard of the parameter.
    parts = *spec[:axis], (*SEQUENCE_AXES, DATA_AXIS), *spec[axis + 1 :]
    return NamedSharding(mesh, PartitionSpec(*parts))


def parameter_names(state: Any) -> Any:
    """The dotted names of parameters, e.g. "layers.self_attn.q_proj.weight", in the same tree."""

    def dotted(path: tuple[Any, ...], _: Any) -> str:
        return ".".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))

    return jax.tree.map_with_path(dotted, state)


def named_shapes(state: Any, shardings: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of each parameter by dotted name."""
    names, leaves = jax.tree.leaves(parameter_names(state)), jax.tree.leaves(state)
    context = zip(names, leaves, jax.tree.leaves(shardings), strict=True)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for name, x, s in context}


def state_shardings(state: nnx.State, table: ParamTable, mesh: Mesh, fsdp: bool) -> nnx.State:
    """The `NamedSharding` of every parameter; warns of matrices that FSDP cannot shard."""
    specs = {name: parameter_spec(x, mesh, fsdp) for name, x in table.items()}
    if fsdp:
        replicated = (name for name, spec in specs.items() if spec == PartitionSpec())
        matrices = tuple(name for name in replicated if "vector" not in table[name].axes)
        _warn_of_replicated(matrices, _ranks(mesh))
    return jax.tree.map(lambda name: NamedSharding(mesh, specs[name]), parameter_names(state))


@functools.cache  # once per model and mesh
def _warn_of_replicated(names: tuple[str, ...], devices: int) -> None:
    if names:
        _log.warning(
            "parallel.fsdp replicates %d of the model's matrices, because %d devices divide none "
            "of their axes: %s",
            len(names),
            devices,
            ", ".join(names),
        )


def layer_specs(layers: nnx.State, table: ParamTable, mesh: Mesh, fsdp: bool) -> nnx.State:
    """The partitions of one layer of the stacked `layers`."""
    return jax.tree.map(
        lambda name: PartitionSpec(*parameter_spec(table[LAYERS + name], mesh, fsdp)[1:]),
        parameter_names(layers),
    )


def lm_head_spec(spec: ModelSpec, mesh: Mesh, fsdp: bool) -> PartitionSpec:
    """The partition of the output matrix [V, E]: that of the embedding if tied."""
    return parameter_spec(spec.parameters[lm_head_name(spec)], mesh, fsdp)


def lm_head_name(spec: ModelSpec) -> str:
    """The name of the output matrix."""
    return "embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
