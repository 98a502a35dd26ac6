"""Sparse indices: which (query, key) pairs of an attention matrix are computed.

Both classes are pytrees, so they pass through `jax.jit`, `shard_map` and `lax.scan`. Capacities
(array shapes) are static, counts are data: one compilation serves every step, and the time a
kernel takes follows the counts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slash_blocks", "slash_count", "vertical_tokens", "vertical_count"],
    meta_fields=["block_size"],
)
@dataclasses.dataclass(frozen=True)
class VerticalSlashIndex:
    """Block diagonals and key columns, per batch entry and query head.

    With g = `block_size` and global token positions q, k, a pair is computed iff `k <= q` and
    (`q//g - k//g` is one of the slash blocks, or `k` is one of the vertical tokens). It is a
    union: a pair that is in both counts once.

    Attributes:
        slash_blocks: int32 [B, Hq, max_slash_blocks], block-diagonal distances, ascending;
            entries at and beyond the count are padding (any value >= S/g).
        slash_count: int32 [B, Hq].
        vertical_tokens: int32 [B, Hq, max_verticals], global key positions, ascending; entries
            at and beyond the count are padding (S or more).
        vertical_count: int32 [B, Hq].
        block_size: g, tokens on one side of a block (static).
    """

    slash_blocks: Array
    slash_count: Array
    vertical_tokens: Array
    vertical_count: Array
    block_size: int

    @classmethod
    def dense(
        cls, batch: int, num_heads: int, seq_len: int, block_size: int
    ) -> "VerticalSlashIndex":
        """The index that computes every causal pair: all block diagonals, no verticals.

        Raises:
            ValueError: if `seq_len` is not a multiple of `block_size`.
        """
        if seq_len % block_size:
            raise ValueError(
                f"seq_len={seq_len} is not a multiple of block_size={block_size}"
            )
        num_blocks = seq_len // block_size
        shape = (batch, num_heads)
        return cls(
            slash_blocks=jnp.broadcast_to(
                jnp.arange(num_blocks, dtype=jnp.int32), (*shape, num_blocks)
            ),
            slash_count=jnp.full(shape, num_blocks, jnp.int32),
            vertical_tokens=jnp.zeros((*shape, 0), jnp.int32),
            vertical_count=jnp.zeros(shape, jnp.int32),
            block_size=block_size,
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_blocks", "key_count", "query_blocks", "query_count"],
    meta_fields=["block_size", "causal"],
)
@dataclasses.dataclass(frozen=True)
class BlockSparseIndex:
    """Lists of key blocks per query block, with their transpose, for patterns of any shape.

    A pair (q, k) is computed iff `k//g` is listed for `q//g` and (`k <= q` or not `causal`).
    A block is listed at most once per row; lists are ascending. With `causal`, no listed block
    lies wholly above the diagonal. Entries at and beyond a count are padding of any value.

    Attributes:
        key_blocks: int32 [B, Hq, Sq/g, max_row], key blocks of each query block.
        key_count: int32 [B, Hq, Sq/g].
        query_blocks: int32 [B, Hq, Sk/g, max_col], query blocks of each key block (the
            transpose, used for dk and dv).
        query_count: int32 [B, Hq, Sk/g].
        block_size: g (static).
        causal: whether the element mask `k <= q` applies (static).
    """

    key_blocks: Array
    key_count: Array
    query_blocks: Array
    query_count: Array
    block_size: int
    causal: bool = True

    @classmethod
    def from_block_mask(
        cls, mask: Array, block_size: int, causal: bool = True
    ) -> "BlockSparseIndex":
        """Builds the lists and their transpose from a boolean block mask.

        Args:
            mask: bool [B, Hq, Sq/g, Sk/g]; blocks wholly above the diagonal are dropped when
                `causal`.
            block_size: g.
            causal: whether pairs with k > q are excluded.
        """
        if causal:
            rows = jnp.arange(mask.shape[-2])[:, None]
            mask = mask & (jnp.arange(mask.shape[-1])[None, :] <= rows)
        key_blocks, key_count = _compact(mask)
        query_blocks, query_count = _compact(jnp.swapaxes(mask, -1, -2))
        return cls(key_blocks, key_count, query_blocks, query_count, block_size, causal)


def _compact(mask: Array) -> tuple[Array, Array]:
    """Positions of the true entries of the last axis, ascending, padded with its length."""
    size = mask.shape[-1]
    positions = jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.sort(positions, axis=-1), mask.sum(-1, dtype=jnp.int32)
