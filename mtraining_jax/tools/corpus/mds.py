"""MosaicML streaming (MDS, version 2) shards, read without the streaming library.

A JSON index lists shards of samples. A shard has: uint32 number of samples n; n + 1 uint32 file
offsets; a copy of the columns as JSON; the samples. A sample has uint32 sizes of its variable-size
columns, then all columns. All is little-endian. Files are untrusted: every size is checked before
use.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.data.documents import Document, TableSource
from mtraining_jax.data.files import (
    COMPRESSIONS,
    errors_as,
    find_files,
    inside,
    open_compressed,
    shown_names,
)
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.file_limits import LARGEST_INDEX, read_json
from mtraining_jax.utils.limits import Text

INDEX = "index.json"
# Offsets are uint32.
_LARGEST_SHARD = 2**32 - 1
# Type codes; other types cannot hold token ids.
_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _TYPES.values()}


# A note of `MaskedTokens`.
_UNCOVERED = "samples with tokens in no document (skipped) or in several (repeated)"


class Damaged(Exception):
    """A corrupt shard; the message is a predicate, the caller adds shard and sample."""


@dataclass(frozen=True)
class Shard:
    """Index entry of a shard."""

    path: Path
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of each column, 0 if variable
    samples: int
    size: int
    hashes: dict[str, str]
    packed: Path | None
    compression: str

    @property
    def file(self) -> Path:
        """The file to read: compressed only if the other one does not exist."""
        if self.packed is not None and self.packed.is_file() and not self.path.is_file():
            return self.packed
        return self.path

    def column(self, name: str, field: str) -> int:
        if name not in self.names:
            names = shown_names(self.names)
            raise UserError(f"{self.path} has no column of {field}; it has {names}")
        number = self.names.index(name)
        if self.encodings[number].partition(":")[0] == "pkl":
            raise UserError(
                f'{self.path}: column "{name}" is pickled, and unpickling can execute arbitrary '
                "code; rewrite it as ndarray or str"
            )
        return number


def read_index(path: Path) -> list[Shard]:
    """Reads the shards of a data set from its index.json."""
    problem = f"{path} is not an index of MDS shards"
    with errors_as(UserError, problem, OSError, ValueError, TypeError, AttributeError):
        index = read_json(path, LARGEST_INDEX)
        try:
            if index["version"] != 2:
                raise ValueError(f"version {index['version']} instead of 2")
            return [_shard(path, entry) for entry in index["shards"]]
        except KeyError as error:
            raise ValueError(f"{error} is missing") from error


def _shard(index: Path, entry: dict[str, Any]) -> Shard:
    if entry["format"] != "mds":
        raise ValueError(f'format "{entry["format"]}" instead of "mds"')
    names, encodings = entry["column_names"], entry["column_encodings"]
    sizes, raw, packed = entry["column_sizes"], entry["raw_data"], entry.get("zip_data")
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError("columns have different numbers of names, encodings and sizes")
    return Shard(
        path=inside(index.parent, str(raw["basename"]), index),
        names=tuple(map(str, names)),
        encodings=tuple(map(str, encodings)),
        sizes=tuple(_number(size or 0) for size in sizes),
        samples=_number(entry["samples"]),
        size=_number(raw["bytes"]),
        hashes={str(kind): str(value) for kind, value in (raw.get("hashes") or {}).items()},
        packed=inside(index.parent, str(packed["basename"]), index) if packed else None,
        compression=str(entry.get("compression")).partition(":")[0],
    )


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_SHARD:
        raise ValueError(f"{value!r} instead of a number from 0 to {_LARGEST_SHARD}")
    return value


def _load(shard: Shard) -> np.ndarray:
    """The bytes of a shard, uint8 [size]: memory-mapped, or decompressed if necessary."""
    size = shard.size
    with errors_as(Damaged, "cannot be read", OSError):
        if not shard.file.is_file():
            raise Damaged("does not exist")
        if shard.file != shard.path:
            data = _unpacked(shard.file, shard.compression, size)
        elif (found := shard.file.stat().st_size) != size:
            raise Damaged(f"has {found} bytes instead of {size}")
        else:
            data = np.memmap(shard.file, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
        for kind, expected in shard.hashes.items():
            if kind in hashlib.algorithms_guaranteed and not kind.startswith("shake"):
                if hashlib.new(kind, data).hexdigest() != expected:
                    raise Damaged(f"is corrupt: its {kind} does not match {INDEX}")
        return data


def _unpacked(path: Path, compression: str, size: int) -> np.ndarray:
    """Decompresses at most `size` bytes (guards against decompression bombs)."""
    if compression not in COMPRESSIONS:
        raise Damaged(f'is compressed with "{compression}"; supported are zstd, gz and bz2')
    with (
        errors_as(Damaged, "cannot be decompressed", Exception),
        open_compressed(path, compression) as reader,
    ):
        data = bytearray()
        while len(data) <= size and (part := reader.read(min(2**24, size + 1 - len(data)))):
            data += part
    if len(data) != size:
        raise Damaged(f"decompresses to {'more' if len(data) > size else 'less'} than {size} bytes")
    return np.frombuffer(data, np.uint8)


def samples(shard: Shard, columns: list[int]) -> Iterator[list[np.ndarray]]:
    """Reads a shard; yields the bytes of these columns for each sample."""
    data = _load(shard)
    table = 4 * (shard.samples + 2)
    if data.size < table or int(data[:4].view("<u4")[0]) != shard.samples:
        raise Damaged(f"does not have the expected {shard.samples} samples")
    offsets = data[4:table].view("<u4").astype(np.int64)
    if offsets[0] < table or offsets[-1] != data.size or (np.diff(offsets) < 0).any():
        raise Damaged("has invalid sample offsets")
    _check_columns(shard, data[table : offsets[0]])
    varying = [number for number, size in enumerate(shard.sizes) if not size]
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        sample = data[begin:end]
        head = 4 * len(varying)
        if sample.size < head:
            raise Damaged("is too short for the sizes of its columns")
        sizes = np.array(shard.sizes, np.int64)
        sizes[varying] = sample[:head].view("<u4")
        ends = head + np.cumsum(sizes)
        if ends[-1] != sample.size:
            raise Damaged(f"has {sample.size} bytes, but its columns have {ends[-1]}")
        yield [sample[ends[number] - sizes[number] : ends[number]] for number in columns]


def _check_columns(shard: Shard, text: np.ndarray) -> None:
    problem = "has no valid list of columns"
    with errors_as(Damaged, problem, ValueError, KeyError, TypeError, RecursionError):
        header = json.loads(text.tobytes().decode("utf-8"))
        names, encodings = header["column_names"], header["column_encodings"]
        same = tuple(names) == shard.names and tuple(encodings) == shard.encodings
    if not same:
        raise Damaged(f"has columns {names} of {encodings}, which do not match {INDEX}")


def decoded(data: np.ndarray, encoding: str) -> np.ndarray:
    """Decodes uint8 [n] of encoding ndarray[:DTYPE[:SHAPE]]; what it omits precedes the values."""
    kind, _, rest = encoding.partition(":")
    if kind != "ndarray":
        raise Damaged(f'has encoding "{encoding}" instead of ndarray')
    name, _, axes = rest.partition(":")
    at = 0
    with errors_as(Damaged, f"is not a valid {encoding}", KeyError, IndexError, ValueError):
        if not name:
            name, at = _TYPES[int(data[0])], 1
        dtype = _DTYPES[name]
        if axes:
            shape = [int(size) for size in axes.split(",")]
        else:
            ndim, item = int(data[at]) >> 2, 1 << (int(data[at]) & 3)
            shape = data[at + 1 : at + 1 + ndim * item].view(f"<u{item}").tolist()
            if len(shape) != ndim:
                raise ValueError("truncated shape")
            at += 1 + ndim * item
        if math.prod(shape) * dtype.itemsize != data.size - at or min(shape, default=0) < 0:
            raise Damaged(f"is not an array of shape {tuple(shape)}: it has {data.size - at} bytes")
        # Raises ValueError for too many axes, or too large axes in an empty array.
        return data[at:].view(dtype).reshape(shape)


@options(kw_only=True)
class MosaicShards(TableSource):
    """Folders with an index.json and its shards; a sample has one or several documents."""

    span_field: Text = "indices"
    """MDS column with the documents of a sample, as pairs of begin and end in tokens; without it a
    sample is one document."""

    def files(self) -> list[Path]:
        """The outermost index.json files."""
        found = [path for path in find_files(self.paths, (INDEX,)) if path.name == INDEX]
        if not found:
            raise UserError(f"data.paths: {', '.join(self.paths)} must be {INDEX} or a folder")
        folders = {path.parent for path in found}
        return [path for path in found if not folders.intersection(path.parent.parents)]

    def inputs(self) -> list[Path]:
        """The indices, and the shards that they list."""
        indices = self.files()
        return [*indices, *(shard.file for index in indices for shard in read_index(index))]

    def size(self) -> int:
        """Uncompressed size in bytes."""
        return sum(shard.size for index in self.files() for shard in read_index(index))

    def documents(self) -> Iterator[tuple[str, Document]]:
        for index in self.files():
            for shard in read_index(index):
                yield from self._shard_documents(shard)

    def _shard_documents(self, shard: Shard) -> Iterator[tuple[str, Document]]:
        of = self.columns_in(shard.names, str(shard.path))
        columns = [shard.column(name, self.shown(option)) for option, name in of.items()]
        if self.holds_ids and self.span_field in shard.names:
            columns.append(shard.column(self.span_field, "data.span_field"))
        encodings = [shard.encodings[number] for number in columns]
        for name, encoding in zip(self.columns.values(), encodings, strict=False):
            if not self.holds_ids and encoding != "str":
                raise UserError(
                    f'{shard.path}: column "{name}" is {encoding}, not text; '
                    "use data.token_field for token ids"
                )
        where = f"data.paths: {shard.file}"
        try:
            for number, parts in enumerate(samples(shard, columns)):
                where = f"{shard.path}, sample {number}"
                yield from self._sample_documents(parts, encodings, where)
                where = f"{shard.path}, sample {number + 1}"
        except Damaged as error:
            raise UserError(f"{where} {error}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8 text (byte {error.start})") from error

    def _sample_documents(
        self, parts: list[np.ndarray], encodings: list[str], where: str
    ) -> Iterator[tuple[str, Document]]:
        if not self.holds_ids:
            yield where, self.document([part.tobytes().decode("utf-8") for part in parts], where)
            return
        values = [decoded(*of) for of in zip(parts, encodings, strict=True)]
        ids, token_values = values[0], values[: len(self.columns)]
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise Damaged(f"has {ids.dtype} of shape {ids.shape}, not a list of token ids")
        sample = self.document(token_values, where)  # checks the mask
        if len(values) == len(token_values):
            yield where, sample
            return
        spans = list(_spans(values[-1], ids.size))
        documents = [self.document([x[slice(*of)] for x in token_values], where) for of in spans]
        if not _cover(spans, ids.size):  # counted once, with a document that has tokens
            at = next((i for i, (begin, end) in enumerate(spans) if begin < end), 0)
            documents = documents or [ids[:0]]
            found = documents[at]
            tokens = found if isinstance(found, MaskedTokens) else MaskedTokens(np.asarray(found))
            documents[at] = dataclasses.replace(tokens, note=_UNCOVERED)
        for number, document in enumerate(documents):
            yield f"{where}, document {number}", document


def _cover(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether each token of a sample of `size` tokens is in one document."""
    filled = sorted(span for span in spans if span[0] < span[1])
    begins, ends = [begin for begin, _ in filled], [end for _, end in filled]
    return [*begins, size] == [0, *ends]


def _spans(spans: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each document of a sample of `size` tokens."""
    if spans.dtype.kind not in "iu" or spans.ndim != 2 or spans.shape[1] != 2:
        raise Damaged(f"has spans of {spans.dtype} {spans.shape}, not pairs of integers")
    for number, (begin, end) in enumerate(spans.tolist()):
        if not 0 <= begin <= end <= size:
            raise Damaged(f"has {size} tokens, but its document {number} has span {begin} to {end}")
        yield begin, end
