"""Documents that are packed into sequences: where each one lies."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.document_blocks import DocumentBlocks


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["block_size"]
)
@dataclasses.dataclass(frozen=True)
class Documents:
    """Where the documents of each sequence lie; a query sees its own document only.

    A document begins at a multiple of the block size, and its last block may end in padding, of
    which its tokens see nothing: it comes behind them. Blocks of no document are padding: their
    rows compute nothing. A pytree, so it may be an argument of a function under `jax.jit`. The
    constructors check what they are given; `Documents(table, block_size)` checks nothing, for
    tables that a program makes.

    Attributes:
        table: int32 [B, NB, 3], for each block, in the order of the sequence whatever its layout:
            the first block of its document, one past the last block, and the document's real
            tokens; (NB, 0, 0) for a block of no document.
        block_size: g, tokens of a block (static).
    """

    table: Array | np.ndarray
    block_size: int = 128

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], seq_len: int, block_size: int = 128
    ) -> "Documents":
        """Documents one after the other, each padded to whole blocks; padding behind the last.

        Args:
            lengths: real tokens of each document of each sequence.
            seq_len: S, a multiple of the block size.
            block_size: g.

        Raises:
            UserError: if a document has no token, or documents are longer than the sequence.
        """
        _check_sizes(seq_len, block_size)
        rows = []
        for row, own in enumerate(lengths):
            own = _integers(f"lengths[{row}]", own)
            ends = np.cumsum(-(-own // block_size)) * block_size
            rows.append(_spans(np.append(0, ends)[:-1], own, seq_len, block_size, "lengths"))
        return cls._from_rows(rows, seq_len, block_size)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: ArrayLike | Sequence[ArrayLike],
        seq_len: int,
        block_size: int = 128,
        lengths: ArrayLike | Sequence[ArrayLike] | None = None,
    ) -> "Documents":
        """Documents by the places where they begin.

        Args:
            cu_seqlens: integers [M + 1], 0 first: where each document begins, and where the last
                one ends; or one such array for each sequence. All but the last are multiples of
                the block size.
            seq_len: S, a multiple of the block size.
            block_size: g.
            lengths: integers [M], real tokens of each document, as documents of other lengths
                than whole blocks leave padding behind them; or one such array for each sequence.
                None: they are the distances of `cu_seqlens`.

        Raises:
            UserError: naming the first boundary that is wrong.
        """
        _check_sizes(seq_len, block_size)
        one = np.ndim(cu_seqlens[0]) == 0
        many = [cu_seqlens] if one else list(cu_seqlens)
        real = [None] * len(many) if lengths is None else [lengths] if one else list(lengths)
        if len(real) != len(many):
            raise UserError(
                f"lengths are of {len(real)} sequences but cu_seqlens of {len(many)}: one for "
                "each is needed"
            )
        rows = []
        for row, (offsets, own) in enumerate(zip(many, real, strict=True)):
            offsets = _integers("cu_seqlens", offsets)
            if offsets.size < 1 or offsets[0] != 0:
                raise UserError(
                    f"cu_seqlens of sequence {row} begin with {offsets[:1].tolist()}: 0, where "
                    "the first document begins, must come first"
                )
            distances = np.diff(offsets)
            if distances.size and distances.min() < 1:
                bad = int(np.argmin(distances > 0))
                raise UserError(
                    f"cu_seqlens[{bad + 1}] = {offsets[bad + 1]} of sequence {row} must be above "
                    f"cu_seqlens[{bad}] = {offsets[bad]}: they ascend, and no document is empty"
                )
            own = distances if own is None else _integers("lengths", own)
            if own.shape != distances.shape or (own > distances).any():
                raise UserError(
                    f"lengths of sequence {row} are {own.tolist()}: one for each of the "
                    f"{distances.size} documents, and at most {distances.tolist()}, the distances "
                    "of cu_seqlens"
                )
            name = f"cu_seqlens of sequence {row}"
            rows.append(_spans(offsets[:-1], own, seq_len, block_size, name))
        return cls._from_rows(rows, seq_len, block_size)

    @classmethod
    def from_segment_ids(cls, segment_ids: ArrayLike, block_size: int = 128) -> "Documents":
        """Documents by a number for each token.

        Args:
            segment_ids: integers [B, S] or [S], in the order of the sequence and known when
                tracing: equal for the tokens of one document, different for different documents,
                0 for padding. A document is a run of tokens; it begins at a multiple of the block
                size.
            block_size: g.

        Raises:
            UserError: naming the first token that is wrong.
        """
        ids = _integers("segment_ids", segment_ids, axes=(1, 2))
        ids = ids[None] if ids.ndim == 1 else ids
        seq_len, rows = ids.shape[1], []
        _check_sizes(seq_len, block_size)
        if (ids < 0).any():
            row, token = np.argwhere(ids < 0)[0]
            raise UserError(
                f"segment_ids[{row}, {token}] = {ids[row, token]} is negative: documents have "
                "numbers from 1 on, and padding has 0"
            )
        for row, own in enumerate(ids):
            # Where a run begins, and where the last one ends.
            edges = np.flatnonzero(np.diff(own, prepend=own[0] - 1, append=own[-1] + 1))
            starts, lengths = edges[:-1], np.diff(edges)
            real = own[starts] != 0
            starts, lengths = starts[real], lengths[real]
            names, first_time = np.unique(own[starts], return_index=True)
            if names.size < starts.size:
                again = int(np.setdiff1d(np.arange(starts.size), first_time)[0])
                raise UserError(
                    f"segment_ids[{row}, {starts[again]}] = {own[starts[again]]} has come before: "
                    "the tokens of a document are one run"
                )
            name = f"segment_ids of sequence {row}"
            rows.append(_spans(starts, lengths, seq_len, block_size, name))
        return cls._from_rows(rows, seq_len, block_size)

    @classmethod
    def _from_rows(
        cls, rows: list[np.ndarray], seq_len: int, block_size: int
    ) -> "Documents":
        table = np.zeros((len(rows), seq_len // block_size, 3), np.int32)
        table[..., 0] = seq_len // block_size
        for into, row in zip(table, rows, strict=True):
            for first, end, tokens in row:
                into[first:end] = first, end, tokens
        return cls(table, block_size)

    def blocks(self) -> DocumentBlocks:
        """The same by fields, for use on the device."""
        return DocumentBlocks.from_table(jax.numpy.asarray(self.table))


def _integers(name: str, x: ArrayLike, axes: tuple[int, ...] = (1,)) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise UserError(
            f"{name} is a traced array: it must be known when tracing; make Documents outside of "
            "jax.jit and pass them as an argument"
        )
    x = np.asarray(x)
    if x.ndim not in axes or not (np.issubdtype(x.dtype, np.integer) or not x.size):
        wanted = " or ".join("1 axis" if n == 1 else f"{n} axes" for n in axes)
        raise UserError(f"{name} is {x.dtype} {list(x.shape)}: integers of {wanted} are needed")
    return x.astype(np.int64)


def _check_sizes(seq_len: int, block_size: int) -> None:
    if block_size < 1:
        raise UserError(f"block_size={block_size} must be at least 1")
    if seq_len % block_size or seq_len < 1:
        raise UserError(f"seq_len={seq_len} must be a multiple of block_size={block_size}")


def _spans(
    starts: np.ndarray, lengths: np.ndarray, seq_len: int, block_size: int, name: str
) -> np.ndarray:
    """First block, one past the last block, and real tokens of each document, int32 [M, 3].

    Raises:
        UserError: naming the first document that cannot be.
    """
    if (lengths < 1).any():
        bad = int(np.argmax(lengths < 1))
        raise UserError(
            f"{name}: document {bad} has {lengths[bad]} tokens; it must have at least 1"
        )
    if (starts % block_size != 0).any():
        bad = int(np.argmax(starts % block_size != 0))
        raise UserError(
            f"{name}: document {bad} begins at token {starts[bad]}, which must be a multiple of "
            f"block_size={block_size}; nearest: {starts[bad] // block_size * block_size} and "
            f"{-(-starts[bad] // block_size) * block_size}, with padding before it"
        )
    if starts.size and (starts + lengths).max() > seq_len:
        bad = int(np.argmax(starts + lengths > seq_len))
        raise UserError(
            f"{name}: document {bad} ends at token {starts[bad] + lengths[bad]}, behind the "
            f"{seq_len} tokens of the sequence"
        )
    ends = -(-(starts + lengths) // block_size)
    return np.stack([starts // block_size, ends, lengths], axis=-1).astype(np.int32)
