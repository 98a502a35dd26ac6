"""Statistics of packed sequences: document lengths, documents per sequence, padding."""

import os
from dataclasses import dataclass

import numpy as np

from mtraining_jax.data.files import errors_as
from mtraining_jax.data.packing.packs import PackArrays, Packs
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import short_power

_SAMPLED = 256  # sequences examined if a source generates them on demand
_DRAWN = 48
_BAR = 24


@dataclass(frozen=True)
class PackReport:
    """Statistics of packed sequences; `str` formats them as a table."""

    sequences: int
    seq_len: int
    block_size: int
    lengths: np.ndarray  # int64 [d], tokens of the documents in order
    ends: np.ndarray  # int64 [n], number of documents up to the end of each sequence

    @property
    def documents_each(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    @property
    def padded(self) -> np.ndarray:
        """Document lengths rounded up to blocks, int64 [d]."""
        return -(-self.lengths // self.block_size) * self.block_size

    @property
    def waste(self) -> float:
        return 1 - float(self.lengths.sum()) / (self.ends.size * self.seq_len)

    @property
    def pairs(self) -> np.ndarray:
        """Dense attention pairs of each sequence, relative to one full-length document, [n]."""
        sums = np.cumsum(self.padded.astype(np.float64) ** 2)[self.ends - 1]
        return np.diff(sums, prepend=0) / self.seq_len**2

    def buckets(self) -> list[tuple[int, ...]]:
        """Lower and upper bounds 2^k, documents, tokens, and tokens with padding."""
        kinds = np.frexp(self.lengths.astype(np.float64))[1]  # 2^(k-1) <= length < 2^k
        first = int(kinds.min())
        sums = [np.bincount(kinds - first, of) for of in (None, self.lengths, self.padded)]
        rows = np.stack(sums, axis=1).astype(np.int64).tolist()
        return [(2 ** (first + i - 1), 2 ** (first + i), *row) for i, row in enumerate(rows)]

    def __str__(self) -> str:
        each, pairs, seen = self.documents_each, self.pairs, self.ends.size
        of = "" if seen == self.sequences else f" (statistics of the first {seen:,})"
        lines = [
            f"{self.sequences:,} sequences of {self.seq_len:,} tokens{of}, blocks of "
            f"{self.block_size}: {self.waste:.2%} padding",
            f"documents per sequence: {each.min():,} to {each.max():,}, mean {each.mean():,.1f}, "
            f"median {np.median(each):,.0f}",
            "dense attention cost per sequence, relative to a single full-length document: "
            f"{pairs.min():.1%} to {pairs.max():.1%}, mean {pairs.mean():.1%}",
            f"{'document length':>24} {'documents':>12} {'of all tokens':>14} {'padding':>8}",
        ]
        total = self.lengths.sum()
        for begin, end, documents, tokens, padded in self.buckets():
            padding = f"{1 - tokens / padded:8.1%}" if documents else f"{'':>8}"
            bar = "#" * round(_BAR * tokens / total)
            lines.append(
                f"{f'{begin:,} to {end - 1:,}':>24} {documents:12,} {tokens / total:14.1%} "
                f"{padding}  {bar}".rstrip()
            )
        return "\n".join(lines)

    def draw(self, path: str | os.PathLike) -> None:
        """Plots tokens by document length, and the documents of the first sequences."""
        problem = "--picture needs matplotlib: pip install matplotlib, or uv run --extra plot"
        with errors_as(UserError, problem, ImportError):
            from matplotlib.figure import Figure
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        found = self.buckets()
        share = np.array([tokens for *_, tokens, _ in found]) / self.lengths.sum()
        left.bar([short_power(begin) for begin, *_ in found], share)
        left.set(xlabel="document length in tokens, at least", ylabel="fraction of all tokens")
        left.tick_params(axis="x", rotation=60)
        ends = self.ends[:_DRAWN]
        packs = (np.split(x[: ends[-1]], ends[:-1]) for x in (self.lengths, self.padded))
        for number, (lengths, padded) in enumerate(zip(*packs, strict=True)):
            spans = list(zip(np.cumsum(padded) - padded, lengths, strict=True))
            colors = [("tab:blue", "tab:orange")[i % 2] for i in range(len(spans))]
            right.broken_barh(spans, (number - 0.45, 0.9), facecolors=colors)
        right.set(xlim=(0, self.seq_len), xlabel="position", ylabel="sequence")
        right.set(facecolor="lightgray", title="documents of the first sequences; gray: padding")
        right.invert_yaxis()
        with errors_as(UserError, f"{path} cannot be written", OSError, ValueError):
            figure.savefig(path, dpi=120)


def report_on(packs: Packs, seq_len: int, block_size: int) -> PackReport:
    """Statistics of packed sequences; of the first ones if they are generated on demand."""
    if isinstance(packs, PackArrays):
        return PackReport(len(packs), seq_len, block_size, packs.lengths, packs.ends)
    lengths = [packs.pieces(number)[1] for number in range(min(_SAMPLED, len(packs)))]
    ends = np.cumsum([of.size for of in lengths])
    return PackReport(len(packs), seq_len, block_size, np.concatenate(lengths), ends)
