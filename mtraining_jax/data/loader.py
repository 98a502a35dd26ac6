"""Loads the local part of global batches of token ids, in layout order.

All processes shuffle with the same seed, so they agree on global batches without communication.
"""

import functools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from mtraining_jax.data.balance import Balance
from mtraining_jax.data.corpus import packs_of, starts_of
from mtraining_jax.data.packing.packs import Packs, Parts, stream_positions
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.stream import TokenStream
from mtraining_jax.documents import Documents
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted

Batch = dict[str, Any]  # NumPy arrays, and `Documents` of them

_SAMPLE = "checksum of a sample of its tokens"
_MASK_SAMPLE = "checksum of a sample of its label mask"
_SAMPLES, _SAMPLE_LEN = 64, 64
_BOS = "data.bos"


class LocalPart:
    """The rows and columns of global batches that a process has, ascending integers [b] and [s]."""

    def __init__(self, data: DataSpec, rows: np.ndarray, columns: np.ndarray) -> None:
        self._data, self.rows, self.columns = data, rows, columns

    def shard(self, array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """One device's shard of an array of a batch, by its global rows, or rows and columns."""
        local = array[_local_slice("rows", self.rows, index[0], self._data.batch_size)]
        if len(index) == 1:
            return local
        return local[:, _local_slice("columns", self.columns, index[1], self._data.seq_len)]


class Loader(LocalPart):
    """Endless iterator over the local part of the global batches: dicts of NumPy arrays.

    - ``tokens``: int32 [b, s], local rows and columns; 0 in padding.
    - ``labels``: int32 [b, s], next tokens; `IGNORE_LABEL` at the last token of a sequence (as in
      MTraining's collate function) or of a document, in padding, and for tokens that the label mask
      does not train.
    - ``documents``, with `data.has_documents`: `Documents` of the local rows, int32 [b, NB] over
      all NB blocks.
    - ``weights``, if `weighted`: fp32 [b, s], equal for the labels of a document, with sum 1.

    Documents begin at block boundaries. An epoch visits every sequence once, in a new order if
    shuffled. Batches may span two epochs. Balancing reorders sequences within a batch only.

    Args:
        permutation: integers [S], layout order index -> position in the sequence.
        rows, columns: ascending integers [b] and [s], the rows of the global batch and the layout
            order indices to read (see `local_rows_and_columns`); None reads all.
        block_size: tokens per attention block; required if `data.has_documents`.
        balance: how to assign sequences to data-parallel replicas; None keeps the order of the
            data. With densities, call `measured` after each step and `close` at the end.

    Attributes:
        packs: None without `data.has_documents`.
        parts: those of a mixture.
        sequences: sequence index of each row of the last global batch, int64 [B].
        step: number of the last batch, counted from 1 over the entire run.
    """

    def __init__(
        self,
        data: DataSpec,
        *,
        permutation: np.ndarray,
        vocab_size: int,
        rows: np.ndarray | None = None,
        columns: np.ndarray | None = None,
        block_size: int | None = None,
        weighted: bool = False,
        balance: Balance | None = None,
    ) -> None:
        if found := list(data.source_options.problems(data, vocab_size)):
            raise UserError("\n".join(found))
        if data.has_documents and block_size is None:
            raise UserError(
                f'data.mode = "{data.mode}" with attention masked between documents is not '
                "supported by this command"
            )
        # Without documents, a sequence is one document of one block.
        self._block_size = block_size if data.has_documents and block_size else data.seq_len
        if data.seq_len % self._block_size:
            raise ValueError(f"data.seq_len = {data.seq_len} is not a multiple of {block_size}")
        super().__init__(
            data,
            np.arange(data.batch_size) if rows is None else rows,
            np.arange(data.seq_len) if columns is None else columns,
        )
        self._weighted = weighted
        self.corpus = data.source_options.open(data, vocab_size)
        self.packs: Packs | None = None
        if data.has_documents:
            self.packs = packs_of(self.corpus, data, self._block_size)
        self._starts = starts_of(self.corpus, data) if self.packs is None else ()
        self.num_sequences = len(self._starts if self.packs is None else self.packs)
        self.parts: Parts | None = getattr(self.packs, "parts", None) or self.corpus.parts
        self.description = self._describe(balance)
        self.identity = self._identity()
        balances = balance is not None and self.packs is not None and balance.replicas > 1
        self._balance = balance if balances else None
        self._densities = None if self._balance is None else self._balance.densities
        positions = np.asarray(permutation, np.int64)[self.columns]
        following = np.minimum(positions + 1, data.seq_len - 1)
        # Tokens that are also labels are read once.
        both = np.concatenate([positions, following])
        self._needed, indices = np.unique(both, return_inverse=True)
        self._token_indices, self._label_indices = np.split(indices, 2)
        self.sequences: np.ndarray | None = None
        self.step = 0
        self._start_reading()

    def _describe(self, balance: Balance | None) -> str:
        data, corpus = self._data, self.corpus
        order = f"shuffled with seed {data.seed}" if data.shuffle else "in order"
        by = "token ids" if corpus.tokenizer is None else f"tokenizer {corpus.tokenizer.name}"
        text = (
            f"{data.source}: {corpus.summary} ({by}, vocabulary {corpus.vocab_size:,});"
            f" {self.num_sequences:,} sequences of {data.seq_len:,} ({data.mode}), {order},"
            f" {data.batch_size} per batch"
        )
        if self.packs is not None:
            text += f"; {self.packs.summary}"
        left = len(corpus.stream) - self.num_sequences * data.seq_len
        if self.packs is None and data.mode == "concat" and left > 0:
            text += f"; {left:,} tokens dropped that fill no sequence"
        if balance is not None:
            text += f"; data.balance = {balance.name}"
            if self.packs is None:
                text += " has no effect: sequences without documents have equal work"
            elif balance.replicas == 1:
                text += " has no effect with a single data-parallel replica"
        return text

    def description_for(self, steps: int, unit: str = "step") -> str:
        """The description, with the number of epochs in these steps."""
        if self.parts is not None:
            read = steps * self._data.batch_size / sum(self.parts.weights)
            parts = zip(self.parts.sequences.items(), self.parts.weights, strict=True)
            texts = [f"{read * weight / len(of):.3g} of {name}" for (name, of), weight in parts]
            return f"{self.description}; epochs in {counted(steps, unit)}: {', '.join(texts)}"
        if self.corpus.endless:
            return self.description
        batch_size = self._data.batch_size
        epochs = steps * batch_size / self.num_sequences
        text = f"{self.description}; {counted(steps, unit)} = {epochs:.3g} epochs"
        if batch_size > self.num_sequences:
            text += f"; warning: data.batch_size = {batch_size} repeats sequences in each batch"
        return text

    def _identity(self) -> dict[str, Any]:
        """A saved state is only valid if all of these are equal."""
        fields = "source", "mode", "seq_len", "batch_size", "shuffle", "seed"
        identity: dict[str, Any] = {f"data.{name}": getattr(self._data, name) for name in fields}
        identity["data.mask_documents"] = self.packs is not None
        if self.packs is not None:
            identity["sparsity.block_size"] = self._block_size
        identity[_BOS] = None if self.corpus.bos is None else list(self.corpus.bos)
        identity["number of tokens"] = len(self.corpus.stream)
        identity["number of sequences"] = self.num_sequences
        if self.parts is not None:
            identity["weights of data.parts"] = dict(self.parts.given)
        if self.packs is not None:
            identity["digest of the packed documents"] = self.packs.digest
        stream = self.corpus.stream
        if isinstance(stream, TokenStream):  # their fields determine other streams
            identity[_SAMPLE] = _checksum_of_sample(stream, stream.take)
            masked = stream.masked
            identity[_MASK_SAMPLE] = _checksum_of_sample(stream, stream.trained) if masked else None
        return identity

    def _start_reading(self) -> None:
        parts, whole = self.parts, range(self.num_sequences)
        numbers = [whole] if parts is None else parts.sequences.values()
        sequences = [grain.MapDataset.range(of.start, of.stop) for of in numbers]
        if self._data.shuffle:
            sequences = [of.shuffle(seed=self._data.seed) for of in sequences]
        weights = (1.0,) if parts is None else parts.weights
        mixed = grain.MapDataset.mix([of.repeat() for of in sequences], weights)
        # Without drop_remainder Grain counts batches of one row in floating point and exceeds the
        # range of an index. The endless repetition has no remainder.
        batches = mixed.batch(self._data.batch_size, drop_remainder=True)
        generation = None if self._densities is None else self._densities.generation
        batches = batches.map_with_index(functools.partial(self._read, generation))
        # Rows may have megabytes; one thread that prefetches two batches hides the latency.
        self._iterator = iter(
            batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        step = self.step + 1
        if self._densities is not None and not self._densities.known_before(step):
            raise RuntimeError(f"the batch of step {step} needs densities: call `measured` first")
        batch = next(self._iterator)
        self.sequences, self.step = batch.pop("sequences"), step
        return batch

    def measured(self, step: int, densities: np.ndarray) -> None:
        """Adds the densities [K] of the next step; not finite for classes without documents."""
        if self._densities is not None:
            self._densities.add(step, densities)

    def densities_before(self, step: int) -> np.ndarray | None:
        """The densities [K] used to balance the batch of a step, if any."""
        return None if self._densities is None else self._densities.before(step)

    def get_state(self) -> dict[str, Any]:
        """JSON-serializable state, identical on all processes."""
        state = {"iterator": self._iterator.get_state(), "identity": dict(self.identity)}
        if self._densities is None:
            return state
        return state | {"densities": self._densities.state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state, for any number of processes and devices."""
        if "given" in state:
            raise UserError(
                "the checkpoint's run had its batches from Python: resume with fit(config, "
                "data=...), or start a new run with another run.name or checkpoint.resume = false"
            )
        try:
            iterator, saved = state["iterator"], dict(state["identity"])
            # Absent from older checkpoints.
            saved.setdefault("data.mask_documents", False)
            saved.setdefault(_BOS, [] if self.identity[_BOS] else self.identity[_BOS])
            step = iterator["next_index"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("the saved state of the data loader is not readable") from error
        for name, value in self.identity.items():
            if name == _SAMPLE and name not in saved:
                continue  # checkpoints of older versions
            if saved.get(name) != value:
                raise UserError(
                    f"the checkpoint's data loader had {name} = {json.dumps(saved.get(name))}, but "
                    f"this run has {json.dumps(value)}: resume with the same data, or start a new "
                    "run with another run.name or checkpoint.resume = false"
                )
        self.step = step
        if self._densities is not None:
            # Prefetched batches may wait for a density that is never added.
            self._densities.go_to(step, state.get("densities"))
            self._iterator.close()
            self._start_reading()
        self._iterator.set_state(iterator)

    def close(self) -> None:
        """Stops prefetching."""
        if self._densities is not None:
            self._densities.close()
        self._iterator.close()

    def _read(self, generation: int | None, number: int, sequences: np.ndarray) -> Batch:
        if self._balance is not None:
            lengths = [self._pieces(sequence)[1] for sequence in sequences.tolist()]
            sequences = sequences[self._balance.order(number + 1, lengths, generation)]
        return {**self._read_rows(sequences[self.rows]), "sequences": sequences}

    def _pieces(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        if self.packs is None:
            return np.array([self._starts[sequence]]), np.array([self._data.seq_len])
        return self.packs.pieces(sequence)

    def _read_rows(self, sequences: np.ndarray) -> Batch:
        shape = self.rows.size, self.columns.size
        tokens, labels = np.empty(shape, np.int32), np.empty(shape, np.int32)
        pieces = [self._pieces(sequence) for sequence in sequences.tolist()]
        size = self._block_size
        documents = Documents.from_lengths([own for _, own in pieces], self._data.seq_len, size)
        weights = np.zeros(shape, np.float32)
        for i, (starts, lengths) in enumerate(pieces):
            first, real = (np.asarray(x[i]) for x in (documents.first, documents.tokens))
            places, left = stream_positions(starts, first, real, self._needed, size)
            ids = np.zeros(places.shape, np.int32)
            ids[left > 0] = self.corpus.stream.take(places[left > 0])
            tokens[i] = ids[self._token_indices]
            # The last token of a document has no label.
            followed = left[self._token_indices] > 1
            if self.corpus.trained is not None:
                trained = np.zeros(places.shape, bool)
                trained[left > 0] = self.corpus.trained(places[left > 0])
                followed &= trained[self._label_indices]
            labels[i] = np.where(followed, ids[self._label_indices], IGNORE_LABEL)
            if self._weighted:
                blocks = -(-lengths // size)
                label_counts = np.repeat(self._label_counts(starts, lengths), blocks)
                block = self._needed[self._token_indices] // size
                weights[i, followed] = 1 / label_counts[block[followed]]
        batch: Batch = {"tokens": tokens, "labels": labels}
        if self.packs is not None:
            batch["documents"] = documents
            if self._weighted:
                batch["weights"] = weights
        return batch

    def _label_counts(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Number of labels of each document of a sequence, int64 [d]."""
        trained = self.corpus.trained
        if trained is None:
            return lengths - 1
        labels = map(np.arange, starts + 1, starts + lengths)
        return np.array([np.count_nonzero(trained(positions)) for positions in labels])


def local_rows_and_columns(
    sharding: Any, batch_size: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ascending rows [b] and columns [s] of a global batch on the devices of this process."""
    held = sharding.addressable_devices_indices_map((batch_size, seq_len)).values()
    rows, columns = (
        np.unique(np.concatenate([np.arange(size)[index[axis]] for index in held]))
        for axis, size in enumerate((batch_size, seq_len))
    )
    return rows, columns


def _checksum_of_sample(stream: TokenStream, take: Callable[[np.ndarray], np.ndarray]) -> int:
    """Checksum of tokens or masks at 64 positions, to detect another file of the same length."""
    size = len(stream)
    starts = np.arange(_SAMPLES, dtype=np.int64) * size // _SAMPLES
    positions = np.unique(starts[:, None] + np.arange(_SAMPLE_LEN))
    return zlib.crc32(take(positions[positions < size]).astype("<i4").tobytes())


def _local_slice(name: str, held: np.ndarray, index: slice, size: int) -> slice:
    start, stop, _ = index.indices(size)
    first, last = np.searchsorted(held, (start, stop)).tolist()
    if last - first != stop - start:
        raise ValueError(f"this loader does not read all {name} from {start} to {stop - 1}")
    return slice(first, last)
