"""Distribution of a sequence's tokens over context-parallel ranks.

*Layout order* is all tokens of rank 0, then all of rank 1, and so on.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import nearest_multiples
from pallas_kernels.index import Segment

KINDS = ("striped", "zigzag", "contiguous")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Assignment and order of token blocks on the context-parallel ranks.

    Attributes:
        kind: "striped": rank r holds blocks p, p + W, p + 2W, ... with phase p (see `nodes`). Every
            block diagonal d then meets its keys at ring distance d mod W on every rank: equal work.
            "zigzag": the sequence is split into 2W chunks and rank r holds chunks r and 2W-1-r.
            Equal work for dense causal attention, but not for sparse.
            "contiguous": rank r holds the r-th of W chunks.
        seq_len: S, tokens of the whole sequence.
        num_ranks: W, the context-parallel size.
        block_size: g, tokens per block.
        nodes: N, for two-level rings; used by the striped layout only. Rank r is device r % L of
            node r // L with L = W/N, and its phase is device * N + node. In each step of a
            two-level ring, all devices of a node then meet diagonals of the same residues mod W.
            With N = 1 the phase is the rank, as the flat ring needs.

    Raises:
        UserError: if a field is invalid, or seq_len is not a multiple of W*g (2*W*g for zigzag);
            the message suggests valid lengths.
    """

    kind: str
    seq_len: int
    num_ranks: int
    block_size: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            allowed = ", ".join(KINDS)
            raise UserError(f"layout {self.kind!r} is unknown; it must be one of {allowed}")
        for field in ("seq_len", "num_ranks", "block_size", "nodes"):
            value = getattr(self, field)
            if not isinstance(value, int | np.integer) or value < 1:
                raise UserError(f"{field}={value!r} must be an integer, at least 1")
        if self.num_ranks % self.nodes:
            raise UserError(f"num_ranks={self.num_ranks} is not a multiple of nodes={self.nodes}")
        unit = self.num_ranks * self.block_size * (2 if self.kind == "zigzag" else 1)
        if self.seq_len % unit:
            factors = f"{self.num_ranks} ranks x block_size {self.block_size}"
            raise UserError(
                f"seq_len={self.seq_len} must be a multiple of {unit} for the {self.kind} layout "
                f"({'2 x ' if self.kind == 'zigzag' else ''}{factors}); nearest: "
                f"{nearest_multiples(self.seq_len, unit)}"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence, S / g."""
        return self.seq_len // self.block_size

    @property
    def local_blocks(self) -> int:
        """Number of blocks per rank."""
        return self.num_blocks // self.num_ranks

    def segments(self, rank: int | Array) -> tuple[Segment, ...]:
        """Returns the local blocks of `rank` in order; their starts are traced if `rank` is."""
        count = self.local_blocks
        if self.kind == "striped":
            devices = self.num_ranks // self.nodes
            phase = rank % devices * self.nodes + rank // devices
            return (Segment(phase, self.num_ranks, count),)
        if self.kind == "zigzag":
            half = count // 2
            mirror = 2 * self.num_ranks - 1 - rank
            return (Segment(rank * half, 1, half), Segment(mirror * half, 1, half))
        return (Segment(rank * count, 1, count),)

    def block_ids(self, rank: int | Array) -> Array:
        """Returns the global number of each local block of `rank`: int32 [S / (W*g)]."""
        return jnp.concatenate([segment.blocks() for segment in self.segments(rank)])

    def local_positions(self, tokens: Array, rank: int | Array) -> Array:
        """Maps global positions, int32, to positions in the shard of `rank`; -1 elsewhere."""
        block, within = tokens // self.block_size, tokens % self.block_size
        local = jnp.full_like(tokens, -1)
        before = 0
        for segment in self.segments(rank):
            distance = block - segment.first_block
            row = distance // segment.stride
            mine = (distance % segment.stride == 0) & (row >= 0) & (row < segment.num_blocks)
            local = jnp.where(mine, (before + row) * self.block_size + within, local)
            before += segment.num_blocks
        return local

    def gathered_positions(self, tokens: Array, ranks: Array) -> Array:
        """Maps global positions to those in the joined shards of `ranks`, int32 [n]; or -1."""
        size = self.local_blocks * self.block_size
        gathered = jnp.full_like(tokens, -1)
        for number in range(ranks.shape[0]):
            local = self.local_positions(tokens, ranks[number])
            gathered = jnp.where(local >= 0, number * size + local, gathered)
        return gathered

    def block_order(self) -> np.ndarray:
        """Returns the global number of each block in layout order: int64 [S / g]."""
        blocks = [
            segment.first_block + segment.stride * np.arange(segment.num_blocks)
            for rank in range(self.num_ranks)
            for segment in self.segments(rank)
        ]
        return np.concatenate(blocks).astype(np.int64)

    def permutation(self) -> np.ndarray:
        """Returns the position of each token in layout order: int64 [S], `x_layout = x[perm]`."""
        tokens = np.arange(self.seq_len).reshape(self.num_blocks, self.block_size)
        return tokens[self.block_order()].reshape(-1)

    def inverse(self) -> np.ndarray:
        """Returns the layout index of each position: int64 [S], `x = x_layout[inverse]`."""
        return np.argsort(self.permutation())
