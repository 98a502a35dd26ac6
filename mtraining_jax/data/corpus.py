"""Sequences of exactly `data.seq_len` tokens, cut but not yet read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mtraining_jax.data.packs import Documents, PackArrays, Packs
from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.errors import UserError
from mtraining_jax.wording import counted

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig


class Stream(Protocol):
    """All tokens of a source as one long sequence."""

    def __len__(self) -> int: ...

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Token ids int32 [n] at positions int64 [n], each from 0 to below ``len(self)``."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Sequences of `data.seq_len` tokens in a stream.

    Attributes:
        stream: all tokens.
        starts: int64 [sequences] (or a range): where each sequence begins in the stream.
        vocab_size: every id is below it.
        tokenizer: None when the source holds token ids.
        summary: what was found, in a few words.
        documents: where documents are, if `data.has_documents`; sequences are then made of these,
            and `starts` is empty. None if the source does not know.
    """

    stream: Stream
    starts: np.ndarray | range
    vocab_size: int
    tokenizer: Tokenizer | None
    summary: str
    documents: Documents | None = None


def packs_of(corpus: Corpus, data: "DataConfig", block_size: int) -> Packs:
    """The sequences of a corpus where `data.has_documents`.

    Args:
        corpus: what the source has found.
        data: the section.
        block_size: g, tokens of a block of attention, of which `data.seq_len` is a multiple.

    Raises:
        UserError: the source does not say where documents are, or there is not one sequence.
    """
    if data.mode == "exact":
        starts = np.asarray(corpus.starts, np.int64)
        lengths, ends = np.full(starts.shape, data.seq_len), 1 + np.arange(starts.size)
        return PackArrays(starts, lengths, ends, block_size, data.seq_len)
    if corpus.documents is None:
        raise UserError(
            f'data.documents = true is not possible with data.source = "{data.source}", which does '
            "not say where documents are"
        )
    return corpus.documents.packs(data, block_size)


def windows(num_tokens: int, data: "DataConfig", what: str) -> range:
    """Where sequences begin when a stream is cut every `data.seq_len` tokens.

    Tokens at the end that do not fill a sequence are dropped.

    Args:
        num_tokens: of the stream.
        data: the section.
        what: what the stream was made of, in a few words, for the message.

    Raises:
        UserError: if there is not one whole sequence.
    """
    count = num_tokens // data.seq_len
    if count == 0:
        raise UserError(
            f"data.seq_len = {data.seq_len} is more than the {num_tokens} tokens of data.source = "
            f'"{data.source}" ({what}): there is not one sequence'
        )
    return range(0, count * data.seq_len, data.seq_len)


def check_some_exact(lengths: np.ndarray, data: "DataConfig") -> None:
    """Checks that a document has exactly `data.seq_len` tokens.

    Args:
        lengths: int64 [documents], tokens of each.
        data: the section.

    Raises:
        UserError: if none has.
    """
    if not np.any(lengths == data.seq_len):
        span = f" (they have {lengths.min()} to {lengths.max()})" if lengths.size else ""
        raise UserError(
            f'data.mode = "exact" keeps documents of exactly data.seq_len = {data.seq_len} tokens, '
            f"and of {counted(lengths.shape[0], 'document')} none is{span}"
        )
