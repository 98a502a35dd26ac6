"""Token ids in .npy and raw .bin files, mapped and never read whole."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from mtraining_jax.data.corpus import Corpus, check_some_exact, windows
from mtraining_jax.data.documents import named_eos
from mtraining_jax.data.files import first_line
from mtraining_jax.data.packs import DocumentSpans
from mtraining_jax.data.source import FileSource
from mtraining_jax.data.stream import Part, TokenStream, chunks
from mtraining_jax.data.token_parts import LENGTHS, check_complete
from mtraining_jax.errors import UserError
from mtraining_jax.wording import counted

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig

# Bytes that other kinds of files have, and their offset. Each is long enough that token ids do not
# match it by chance.
_OTHER_FILES = (
    (0, b"PAR1", 'a Parquet file: data.source = "parquet" reads it'),
    (0, b"\x93NUMPY", "a NumPy file: give it a name that ends in .npy"),
    (0, b"PK\x03\x04", "a zip archive (.npz, .pt)"),
    (0, b"\x1f\x8b\x08\x00", "compressed by gzip"),
    (0, b"\x1f\x8b\x08\x08", "compressed by gzip"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (0, b"\xfd7zXZ\x00", "compressed by xz"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"ARROW1\x00\x00", "an Arrow file"),
    (0, b"GGUF", "a GGUF file of model weights"),
    (0, b"MMIDIDX\x00\x00", "an index of a Megatron data set: its ids are in the .bin beside it"),
    (257, b"ustar", "a tar archive"),
)
# A safetensors file begins with the length of its header, uint64, and the header, JSON.
_SAFETENSORS = 8, b'{"'


@dataclass(frozen=True, kw_only=True)
class TokenFiles(FileSource):
    """Token ids in ``.npy`` files (integers, 1-D or 2-D) or raw ``.bin`` files.

    In ``concat`` mode files are joined and cut as they are: no eos is added. In ``exact`` mode a
    document is what stands between two eos of a flat file, or a row of a 2-D one. Documents of
    their own, in mode ``pack`` or with `data.documents`, are these with their eos, or as long as
    the file of lengths says that lies beside (`a.npy.lengths` for `a.npy`).

    Attributes:
        token_dtype: Type of the ids in a .bin file, little-endian (a .npy file names its own).
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact", "pack")
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".bin")

    def problems(self, data: "DataConfig", vocab_size: int) -> Iterator[str]:
        """As of `Source`."""
        yield from super().problems(data, vocab_size)
        if data.mode == "exact" or data.has_documents:  # these look for the ends of documents
            yield from named_eos(data)

    def has_lengths(self, data: "DataConfig") -> bool:
        """As of `Source`: if every file has lengths beside it, or is a table."""
        try:
            files = [open_token_file(path, self.token_dtype) for path in self.files()]
        except UserError:
            return True  # `open` says what is wrong
        return all(
            file.row_len is not None or Path(file.part.name + LENGTHS).is_file() for file in files
        )

    def open(self, data: "DataConfig", vocab_size: int) -> Corpus:
        """As of `Source`. Reads no tokens, except to find documents that no file tells."""
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
            # To be told: a row that is a sequence is one in either mode, others are cut anew.
            rows = {file.row_len for file in files} - {None, data.seq_len}
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
    """A token file: ids [n], and the length of its rows when it is a table."""

    part: Part
    row_len: int | None


def _exact(files: list[TokenFile], data: "DataConfig") -> tuple[np.ndarray, np.ndarray]:
    """Lengths of all documents, and where those of `data.seq_len` begin: int64 each."""
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
    """Finds the documents of all files, each with its end token, as places in their stream.

    Raises:
        UserError: a flat file without lengths where data.eos is not set, or lengths that are not
            those of their file.
    """
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
            if not ends.size or ends[-1] != size:  # the last document may lack its end
                ends = np.append(ends, size)
            lengths = np.diff(ends, prepend=0)
        all_lengths.append(lengths)
    lengths = np.concatenate(all_lengths).astype(np.int64)
    return DocumentSpans(np.cumsum(lengths) - lengths, lengths)


def read_lengths(path: Path, size: int) -> np.ndarray:
    """Reads the tokens of each document of a token file, in NumPy's format.

    Args:
        path: the file of lengths.
        size: tokens of the token file.

    Returns:
        Integers [d], their sum is `size`.

    Raises:
        UserError: it holds something else.
    """
    try:
        shape, dtype, offset = _npy_header(path)
        integers = dtype.kind in "iu" and len(shape) == 1
        # Before memory is taken for as much as the header says.
        if integers and path.stat().st_size < offset + shape[0] * dtype.itemsize:
            raise ValueError("it is shorter than its header says")
        lengths = np.fromfile(path, dtype, shape[0], offset=offset) if integers else None
    except (ValueError, OSError) as error:  # a UserError is a ValueError
        raise UserError(
            f"{path} cannot be read as lengths of documents ({first_line(error)}); move it away, "
            "and documents are what stands between two data.eos"
        ) from error
    if lengths is None:
        raise UserError(f"{path} holds {dtype} {shape}, not a list of lengths")
    if lengths.size and lengths.min() < 0:
        bad = int(np.argmin(lengths))
        raise UserError(f"{path}: document {bad} has {lengths[bad]:,} tokens, which is less than 0")
    total = int(lengths.sum(dtype=np.int64))
    if total != size:
        raise UserError(
            f"{path}: the lengths of {lengths.size:,} documents add up to {total:,}, and the file "
            f"of tokens beside it has {size:,}"
        )
    return lengths


def _needed_eos(file: TokenFile, data: "DataConfig") -> int:
    """data.eos, without which documents of a flat file cannot be found."""
    if data.eos is None:
        why = f'data.mode = "{data.mode}"' if data.mode != "concat" else "data.documents = true"
        raise UserError(
            f"data.eos is not set; {why} needs it, an id, to find the documents of "
            f"{file.part.name}, which is flat"
        )
    return data.eos


def documents_between(ids: np.ndarray, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the documents of a flat file: what stands between two ends.

    Reads the ids once, a few at a time.

    Args:
        ids: integers [n].
        eos: the id that ends a document; the last document may lack it.

    Returns:
        Starts and lengths of the documents that are not empty, without their ends: int64 [d] each.
    """
    found = [start + np.flatnonzero(chunk == eos) for start, chunk in chunks(ids)]
    ends = np.concatenate([*found, [ids.shape[0]]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts
    return starts[lengths > 0], lengths[lengths > 0]


def open_token_file(path: Path, token_dtype: str) -> TokenFile:
    """Maps a ``.npy`` file (1-D or 2-D, integers) or a raw ``.bin`` file; reads no token yet.

    Args:
        path: the file, not empty; anything not called ``.npy`` is raw.
        token_dtype: numpy name of the integers of a raw file, little-endian.

    Returns:
        The mapped file. The rows of a 2-D array follow each other.

    Raises:
        UserError: a truncated file, or one that holds something else.
    """
    size = path.stat().st_size
    if path.suffix != ".npy":
        _check_raw(path, size)
        dtype = np.dtype(token_dtype).newbyteorder("<")
        if size % dtype.itemsize:
            raise UserError(
                f"data.paths: {path} is truncated or not of data.token_dtype = "
                f'"{token_dtype}": its {size} bytes are no multiple of {dtype.itemsize}'
            )
        return TokenFile(Part(str(path), _mapped(path, dtype, 0, size // dtype.itemsize)), None)
    shape, dtype, offset = _npy_header(path)
    if dtype.kind not in "iu":
        raise UserError(f"data.paths: {path} holds {dtype}, not integer token ids")
    if len(shape) not in (1, 2):
        raise UserError(
            f"data.paths: {path} has shape {shape}; token ids are 1-D, or 2-D with one document a "
            "row"
        )
    count = math.prod(shape)
    if count == 0:
        raise UserError(f"data.paths: {path} is empty (shape {shape})")
    whole = offset + count * dtype.itemsize
    if size < whole:
        raise UserError(
            f"data.paths: {path} is truncated: shape {shape} of {dtype} needs {whole} bytes, the "
            f"file has {size}"
        )
    ids = _mapped(path, dtype, offset, count)
    return TokenFile(Part(str(path), ids), shape[1] if len(shape) == 2 else None)


def _check_raw(path: Path, size: int) -> None:
    """Refuses a file of another kind, which would otherwise be read as token ids."""
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
    except Exception as error:  # NumPy parses the header as Python, and raises what that raises
        raise UserError(
            f"data.paths: {path} is truncated or no .npy file ({first_line(error)})"
        ) from error
    if fortran and len(shape) == 2:
        raise UserError(
            f"data.paths: {path} is stored column by column (Fortran order); save it with "
            "numpy.ascontiguousarray so that a document lies together"
        )
    return shape, dtype, offset
