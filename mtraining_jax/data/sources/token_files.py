"""Opens token files, and files of document lengths."""

import math
import string
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from mtraining_jax.data.files import errors_as, reason
from mtraining_jax.data.stream import Part, chunks
from mtraining_jax.utils.errors import UserError

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
_HEAD = 2**16  # bytes
_PRINTABLE = frozenset(string.printable.encode())


def open_token_file(path: Path, token_dtype: str) -> Part:
    """Memory-maps a ``.npy`` file (1-D or 2-D integers) or a raw, little-endian ``.bin`` file."""
    with errors_as(UserError, f"data.paths: {path} cannot be read", OSError):
        if path.suffix == ".npy":
            shape, dtype, offset = _npy_header(path)
            if dtype.kind not in "iu":
                raise UserError(f"data.paths: {path} has {dtype}, not integer token ids")
            if len(shape) not in (1, 2):
                raise UserError(
                    f"data.paths: {path} has {len(shape)} axes; token ids must be 1-D, or 2-D with "
                    "one document per row"
                )
            if 0 in shape:
                raise UserError(f"data.paths: {path} is empty (shape {shape})")
        else:
            dtype, offset = np.dtype(token_dtype).newbyteorder("<"), 0
            _check_raw(path, dtype)
            size = path.stat().st_size
            if size % dtype.itemsize:
                raise UserError(
                    f"data.paths: {path} is truncated or not of data.token_dtype = "
                    f'"{token_dtype}": its {size} bytes are not a multiple of {dtype.itemsize}'
                )
            _check_width(path, dtype)
            shape = (size // dtype.itemsize,)
        ids = _mapped(path, shape, dtype, offset)
    return Part(str(path), ids.reshape(-1), shape[1] if len(shape) == 2 else None)


def _check_raw(path: Path, dtype: np.dtype) -> None:
    """Rejects files of other types, which would otherwise be read as token ids."""
    with path.open("rb") as file:
        head = file.read(512)
    found = [kind for at, begins, kind in _OTHER_FILES if head[at:].startswith(begins)]
    # A safetensors file begins with the size of its JSON header, uint64.
    if head[8:].startswith(b'{"') and int.from_bytes(head[:8], "little") < 2**27:
        found.append("a safetensors file of model weights")
    # Bytes may be ids, but 16 larger ids do not consist of printable bytes by chance.
    if dtype.itemsize > 1 and len(head) >= 32 and _PRINTABLE.issuperset(head):
        found.append('text, which data.source = "text" or "jsonl" reads')
    if found or path.suffix != ".bin":
        problem = f"is {found[0]}" if found else "has neither the suffix .npy nor .bin"
        raise UserError(
            f'data.paths: {path} {problem}; data.source = "tokens" reads NumPy files and raw token '
            "ids"
        )


def _check_width(path: Path, dtype: np.dtype) -> None:
    """Rejects wider ids: their halves would be read as ids, most of them in the vocabulary."""
    with path.open("rb") as file:
        ids = np.frombuffer(file.read(_HEAD), dtype)
    # Every second byte may be small, no ids are wider than int64, and a few are small by chance.
    if dtype.itemsize not in (2, 4) or ids.size < 128:
        return
    low, high = ids[: ids.size // 2 * 2].reshape(-1, 2).T
    # Of ids below 2^20. Every second token of a text is not among 16 ids by chance.
    if (high < 16).all() and np.unique(low).size > 16:
        is_int64 = dtype.itemsize == 4 or not low[1::2].any()
        raise UserError(
            f'data.paths: {path} has wider ids than data.token_dtype = "{dtype.name}": every '
            f'second one would be below 16; set "{"int64" if is_int64 else "uint32"}", or save the '
            "ids as .npy, which states their type"
        )


def _npy_header(path: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    problem = f"data.paths: {path} is truncated or not a .npy file"
    # NumPy parses the header as Python, which may raise anything.
    with errors_as(UserError, problem, Exception), path.open("rb") as file:
        is_first = npy.read_magic(file) == (1, 0)
        read_header = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape}")
        offset = file.tell()
    if fortran and len(shape) == 2:
        raise UserError(
            f"data.paths: {path} is in Fortran order; convert it with numpy.ascontiguousarray and "
            "save it again"
        )
    return shape, dtype, offset


def _mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> np.memmap:
    """Memory-maps an array; checks the size of the file, since its header is untrusted."""
    size, needed = path.stat().st_size, offset + math.prod(shape) * dtype.itemsize
    if size < needed:
        raise UserError(
            f"data.paths: {path} is truncated: shape {shape} of {dtype} needs {needed} bytes, "
            f"but the file has {size}"
        )
    return np.memmap(path, dtype, mode="r", offset=offset, shape=shape)


def read_lengths(path: Path, size: int) -> np.ndarray:
    """Reads a file of document lengths (NumPy format), integers [d] with sum `size`."""
    try:
        shape, dtype, offset = _npy_header(path)
        is_list = dtype.kind in "iu" and len(shape) == 1
        lengths = _mapped(path, shape, dtype, offset) if is_list else None
    except (UserError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as document lengths ({reason(error)}); without this file "
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


def read_mask(path: Path, size: int) -> np.ndarray:
    """Memory-maps the label mask of a token file (NumPy format, bool or 0 and 1), bool [size]."""
    with errors_as(UserError, f"{path} cannot be read as a label mask", OSError):
        shape, dtype, offset = _npy_header(path)
        if dtype.kind not in "biu":
            raise UserError(f"{path} has {dtype}, not a label mask of bool or 0 and 1")
        if math.prod(shape) != size:
            values = math.prod(shape)
            raise UserError(f"{path} has {values:,} values, but the token file has {size:,} tokens")
        mask = _mapped(path, (size,), dtype, offset)
    for start, chunk in chunks(mask.view(np.uint8) if dtype.kind == "b" else mask):
        if chunk.min() < 0 or chunk.max() > 1:
            first = int(np.argmax((chunk < 0) | (chunk > 1)))
            raise UserError(f"{path} has {chunk[first]} at position {start + first}, not 0 or 1")
    return mask
