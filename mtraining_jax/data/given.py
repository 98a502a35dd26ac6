"""Reads batches that a caller makes, in place of a `Loader`."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from mtraining_jax.data.loader import LocalPart
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.documents import Documents
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.utils.errors import UserError

_WHERE = "fit(data=...)"


class GivenBatches(LocalPart):
    """Iterator over the local part of batches; arguments and arrays are those of `Loader`.

    Each batch of `batches` is a mapping of whole sequences, for `rows` only: int [b, S] `tokens`,
    optionally `labels`, and `documents` and fp32 `weights` if the run needs them.
    """

    packs = sequences = None

    def __init__(
        self,
        batches: Iterator[Mapping[str, Any]],
        data: DataSpec,
        *,
        permutation: np.ndarray,
        vocab_size: int,
        rows: np.ndarray,
        columns: np.ndarray,
        block_size: int,
        weighted: bool,
    ) -> None:
        super().__init__(data, rows, columns)
        self._batches, self._vocab_size = batches, vocab_size
        self._order = permutation[columns]
        self._block_size, self._weighted = block_size, weighted
        self.step, self.resumes = 0, hasattr(batches, "get_state") and hasattr(batches, "set_state")
        shape = {"data.seq_len": data.seq_len, "data.batch_size": data.batch_size}
        self.identity = {"data.source": "given", **shape}

    def description_for(self, steps: int) -> str:
        """One line about the data."""
        del steps
        return "batches from Python" + (
            "" if self.resumes else ", which a resumed run reads again from their start"
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The arrays of `Loader`, at the local rows and columns."""
        try:
            given = next(self._batches)
        except StopIteration:
            raise UserError(
                f"{_WHERE} ended after {self.step} batches, and the run needs more: set run.steps "
                "to their number, or repeat them"
            ) from None
        self.step += 1
        tokens = self._ids(given, "tokens", 0)
        documents = self._documents(given)
        if "labels" in given:
            labels = self._ids(given, "labels", IGNORE_LABEL)
        else:
            labels = np.roll(tokens, -1, axis=1)
            labels[:, -1] = IGNORE_LABEL
            if documents is not None:
                labels[_last_or_padding(documents)] = IGNORE_LABEL
        batch: dict[str, Any] = {"tokens": tokens[:, self._order], "labels": labels[:, self._order]}
        if documents is not None:
            batch["documents"] = documents
        if self._weighted:
            if "weights" not in given:
                raise self._wrong('has no weights, which loss.weighting = "document" needs')
            weights = np.asarray(given["weights"], np.float32)
            batch["weights"] = self._checked("weights", weights)[:, self._order]
        return batch

    def get_state(self) -> dict[str, Any]:
        """JSON-serializable."""
        own: Any = self._batches
        return {
            "given": own.get_state() if self.resumes else None,
            "step": self.step,
            "identity": self.identity,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state."""
        if "given" not in state or state.get("identity") != self.identity:
            raise UserError(
                f"the checkpoint's run read other data than {self.identity}: resume with the same, "
                "or start a new run with another run.name or checkpoint.resume = false"
            )
        own: Any = self._batches
        if self.resumes and state["given"] is not None:
            own.set_state(state["given"])
        self.step = state["step"]

    def close(self) -> None:
        """Leaves the iterator to the caller."""

    def _ids(self, given: Mapping[str, Any], name: str, lowest: int) -> np.ndarray:
        if name not in given:
            raise self._wrong(f"has no {name!r}, only {', '.join(map(repr, given))}")
        ids = self._checked(name, np.asarray(given[name]))
        if not np.issubdtype(ids.dtype, np.integer):
            raise self._wrong(f"has {name} of type {ids.dtype}, but they must be integers")
        allowed = (ids >= 0) & (ids < self._vocab_size)
        if lowest < 0:
            allowed |= ids == lowest
        if not allowed.all():
            also = f" or {lowest}" if lowest < 0 else ""
            raise self._wrong(
                f"has {ids[~allowed][0]} among its {name}, but they must be 0 to "
                f"{self._vocab_size - 1}{also} (model.vocab_size = {self._vocab_size})"
            )
        return ids.astype(np.int32)

    def _checked(self, name: str, array: np.ndarray) -> np.ndarray:
        needed = self.rows.size, self._data.seq_len
        if array.shape != needed:
            raise self._wrong(
                f"has {name} of shape {array.shape}, but this process needs {needed}: its part of "
                f"data.batch_size = {self._data.batch_size}, and data.seq_len"
            )
        return array

    def _documents(self, given: Mapping[str, Any]) -> Documents | None:
        documents, wanted = given.get("documents"), self._data.has_documents
        if (documents is not None) != wanted:
            raise self._wrong(
                "has no documents, but data.mask_documents = true"
                if wanted
                else "has documents, which needs data.mask_documents = true"
            )
        if documents is None:
            return None
        needed = self.rows.size, self._data.seq_len // self._block_size
        if not isinstance(documents, Documents) or documents.block_size != self._block_size:
            raise self._wrong(
                "has other documents than mtraining_jax.Documents with blocks of "
                f"{self._block_size} tokens (sparsity.block_size)"
            )
        if documents.first.shape != needed:
            shape = documents.first.shape
            raise self._wrong(f"has documents of shape {shape}, but {needed} is needed")
        return jax.tree.map(lambda x: np.asarray(x, np.int32), documents)

    def _wrong(self, what: str) -> UserError:
        return UserError(f"batch {self.step} of {_WHERE} {what}")


def _last_or_padding(documents: Documents) -> np.ndarray:
    """Whether each position is the last token of its document, or padding, bool [b, S]."""
    size = documents.block_size
    first, tokens = (np.repeat(x, size, axis=1) for x in (documents.first, documents.tokens))
    return (tokens == 0) | (np.arange(first.shape[1]) - first * size >= tokens - 1)
