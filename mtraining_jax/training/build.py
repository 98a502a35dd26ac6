"""Builds the parts of a run from its configuration."""

import jax
from jax.sharding import Mesh

from mtraining_jax.attention.order import layout_for_ring
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.config import Config, validate
from mtraining_jax.models.transformer import Attention
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.base import ModelSizes, Pattern
from mtraining_jax.utils.errors import UserError


def build_mesh(config: Config) -> Mesh:
    """Builds the mesh over all processes; raises a UserError if the devices do not fit."""
    validate(config, jax.device_count(), jax.default_backend())
    try:
        return make_mesh(*config.mesh_shape)
    except ValueError as error:
        raise UserError(f"the mesh sizes under [parallel] do not fit: {error}") from None


def build_layout(config: Config) -> Layout:
    """Builds the layout that assigns tokens to context-parallel ranks."""
    parallel = config.parallel
    return layout_for_ring(
        parallel.layout,
        config.data.seq_len,
        (parallel.nodes, parallel.devices_per_node),
        config.sparsity.block_size,
        parallel.ring,
    )


def build_pattern(config: Config) -> Pattern:
    """Builds the sparse pattern; with a leading layer axis if it differs from layer to layer."""
    model = config.model
    sizes = ModelSizes(model.num_layers, model.num_heads, config.data.seq_len, config.run.seed)
    return config.sparsity.pattern.bind(sizes)


def build_attention(
    config: Config, mesh: Mesh, layout: Layout, pattern: Pattern, by_length: bool = False
) -> Attention:
    """Builds the attention of the model's layers; `by_length` counts pairs by document length."""
    parallel = config.parallel
    return make_attention(
        mesh,
        layout,
        pattern,
        ring=parallel.ring,
        backend=None if parallel.backend == "auto" else parallel.backend,
        by_length=by_length,
    )
