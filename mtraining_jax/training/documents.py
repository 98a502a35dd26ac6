"""Positions and lengths of the documents of a batch, for rotary embedding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from mtraining_jax.config import Config
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.parallel.mesh import DOCUMENTS, TOKENS
from mtraining_jax.selection.document_blocks import DocumentBlocks


def reads_lengths(config: Config) -> bool:
    """Whether rotary positions depend on the length of each token's document."""
    scaling = ModelSpec.from_config(config.model).rope_scaling
    return config.data.has_documents and scaling is not None and scaling.switches_at is not None


def restarting_positions(mesh: Mesh, block_size: int) -> Callable[[Array, Array], Array]:
    """Compiles a function that counts positions from the start of each document.

    Its arguments are positions in the sequence, int32 [B, S] in layout order, and documents, int32
    [B, NB, 3]. It returns 0 for a token outside of documents.
    """

    def restart(positions: Array, documents: DocumentBlocks) -> Array:
        first, length = (
            jnp.take_along_axis(x, positions // block_size, axis=1)
            for x in (documents.first, documents.length)
        )
        return jnp.where(length > 0, positions - first * block_size, 0)

    return _on_shards(restart, mesh)


def lengths_of_documents(mesh: Mesh, block_size: int) -> Callable[[Array, Array], Array]:
    """Compiles a function that returns the real tokens of each token's document, int32 [B, S]."""

    def lengths(positions: Array, documents: DocumentBlocks) -> Array:
        return jnp.take_along_axis(documents.tokens, positions // block_size, axis=1)

    return _on_shards(lengths, mesh)


def _on_shards(
    function: Callable[[Array, DocumentBlocks], Array], mesh: Mesh
) -> Callable[[Array, Array], Array]:
    def on_shard(positions: Array, table: Array) -> Array:
        return function(positions, DocumentBlocks.from_table(table))

    specs = {"in_specs": (TOKENS, DOCUMENTS), "out_specs": TOKENS}
    return jax.jit(jax.shard_map(on_shard, mesh=mesh, check_vma=False, **specs))
