"""A corpus: a token stream and the positions of its sequences or documents."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mtraining_jax.data.packs import Documents, PackArrays, Packs
from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig


class Stream(Protocol):
    """All tokens of a source as one long sequence."""

    def __len__(self) -> int: ...

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Token ids, int32 [n], at positions int64 [n] in ``range(len(self))``."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Sequences of `data.seq_len` tokens in a stream.

    Attributes:
        stream: all tokens.
        starts: first position of each sequence in the stream, int64 [sequences] or a range.
        vocab_size: all token ids are below this.
        tokenizer: None if the source holds token ids.
        documents: positions of documents if `data.has_documents`; sequences are then packed from
            them and `starts` is empty. None if unknown.
    """

    stream: Stream
    starts: np.ndarray | range
    vocab_size: int
    tokenizer: Tokenizer | None
    summary: str
    documents: Documents | None = None


def packs_of(corpus: Corpus, data: "DataConfig", block_size: int) -> Packs:
    """Packs the documents of a corpus into sequences, if `data.has_documents`.

    Args:
        block_size: tokens per attention block; divides `data.seq_len`.
    """
    if data.mode == "exact":
        starts = np.asarray(corpus.starts, np.int64)
        lengths, ends = np.full(starts.shape, data.seq_len), 1 + np.arange(starts.size)
        return PackArrays(starts, lengths, ends, block_size, data.seq_len)
    if corpus.documents is None:
        raise UserError(
            f'data.mask_documents = true is not possible with data.source = "{data.source}", which has '
            "no document boundaries"
        )
    return corpus.documents.packs(data, block_size)


def windows(num_tokens: int, data: "DataConfig", what: str) -> range:
    """Start positions of sequences in a stream split every `data.seq_len` tokens.

    Drops the last, incomplete sequence.
    """
    count = num_tokens // data.seq_len
    if count == 0:
        raise UserError(
            f"data.seq_len = {data.seq_len} is more than the {num_tokens} tokens of data.source = "
            f'"{data.source}" ({what}); use a smaller data.seq_len or more data'
        )
    return range(0, count * data.seq_len, data.seq_len)


def check_some_exact(lengths: np.ndarray, data: "DataConfig") -> None:
    """Checks that some document has exactly `data.seq_len` tokens.

    Args:
        lengths: int64 [documents], tokens of each.
    """
    if not np.any(lengths == data.seq_len):
        span = f" ({lengths.min()} to {lengths.max()} tokens)" if lengths.size else ""
        raise UserError(
            f'data.mode = "exact" keeps documents of exactly data.seq_len = {data.seq_len} tokens, '
            f"but none of {counted(lengths.shape[0], 'document')} matches{span}"
        )
