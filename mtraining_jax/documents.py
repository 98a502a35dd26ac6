"""Documents packed into sequences: one type from the loader to the rows of an index."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened
from pallas_kernels.index import bits as sets

Integers = Sequence[int] | np.ndarray | Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "end", "tokens"],
    meta_fields=["block_size", "packed"],
)
@dataclasses.dataclass(frozen=True)
class Documents:
    """Document boundaries of sequences; queries attend only to their own document.

    A document begins at a multiple of the block size. Its last block may end with padding, which
    its tokens never see because it comes after them. Blocks without a document are padding and
    compute nothing. A pytree of NumPy or JAX arrays, one row per sequence and one entry per block
    in sequence order, whatever the layout. The class methods validate their input; the constructor
    does not, for arrays computed by a program.

    Attributes:
        first: int32 [B, NB], first block of the block's document; NB without a document.
        end: int32 [B, NB], one past its last block; 0 without a document.
        tokens: int32 [B, NB], its number of real tokens; 0 without a document.
        block_size: g, tokens per block (static).
        packed: False if made by `padded` or `whole` (static): a sequence is one document, and all
            of its blocks have the same entries. NumPy arrays are then constants of the program.
    """

    first: Array
    end: Array
    tokens: Array
    block_size: int = 128
    packed: bool = True

    @classmethod
    def whole(cls, num_blocks: int, block_size: int = 128) -> "Documents":
        """Describes sequences of one document each, without padding."""
        return cls.padded(num_blocks * block_size, num_blocks * block_size, block_size)

    @classmethod
    def padded(cls, valid_len: ArrayLike, seq_len: int, block_size: int = 128) -> "Documents":
        """Describes one document from the start of the sequence, with padding after it.

        Selection ignores the padding; results there are undefined. The document is never dense
        because of its length, and costs nothing at run time. Supported by every causal pattern.

        Args:
            valid_len: integer, possibly traced: number of tokens before the padding, the same for
                every sequence.
            seq_len: S, a multiple of the block size.
            block_size: tokens per block (g).

        Raises:
            UserError: if `valid_len` is not an integer or, if known at trace time, not in 1 .. S.
        """
        _check_sizes(seq_len, block_size)
        kind = getattr(valid_len, "dtype", type(valid_len))
        if not jnp.isscalar(valid_len) or not jnp.issubdtype(kind, jnp.integer):
            raise UserError(f"valid_len={shortened(repr(valid_len))} must be a single integer")
        known = not isinstance(valid_len, Tracer)
        if known and not 1 <= int(cast(int, valid_len)) <= seq_len:
            raise UserError(
                f"valid_len={valid_len} is not in 1 .. {seq_len}, the tokens of the sequence"
            )
        shape = 1, seq_len // block_size
        first, end = (np.full(shape, block, np.int32) for block in (0, shape[1]))
        tokens = np.full(shape, valid_len) if known else jnp.full(shape, valid_len)
        tokens = tokens.astype(np.int32)
        return cls(*cast(Any, (first, end, tokens)), block_size=block_size, packed=False)

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Integers], seq_len: int, block_size: int = 128
    ) -> "Documents":
        """Packs documents one after another, each padded to whole blocks; pads the end.

        Args:
            lengths: real tokens of each document of each sequence.
            seq_len: S, a multiple of the block size.
            block_size: tokens per block (g).

        Raises:
            UserError: if a document is empty, or the documents do not fit into the sequence.
        """
        _check_sizes(seq_len, block_size)
        rows = []
        for row, tokens in enumerate(lengths):
            tokens = _integers(f"lengths[{row}]", tokens)
            ends = np.cumsum(-(-tokens // block_size)) * block_size
            starts = np.append(0, ends)[:-1]
            rows.append(_blocks_of(starts, tokens, seq_len, block_size, "lengths"))
        return cls._from_rows(rows, seq_len, block_size)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Integers | Sequence[Integers],
        seq_len: int,
        block_size: int = 128,
        lengths: Integers | Sequence[Integers] | None = None,
    ) -> "Documents":
        """Builds documents from cumulative lengths.

        Args:
            cu_seqlens: integers [M + 1], starting with 0: start of each document, and end of the
                last one; or one such array per sequence. All but the last entry are multiples of
                the block size.
            seq_len: S, a multiple of the block size.
            block_size: tokens per block (g).
            lengths: integers [M], real tokens of each document, if documents are padded to whole
                blocks; or one such array per sequence. Defaults to the differences of
                `cu_seqlens`.

        Raises:
            UserError: if a boundary is invalid; the message names the first one.
        """
        _check_sizes(seq_len, block_size)
        if not isinstance(cu_seqlens, Sequence | np.ndarray | Array) or not len(cu_seqlens):
            raise UserError(
                f"cu_seqlens={cu_seqlens!r} must be the offsets of each document, from 0 on"
            )
        one = np.ndim(cu_seqlens[0]) == 0
        many = [cu_seqlens] if one else list(cu_seqlens)
        real = [None] * len(many) if lengths is None else [lengths] if one else list(lengths)
        if len(real) != len(many):
            raise UserError(
                f"lengths has {len(real)} sequences but cu_seqlens has {len(many)}; pass one array "
                "of each per sequence"
            )
        rows = []
        for row, (offsets, own) in enumerate(zip(many, real, strict=True)):
            offsets = _integers("cu_seqlens", offsets)
            if offsets.size < 1 or offsets[0] != 0:
                raise UserError(
                    f"cu_seqlens of sequence {row} begins with {offsets[:1].tolist()}; the first "
                    "entry must be 0"
                )
            distances = np.diff(offsets)
            if distances.size and distances.min() < 1:
                bad = int(np.argmin(distances > 0))
                raise UserError(
                    f"cu_seqlens[{bad + 1}] = {offsets[bad + 1]} of sequence {row} must be above "
                    f"cu_seqlens[{bad}] = {offsets[bad]}; entries ascend, and no document is empty"
                )
            own = distances if own is None else _integers("lengths", own)
            if own.shape != distances.shape or (own > distances).any():
                raise UserError(
                    f"lengths of sequence {row} are {own.tolist()}; expected one for each of the "
                    f"{distances.size} documents, at most {distances.tolist()}, the differences of "
                    "cu_seqlens"
                )
            name = f"cu_seqlens of sequence {row}"
            rows.append(_blocks_of(offsets[:-1], own, seq_len, block_size, name))
        return cls._from_rows(rows, seq_len, block_size)

    @classmethod
    def from_segment_ids(cls, segment_ids: ArrayLike, block_size: int = 128) -> "Documents":
        """Builds documents from a document number for each token.

        Args:
            segment_ids: integers [B, S] or [S], in sequence order, known at trace time: equal
                within a document, distinct for different documents, 0 for padding. The tokens of a
                document are contiguous and begin at a multiple of the block size.
            block_size: tokens per block (g).

        Raises:
            UserError: if a token is invalid; the message names the first one.
        """
        ids = _integers("segment_ids", segment_ids, axes=(1, 2))
        ids = ids[None] if ids.ndim == 1 else ids
        seq_len, rows = ids.shape[1], []
        _check_sizes(seq_len, block_size)
        if (ids < 0).any():
            row, token = np.argwhere(ids < 0)[0]
            raise UserError(
                f"segment_ids[{row}, {token}] = {ids[row, token]} is negative; number documents "
                "from 1, and use 0 for padding"
            )
        for row, own in enumerate(ids):
            # Starts of runs, and the end of the last one.
            edges = np.flatnonzero(np.diff(own, prepend=own[0] - 1, append=own[-1] + 1))
            starts, lengths = edges[:-1], np.diff(edges)
            real = own[starts] != 0
            starts, lengths = starts[real], lengths[real]
            names, first_time = np.unique(own[starts], return_index=True)
            if names.size < starts.size:
                again = int(np.setdiff1d(np.arange(starts.size), first_time)[0])
                raise UserError(
                    f"segment_ids[{row}, {starts[again]}] = {own[starts[again]]} appears a second "
                    "time; the tokens of a document must be contiguous"
                )
            name = f"segment_ids of sequence {row}"
            rows.append(_blocks_of(starts, lengths, seq_len, block_size, name))
        return cls._from_rows(rows, seq_len, block_size)

    @classmethod
    def _from_rows(cls, rows: list[np.ndarray], seq_len: int, block_size: int) -> "Documents":
        """Builds documents from the `_blocks_of` each sequence."""
        num_blocks = seq_len // block_size
        arrays = np.zeros((3, len(rows), num_blocks), np.int32)
        arrays[0] = num_blocks
        for row, (first, end, tokens) in enumerate(rows):
            count = end - first
            blocks = np.repeat(end - np.cumsum(count), count) + np.arange(count.sum())
            arrays[:, row, blocks] = np.repeat([first, end, tokens], count, axis=1)
        return cls(*cast(Any, arrays), block_size=block_size)

    @property
    def is_whole(self) -> bool:
        """Whether it is known at trace time that a sequence is one document without padding."""
        known = not self.packed and isinstance(self.tokens, np.ndarray)
        return known and int(self.tokens[0, 0]) == self.tokens.shape[1] * self.block_size

    @property
    def length(self) -> Array:
        """Number of blocks of each block's document, int32 [B, NB]; 0 without a document."""
        return (self.end - self.first).clip(min=0)

    def of(self, blocks: Array) -> "Documents":
        """Returns the entries of the given blocks, int32 [n]: arrays [B, n]."""
        if self.packed:
            return jax.tree.map(lambda x: jnp.asarray(x)[:, blocks], self)
        # Not a lookup, which would hide from the compiler that they are constants.
        return jax.tree.map(lambda x: jnp.broadcast_to(x[:, :1], (1, *blocks.shape)), self)

    def spans(self) -> tuple[Array, Array]:
        """Returns first and one past the last block of each block's document: NB and 0 for none."""
        return self.first, self.end

    def ends(self) -> Array:
        """Returns one past the document's last real token, int32 [B, NB]; 0 without a document."""
        size, length = self.block_size, self.length
        return jnp.where(length > 0, self.first * size + jnp.minimum(self.tokens, length * size), 0)

    def shorter_than(self, blocks: int) -> Array:
        """Whether the document of each block has fewer blocks, or it has none: bool [B, NB].

        Never if not packed: the caller selected a sparse pattern for the sequence.
        """
        return (self.length < blocks) & self.packed

    def contain(self, blocks: Array) -> Array:
        """Whether the document of each block contains each given block: bool [B, NB, C]."""
        return (blocks >= self.first[..., None]) & (blocks < self.end[..., None])

    def causal_blocks(self, rows: Array, num_blocks: int) -> Array:
        """Returns the blocks of each row's document up to the row, int32 [n]: uint32 [B, 1, n, w].

        Bits as in `BlockMaskIndex`.
        """
        return sets.ranges(self.of(rows).first, rows, num_blocks)[:, None]

    def causal_pairs(self) -> Array:
        """Counts the causal pairs within documents, including their padding: float [B, 1].

        Rounded, since it may exceed 2^31.
        """
        size, inside = self.block_size, self.length > 0
        blocks = jnp.arange(inside.shape[1], dtype=jnp.int32)
        whole = jnp.where(inside, blocks - self.first, 0).sum(-1, dtype=jnp.int32)
        cut = inside.sum(-1, dtype=jnp.int32)
        to_float = jnp.result_type(float)
        pairs = whole.astype(to_float) * size**2
        pairs += cut.astype(to_float) * (size * (size + 1) // 2)
        return pairs[:, None]

    def positions(self, blocks: Array) -> Array:
        """Returns the position in its document of each token of blocks int32 [n]: int32 [B, n g].

        0 without a document.
        """
        own = self.of(blocks)
        begins = (blocks[None] - own.first) * self.block_size
        within = begins[..., None] + jnp.arange(self.block_size, dtype=jnp.int32)
        return jnp.where(own.length[..., None] > 0, within, 0).reshape(len(within), -1)

    def lengths(self, blocks: Array) -> Array:
        """Returns the real tokens of the document of each token, as in `positions`."""
        return jnp.repeat(self.of(blocks).tokens, self.block_size, axis=1)


def _integers(name: str, x: Any, axes: tuple[int, ...] = (1,)) -> np.ndarray:
    if isinstance(x, Tracer):
        raise UserError(
            f"{name} is a traced array; its values must be known at trace time. Build Documents "
            "outside of jax.jit and pass them as an argument"
        )
    try:
        x = np.asarray(x)
    except ValueError:  # rows of different lengths
        x = np.asarray(x, object)
    if x.ndim not in axes or not (np.issubdtype(x.dtype, np.integer) or not x.size):
        wanted = " or ".join("1 axis" if n == 1 else f"{n} axes" for n in axes)
        raise UserError(f"{name} is {x.dtype} {list(x.shape)}; expected integers with {wanted}")
    return x.astype(np.int64)


def _check_sizes(seq_len: int, block_size: int) -> None:
    for name, value in (("block_size", block_size), ("seq_len", seq_len)):
        check_positive(name, value)
    if seq_len % block_size:
        raise UserError(f"seq_len={seq_len} must be a multiple of block_size={block_size}")


def check_positive(name: str, value: Any) -> None:
    """Raises a UserError if a number is not a positive integer."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise UserError(f"{name}={value!r} must be an integer, at least 1")


def _blocks_of(
    starts: np.ndarray, lengths: np.ndarray, seq_len: int, block_size: int, name: str
) -> np.ndarray:
    """Returns first block, one past the last block, and real tokens per document: int64 [3, M]."""
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
            f"{name}: document {bad} ends at token {starts[bad] + lengths[bad]}, beyond the "
            f"{seq_len} tokens of the sequence"
        )
    ends = -(-(starts + lengths) // block_size)
    return np.stack([starts // block_size, ends, lengths])
