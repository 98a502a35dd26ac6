"""Batches of token ids, in layout order, only the part that this process holds.

Every process shuffles the same list of sequence numbers with the same seed, so all of them agree
on every global batch without communication. A process reads only its rows and columns of it.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from mtraining_jax.data.corpus import Corpus
from mtraining_jax.data.sources import problems, selected_source
from mtraining_jax.errors import UserError

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig

IGNORE_LABEL = -100  # this position has no next token: the loss leaves it out

Batch = dict[str, np.ndarray]


def build_loader(
    data: "DataConfig",
    *,
    permutation: np.ndarray,
    vocab_size: int,
    rows: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> "Loader":
    """Opens the data and makes the endless iterator over its batches.

    Args:
        data: the section of the configuration.
        permutation: integers [S], layout order index -> position in the sequence.
        vocab_size: ids that the model knows.
        rows: integers [b], rows of the global batch to read; None reads all. See
            `local_rows_and_columns`.
        columns: integers [s], layout order indices to read; None reads all S.

    Returns:
        The loader, at its first batch.

    Raises:
        UserError: the section or the data are not usable.
        ValueError: the other arguments contradict the section.
    """
    if found := list(problems(data, vocab_size)):
        raise UserError("\n".join(found))
    permutation = _checked_permutation(permutation, data.seq_len)
    rows = _checked_indices("rows", rows, data.batch_size)
    columns = _checked_indices("columns", columns, data.seq_len)
    corpus = selected_source(data).open(data, vocab_size)
    return Loader(corpus, data, permutation, rows, columns)


class Loader:
    """Endless iterator over the local part of the global batches; `build_loader` makes it.

    A batch is a dict of int32 arrays [b, s] over the local rows and columns: ``tokens``, and
    ``labels``, the token that follows in the sequence, and `IGNORE_LABEL` at its last position (a
    sequence predicts S - 1 tokens, as in the reference's collate function).

    One epoch goes through all sequences once, in a new order if shuffled; a batch may span two
    epochs, so none is dropped.

    Attributes:
        vocab_size: every id is below it.
        tokenizer: what made the ids (`Tokenizer`), None when the source holds ids.
        num_sequences: sequences an epoch.
        batch_size: rows of the global batch.
        seq_len: columns of the global batch.
        rows: int64 [b], rows of the global batch that are read here.
        columns: int64 [s], layout order indices that are read here.
        description: one line for the log.
    """

    def __init__(
        self,
        corpus: Corpus,
        data: "DataConfig",
        permutation: np.ndarray,
        rows: np.ndarray,
        columns: np.ndarray,
    ):
        self.vocab_size = corpus.vocab_size
        self.tokenizer = corpus.tokenizer
        self.num_sequences = len(corpus.starts)
        self.batch_size = data.batch_size
        self.seq_len = data.seq_len
        self.rows = rows
        self.columns = columns
        order = f"shuffled with seed {data.seed}" if data.shuffle else "in order"
        by = "token ids" if corpus.tokenizer is None else f"tokenizer {corpus.tokenizer.name}"
        self.description = (
            f"{data.source}: {corpus.summary} ({by}, vocabulary {self.vocab_size:,});"
            f" {self.num_sequences:,} sequences of {self.seq_len:,} ({data.mode}), {order},"
            f" {self.batch_size} a batch"
        )
        # A saved place means the same data only if all of these are the same.
        self._identity = {
            "data.source": data.source,
            "data.mode": data.mode,
            "data.seq_len": data.seq_len,
            "data.batch_size": data.batch_size,
            "data.shuffle": data.shuffle,
            "data.seed": data.seed,
            "number of tokens": len(corpus.stream),
            "number of sequences": self.num_sequences,
        }
        self._corpus = corpus
        positions = permutation[columns]
        self._is_last = positions == self.seq_len - 1
        following = np.minimum(positions + 1, self.seq_len - 1)
        # Most tokens are also the label of another one; each is read once.
        self._needed, places = np.unique(
            np.concatenate([positions, following]), return_inverse=True
        )
        self._token_places, self._label_places = np.split(places, 2)
        sequences = grain.MapDataset.range(self.num_sequences)
        if data.shuffle:
            sequences = sequences.shuffle(seed=data.seed)
        # An endless repetition has no incomplete batch to drop. Without drop_remainder Grain counts
        # batches of one row in floating point and gets more than an index can hold.
        batches = sequences.repeat().batch(data.batch_size, drop_remainder=True).map(self._read)
        # A row may take megabytes; one thread that reads two batches ahead hides that.
        self._iterator = iter(
            batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Reads the next batch.

        Raises:
            UserError: a token id outside the vocabulary.
        """
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where the loader stands: a small dict that JSON can hold, the same on every process."""
        return {"iterator": self._iterator.get_state(), "identity": dict(self._identity)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved place: the next batch is the one that would have followed it.

        The place counts global batches, so it holds for any number of processes and devices.

        Args:
            state: from `get_state`.

        Raises:
            UserError: the state was saved for other data or another batch.
        """
        try:
            iterator, saved = state["iterator"], state["identity"]
        except (KeyError, TypeError) as error:
            raise UserError("the saved state of the data loader is not readable") from error
        for name, value in self._identity.items():
            if saved.get(name) != value:
                raise UserError(
                    f"the checkpoint's data loader had {name} = {_shown(saved.get(name))}, and "
                    f"this run has {_shown(value)}: resume with the same data, or begin a new run "
                    "with another run.name or checkpoint.resume = false"
                )
        self._iterator.set_state(iterator)

    def block(self, array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Cuts one device's part out of a local array.

        For `jax.make_array_from_callback`:
        ``make_array_from_callback((loader.batch_size, loader.seq_len), sharding,
        lambda index: loader.block(batch["tokens"], index))``.

        Args:
            array: [b, s], from a batch of this loader.
            index: rows and columns of the global array, as slices.

        Returns:
            The values there.

        Raises:
            ValueError: rows or columns that this loader does not read.
        """
        at_rows = _local_slice("rows", self.rows, index[0], self.batch_size)
        at_columns = _local_slice("columns", self.columns, index[1], self.seq_len)
        return array[at_rows, at_columns]

    def close(self) -> None:
        """Stops reading ahead."""
        self._iterator.close()

    def _read(self, sequences: np.ndarray) -> Batch:
        shape = (self.rows.shape[0], self.columns.shape[0])
        tokens, labels = np.empty(shape, np.int32), np.empty(shape, np.int32)
        for i, sequence in enumerate(sequences[self.rows].tolist()):
            start = int(self._corpus.starts[sequence])
            ids = self._corpus.stream.take(start + self._needed)
            tokens[i], labels[i] = ids[self._token_places], ids[self._label_places]
            labels[i, self._is_last] = IGNORE_LABEL
        return {"tokens": tokens, "labels": labels}


def local_rows_and_columns(
    sharding: Any, batch_size: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds what the devices of this process hold of a global array [batch_size, seq_len].

    Args:
        sharding: a `jax.sharding.Sharding` of such an array.
        batch_size: its rows.
        seq_len: its columns.

    Returns:
        Ascending row numbers int64 [b] and column numbers int64 [s]. Every local shard lies in
        their product.
    """
    held = sharding.addressable_devices_indices_map((batch_size, seq_len)).values()
    return tuple(
        np.unique(np.concatenate([np.arange(size)[index[axis]] for index in held]))
        for axis, size in enumerate((batch_size, seq_len))
    )


def _checked_permutation(permutation: np.ndarray, seq_len: int) -> np.ndarray:
    permutation = np.asarray(permutation)
    if permutation.shape != (seq_len,) or not np.array_equal(
        np.sort(permutation), np.arange(seq_len)
    ):
        raise ValueError(
            f"permutation has shape {permutation.shape}: it must hold each position of "
            f"data.seq_len = {seq_len} once"
        )
    return permutation.astype(np.int64)


def _checked_indices(name: str, indices: np.ndarray | None, size: int) -> np.ndarray:
    indices = np.arange(size) if indices is None else np.asarray(indices)
    ascending = indices.ndim == 1 and indices.size > 0 and bool(np.all(np.diff(indices) > 0))
    if not ascending or indices[0] < 0 or indices[-1] >= size:
        raise ValueError(f"{name} must be ascending numbers from 0 to {size - 1}, at least one")
    return indices.astype(np.int64)


def _local_slice(name: str, held: np.ndarray, index: slice, size: int) -> slice:
    start, stop, _ = index.indices(size)
    first = int(np.searchsorted(held, start))
    last = first + stop - start
    if not np.array_equal(held[first:last], np.arange(start, stop)):
        raise ValueError(f"this loader does not read all {name} from {start} to {stop - 1}")
    return slice(first, last)


def _shown(value: Any) -> str:
    """A value as a configuration has it."""
    return json.dumps(value)
