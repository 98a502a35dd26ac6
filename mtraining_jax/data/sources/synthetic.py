"""Synthetic token ids for benchmarks, with realistic document structure.

Every token is a function of the seed and its position, so processes generate only their tokens, and
runs can resume anywhere.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mtraining_jax.data.corpus import Corpus
from mtraining_jax.data.packing.rules import consecutive
from mtraining_jax.data.source import Source, id_problems
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.random_bits import GOLDEN, hash_uint64

# Sequences per epoch: more than any benchmark reads.
NUM_SEQUENCES = 2**20

# Lognormal document lengths in tokens. The mean is 3 times the median, the longest of a thousand
# documents 100 times.
_MEDIAN_DOCUMENT, _DOCUMENT_SIGMA = 2048, 1.5
# Exponential passage lengths in tokens, and the fraction of passages that repeat an earlier one.
_MEAN_PASSAGE, _REPEATED = 256, 0.3
# Size of the table from uniform random numbers to Zipf-distributed ids.
_TABLE_BITS = 20


@options(kw_only=True)
class Synthetic(Source):
    """Random token ids over the vocabulary; mode `exact` is not supported."""

    modes: ClassVar[tuple[str, ...]] = ("concat",)

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        yield from id_problems(data, "eos", "bos")
        if vocab_size < 2:
            yield (
                f"model.vocab_size = {vocab_size} must be at least 2 for data.source = "
                '"synthetic": eos and another id'
            )

    def has_lengths(self, data: DataSpec) -> bool:
        return True

    def open(self, data: DataSpec, vocab_size: int) -> Corpus:
        # Without data.eos, the last id of the vocabulary ends documents.
        eos = data.eos if isinstance(data.eos, int) else vocab_size - 1
        stream = SyntheticStream(data.seq_len, vocab_size, eos, data.seed)
        summary = "random token ids, repeated passages"
        pack = functools.partial(SyntheticPacks, stream)
        return Corpus(stream, vocab_size, None, summary, endless=True, pack=pack)


class SyntheticStream:
    """Token ids that follow Zipf's law, in documents that end with `eos`.

    The last document of a sequence is truncated. About every third passage repeats an earlier one
    of its sequence, at any distance, so that models have something to learn.
    """

    def __init__(self, seq_len: int, vocab_size: int, eos: int, seed: int):
        self._seq_len, self._eos, self._seed = seq_len, eos, seed
        self._ids = _zipf_table(vocab_size, eos)

    def __len__(self) -> int:
        return NUM_SEQUENCES * self._seq_len

    def take(self, positions: np.ndarray) -> np.ndarray:
        if not positions.size:
            return np.zeros(0, np.int32)
        sequence = int(positions[0]) // self._seq_len
        within = positions - sequence * self._seq_len
        rng = self._rng(sequence)
        document_ends = self._draw_document_ends(rng)  # first, since lengths need nothing else
        starts, contents = self._draw_passages(rng)
        passage = np.searchsorted(starts, within, side="right") - 1
        key = hash_uint64(np.array([self._seed * NUM_SEQUENCES + sequence], np.uint64))
        key = hash_uint64(key + contents.astype(np.uint64) * GOLDEN)
        offset = (within - starts[passage]).astype(np.uint64)
        ids = self._ids[hash_uint64(key[passage] + offset * GOLDEN) >> np.uint64(64 - _TABLE_BITS)]
        ids[np.isin(within, document_ends)] = self._eos
        return ids

    def document_lengths(self, sequence: int) -> np.ndarray:
        ends = self._draw_document_ends(self._rng(sequence)) + 1
        return np.diff(ends, prepend=0, append=self._seq_len)

    def _rng(self, sequence: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, sequence])

    def _draw_document_ends(self, rng: np.random.Generator) -> np.ndarray:
        """The last position of each document except the truncated last one, ascending int64."""
        draw = functools.partial(rng.lognormal, np.log(_MEDIAN_DOCUMENT), _DOCUMENT_SIGMA)
        mean = _MEDIAN_DOCUMENT * np.exp(_DOCUMENT_SIGMA**2 / 2)
        return _ends(draw, mean, self._seq_len) - 1

    def _draw_passages(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """First position and content id (its index or that of a repeated one) of each passage."""
        draw = functools.partial(rng.exponential, _MEAN_PASSAGE)
        starts = np.concatenate([[0], _ends(draw, _MEAN_PASSAGE, self._seq_len)])
        contents = np.arange(starts.size)
        for passage in 1 + np.flatnonzero(rng.random(starts.size - 1) < _REPEATED):
            contents[passage] = contents[rng.integers(passage)]
        return starts, contents


@dataclass(frozen=True)
class SyntheticPacks:
    """The documents of each sequence, aligned to blocks, and split or dropped beyond its end."""

    stream: SyntheticStream
    data: DataSpec
    block_size: int
    summary = "documents aligned to blocks"
    digest = "synthetic"  # the fields of the section determine the packing

    def __len__(self) -> int:
        return NUM_SEQUENCES

    def pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.stream.document_lengths(number)
        seq_len = self.data.seq_len
        starts = number * seq_len + np.cumsum(lengths) - lengths
        starts, lengths, ends = consecutive(
            starts, lengths, self.block_size, seq_len // self.block_size
        )
        return starts[: ends[0]], lengths[: ends[0]]


def _ends(lengths: Callable[[int], np.ndarray], mean: float, total: int) -> np.ndarray:
    """Cumulative sums below `total` of random lengths, rounded up, ascending int64."""
    found, end = [], 0
    while end < total:
        sums = end + np.cumsum(np.ceil(lengths(int(total / mean) + 16)).astype(np.int64))
        found.append(sums)
        end = int(sums[-1])
    ends = np.concatenate(found)
    return ends[ends < total]


def _zipf_table(vocab_size: int, eos: int) -> np.ndarray:
    """Ids at evenly spaced quantiles, int32 [2^20], without eos."""
    # The Zipf-Mandelbrot law of English words.
    sums = np.cumsum(1 / (np.arange(vocab_size - 1) + 2.7))
    quantiles = (np.arange(2**_TABLE_BITS) + 0.5) / 2**_TABLE_BITS * sums[-1]
    ids = np.searchsorted(sums, quantiles).astype(np.int32)
    return ids + (ids >= eos)
