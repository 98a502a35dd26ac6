"""Base class of sources of documents, which become sequences by `data.mode`."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mtraining_jax.data.corpus import Corpus, check_some_exact, windows
from mtraining_jax.data.packs import DocumentSpans
from mtraining_jax.data.source import Source
from mtraining_jax.data.stream import TokenStream, check_ids, spill
from mtraining_jax.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, make_tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class DocumentSource(Source):
    """A source that yields documents.

    Documents are tokenized once at startup into a temporary file. ``concat`` joins documents, each
    followed by eos, and splits them every `seq_len` tokens. ``exact`` keeps documents of exactly
    `seq_len` tokens without eos. ``pack`` packs documents, each followed by eos.
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact", "pack")

    def documents(self) -> Iterator[tuple[str, str | np.ndarray]]:
        """Yields the location and the text of each document, or its ids [n] if `holds_ids`."""
        raise NotImplementedError(f"{type(self).__name__}.documents")

    @property
    def holds_ids(self) -> bool:
        """Whether documents are token ids instead of text."""
        return False

    def problems(self, data: "DataConfig", vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        if self.holds_ids:
            yield from named_eos(data)
        elif data.tokenizer == BYTES:
            least = ByteTokenizer.vocab_size
            if vocab_size < least:
                yield (
                    f"model.vocab_size = {vocab_size} is less than {least}, the ids of "
                    f'data.tokenizer = "{BYTES}"'
                )
            if isinstance(data.eos, str):
                yield (
                    f'data.eos = "{data.eos}" must be an id: data.tokenizer = "{BYTES}" has no '
                    "named tokens"
                )

    def open(self, data: "DataConfig", vocab_size: int) -> Corpus:
        if self.holds_ids:
            tokenizer, eos, vocab_name = None, eos_id(data), "model.vocab_size"
        else:
            tokenizer = make_tokenizer(data.tokenizer, data.eos)
            eos, vocab_name = tokenizer.eos, f"the tokenizer {tokenizer.name}"
            check_tokenizer(tokenizer, vocab_size)
            vocab_size = tokenizer.vocab_size
        exact = data.mode == "exact"
        lengths = array("q")  # with eos, except in mode exact

        def kept() -> Iterator[np.ndarray]:
            for where, document in self.documents():
                if tokenizer is None:
                    # Before ids are narrowed to the stored type.
                    check_ids(np.asarray(document), where, vocab_size, vocab_name)
                ids = encoded(document, where, tokenizer, None if exact else eos)
                lengths.append(ids.shape[0])
                if not exact or ids.shape[0] == data.seq_len:
                    yield ids

        dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        part = spill(kept(), dtype, f'data.source = "{data.source}"')
        what = counted(len(lengths), "document")
        if exact:
            check_some_exact(np.asarray(lengths), data)
        spans, starts = None, range(0)
        if data.has_documents and not exact:
            ends = np.cumsum(lengths, dtype=np.int64)
            spans = DocumentSpans(ends - lengths, np.asarray(lengths, np.int64))
        else:
            starts = windows(part.ids.shape[0], data, what)
        stream = TokenStream([part], vocab_size, vocab_name)
        what += f", {len(stream):,} tokens"
        return Corpus(stream, starts, vocab_size, tokenizer, what, spans)


def named_eos(data: "DataConfig") -> Iterator[str]:
    """Rejects eos given as a string if there is no tokenizer."""
    if isinstance(data.eos, str):
        yield (
            f'data.eos = "{data.eos}" must be an id: data.source = "{data.source}" has no tokenizer'
        )


def eos_id(data: "DataConfig") -> int | None:
    """data.eos of a source of token ids, where `named_eos` rejects strings."""
    return data.eos if isinstance(data.eos, int) else None


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that the model's vocabulary includes all ids of a tokenizer."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f'data.tokenizer = "{tokenizer.name}" has {tokenizer.vocab_size} token ids, '
            f"more than model.vocab_size = {vocab_size}"
        )


def encoded(
    document: str | np.ndarray, where: str, tokenizer: Tokenizer | None, eos: int | None
) -> np.ndarray:
    """Token ids of a document, integers [n].

    `eos`, if any, is appended unless the document is empty or its ids end with it.
    """
    ids = np.asarray(document) if tokenizer is None else _ids_of(tokenizer, document, where)
    if eos is None or not ids.shape[0] or (tokenizer is None and ids[-1] == eos):
        return ids
    # eos may not fit the type of the other ids, e.g. 256 and bytes.
    return np.append(ids.astype(np.int64), eos)


def _ids_of(tokenizer: Tokenizer, text: Any, where: str) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except (UnicodeEncodeError, TypeError) as error:
        # JSON can contain unpaired surrogates, which cannot be encoded.
        raise UserError(f"{where} has text that is not valid Unicode") from error
