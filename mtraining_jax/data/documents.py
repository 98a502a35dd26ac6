"""Base class of sources of documents, which become sequences by `data.mode`."""

import functools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mtraining_jax.data.corpus import Corpus, check_some_exact
from mtraining_jax.data.packs import pack_documents
from mtraining_jax.data.source import FileSource, Source, eos_id_problems
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.stream import TokenStream, Vocab, spill
from mtraining_jax.data.tokenizer import BYTES, Tokenizer, make_tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import Text
from mtraining_jax.utils.text import counted

Document = str | np.ndarray  # text or token ids [n]


@dataclass(frozen=True, kw_only=True)
class DocumentSource(Source):
    """A source that yields documents, which are tokenized at startup into a temporary file.

    Documents end with eos, except in mode ``exact``, which keeps those of `seq_len` tokens.
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact", "pack")

    def documents(self) -> Iterator[tuple[str, Document]]:
        """Yields the location and the text of each document, or its ids [n] if `holds_ids`."""
        raise NotImplementedError(f"{type(self).__name__}.documents")

    @property
    def holds_ids(self) -> bool:
        """Whether documents are token ids instead of text."""
        return False

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        if self.holds_ids:
            yield from eos_id_problems(data)
        elif data.tokenizer == BYTES:  # others are files, which are read later
            named_eos = data.eos if isinstance(data.eos, str) else None
            try:
                make_encoder(BYTES, named_eos, vocab_size)
            except UserError as error:
                yield str(error)

    def open(self, data: DataSpec, vocab_size: int) -> Corpus:
        exact = data.mode == "exact"
        encoder = make_encoder(None if self.holds_ids else data.tokenizer, data.eos, vocab_size)
        lengths = array("q")  # with eos, except in mode exact

        def encoded_documents() -> Iterator[np.ndarray]:
            for where, document in self.documents():
                ids = encoder.encode(document, where, with_eos=not exact)
                lengths.append(ids.size)
                if not exact or ids.size == data.seq_len:
                    yield ids

        part = spill(encoded_documents(), encoder.dtype, f'data.source = "{data.source}"')
        sizes = np.asarray(lengths, np.int64)
        if exact:
            check_some_exact(sizes, data)
        stream = TokenStream([part], encoder.vocab)
        summary = f"{counted(sizes.size, 'document')}, {len(stream):,} tokens"
        pack = functools.partial(pack_documents, sizes)
        return Corpus(stream, encoder.vocab_size, encoder.tokenizer, summary, pack=pack)


@dataclass(frozen=True, kw_only=True)
class TableSource(FileSource, DocumentSource):
    """Files with a column of text or token ids.

    Attributes:
        text_field: JSONL field or table column with the text.
        token_field: Table column with token ids, used instead of text_field.
    """

    text_field: Text = "text"
    token_field: Text | None = None

    @property
    def holds_ids(self) -> bool:
        return self.token_field is not None

    @property
    def column(self) -> str:
        return self.token_field or self.text_field

    @property
    def column_field(self) -> str:
        return f'data.{"token_field" if self.holds_ids else "text_field"} = "{self.column}"'


@dataclass(frozen=True)
class Encoder:
    """Turns documents into token ids of type `dtype`, which end with `eos`, if any."""

    tokenizer: Tokenizer | None  # None for documents of token ids
    eos: int | None
    vocab_size: int

    @property
    def vocab(self) -> Vocab:
        origin = "model.vocab_size"
        if self.tokenizer is not None:
            origin = f"the tokenizer {self.tokenizer.name}"
        return Vocab(self.vocab_size, origin)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode(self, document: Any, where: str, with_eos: bool = True) -> np.ndarray:
        """The ids [n] of a document; appends eos unless it is empty or given with eos."""
        if self.tokenizer is None:
            ids = np.asarray(document)
            self.vocab.check(ids, where, range(ids.size))
        else:
            try:
                ids = self.tokenizer.encode(document)
            except (UnicodeEncodeError, TypeError) as error:
                # JSON can contain unpaired surrogates, which cannot be encoded.
                raise UserError(f"{where} has text that is not valid Unicode") from error
        ids = ids.astype(self.dtype)
        if self.eos is None or not with_eos or not ids.size:
            return ids
        if self.tokenizer is None and ids[-1] == self.eos:
            return ids
        return np.append(ids, self.dtype.type(self.eos))


def make_encoder(tokenizer: str | None, eos: int | str | None, vocab_size: int) -> Encoder:
    """The encoder for values of `data.tokenizer`, None for token ids, and `data.eos`."""
    if tokenizer is None:
        eos = eos if isinstance(eos, int) else None  # `eos_id_problems` rejects strings
        return Encoder(None, eos, vocab_size)
    loaded = make_tokenizer(tokenizer, eos)
    if loaded.vocab_size > vocab_size:
        raise UserError(
            f'data.tokenizer = "{loaded.name}" has {loaded.vocab_size} token ids, '
            f"more than model.vocab_size = {vocab_size}"
        )
    return Encoder(loaded, loaded.eos, loaded.vocab_size)
