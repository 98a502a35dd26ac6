"""What packed sequences look like: how long documents are, how many share one, what stays empty."""

import os
from dataclasses import dataclass

import numpy as np

from mtraining_jax.data.packs import PackArrays, Packs
from mtraining_jax.errors import UserError

# Sequences that are looked at where each is made only when it is read.
_SAMPLED = 256
_DRAWN = 48
_BAR = 24


@dataclass(frozen=True)
class PackReport:
    """Numbers of packed sequences; `str` makes a table of them.

    Attributes:
        sequences: how many there are; `documents_each` and `pairs` are of all or of the first ones.
        seq_len: S.
        block_size: g.
        lengths: int64 [d], tokens of the documents of these sequences, in order.
        ends: int64 [n], documents up to the end of each.
    """

    sequences: int
    seq_len: int
    block_size: int
    lengths: np.ndarray
    ends: np.ndarray

    @property
    def documents_each(self) -> np.ndarray:
        """Documents of each sequence, int64 [n]."""
        return np.diff(self.ends, prepend=0)

    @property
    def padded(self) -> np.ndarray:
        """Tokens of each document with the padding of its last block, int64 [d]."""
        return -(-self.lengths // self.block_size) * self.block_size

    @property
    def waste(self) -> float:
        """Share of all places that hold padding."""
        return 1 - float(self.lengths.sum()) / (self.ends.size * self.seq_len)

    @property
    def pairs(self) -> np.ndarray:
        """Of each sequence, the pairs of dense attention over those of one whole document: [n]."""
        sums = np.cumsum(self.padded.astype(np.float64) ** 2)[self.ends - 1]
        return np.diff(sums, prepend=0) / self.seq_len**2

    def buckets(self) -> list[tuple[int, int, int, int, int]]:
        """Documents by length: from, to (excluded), documents, tokens, tokens with padding.

        Bounds are powers of two; buckets at either end that hold no document are left out.
        """
        kinds = np.frexp(self.lengths.astype(np.float64))[1]  # 2^(k-1) <= length < 2^k
        first = int(kinds.min())
        sums = [np.bincount(kinds - first, of) for of in (None, self.lengths, self.padded)]
        return [
            (2 ** (first + i - 1), 2 ** (first + i), *(int(of[i]) for of in sums))
            for i in range(sums[0].size)
        ]

    def __str__(self) -> str:
        """A table with one line a length."""
        each, pairs, seen = self.documents_each, self.pairs, self.ends.size
        of = "" if seen == self.sequences else f" (the first {seen:,} of them)"
        lines = [
            f"{self.sequences:,} sequences of {self.seq_len:,} tokens{of}, blocks of "
            f"{self.block_size}: {self.waste:.2%} padding",
            f"documents of a sequence: {each.min():,} to {each.max():,}, mean {each.mean():,.1f}, "
            f"median {np.median(each):,.0f}",
            "dense attention of a sequence over that of one whole document: "
            f"{pairs.min():.1%} to {pairs.max():.1%}, mean {pairs.mean():.1%}",
            f"{'tokens of a document':>24} {'documents':>12} {'of all tokens':>14} {'padding':>8}",
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
        """Writes a picture: tokens by length of their document, and the first sequences.

        Args:
            path: of the picture, of any kind that matplotlib knows by its suffix.

        Raises:
            UserError: matplotlib is not installed, or the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UserError(
                "a picture needs matplotlib, which is not installed: pip install matplotlib, or "
                "uv run --extra plot"
            ) from error
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        found = self.buckets()
        share = np.array([tokens for *_, tokens, _ in found]) / self.lengths.sum()
        left.bar([_short(begin) for begin, *_ in found], share)
        left.set(xlabel="tokens of a document, at least", ylabel="share of all tokens")
        left.tick_params(axis="x", rotation=60)
        begin, colors = 0, ("tab:blue", "tab:orange")
        for number, end in enumerate(self.ends[:_DRAWN].tolist()):
            spans, at = [], 0
            for length, padded in zip(
                self.lengths[begin:end].tolist(), self.padded[begin:end].tolist(), strict=True
            ):
                spans.append((at, length))
                at += padded
            turns = [colors[i % 2] for i in range(len(spans))]
            right.broken_barh(spans, (number - 0.45, 0.9), facecolors=turns)
            begin = end
        right.set(
            xlim=(0, self.seq_len), xlabel="position", ylabel="sequence", facecolor="lightgray",
            title="documents of the first sequences; gray: padding",
        )  # fmt: skip
        right.invert_yaxis()
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be written ({error})") from error


def report_on(packs: Packs, seq_len: int, block_size: int) -> PackReport:
    """Looks at packed sequences: at all, or at the first ones of a source that makes them.

    Args:
        packs: at least one sequence.
        seq_len: S.
        block_size: g.
    """
    if isinstance(packs, PackArrays):
        return PackReport(len(packs), seq_len, block_size, packs.lengths, packs.ends)
    lengths = [packs.pieces(number)[1] for number in range(min(_SAMPLED, len(packs)))]
    ends = np.cumsum([of.size for of in lengths])
    return PackReport(len(packs), seq_len, block_size, np.concatenate(lengths), ends)


def _short(number: int) -> str:
    """1024 as 1K; powers of two."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)
