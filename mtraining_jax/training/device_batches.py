"""Iterates over the batches of a run as global arrays on its mesh."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from mtraining_jax.config import Config
from mtraining_jax.data.loader import Loader, local_rows_and_columns
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DOCUMENTS, TOKENS
from mtraining_jax.training.documents import (
    lengths_of_documents,
    reads_lengths,
    restarting_positions,
)
from mtraining_jax.training.tuning.replica_load import balance_of


class DeviceBatches:
    """Iterates over global batches on the devices; each process reads its own part.

    The state of its `loader` is that of the batch returned last.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: Layout) -> None:
        self._sharding = NamedSharding(mesh, TOKENS)
        self._shape = (config.data.batch_size, config.data.seq_len)
        rows, columns = local_rows_and_columns(self._sharding, *self._shape)
        permutation = layout.permutation()
        self.loader = Loader(
            config.data,
            permutation=permutation,
            vocab_size=config.model.vocab_size,
            rows=rows,
            columns=columns,
            block_size=config.sparsity.block_size,
            weighted=config.loss.weighting == "document",
            balance=balance_of(config),
        )
        # Positions are the same in every batch, so they stay on the devices.
        positions = np.broadcast_to(permutation.astype(np.int32), self._shape)
        self._positions = jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: positions[index]
        )
        self._of_documents = NamedSharding(mesh, DOCUMENTS)
        self._restart = restarting_positions(mesh, config.sparsity.block_size)
        self._lengths = None
        if reads_lengths(config):
            self._lengths = lengths_of_documents(mesh, config.sparsity.block_size)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return self

    def __next__(self) -> dict[str, Array]:
        """Returns int32 [B, S] `tokens`, `labels` and `positions`, in layout order.

        Data with documents adds `documents`, int32 [B, NB, 3] as in the loader, and positions
        restart in each document. loss.weighting = "document" adds `weights`, fp32 [B, S]. If
        rotary positions depend on the document length, `document_lengths` is int32 [B, S].
        """
        local = next(self.loader)
        documents = local.pop("documents", None)
        batch = {name: self._spread(array) for name, array in local.items()}
        if documents is None:
            return batch | {"positions": self._positions}
        table = jax.make_array_from_callback(
            (self._shape[0], *documents.shape[1:]),
            self._of_documents,
            lambda index: self.loader.shard(documents, index or ()),
        )
        positions = self._restart(self._positions, table)
        batch |= {"positions": positions, "documents": table}
        if self._lengths is not None:
            batch["document_lengths"] = self._lengths(self._positions, table)
        return batch

    def state(self) -> dict[str, Any]:
        return self.loader.get_state()

    def go_to(self, state: dict[str, Any]) -> None:
        self.loader.set_state(state)

    def close(self) -> None:
        self.loader.close()

    def _spread(self, local: np.ndarray) -> Array:
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self.loader.shard(local, index or ())
        )
