"""Where parameters live: one table from logical axes to mesh axes.

The table of activations is in `mtraining_jax.parallel.mesh`.
"""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtraining_jax.parallel.mesh import SEQUENCE_AXES

# Names of each parameter's axes. Parameters of the layers are stacked on a leading axis.
LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("vocab", "embed"),
    "layers.input_layernorm.weight": ("layers", "vector"),
    "layers.self_attn.q_proj.weight": ("layers", "heads", "embed"),
    "layers.self_attn.q_proj.bias": ("layers", "vector"),
    "layers.self_attn.k_proj.weight": ("layers", "kv_heads", "embed"),
    "layers.self_attn.k_proj.bias": ("layers", "vector"),
    "layers.self_attn.v_proj.weight": ("layers", "kv_heads", "embed"),
    "layers.self_attn.v_proj.bias": ("layers", "vector"),
    "layers.self_attn.o_proj.weight": ("layers", "embed", "heads"),
    "layers.post_attention_layernorm.weight": ("layers", "vector"),
    "layers.mlp.gate_proj.weight": ("layers", "mlp", "embed"),
    "layers.mlp.up_proj.weight": ("layers", "mlp", "embed"),
    "layers.mlp.down_proj.weight": ("layers", "embed", "mlp"),
    "norm.weight": ("vector",),
    "lm_head.weight": ("vocab", "embed"),
}

# Mesh axes that fully sharded data parallelism (FSDP) cuts a logical axis over; None is
# replicated. The first axis of a parameter that divides is cut: leading axes gather without a
# transpose. Vectors are too small to be worth a gather of their own.
FSDP_AXES: dict[str, tuple[str, ...] | None] = {
    "layers": None,
    "vector": None,
    "vocab": SEQUENCE_AXES,
    "heads": SEQUENCE_AXES,
    "kv_heads": SEQUENCE_AXES,
    "mlp": SEQUENCE_AXES,
    "embed": SEQUENCE_AXES,
}


def parameter_spec(name: str, shape: tuple[int, ...], mesh: Mesh, fsdp: bool) -> PartitionSpec:
    """The partition of one parameter.

    Args:
        name: dotted path, a key of `LOGICAL_AXES`.
        shape: its global shape.
        mesh: as `mtraining_jax.parallel.mesh.make_mesh` makes it.
        fsdp: cut the first axis that divides; otherwise replicate.
    """
    if not fsdp:
        return PartitionSpec()
    for axis, (logical, size) in enumerate(zip(LOGICAL_AXES[name], shape, strict=True)):
        mesh_axes = FSDP_AXES[logical]
        if mesh_axes is None:
            continue
        parts = 1
        for mesh_axis in mesh_axes:
            parts *= mesh.shape[mesh_axis]
        if size % parts == 0:
            return PartitionSpec(*[None] * axis, mesh_axes)
    return PartitionSpec()


def parameter_names(state: Any) -> Any:
    """The dotted name of every parameter, e.g. "layers.self_attn.q_proj.weight".

    Args:
        state: `nnx.State` or pure dict of a model.

    Returns:
        A tree of the same structure with strings as leaves.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _dotted(path), state)


def state_shardings(state: nnx.State, mesh: Mesh, fsdp: bool) -> nnx.State:
    """The sharding of every parameter.

    Args:
        state: of a `Qwen2`, arrays or `jax.ShapeDtypeStruct`.
        mesh: axes ('data', 'node', 'device'), of type Auto.
        fsdp: cut matrices over ('node', 'device') where they divide; otherwise replicate all.

    Returns:
        A state of the same structure with `NamedSharding` leaves.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(
            mesh, parameter_spec(_dotted(path), leaf.shape, mesh, fsdp)
        ),
        state,
    )


def layer_specs(layers: nnx.State, mesh: Mesh, fsdp: bool) -> nnx.State:
    """How the parameters of one layer lie, without the leading axis of layers.

    Args:
        layers: state of the stacked layers, [L, ...].
        mesh: axes ('data', 'node', 'device').
        fsdp: as for `state_shardings`.

    Returns:
        A state of the same structure with `PartitionSpec` leaves.
    """

    def of_layer(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        return PartitionSpec(
            *parameter_spec(f"layers.{_dotted(path)}", leaf.shape, mesh, fsdp)[1:]
        )

    return jax.tree_util.tree_map_with_path(of_layer, layers)


def lm_head_spec(tied: bool, shape: tuple[int, ...], mesh: Mesh, fsdp: bool) -> PartitionSpec:
    """The partition of the output matrix [V, E]: the embedding's when tied."""
    name = "embed_tokens.weight" if tied else "lm_head.weight"
    return parameter_spec(name, shape, mesh, fsdp)


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
