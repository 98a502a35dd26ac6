"""Reads GGUF files, the format of llama.cpp for weights and tokenizers, into NumPy arrays.

ggml's docs/gguf.md describes the format: a header with metadata, a table of tensors, and their
data. This supports three tensor types: F32, and two types that are quantized in blocks of 32
numbers. Q8_0 has a scale and 32 int8; Q4_1 has a scale, a minimum and 32 numbers of 4 bits.
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtraining_jax.utils.errors import UserError

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_STRING, _LIST = 8, 9
_BLOCK = 32  # numbers per quantization block


class Gguf(NamedTuple):
    """The contents of a file.

    Attributes:
        metadata: numbers, strings, and lists of them, by name.
        tensors: fp32 by name. The last axis is the one that GGUF lists first, as in NumPy and in
            Hugging Face checkpoints: a matrix is [out, in].
    """

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


def _f32(raw: np.ndarray) -> np.ndarray:
    return raw.view("<f4")


def _q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 2 + _BLOCK)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 4 + _BLOCK // 2)
    scale, least = blocks[:, :4].copy().view("<f2").astype(np.float32).T
    packed = blocks[:, 4:]
    # The low halves of the bytes are the first 16 numbers, the high halves the other 16.
    numbers = np.concatenate([packed & 15, packed >> 4], axis=1)
    return (scale[:, None] * numbers + least[:, None]).reshape(-1)


# Type id -> bytes per block, numbers per block, and decoder.
_KINDS: dict[int, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    0: (4, 1, _f32),
    3: (4 + _BLOCK // 2, _BLOCK, _q4_1),
    8: (2 + _BLOCK, _BLOCK, _q8_0),
}


def read_gguf(path: str | Path) -> Gguf:
    """Reads a complete file.

    Args:
        path: a GGUF file of version 2 or 3, little-endian.

    Raises:
        UserError: if it is unreadable, truncated or not a GGUF file, or has a tensor of a type
            other than F32, Q8_0 and Q4_1.
    """
    try:
        reader = _Reader(np.fromfile(path, np.uint8))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return reader.read()
    except (struct.error, KeyError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a supported GGUF file: {error}") from None


class _Reader:
    """A position in a file."""

    def __init__(self, raw: np.ndarray) -> None:
        self.raw, self.place = raw, 0

    def read(self) -> Gguf:
        if self.raw[:4].tobytes() != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self.place = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, but only 2 and 3 are supported")
        num_tensors, num_metadata = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(num_metadata):
            name = self.string()
            metadata[name] = self.value(self.scalar("I"))
        table = [self.entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.place // alignment) * alignment
        tensors = {
            name: self.tensor(name, shape, kind, start + at) for name, shape, kind, at in table
        }
        return Gguf(metadata, tensors)

    def scalar(self, kind: str) -> Any:
        size = struct.calcsize(f"<{kind}")
        found = struct.unpack(f"<{kind}", self.raw[self.place : self.place + size])[0]
        self.place += size
        return found

    def string(self) -> str:
        size = self.scalar("Q")
        found = self.raw[self.place : self.place + size].tobytes()
        if len(found) < size:
            raise ValueError("it is truncated")
        self.place += size
        return found.decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _LIST:
            kind, size = self.scalar("I"), self.scalar("Q")
            return [self.value(kind) for _ in range(size)]
        if kind not in _SCALARS:
            raise ValueError(f"its metadata has a value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> np.ndarray:
        if kind not in _KINDS:
            raise ValueError(f"tensor {name} has type {kind}; supported are F32, Q4_1 and Q8_0")
        block_bytes, block_numbers, decode = _KINDS[kind]
        size = math.prod(shape) // block_numbers * block_bytes
        raw = self.raw[start : start + size]
        if len(raw) < size:
            raise ValueError(f"it is truncated in tensor {name}")
        return decode(raw).reshape(shape)
