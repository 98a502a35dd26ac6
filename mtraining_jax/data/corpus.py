"""A corpus: a token stream and the positions of its sequences or documents."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mtraining_jax.data.packing.packs import PackArrays, Packs, Parts
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted


class Stream(Protocol):
    """All tokens of a source as one long sequence."""

    def __len__(self) -> int: ...

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Token ids, int32 [n], at positions int64 [n] of one sequence."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Sequences of `data.seq_len` tokens in a stream, see `starts_of` and `packs_of`."""

    stream: Stream
    vocab_size: int  # all token ids are below this
    tokenizer: Tokenizer | None  # None if the source holds token ids
    summary: str  # description for the log
    # First position of each sequence in the stream, int64; None splits it every `data.seq_len`.
    starts: np.ndarray | range | None = None
    # Packs the documents, for `data` and the tokens per block; None if they are unknown.
    pack: Callable[..., Packs] | None = None
    # Whether the tokens at positions int64 [n] are trained, bool [n]; None: all are.
    trained: Callable[[np.ndarray], np.ndarray] | None = None
    endless: bool = False  # without epochs: a mixture, or sequences that are generated on demand
    parts: Parts | None = None  # of a mixture that is not packed
    bos: tuple[int, ...] | None = None  # ids that begin documents; None: unknown or various


def starts_of(corpus: Corpus, data: DataSpec) -> np.ndarray | range:
    """First positions of the sequences in the stream, if they are not packed."""
    if corpus.starts is not None:
        return corpus.starts
    num_tokens = len(corpus.stream)
    if num_tokens < data.seq_len:
        raise UserError(
            f"data.seq_len = {data.seq_len} is more than the {num_tokens} tokens of data.source = "
            f'"{data.source}" ({corpus.summary}); use a smaller data.seq_len or more data'
        )
    return range(0, num_tokens - data.seq_len + 1, data.seq_len)


def packs_of(corpus: Corpus, data: DataSpec, block_size: int) -> Packs:
    """Packs the documents of a corpus into sequences, if `data.has_documents`."""
    if data.mode == "exact":
        return one_document_each(starts_of(corpus, data), data.seq_len)
    if corpus.pack is None:
        raise UserError(
            f'data.mask_documents = true is not possible with data.source = "{data.source}", which '
            "has no document boundaries"
        )
    return corpus.pack(data, block_size)


def one_document_each(starts: np.ndarray | range, seq_len: int) -> PackArrays:
    """Sequences of one document, with these first positions."""
    begins = np.asarray(starts, np.int64)
    return PackArrays(begins, np.full(begins.shape, seq_len), 1 + np.arange(begins.size), seq_len)


def check_some_exact(lengths: np.ndarray, data: DataSpec) -> None:
    """Checks that one of the document lengths, int64 [d], is `data.seq_len`."""
    if not np.any(lengths == data.seq_len):
        span = f" ({lengths.min()} to {lengths.max()} tokens)" if lengths.size else ""
        raise UserError(
            f'data.mode = "exact" keeps documents of exactly data.seq_len = {data.seq_len} tokens, '
            f"but none of {counted(lengths.size, 'document')} matches{span}"
        )
