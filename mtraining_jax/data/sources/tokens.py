"""Memory-mapped token ids in .npy and raw .bin files."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from mtraining_jax.data.corpus import Corpus, check_some_exact
from mtraining_jax.data.packing.packs import pack_documents
from mtraining_jax.data.source import FileSource, id_problems
from mtraining_jax.data.sources.token_files import open_token_file, read_lengths, read_mask
from mtraining_jax.data.sources.token_parts import LENGTHS, MASK, bos_of, check_parts
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.stream import Part, TokenStream, Vocab, chunks
from mtraining_jax.data.tokenizer import beginning
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options, toml_value
from mtraining_jax.utils.text import counted


@options(kw_only=True)
class TokenFiles(FileSource):
    """Token ids in ``.npy`` files (integers, 1-D or 2-D) or raw ``.bin`` files.

    Documents are the rows of 2-D files. In 1-D files they are given by an optional file of lengths
    (`a.npy.lengths` for `a.npy`) or else end at eos. Mode ``concat`` joins files without adding
    eos; ``exact`` does not count the eos that ends a document. An optional `a.npy.mask` is the
    label mask: bool, or 0 and 1, for each token.
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact", "pack")
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of token ids in .bin files, little-endian (.npy files store their own)."""
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".bin")

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        ends = data.mode == "exact" or data.has_documents  # documents end at eos
        yield from id_problems(data, *(["eos", "bos"] if ends else ["bos"]))

    def has_lengths(self, data: DataSpec) -> bool:
        try:
            files = [open_token_file(path, self.token_dtype) for path in self.files()]
        except UserError:
            return True  # `open` reports the error
        return all(file.row_len is not None or _lengths_path(file).is_file() for file in files)

    def recorded_bos(self) -> tuple[int, ...] | None:
        folders = {path.parent: bos_of(path.parent) for path in self.files()}
        known = {bos: folder for folder, bos in folders.items() if bos is not None}
        if len(known) > 1:
            differ = " and ".join(f"{x} begin {beginning(bos)}" for bos, x in known.items())
            raise UserError(
                f"data.paths: the documents of {differ}; tokenize both with the same data.bos"
            )
        return next(iter(known), None)

    def _bos(self, data: DataSpec) -> tuple[int, ...] | None:
        """The ids that begin documents, by the files or else by data.bos."""
        known, given = self.recorded_bos(), None
        if data.bos is not None:
            given = () if data.bos is False else (int(data.bos),)  # `problems` rejects strings
        if None not in (known, given) and known != given:
            raise UserError(
                f"data.bos = {toml_value(data.bos)}, but the documents of data.paths = "
                f"{toml_value(self.paths)} begin {beginning(known or ())}; remove data.bos, or "
                "tokenize the text again"
            )
        return given if known is None else known

    def open(self, data: DataSpec, vocab_size: int) -> Corpus:
        paths = self.files()
        for folder in dict.fromkeys(path.parent for path in paths):
            check_parts(folder, data.tokenizer)
        files = [_with_mask(open_token_file(path, self.token_dtype)) for path in paths]
        stream = TokenStream(files, Vocab(vocab_size, "model.vocab_size"))
        summary, starts, pack = counted(len(files), "file"), None, None
        if data.mode == "exact":
            all_starts, lengths = _exact_documents(files, data)
            check_some_exact(lengths, data)
            starts = all_starts[lengths == data.seq_len]
            summary += f", {counted(lengths.size, 'document')}"
        elif data.has_documents:
            lengths = np.concatenate([_document_lengths(file, data) for file in files])
            pack = functools.partial(pack_documents, lengths, stream)
            summary += f", {counted(lengths.size, 'document')}"
        else:
            # Reported, since rows of other lengths than a sequence are joined and split.
            rows = {file.row_len for file in files if file.row_len is not None} - {data.seq_len}
            if rows:
                summary += f" with rows of {' or '.join(f'{n:,}' for n in sorted(rows))} joined"
        summary, bos = f"{summary}, {stream.summary}", self._bos(data)
        summary += "" if bos is None else f", documents begin {beginning(bos)}"
        trained = stream.trained if stream.masked else None
        return Corpus(stream, vocab_size, None, summary, starts, pack, trained, bos=bos)


def _exact_documents(files: list[Part], data: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of all non-empty documents, without eos, int64 [d] each."""
    starts, lengths, offset = [], [], 0
    for file in files:
        size = file.ids.size
        if file.row_len is not None:
            begins = np.arange(0, size, file.row_len, dtype=np.int64)
            ends = begins + file.row_len
        elif (path := _lengths_path(file)).is_file():
            whole = read_lengths(path, size).astype(np.int64)
            ends = np.cumsum(whole)
            begins = ends - whole
            if data.eos is not None:
                ends -= (whole > 0) & (file.ids[ends - 1] == data.eos)
        else:  # the last document may lack its end token
            ends = np.append(_eos_positions(file, data), size)
            begins = np.concatenate([[0], ends[:-1] + 1])
        filled = ends > begins
        starts.append(begins[filled] + offset)
        lengths.append((ends - begins)[filled])
        offset += size
    return np.concatenate(starts), np.concatenate(lengths)


def _document_lengths(file: Part, data: DataSpec) -> np.ndarray:
    """Lengths of the documents of a file, with their end tokens, int64 [d]."""
    size = file.ids.size
    if file.row_len is not None:
        return np.full(size // file.row_len, file.row_len, np.int64)
    if (path := _lengths_path(file)).is_file():
        return read_lengths(path, size).astype(np.int64)
    ends = _eos_positions(file, data) + 1
    if not ends.size or ends[-1] != size:  # the last document may lack eos
        ends = np.append(ends, size)
    return np.diff(ends, prepend=0)


def _eos_positions(file: Part, data: DataSpec) -> np.ndarray:
    """Positions of end tokens in a 1-D file, int64 [n]."""
    if data.eos is None:
        why = (
            f'data.mode = "{data.mode}"' if data.mode != "concat" else "data.mask_documents = true"
        )
        raise UserError(
            f"data.eos is not set; {why} needs it to find the documents of {file.name}, "
            "which is 1-D: set it to the id of the end token"
        )
    found = [start + np.flatnonzero(chunk == data.eos) for start, chunk in chunks(file.ids)]
    return np.concatenate(found).astype(np.int64)


def _with_mask(file: Part) -> Part:
    path = Path(file.name + MASK)
    return replace(file, trained=read_mask(path, file.ids.size)) if path.is_file() else file


def _lengths_path(file: Part) -> Path:
    return Path(file.name + LENGTHS)
