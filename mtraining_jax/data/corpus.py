"""From a source to sequences of exactly `seq_len` tokens, cut but not yet read."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtraining_jax.data import documents
from mtraining_jax.data.files import find_files, python_stdlib_files
from mtraining_jax.data.options import DataOptionsLike
from mtraining_jax.data.stream import (
    Part,
    TokenStream,
    documents_between,
    open_token_file,
    spill,
)
from mtraining_jax.data.synthetic import SyntheticStream
from mtraining_jax.data.tokenizer import Tokenizer, make_tokenizer
from mtraining_jax.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """Sequences of `seq_len` tokens in a stream.

    Attributes:
      stream: all tokens.
      starts: int64 [sequences] (or a range): where each sequence begins in the stream.
      vocab_size: every id is below it.
      tokenizer: None when the source holds token ids.
      summary: what was found, in a few words.
    """

    stream: TokenStream | SyntheticStream
    starts: np.ndarray | range
    vocab_size: int
    tokenizer: Tokenizer | None
    summary: str


def open_corpus(options: DataOptionsLike, vocab_size: int | None = None) -> Corpus:
    """Opens the source and cuts it into sequences.

    Token files are mapped and not read, except to find the documents in ``exact`` mode. Text and
    Parquet are turned into token ids once, one document at a time, and kept in a temporary file.

    ``concat`` joins the documents, each ended by eos, and cuts every `seq_len` tokens; the rest
    that fills no sequence is dropped. Token files are cut as they are: no eos is added.
    ``exact`` keeps the documents of exactly `seq_len` tokens, eos not counted, and drops the
    others: in a flat token file a document is what stands between two eos, in a 2-D one a row.

    Args:
      options: the ``data`` section.
      vocab_size: of the model; sources of token ids need it, a tokeniser must fit into it.

    Returns:
      The sequences.

    Raises:
      UserError: the source is unreadable, malformed or too small, or does not fit the vocabulary.
    """
    if options.source == "tokens":
        return _open_token_files(options, vocab_size)
    if options.source == "synthetic":
        return _open_synthetic(options, vocab_size)
    return _tokenize(options, vocab_size)


def _open_token_files(options: DataOptionsLike, vocab_size: int | None) -> Corpus:
    vocab_size, vocab_name = _needed_vocab_size(options, vocab_size)
    files = [open_token_file(p, options.token_dtype) for p in find_files(options.paths, "tokens")]
    stream = TokenStream([file.part for file in files], vocab_size, vocab_name)
    what = _counted(len(files), "file")
    if options.mode == "concat":
        starts = _windows(len(stream), options, what)
    else:
        all_starts, all_lengths, offset = [], [], 0
        for file in files:
            ids = file.part.ids
            if file.row_len is not None:
                starts = np.arange(0, ids.shape[0], file.row_len, dtype=np.int64)
                lengths = np.full(starts.shape, file.row_len)
            else:
                starts, lengths = documents_between(ids, _token_file_eos(options))
            all_starts.append(starts + offset)
            all_lengths.append(lengths)
            offset += ids.shape[0]
        lengths = np.concatenate(all_lengths)
        starts = np.concatenate(all_starts)[lengths == options.seq_len]
        _check_some_exact(lengths, options)
        what += f", {_counted(lengths.shape[0], 'document')}"
    return Corpus(stream, starts, vocab_size, None, f"{what}, {len(stream):,} tokens")


def _open_synthetic(options: DataOptionsLike, vocab_size: int | None) -> Corpus:
    vocab_size, _ = _needed_vocab_size(options, vocab_size)
    eos = _id_or_none(options.eos, "source 'synthetic'")
    eos = vocab_size - 1 if eos is None else eos
    if vocab_size < 2 or not 0 <= eos < vocab_size:
        raise UserError(
            f"data.eos is {eos} and model.vocab_size {vocab_size}; source 'synthetic' needs an eos"
            " in the vocabulary, and another id."
        )
    stream = SyntheticStream(options.seq_len, vocab_size, eos, options.seed)
    starts = range(0, len(stream), options.seq_len)
    return Corpus(stream, starts, vocab_size, None, "random token ids, repeated passages")


def _tokenize(options: DataOptionsLike, vocab_size: int | None) -> Corpus:
    exact = options.mode == "exact"
    if options.source == "parquet" and options.token_field is not None:
        tokenizer, eos = None, _id_or_none(options.eos, "source 'parquet' with token ids")
        vocab_size, vocab_name = _needed_vocab_size(options, vocab_size)
    else:
        tokenizer = make_tokenizer(options.tokenizer, options.eos)
        eos, vocab_name = tokenizer.eos, f"the tokenizer {tokenizer.name}"
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"data.tokenizer {tokenizer.name} has {tokenizer.vocab_size} token ids;"
                f" model.vocab_size is {vocab_size} and must be at least as many."
            )
        vocab_size = tokenizer.vocab_size
    if eos is not None and not 0 <= eos < vocab_size:
        raise UserError(f"data.eos is {eos}; it must be from 0 to {vocab_size - 1}.")
    lengths: list[int] = []

    def kept() -> Iterator[np.ndarray]:
        for ids in _encoded(options, tokenizer, vocab_size, vocab_name):
            lengths.append(ids.shape[0])
            if exact:
                if ids.shape[0] == options.seq_len:
                    yield ids
            elif ids.shape[0]:
                yield ids
                # A row that was stored with its end already has one.
                if eos is not None and (tokenizer is not None or ids[-1] != eos):
                    yield np.asarray([eos])

    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    part, _ = spill(kept(), dtype, f"data.source {options.source!r}")
    what = _counted(len(lengths), "document")
    if exact:
        _check_some_exact(np.asarray(lengths), options)
    starts = _windows(part.ids.shape[0], options, what)
    stream = TokenStream([part], vocab_size, vocab_name)
    return Corpus(stream, starts, vocab_size, tokenizer, f"{what}, {len(stream):,} tokens")


def _encoded(
    options: DataOptionsLike, tokenizer: Tokenizer | None, vocab_size: int, vocab_name: str
) -> Iterator[np.ndarray]:
    if options.source == "python_stdlib":
        texts = documents.read_python(python_stdlib_files())
    else:
        files = find_files(options.paths, options.source)
        if tokenizer is None:
            for where, ids in documents.read_parquet_tokens(files, options.token_field):
                if ids.size:
                    # For its check: ids must be sound before they are narrowed to the stored type.
                    TokenStream([Part(where, ids)], vocab_size, vocab_name)
                yield ids
            return
        if options.source == "text":
            texts = documents.read_text(files)
        elif options.source == "jsonl":
            texts = documents.read_jsonl(files, options.text_field)
        else:
            texts = documents.read_parquet_text(files, options.text_field)
    for where, text in texts:
        try:
            ids = tokenizer.encode(text)
        except (UnicodeEncodeError, TypeError) as error:
            # JSON may spell half of a surrogate pair, which no encoding has.
            raise UserError(f"{where} holds text that is not valid Unicode.") from error
        yield ids


def _windows(num_tokens: int, options: DataOptionsLike, what: str) -> range:
    count = num_tokens // options.seq_len
    if count == 0:
        raise UserError(
            f"data.source {options.source!r} holds {num_tokens} tokens ({what}), fewer than one"
            f" sequence of data.seq_len = {options.seq_len}."
        )
    return range(0, count * options.seq_len, options.seq_len)


def _check_some_exact(lengths: np.ndarray, options: DataOptionsLike) -> None:
    if not np.any(lengths == options.seq_len):
        span = f" (they have {lengths.min()} to {lengths.max()})" if lengths.size else ""
        raise UserError(
            f"data.mode 'exact': of {_counted(lengths.shape[0], 'document')} none has exactly"
            f" data.seq_len = {options.seq_len} tokens{span}."
        )


def _needed_vocab_size(options: DataOptionsLike, vocab_size: int | None) -> tuple[int, str]:
    if vocab_size is None:
        raise UserError(
            f"model.vocab_size is not given; source {options.source!r} of token ids needs it."
        )
    return vocab_size, "model.vocab_size"


def _token_file_eos(options: DataOptionsLike) -> int:
    eos = _id_or_none(options.eos, "source 'tokens'")
    if eos is None:
        raise UserError(
            "data.eos is not set; mode 'exact' needs it to find the documents of a flat token file."
        )
    return eos


def _id_or_none(eos: int | str | None, what: str) -> int | None:
    if isinstance(eos, str):
        raise UserError(f"data.eos is {eos!r}; {what} takes a token id (a number).")
    return eos


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
