"""Iterates over the batches of a run as global arrays on its mesh."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from mtraining_jax.config import Config
from mtraining_jax.data.balance import Balance
from mtraining_jax.data.given import GivenBatches
from mtraining_jax.data.loader import Loader, local_rows_and_columns
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DOCUMENTS, TOKENS


class DeviceBatches:
    """Iterates over global batches on the devices; each process reads its own part.

    `given` are batches of `fit`, in place of the data of the configuration. `balance` distributes
    the sequences of that data over replicas.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        layout: Layout,
        given: Iterator[Mapping[str, Any]] | None = None,
        balance: Balance | None = None,
    ) -> None:
        self._sharding = NamedSharding(mesh, TOKENS)
        self._shape = (config.data.batch_size, config.data.seq_len)
        rows, columns = local_rows_and_columns(self._sharding, *self._shape)
        how = {
            "permutation": layout.permutation(),
            "vocab_size": config.model.vocab_size,
            "rows": rows,
            "columns": columns,
            "block_size": config.sparsity.block_size,
            "weighted": config.loss.weighting == "document",
        }
        self.loader = (
            Loader(config.data, balance=balance, **how)
            if given is None
            else GivenBatches(given, config.data, **how)
        )
        self._documents_sharding = NamedSharding(mesh, DOCUMENTS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Returns int32 [B, S] `tokens` and `labels`, in layout order.

        Data with documents adds `documents`, the `Documents` of all sequences. loss.weighting =
        "document" adds `weights`, fp32 [B, S].
        """
        local, (batch_size, _) = next(self.loader), self._shape
        documents: Any = local.pop("documents", None)
        batch = {name: self._spread(x, self._shape, self._sharding) for name, x in local.items()}
        if documents is None:
            return batch
        shape = batch_size, documents.first.shape[1]
        return batch | {
            "documents": jax.tree.map(
                lambda x: self._spread(x, shape, self._documents_sharding, axes=1), documents
            )
        }

    def close(self) -> None:
        self.loader.close()

    def _spread(
        self, local: np.ndarray, shape: tuple[int, ...], sharding: NamedSharding, axes: int = 2
    ) -> Array:
        return jax.make_array_from_callback(
            shape, sharding, lambda index: self.loader.shard(local, (index or ())[:axes])
        )
