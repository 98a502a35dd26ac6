"""Inspection of a sparse index: density, recall and pictures."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from mtraining_jax.attention.checks import check_arrays, check_scale
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.selection.metrics import attention_recall, pairs_to_share
from mtraining_jax.tools.audit.picture import Panel, block_shares, draw, index_of_head
from pallas_kernels.index import Index


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Metrics of an index, as NumPy arrays by batch entry and query head.

    Attributes:
        index: the index.
        seq_len: S.
        density: float [B, Hq], computed pairs over causal pairs.
        executed: float [B, Hq], pairs in the tiles that kernels execute, over causal pairs.
        budgets: int [B, Hq] each, number of listed entries by kind: "columns" and "diagonals" of
            a vertical-slash index, "blocks" of a block list.
        pairs: float [B, Hq], computed pairs.
        recall: float [B, Hq], fraction of exact attention's softmax mass on computed pairs, mean
            over the `rows`, int [R] positions. None if no queries and keys were given.
        documents: documents within which everything was measured, or None.
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
        lines = [
            f"{self.seq_len} tokens, blocks of {self.index.block_size}; mean density "
            f"{self.density.mean():.4f}"
        ]
        shares = {"density": self.density, "executed": self.executed}
        if self.recall is not None and self.rows is not None:
            lines[0] += (
                f", recall {self.recall.mean():.4f} on {len(self.rows)} rows, worst head "
                f"{self.recall.min():.4f}"
            )
            shares["recall"] = self.recall
        names = ["batch", "head", *self.budgets, *shares]
        lines.append("  ".join(f"{name:>9}" for name in names))
        for b, h in np.ndindex(self.density.shape):
            cells = [f"{x:9d}" for x in (b, h, *(x[b, h] for x in self.budgets.values()))]
            cells += [f"{x[b, h]:9.4f}" for x in shares.values()]
            lines.append("  ".join(cells))
        return "\n".join(lines)

    def token_mask(self, batch: int = 0, head: int = 0) -> np.ndarray:
        """Returns the computed pairs of one head: bool [S, S], queries by keys.

        Takes S^2 bytes, at most 4 GiB; use `block_mask` for long sequences.
        """
        self._check_head(batch, head)
        return np.asarray(index_of_head(self.index, batch, head).to_mask(self.seq_len))[0, 0]

    def block_mask(self, batch: int = 0, head: int = 0) -> np.ndarray:
        """Returns the blocks of one head with a computed pair: bool [S/g, S/g], queries by keys."""
        self._check_head(batch, head)
        return np.nan_to_num(block_shares(self.index, self.seq_len, batch, head)) > 0

    def _check_head(self, batch: int, head: int) -> None:
        sizes = self.density.shape
        for name, value, size in ("batch", batch, sizes[0]), ("head", head, sizes[1]):
            if value not in range(size):
                raise ValueError(f"{name}={value!r} must be in 0 .. {size - 1}")

    def save_picture(
        self, path: str | os.PathLike, *, heads: Sequence[int] = (0,), batch: int = 0
    ) -> None:
        """Writes a PNG with the masks of the given heads side by side.

        A pixel is one block of queries by one block of keys (several blocks for a long sequence);
        darker means a larger fraction of computed pairs. Lines mark document boundaries.

        Raises:
            ValueError: if an argument is invalid.
            ImportError: if matplotlib is not installed.
        """
        if not str(path).endswith(".png"):
            raise ValueError(f"path={str(path)!r} must end in .png")
        if not isinstance(heads, Sequence) or not heads:
            raise ValueError(f"heads={heads!r} must be a list of one or more heads")
        panels = []
        for head in heads:
            self._check_head(batch, head)
            title = f"head {head}: density {self.density[batch, head]:.1%}"
            if self.recall is not None:
                title += f"\nrecall {self.recall[batch, head]:.1%}"
            panels.append(Panel(self.index, batch, head, title))
        borders: Sequence[int] = ()
        if self.documents is not None:
            # A single row applies to all batch entries.
            first, end = (np.asarray(x)[batch % len(x)] for x in self.documents.spans())
            blocks = np.unique(np.stack([first, end])[:, end > 0])
            borders = (blocks * self.index.block_size).tolist()
        draw(path, panels, self.seq_len, borders)


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
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
    """Measures an index returned by `sparse_attention(..., return_residuals=True)`.

    Needs concrete arrays: call it outside `jax.jit`.

    Args:
        index: index with arrays [B, Hq, ...].
        q, k: [B, S, Hq, D] and [B, S, Hk, D] queries and keys, to measure recall.
        seq_len: S. Needed only without q, for an index that does not store it.
        rows: number of queries to measure recall on, sampled evenly over the sequence, or their
            positions.
        seed: seed of the sampling.
        scale: scale of the logits; defaults to 1/sqrt(D).
        layout: token order of q and k; defaults to sequence order.
        documents: as passed to `sparse_attention`. Density and recall are then measured within
            documents, and padding rows are ignored.

    Returns:
        An `Inspection` with density, budgets and recall. Use `print` or `save_picture` on it.

    Raises:
        ValueError: if an argument is invalid; the message names it and what is allowed.
    """
    if not isinstance(index, Index):
        raise ValueError(
            f"index is a {type(index).__name__}; pass an index, such as residuals.index from "
            "sparse_attention with return_residuals=True"
        )
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((index, q, k))):
        raise ValueError("index, q and k are traced; return them from jax.jit first")
    if (q is None) != (k is None):
        raise ValueError("pass both q and k to measure recall, or neither")
    for name, value, kind in (("layout", layout, Layout), ("documents", documents, Documents)):
        if not isinstance(value, kind | None):
            raise ValueError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}")
    index = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), index)
    listed = {leaf.shape[:2] for leaf in jax.tree.leaves(index)}  # empty for a dense index
    if q is not None and k is not None:
        check_arrays(q, k, k, index.causal)
        scale = check_scale(scale, q)
        if q.ndim != 4 or k.ndim != 4 or listed not in ({q.shape[:3:2]}, set()):
            needed = [list(shape) for shape in listed]
            raise ValueError(
                f"q has shape {q.shape} and k {k.shape}; expected [batch, tokens, heads, dim] "
                f"with [batch, heads] = {', '.join(map(str, needed))} in q as in the index"
            )
        if seq_len not in (None, q.shape[1]):
            raise ValueError(f"seq_len={seq_len} but q has {q.shape[1]} tokens; omit seq_len")
        seq_len = q.shape[1]
    seq_len = index.known_seq_len() if seq_len is None else seq_len
    if seq_len is None:
        raise ValueError("seq_len is needed: this index does not store the sequence length")
    if not isinstance(seq_len, int) or seq_len < 1 or seq_len % index.block_size:
        raise ValueError(
            f"seq_len={seq_len!r} must be a multiple of the index's block_size={index.block_size}"
        )
    if documents is not None:
        num_blocks = seq_len // index.block_size
        if documents.block_size != index.block_size or documents.first.shape[1] != num_blocks:
            raise ValueError(
                f"documents have {documents.first.shape[1]} blocks of {documents.block_size} "
                f"tokens, but the index has {num_blocks} of {index.block_size}"
            )
    pairs, executed, total = jax.device_get(_counts(index, seq_len, documents))
    found: dict[str, Any] = {"density": pairs / total, "executed": executed / total, "pairs": pairs}
    if q is not None and k is not None:
        # The counts of a dense index have no head axis.
        found = {name: np.broadcast_to(x, q.shape[:3:2]) for name, x in found.items()}
        positions = _rows(rows, seq_len, seed)
        if layout is not None and layout.seq_len != seq_len:
            raise ValueError(f"layout has seq_len={layout.seq_len} but q has {seq_len} tokens")
        order = np.arange(seq_len) if layout is None else layout.permutation()
        q, k = (jnp.asarray(jax.device_get(x)) for x in (q, k))
        blocks = jnp.asarray(order[:: index.block_size] // index.block_size, jnp.int32)
        recall = _recall(q, k, index, positions, block_ids=blocks, scale=scale, documents=documents)
        found |= {"recall": np.asarray(recall), "rows": positions}
    budgets = {name: np.asarray(x) for name, x in index.budgets().items()}
    return Inspection(index, seq_len, budgets=budgets, documents=documents, **found)


# Jitted as a whole: eager execution would compile dozens of small programs.
_recall = jax.jit(attention_recall)


@functools.partial(jax.jit, static_argnames="seq_len")
def _counts(
    index: Index, seq_len: int, documents: Documents | None
) -> tuple[Array, Array, float | Array]:
    """Returns computed pairs, executed pairs and the denominator of both densities."""
    total = pairs_to_share(seq_len, index.block_size, documents)
    return index.computed_pairs(seq_len), index.executed_pairs(seq_len), total


def _rows(rows: int | Sequence[int], seq_len: int, seed: int) -> np.ndarray:
    if isinstance(rows, int):
        if not 1 <= rows:
            raise ValueError(f"rows={rows} must be at least 1")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed={seed!r} must be an integer, at least 0")
        # One query from each of `rows` equal intervals, so that the whole sequence is covered.
        edges = np.linspace(0, seq_len, min(rows, seq_len) + 1).astype(np.int64)
        return np.random.default_rng(seed).integers(edges[:-1], edges[1:]).astype(np.int32)
    positions = np.asarray(rows)
    integers = positions.ndim == 1 and positions.size and positions.dtype.kind in "iu"
    if not integers or positions.min() < 0 or positions.max() >= seq_len:
        raise ValueError(f"rows={rows} must be positions in 0 .. {seq_len - 1}")
    return positions.astype(np.int32)
