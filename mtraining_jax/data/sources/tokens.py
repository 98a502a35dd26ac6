"""Memory-mapped token ids in .npy and raw .bin files."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from mtraining_jax.data.corpus import Corpus, check_some_exact, windows
from mtraining_jax.data.documents import eos_id, named_eos
from mtraining_jax.data.files import first_line
from mtraining_jax.data.packs import DocumentSpans
from mtraining_jax.data.source import FileSource
from mtraining_jax.data.sources.token_parts import LENGTHS, check_complete
from mtraining_jax.data.stream import Part, TokenStream, chunks
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig

# Offset and magic bytes of other file types, long enough not to match token ids by chance.
_OTHER_FILES = (
    (0, b"PAR1", 'a Parquet file, which data.source = "parquet" reads'),
    (0, b"\x93NUMPY", "a NumPy file without the suffix .npy"),
    (0, b"PK\x03\x04", "a zip archive (.npz, .pt)"),
    (0, b"\x1f\x8b\x08\x00", "compressed with gzip"),
    (0, b"\x1f\x8b\x08\x08", "compressed with gzip"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (0, b"\xfd7zXZ\x00", "compressed with xz"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"ARROW1\x00\x00", "an Arrow file"),
    (0, b"GGUF", "a GGUF file of model weights"),
    (0, b"MMIDIDX\x00\x00", "a Megatron index: the token ids are in the .bin file next to it"),
    (257, b"ustar", "a tar archive"),
)
# A safetensors file begins with the size of its JSON header, uint64.
_SAFETENSORS = 8, b'{"'


@dataclass(frozen=True, kw_only=True)
class TokenFiles(FileSource):
    """Token ids in ``.npy`` files (integers, 1-D or 2-D) or raw ``.bin`` files.

    Documents are the rows of 2-D files. In 1-D files they are given by an optional file of lengths
    (`a.npy.lengths` for `a.npy`) or else end at eos. Mode ``concat`` joins files without adding
    eos; ``exact`` ignores files of lengths and does not count eos.

    Attributes:
        token_dtype: Type of token ids in .bin files, little-endian (.npy files store their own).
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact", "pack")
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".bin")

    def problems(self, data: "DataConfig", vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        if data.mode == "exact" or data.has_documents:  # documents end at eos
            yield from named_eos(data)

    def has_lengths(self, data: "DataConfig") -> bool:
        """True if all files are 2-D or have a file of lengths."""
        try:
            files = [open_token_file(path, self.token_dtype) for path in self.files()]
        except UserError:
            return True  # `open` reports the error
        return all(
            file.row_len is not None or Path(file.part.name + LENGTHS).is_file() for file in files
        )

    def open(self, data: "DataConfig", vocab_size: int) -> Corpus:
        """Reads no tokens, except to find documents without lengths."""
        paths = self.files()
        for folder in dict.fromkeys(path.parent for path in paths):
            check_complete(folder)
        files = [open_token_file(path, self.token_dtype) for path in paths]
        stream = TokenStream([file.part for file in files], vocab_size, "model.vocab_size")
        what = counted(len(files), "file")
        spans, starts = None, range(0)
        if data.has_documents and data.mode != "exact":
            spans = spans_of(files, data)
            what += f", {counted(spans.lengths.shape[0], 'document')}"
        elif data.mode == "concat":
            # Reported, since rows of other lengths than a sequence are joined and split.
            rows = {file.row_len for file in files if file.row_len is not None} - {data.seq_len}
            if rows:
                what += f" with rows of {' or '.join(f'{n:,}' for n in sorted(rows))} joined"
            starts = windows(len(stream), data, what)
        else:
            lengths, starts = _exact(files, data)
            what += f", {counted(lengths.shape[0], 'document')}"
        what += f", {len(stream):,} tokens"
        return Corpus(stream, starts, vocab_size, None, what, spans)


@dataclass(frozen=True)
class TokenFile:
    """A token file: ids [n], and the row length of 2-D files."""

    part: Part
    row_len: int | None


def _exact(files: list[TokenFile], data: "DataConfig") -> tuple[np.ndarray, np.ndarray]:
    """Lengths of all documents, and starts of those with `data.seq_len` tokens, int64."""
    all_starts, all_lengths, offset = [], [], 0
    for file in files:
        ids = file.part.ids
        if file.row_len is not None:
            starts = np.arange(0, ids.shape[0], file.row_len, dtype=np.int64)
            lengths = np.full(starts.shape, file.row_len)
        else:
            starts, lengths = documents_between(ids, _needed_eos(file, data))
        all_starts.append(starts + offset)
        all_lengths.append(lengths)
        offset += ids.shape[0]
    lengths = np.concatenate(all_lengths)
    check_some_exact(lengths, data)
    return lengths, np.concatenate(all_starts)[lengths == data.seq_len]


def spans_of(files: list[TokenFile], data: "DataConfig") -> DocumentSpans:
    """Finds the documents of all files, with their end tokens, as positions in the stream."""
    all_lengths = []
    for file in files:
        size, path = file.part.ids.shape[0], Path(file.part.name + LENGTHS)
        if file.row_len is not None:
            lengths = np.full(size // file.row_len, file.row_len)
        elif path.is_file():
            lengths = read_lengths(path, size)
        else:
            eos = _needed_eos(file, data)
            found = [start + np.flatnonzero(part == eos) for start, part in chunks(file.part.ids)]
            ends = np.concatenate(found).astype(np.int64) + 1
            if not ends.size or ends[-1] != size:  # the last document may lack eos
                ends = np.append(ends, size)
            lengths = np.diff(ends, prepend=0)
        all_lengths.append(lengths)
    lengths = np.concatenate(all_lengths).astype(np.int64)
    return DocumentSpans(np.cumsum(lengths) - lengths, lengths)


def read_lengths(path: Path, size: int) -> np.ndarray:
    """Reads a file of document lengths (NumPy format), integers [d] with sum `size`."""
    try:
        shape, dtype, offset = _npy_header(path)
        integers = dtype.kind in "iu" and len(shape) == 1
        # Before allocating the size in an untrusted header.
        if integers and path.stat().st_size < offset + shape[0] * dtype.itemsize:
            raise ValueError("it is shorter than its header says")
        lengths = np.fromfile(path, dtype, shape[0], offset=offset) if integers else None
    except (ValueError, OSError) as error:  # a UserError is a ValueError
        raise UserError(
            f"{path} cannot be read as document lengths ({first_line(error)}); without this file "
            "documents end at data.eos"
        ) from error
    if lengths is None:
        raise UserError(f"{path} has {dtype} {shape}, not a list of lengths")
    if lengths.size and lengths.min() < 0:
        bad = int(np.argmin(lengths))
        raise UserError(f"{path}: document {bad} has negative length {lengths[bad]:,}")
    total = int(lengths.sum(dtype=np.int64))
    if total != size:
        raise UserError(
            f"{path}: the lengths of {lengths.size:,} documents sum to {total:,}, but the token "
            f"file has {size:,} tokens"
        )
    return lengths


def _needed_eos(file: TokenFile, data: "DataConfig") -> int:
    """data.eos, required to find the documents of a 1-D file."""
    eos = eos_id(data)
    if eos is None:
        why = f'data.mode = "{data.mode}"' if data.mode != "concat" else "data.mask_documents = true"
        raise UserError(
            f"data.eos is not set; {why} needs it to find the documents of {file.part.name}, "
            "which is 1-D: set it to the id of the end token"
        )
    return eos


def documents_between(ids: np.ndarray, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the non-empty documents of a 1-D file, without eos, int64 [d] each.

    Reads `ids` in chunks; the last document may lack its end token.
    """
    found = [start + np.flatnonzero(chunk == eos) for start, chunk in chunks(ids)]
    ends = np.concatenate([*found, [ids.shape[0]]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts
    return starts[lengths > 0], lengths[lengths > 0]


def open_token_file(path: Path, token_dtype: str) -> TokenFile:
    """Memory-maps a ``.npy`` file (1-D or 2-D integers) or a raw, little-endian ``.bin`` file."""
    size = path.stat().st_size
    if path.suffix != ".npy":
        _check_raw(path)
        dtype = np.dtype(token_dtype).newbyteorder("<")
        if size % dtype.itemsize:
            raise UserError(
                f"data.paths: {path} is truncated or not of data.token_dtype = "
                f'"{token_dtype}": its {size} bytes are not a multiple of {dtype.itemsize}'
            )
        return TokenFile(Part(str(path), _mapped(path, dtype, 0, size // dtype.itemsize)), None)
    shape, dtype, offset = _npy_header(path)
    if dtype.kind not in "iu":
        raise UserError(f"data.paths: {path} has {dtype}, not integer token ids")
    if len(shape) not in (1, 2):
        raise UserError(
            f"data.paths: {path} has shape {shape}; token ids must be 1-D, or 2-D with one "
            "document per row"
        )
    count = math.prod(shape)
    if count == 0:
        raise UserError(f"data.paths: {path} is empty (shape {shape})")
    whole = offset + count * dtype.itemsize
    if size < whole:
        raise UserError(
            f"data.paths: {path} is truncated: shape {shape} of {dtype} needs {whole} bytes, but "
            f"the file has {size}"
        )
    ids = _mapped(path, dtype, offset, count)
    return TokenFile(Part(str(path), ids), shape[1] if len(shape) == 2 else None)


def _check_raw(path: Path) -> None:
    """Rejects files of other types, which would otherwise be read as token ids."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"data.paths: {path} cannot be read ({error.strerror})") from error
    found = [kind for at, begins, kind in _OTHER_FILES if head[at:].startswith(begins)]
    at, begins = _SAFETENSORS
    if head[at:].startswith(begins) and int.from_bytes(head[:at], "little") < 2**27:
        found.append("a safetensors file of model weights")
    if found:
        raise UserError(
            f'data.paths: {path} is {found[0]}; data.source = "tokens" reads .npy files and raw '
            "token ids"
        )
    if path.suffix != ".bin":
        raise UserError(
            f"data.paths: {path} has neither the suffix .npy nor .bin; data.source = "
            '"tokens" reads NumPy files and raw token ids'
        )


def _mapped(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    try:
        return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,))
    except OSError as error:
        raise UserError(f"data.paths: {path} cannot be read ({error.strerror})") from error


def _npy_header(path: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version not in readers:
                raise ValueError(f"format version {version}")
            shape, fortran, dtype = readers[version](file)
            if any(size < 0 for size in shape):
                raise ValueError(f"shape {shape}")
            offset = file.tell()
    except Exception as error:  # NumPy parses the header as Python, which may raise anything
        raise UserError(
            f"data.paths: {path} is truncated or not a .npy file ({first_line(error)})"
        ) from error
    if fortran and len(shape) == 2:
        raise UserError(
            f"data.paths: {path} is in Fortran order; convert it with numpy.ascontiguousarray and "
            "save it again"
        )
    return shape, dtype, offset
