"""Looking at a sparse index: what it costs, what it keeps and how it is shaped."""

import dataclasses
import functools
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.attention.picture import Panel, draw
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.sparsity import attention_recall
from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.documents import Documents
from mtraining_jax.sparsity.metrics import pairs_to_share
from pallas_kernels.index import Index


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `inspect` found; NumPy arrays, by batch entry and query head.

    Attributes:
        index: the index.
        seq_len: S.
        density: float [B, Hq], computed pairs over causal pairs.
        executed: float [B, Hq], pairs in the tiles that kernels execute, over causal pairs.
        budgets: int [B, Hq] each, by name, the numbers of entries that the index lists: "columns"
            and "diagonals" of a vertical-slash index, "blocks" of a list of blocks.
        pairs: float [B, Hq], computed pairs.
        recall: float [B, Hq], share of the softmax mass of exact attention that lies on computed
            pairs, mean over the rows; None without queries and keys.
        rows: int [R], queries that recall was measured on; None as above.
        documents: those that the sequences are made of, within which all of this was measured;
            None if each sequence is one.
    """

    index: Index
    seq_len: int
    density: np.ndarray
    executed: np.ndarray
    budgets: dict[str, np.ndarray]
    pairs: np.ndarray
    recall: np.ndarray | None = None
    rows: np.ndarray | None = None
    documents: Documents | None = None

    def __str__(self) -> str:
        """A table with one line a head."""
        lines = [
            f"{self.seq_len} tokens, blocks of {self.index.block_size}; mean density "
            f"{self.density.mean():.4f}"
        ]
        if self.recall is not None:
            lines[0] += (
                f", recall {self.recall.mean():.4f} on {len(self.rows)} rows, that of the worst "
                f"head {self.recall.min():.4f}"
            )
        shares = {"density": self.density, "executed": self.executed}
        if self.recall is not None:
            shares["recall"] = self.recall
        names = ["batch", "head", *self.budgets, *shares]
        lines.append("  ".join(f"{name:>9}" for name in names))
        for b, h in np.ndindex(self.density.shape):
            cells = [f"{x:9d}" for x in (b, h, *(x[b, h] for x in self.budgets.values()))]
            cells += [f"{x[b, h]:9.4f}" for x in shares.values()]
            lines.append("  ".join(cells))
        return "\n".join(lines)

    def save_picture(
        self, path: str | os.PathLike, *, heads: Sequence[int] = (0,), batch: int = 0
    ) -> None:
        """Writes a PNG of the masks of some heads, side by side.

        A pixel is a block of queries by a block of keys (or several, of a long sequence): the
        darker, the larger the share of its pairs that is computed. The upper right, which is
        never computed, is grey. Lines show where documents begin and end. Needs matplotlib (`pip
        install matplotlib`).

        Args:
            path: of the file, ending in .png.
            heads: query heads.
            batch: entry of the batch.

        Raises:
            ValueError: naming the argument.
        """
        entries, num_heads = self.density.shape
        if not str(path).endswith(".png"):
            raise ValueError(f"path={str(path)!r} must end in .png")
        if not 0 <= batch < entries:
            raise ValueError(f"batch={batch} must be in 0 .. {entries - 1}")
        if not heads or not all(0 <= head < num_heads for head in heads):
            raise ValueError(f"heads={list(heads)} must be some of 0 .. {num_heads - 1}")
        panels = []
        for head in heads:
            title = f"head {head}: density {self.density[batch, head]:.1%}"
            if self.recall is not None:
                title += f"\nrecall {self.recall[batch, head]:.1%}"
            panels.append(Panel(self.index, batch, head, title))
        borders = ()
        if self.documents is not None:
            # A batch of one table is of all entries.
            table = np.asarray(self.documents.table)[batch % len(self.documents.table)]
            borders = np.unique(table[table[:, 2] > 0, :2]) * self.index.block_size
        draw(path, panels, self.seq_len, borders)


def inspect(
    index: Index,
    q: Array | None = None,
    k: Array | None = None,
    *,
    seq_len: int | None = None,
    rows: int | Sequence[int] = 64,
    seed: int = 0,
    scale: float | None = None,
    layout: Layout | None = None,
    documents: Documents | None = None,
) -> Inspection:
    """Measures an index that `sparse_attention(..., return_index=True)` gave.

    Not for use under `jax.jit`: it needs the values of the arrays.

    Args:
        index: arrays [B, Hq, ...].
        q: [B, S, Hq, D], the queries that the index was chosen for; with k, recall is measured.
        k: [B, S, Hk, D], the keys.
        seq_len: S; only needed without q, and if it cannot be read off unused entries of the index.
        rows: how many queries recall is measured on, drawn evenly over the sequence; or their
            positions in the sequence.
        seed: of the draw.
        scale: of the logits; default 1/sqrt(D).
        layout: the order of the tokens of q and k; None for that of the sequence.
        documents: as given to `sparse_attention`. Density is then the share of the causal pairs
            within documents, and recall that of attention within them, of rows that are no padding.

    Returns:
        An `Inspection`: density, budgets, recall; `print` it, or `save_picture` of it.

    Raises:
        ValueError: naming the argument and what is allowed.
    """
    if not isinstance(index, Index):
        raise ValueError(
            f"index is a {type(index).__name__}: an index is needed, as return_index=True gives it"
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((index, q, k))):
        raise ValueError("index, q and k must not be traced: return them from jax.jit first")
    if (q is None) != (k is None):
        raise ValueError("q and k are needed both for recall, or neither")
    index = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), index)
    listed = {leaf.shape[:2] for leaf in jax.tree.leaves(index)}  # of a dense one: nothing
    if q is not None:
        if q.ndim != 4 or k.ndim != 4 or listed not in ({q.shape[:3:2]}, set()):
            needed = [list(shape) for shape in listed]
            raise ValueError(
                f"q has shape {q.shape} and k {k.shape}: [batch, tokens, heads, dim] is needed, "
                f"with [batch, heads] = {', '.join(map(str, needed))} in q as in the index"
            )
        if seq_len not in (None, q.shape[1]):
            raise ValueError(f"seq_len={seq_len} but q has {q.shape[1]} tokens; leave it out")
        seq_len = q.shape[1]
    if seq_len is None:
        seq_len = index.told_length()
    if seq_len is None:
        raise ValueError("seq_len is needed: this index does not tell the length of the sequence")
    if seq_len < 1 or seq_len % index.block_size:
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of the index's block_size={index.block_size}"
        )
    blocks_of = None
    if documents is not None:
        num_blocks = seq_len // index.block_size
        if documents.block_size != index.block_size or documents.table.shape[1] != num_blocks:
            raise ValueError(
                f"documents are of {documents.table.shape[1]} blocks of {documents.block_size} "
                f"tokens, but the index of {num_blocks} of {index.block_size}"
            )
        blocks_of = documents.blocks()
    pairs, executed, total = jax.device_get(_counts(index, seq_len, blocks_of))
    found = {"density": pairs / total, "executed": executed / total, "pairs": pairs}
    if q is not None:
        positions = _rows(rows, seq_len, seed)
        order = np.arange(seq_len) if layout is None else layout.permutation()
        if len(order) != seq_len:
            raise ValueError(f"layout has seq_len={layout.seq_len} but q {seq_len} tokens")
        q, k = (jnp.asarray(jax.device_get(x)) for x in (q, k))
        blocks = jnp.asarray(order[:: index.block_size] // index.block_size, jnp.int32)
        found["recall"] = _recall(
            q, k, index, positions, block_ids=blocks, scale=scale, documents=blocks_of
        )
        found["rows"] = positions
    budgets = {name: np.asarray(x) for name, x in index.budgets().items()}
    found = {name: np.asarray(x) for name, x in found.items()}
    if q is not None:  # a dense index is the same for all heads
        of_heads = {name for name, x in found.items() if x.ndim == 2}
        found |= {name: np.broadcast_to(found[name], q.shape[:3:2]) for name in of_heads}
    return Inspection(index, seq_len, budgets=budgets, documents=documents, **found)


# One program each, where operation by operation would compile dozens.
_recall = jax.jit(attention_recall, static_argnames="scale")


@functools.partial(jax.jit, static_argnames="seq_len")
def _counts(
    index: Index, seq_len: int, documents: DocumentBlocks | None
) -> tuple[Array, Array, float | Array]:
    """Pairs that are computed and executed, and those that densities are shares of."""
    total = pairs_to_share(seq_len, index.block_size, documents)
    return index.computed_pairs(seq_len), index.executed_pairs(seq_len), total


def _rows(rows: int | Sequence[int], seq_len: int, seed: int) -> np.ndarray:
    if isinstance(rows, int):
        if not 1 <= rows:
            raise ValueError(f"rows={rows} must be at least 1")
        # One in each of `rows` equal parts, so that all of the sequence is sampled.
        edges = np.linspace(0, seq_len, min(rows, seq_len) + 1).astype(np.int64)
        return np.random.default_rng(seed).integers(edges[:-1], edges[1:]).astype(np.int32)
    positions = np.asarray(rows)
    integers = positions.ndim == 1 and positions.size and positions.dtype.kind in "iu"
    if not integers or positions.min() < 0 or positions.max() >= seq_len:
        raise ValueError(f"rows={rows} must be positions in 0 .. {seq_len - 1}")
    return positions.astype(np.int32)
