"""Synthetic token ids for benchmarks, with realistic document structure.

Every token is a function of the seed and its position, so processes generate only their tokens, and
runs can resume anywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mtraining_jax.data.corpus import Corpus
from mtraining_jax.data.documents import eos_id, named_eos
from mtraining_jax.data.packing import consecutive
from mtraining_jax.data.source import Source
from mtraining_jax.utils.random_bits import GOLDEN, mixed

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig

# Sequences per epoch: more than any benchmark reads.
NUM_SEQUENCES = 2**20

# Lognormal document lengths in tokens. The mean is 3 times the median, the longest of a thousand
# documents 100 times.
_MEDIAN_DOCUMENT, _DOCUMENT_SIGMA = 2048, 1.5
# Exponential passage lengths in tokens, and the fraction of passages that repeat an earlier one.
_MEAN_PASSAGE, _REPEATED = 256, 0.3
# Size of the table from uniform random numbers to Zipf-distributed ids.
_TABLE_BITS = 20


@dataclass(frozen=True, kw_only=True)
class Synthetic(Source):
    """Random token ids over the vocabulary; mode `exact` is not supported."""

    modes: ClassVar[tuple[str, ...]] = ("concat",)

    def problems(self, data: "DataConfig", vocab_size: int) -> Iterator[str]:
        yield from named_eos(data)
        if vocab_size < 2:
            yield (
                f"model.vocab_size = {vocab_size} must be at least 2 for data.source = "
                '"synthetic": eos and another id'
            )

    def has_lengths(self, data: "DataConfig") -> bool:
        return True

    def open(self, data: "DataConfig", vocab_size: int) -> Corpus:
        """If data.eos is not set, the last id of the vocabulary ends documents."""
        eos = eos_id(data)
        eos = vocab_size - 1 if eos is None else eos
        stream = SyntheticStream(data.seq_len, vocab_size, eos, data.seed)
        starts = range(0, len(stream), data.seq_len)
        documents = SyntheticDocuments(stream) if data.has_documents else None
        what = "random token ids, repeated passages"
        return Corpus(stream, starts, vocab_size, None, what, documents)


@dataclass(frozen=True)
class _Outline:
    """Structure of one sequence, as int64 arrays.

    Attributes:
        document_ends: last position of each document except the truncated last one, ascending.
        starts: first position of each passage, ascending.
        contents: content id of each passage: its index, or that of the passage it repeats.
    """

    document_ends: np.ndarray
    starts: np.ndarray
    contents: np.ndarray


class SyntheticStream:
    """Random token ids of `NUM_SEQUENCES` sequences.

    Ids follow Zipf's law. Documents have lognormal lengths and end with `eos`, which occurs nowhere
    else; the last document of a sequence is truncated. About every third passage repeats an earlier
    one of its sequence, at any distance, so that models have something to learn.

    Args:
        seq_len: tokens per sequence.
        vocab_size: vocabulary size, at least 2.
        eos: end-of-document token.
        seed: random seed.
    """

    def __init__(self, seq_len: int, vocab_size: int, eos: int, seed: int):
        self._seq_len, self._eos, self._seed = seq_len, eos, seed
        self._ids = _zipf_table(vocab_size, eos)

    def __len__(self) -> int:
        return NUM_SEQUENCES * self._seq_len

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Token ids, int32 [n], at positions int64 [n] in ``range(len(self))``, in any order."""
        out = np.empty(positions.shape, np.int32)
        if not positions.size:
            return out
        first, last = (int(x) // self._seq_len for x in (positions.min(), positions.max()))
        for sequence in range(first, last + 1):
            inside = slice(None)
            if first != last:
                inside = positions // self._seq_len == sequence
            out[inside] = self._make(sequence, positions[inside] - sequence * self._seq_len)
        return out

    def document_lengths(self, sequence: int) -> np.ndarray:
        """Document lengths of one sequence, int64 [d]; the last document is truncated."""
        ends = self._draw_document_ends(self._rng(sequence)) + 1
        return np.diff(ends, prepend=0, append=self._seq_len)

    def _make(self, sequence: int, places: np.ndarray) -> np.ndarray:
        outline = self._draw_outline(sequence)
        passage = np.searchsorted(outline.starts, places, side="right") - 1
        key = mixed(np.array([self._seed * NUM_SEQUENCES + sequence], np.uint64))
        key = mixed(key + outline.contents.astype(np.uint64) * GOLDEN)
        offset = (places - outline.starts[passage]).astype(np.uint64)
        ids = self._ids[mixed(key[passage] + offset * GOLDEN) >> np.uint64(64 - _TABLE_BITS)]
        ids[np.isin(places, outline.document_ends)] = self._eos
        return ids

    def _rng(self, sequence: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, sequence])

    def _draw_document_ends(self, rng: np.random.Generator) -> np.ndarray:
        """Drawn first, so that document lengths need no further random numbers."""
        mean = _MEDIAN_DOCUMENT * np.exp(_DOCUMENT_SIGMA**2 / 2)

        def documents(number: int) -> np.ndarray:
            return rng.lognormal(np.log(_MEDIAN_DOCUMENT), _DOCUMENT_SIGMA, number)

        return _ends(documents, mean, self._seq_len) - 1

    def _draw_outline(self, sequence: int) -> _Outline:
        rng = self._rng(sequence)

        def passages(number: int) -> np.ndarray:
            return rng.exponential(_MEAN_PASSAGE, number)

        ends = self._draw_document_ends(rng)
        starts = np.concatenate([[0], _ends(passages, _MEAN_PASSAGE, self._seq_len)])
        contents = np.arange(starts.size)
        for passage in 1 + np.flatnonzero(rng.random(starts.size - 1) < _REPEATED):
            contents[passage] = contents[rng.integers(passage)]
        return _Outline(ends, starts, contents)


@dataclass(frozen=True)
class SyntheticDocuments:
    """The documents of a synthetic stream, packed on demand.

    Each sequence has the documents of one sequence of the stream, aligned to blocks; documents
    beyond its end are split or dropped.
    """

    stream: SyntheticStream

    def packs(self, data: "DataConfig", block_size: int) -> "SyntheticPacks":
        return SyntheticPacks(self.stream, data.seq_len, block_size)


@dataclass(frozen=True)
class SyntheticPacks:
    """Packed sequences of random documents."""

    stream: SyntheticStream
    seq_len: int
    block_size: int

    def __len__(self) -> int:
        return NUM_SEQUENCES

    def pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.stream.document_lengths(number)
        starts = number * self.seq_len + np.cumsum(lengths) - lengths
        starts, lengths, ends = consecutive(
            starts, lengths, self.block_size, self.seq_len // self.block_size
        )
        return starts[: ends[0]], lengths[: ends[0]]

    @property
    def summary(self) -> str:
        return "documents aligned to blocks"

    @property
    def digest(self) -> str:
        return "synthetic"  # the fields of the section determine the packing


def _ends(lengths, mean: float, total: int) -> np.ndarray:
    """Cumulative sums below `total` of random lengths, rounded up, ascending int64."""
    found, end = [], 0
    while end < total:
        sums = end + np.cumsum(np.ceil(lengths(int(total / mean) + 16)).astype(np.int64))
        found.append(sums)
        end = int(sums[-1])
    ends = np.concatenate(found)
    return ends[ends < total]


def _zipf_table(vocab_size: int, eos: int) -> np.ndarray:
    """Ids at evenly spaced quantiles, int32 [2^20], without eos.

    The Zipf-Mandelbrot law for English words: probability of id r proportional to 1 / (r + 2.7).
    """
    shares = 1 / (np.arange(vocab_size - 1) + 2.7)
    sums = np.cumsum(shares)
    quantiles = (np.arange(2**_TABLE_BITS) + 0.5) / 2**_TABLE_BITS * sums[-1]
    ids = np.searchsorted(sums, quantiles).astype(np.int32)
    return ids + (ids >= eos)
