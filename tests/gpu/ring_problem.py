"""The problem of the ring tests; as a script, one of several processes that compute it.

    python -m tests.gpu.ring_problem COORDINATOR NUM_PROCESSES PROCESS_ID FOLDER

Process i uses the i-th GPU and writes its shard of the output to FOLDER/i.npy.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, make_mesh
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from pallas_kernels import BlockMaskIndex, BlockSparseIndex, Index, VerticalSlashIndex
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size

SIZE = Size(1, 8, 2, 128, 128, block_size=128, dim=128)  # 16384 tokens
SEED, MAX_VERTICALS = 7, 800
BACKEND = "mosaic_gpu"
PATTERN = VerticalSlash(0.5, 4096, 100, block_size=SIZE.block_size)


@functools.cache
def inputs() -> list[np.ndarray]:
    """bf16 q, k, v and output gradient in sequence order."""
    return [np.asarray(x) for x in cases.qkv_dout(np.random.default_rng(SEED), SIZE, "bfloat16")]


def estimate_inputs() -> list[np.ndarray]:
    """q and k with large logits: a few columns, differently many per head, hold half the mass."""
    q, k = inputs()[:2]
    return [4 * q, k]


def sparse_index() -> VerticalSlashIndex:
    """Every kind of head, including empty and crowded ones."""
    rng = np.random.default_rng(SEED + 1)
    return cases.vertical_slash(
        rng, SIZE, max_slashes=SIZE.key_blocks, max_verticals=MAX_VERTICALS, garbage=rng
    )


def block_mask() -> np.ndarray:
    """A third of the blocks, with an empty head and empty rows."""
    rng = np.random.default_rng(SEED + 2)
    mask = rng.random((SIZE.batch, SIZE.heads, SIZE.query_blocks, SIZE.key_blocks)) < 1 / 3
    mask[:, 0], mask[:, 1, ::3] = False, False
    return mask


def block_index() -> BlockSparseIndex:
    """The lists of `block_mask`."""
    return BlockSparseIndex.from_block_mask(jnp.asarray(block_mask()), SIZE.block_size)


def mask_index() -> BlockMaskIndex:
    """The blocks of `block_mask` as bits, with columns: one head has only those, one has none."""
    tokens = np.random.default_rng(SEED + 3).integers(
        0, SIZE.seq_len, (SIZE.batch, SIZE.heads, MAX_VERTICALS)
    )
    tokens[:, 2] = SIZE.seq_len
    index = BlockMaskIndex.from_block_mask(jnp.asarray(block_mask()), SIZE.block_size)
    return index.with_columns(jnp.asarray(tokens, jnp.int32))


def dense_index() -> VerticalSlashIndex:
    """Every causal pair, with the capacities of the sparse index: the same program."""
    every = cases.every_diagonal(SIZE.batch, SIZE.heads, SIZE.seq_len, SIZE.block_size)
    tokens = jnp.full((SIZE.batch, SIZE.heads, MAX_VERTICALS), SIZE.seq_len, jnp.int32)
    return VerticalSlashIndex(
        every.slash_blocks,
        every.slash_count,
        tokens,
        jnp.zeros_like(every.vertical_count),
        SIZE.block_size,
    )


class Ring:
    """Attention with one mesh, layout and ring."""

    def __init__(self, layout: str, ring: str, nodes: int, devices: list[jax.Device]):
        """Uses all the devices, as `nodes` nodes."""
        ranks = len(devices)
        self.mesh: Mesh = make_mesh(1, nodes, ranks // nodes, devices)
        self.layout = Layout(
            layout, SIZE.seq_len, ranks, SIZE.block_size, 1 if ring == "flat" else nodes
        )
        self._attention = make_attention(
            self.mesh, self.layout, Dense(SIZE.block_size), ring=ring, backend=BACKEND
        )
        self._sharding = NamedSharding(self.mesh, HEADS)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, index: Index) -> jax.Array:
        return self._attention(q, k, v, AttentionInputs(index))[0]

    def lower_forward(self, index: Index) -> jax.stages.Lowered:
        """(q, k, v, index) -> out."""
        return self._lower(self._attend, 3, index)

    def lower_both(self, index: Index) -> jax.stages.Lowered:
        """(q, k, v, dout, index) -> out, dq, dk, dv."""

        def both(q, k, v, dout, index):
            out, vjp = jax.vjp(lambda q, k, v: self._attend(q, k, v, index), q, k, v)
            return out, *vjp(dout)

        return self._lower(both, 4, index)

    def arrays(self) -> list[jax.Array]:
        """q, k, v and dout in layout order; each process holds its part."""
        order = self.layout.permutation()
        parts = [functools.partial(_part, x, order) for x in inputs()]
        return [
            jax.make_array_from_callback(x.shape, self._sharding, part)
            for x, part in zip(inputs(), parts, strict=True)
        ]

    def replicated(self, index: Index) -> Index:
        """The index on every device."""
        everywhere = NamedSharding(self.mesh, P())
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, everywhere, np.asarray(x).__getitem__),
            index,
        )

    def _lower(self, f: Callable, heads: int, index) -> jax.stages.Lowered:
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding) for x in inputs()
        ][:heads]
        everywhere = NamedSharding(self.mesh, P())
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), index
        )
        options = ring_compiler_options(self.mesh.devices.flat[0].platform)
        return jax.jit(f, compiler_options=options).lower(*shapes, abstract)


def _part(x: np.ndarray, order: np.ndarray, at: tuple[slice, ...]) -> np.ndarray:
    return x[at[0], order[at[1]]]


def _main(coordinator: str, num_processes: int, process_id: int, folder: Path) -> None:
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=[process_id],
        initialization_timeout=60,
        heartbeat_timeout_seconds=30,
    )
    ring = Ring("striped", "hierarchical", 2, jax.devices())
    index = sparse_index()
    forward = ring.lower_forward(index).compile()
    out = forward(*ring.arrays()[:3], ring.replicated(index))
    (shard,) = out.addressable_shards
    # As bytes, since NumPy files do not support bf16.
    np.save(folder / f"{process_id}.npy", np.asarray(shard.data).view(np.uint16))
    jax.distributed.shutdown()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
