"""Iterates over the batches of a run as global arrays on its mesh."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from mtraining_jax.config import Config
from mtraining_jax.data.given import GivenBatches
from mtraining_jax.data.loader import Loader, local_rows_and_columns
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DOCUMENTS, TOKENS
from mtraining_jax.parallel.replicas import shard_map_remaining
from mtraining_jax.selection.document_blocks import DocumentBlocks
from mtraining_jax.training.tuning.replica_load import balance_of


class DeviceBatches:
    """Iterates over global batches on the devices; each process reads its own part.

    `given` are batches of `fit`, in place of the data of the configuration.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        layout: Layout,
        given: Iterator[Mapping[str, Any]] | None = None,
    ) -> None:
        self._sharding = NamedSharding(mesh, TOKENS)
        self._shape = (config.data.batch_size, config.data.seq_len)
        rows, columns = local_rows_and_columns(self._sharding, *self._shape)
        permutation = layout.permutation()
        how = {
            "permutation": permutation,
            "vocab_size": config.model.vocab_size,
            "rows": rows,
            "columns": columns,
            "block_size": config.sparsity.block_size,
            "weighted": config.loss.weighting == "document",
        }
        if given is None:
            self.loader = Loader(config.data, balance=balance_of(config), **how)
        else:
            self.loader = GivenBatches(given, config.data, **how)
        # Positions are the same in every batch, so they stay on the devices.
        positions = np.broadcast_to(permutation.astype(np.int32), self._shape)
        self._positions = jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: positions[index]
        )
        self._of_documents = NamedSharding(mesh, DOCUMENTS)
        self._in_documents = positions_in_documents(mesh, config.sparsity.block_size)
        self._reads_lengths = reads_lengths(config)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return self

    def __next__(self) -> dict[str, Array]:
        """Returns int32 [B, S] `tokens`, `labels` and `positions`, in layout order.

        Data with documents adds `documents`, int32 [B, NB, 3] as in the loader, and positions
        restart in each document. loss.weighting = "document" adds `weights`, fp32 [B, S]. If
        the model reads it, `document_lengths` is int32 [B, S], 0 in padding after documents.
        """
        local = next(self.loader)
        documents = local.pop("documents", None)
        batch = {name: self._spread(x, self._shape, self._sharding) for name, x in local.items()}
        if documents is None:
            return batch | {"positions": self._positions}
        shape = self._shape[0], *documents.shape[1:]
        table = self._spread(documents, shape, self._of_documents)
        positions, lengths = self._in_documents(self._positions, table)
        batch |= {"positions": positions, "documents": table}
        return batch | {"document_lengths": lengths} if self._reads_lengths else batch

    def close(self) -> None:
        self.loader.close()

    def _spread(self, local: np.ndarray, shape: tuple[int, ...], sharding: NamedSharding) -> Array:
        return jax.make_array_from_callback(
            shape, sharding, lambda index: self.loader.shard(local, index or ())
        )


def reads_lengths(config: Config) -> bool:
    """Whether the model reads the length of each token's document: for RoPE, or the router."""
    spec = ModelSpec.from_config(config.model)
    switches = spec.rope_scaling is not None and spec.rope_scaling.switches_at is not None
    return config.data.has_documents and (switches or bool(spec.num_experts))


def positions_in_documents(
    mesh: Mesh, block_size: int
) -> Callable[[Array, Array], tuple[Array, Array]]:
    """Compiles a function of positions in the sequence [B, S] and documents [B, NB, 3], int32.

    It returns the position in its document and the number of real tokens of that document for each
    token, int32 [B, S]; both are 0 outside of documents.
    """

    def on_shard(positions: Array, table: Array) -> tuple[Array, Array]:
        first, length, tokens, _ = (
            jnp.take_along_axis(x, positions // block_size, axis=1)
            for x in DocumentBlocks.from_table(table)
        )
        return jnp.where(length > 0, positions - first * block_size, 0), tokens

    specs = (TOKENS, DOCUMENTS), (TOKENS, TOKENS)
    return jax.jit(shard_map_remaining(on_shard, mesh, *specs))
