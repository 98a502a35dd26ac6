"""Programs that the attention benchmark compiles and times: mtraining-jax and cuDNN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import pallas_kernels
from benchmarks.kernels.masks import BLOCK, SlashMask, padded
from benchmarks.kernels.rows import Shape
from mtraining_jax.attention.sharded import select_index
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from pallas_kernels import DenseIndex, Index, Plan, VerticalSlashIndex

HEADS = {128: (16, 2), 64: (14, 2)}  # query and key/value heads by head dim
ALL_HEADS = HEADS | {192: (8, 4), 256: (8, 4)}  # with those that only the Hopper kernels have
PATTERN = VerticalSlash(top_p=0.9, max_verticals=4096, max_slashes=4096)


def select(q: Array, k: Array, backend: str | None = None) -> VerticalSlashIndex:
    """Selects an index as a training step does."""
    num_blocks = q.shape[1] // BLOCK
    block_ids = jnp.arange(num_blocks, dtype=jnp.int32)
    return select_index(q, k, PATTERN, block_ids=block_ids, num_blocks=num_blocks, backend=backend)


class Attention:
    """One attention call of mtraining-jax in parts: build, forward, backward.

    An index of None is dense causal attention.
    """

    def __init__(self, backend: str | None):
        """Uses a backend of `pallas_kernels`; None is the best one here."""
        self.backend = backend

    def build(self, q: Array, k: Array, v: Array, index: Index | None) -> tuple[Plan, Any]:
        """Everything that the kernels of both passes read, other than q, k, v and dout."""
        tiles, columns = _or_dense(index).on_one_device(*q.shape[:3], k.shape[1])
        plan = pallas_kernels.plan(q, k, tiles, columns, single_call=True, backend=self.backend)
        if columns is None:
            return plan, None
        return plan, tuple(pallas_kernels.gather_columns(x, columns.tokens) for x in (k, v))

    def forward(self, q: Array, k: Array, v: Array, built: Any) -> tuple[Array, Array]:
        """Output and lse."""
        return pallas_kernels.forward(q, k, v, *built)

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array, built: Any
    ) -> tuple[Array, Array, Array]:
        """Gradients of q, k and v in their dtype, with those of gathered columns added."""
        delta = pallas_kernels.delta_of(out, dout, backend=self.backend)
        grads = pallas_kernels.backward(
            q, k, v, dout, lse, delta, *built, dq_dtype=q.dtype, key_dtype=k.dtype
        )
        return grads.dq, grads.dk, grads.dv

    def attention(self, q: Array, k: Array, v: Array, index: Index | None) -> Array:
        """The whole call, through the public function."""
        return pallas_kernels.attention(q, k, v, _or_dense(index), backend=self.backend)

    def together(self, q: Array, k: Array, v: Array, dout: Array, index: Index | None) -> Any:
        """What a layer does in a training step: select an index, then output and gradients.

        The selected index is only returned; `index` is computed, so that its density is known.
        """
        selected = select(q, k, self.backend) if isinstance(index, VerticalSlashIndex) else None
        out, vjp = jax.vjp(lambda q, k, v: self.attention(q, k, v, index), q, k, v)
        return selected, out, *vjp(dout)


def _or_dense(index: Index | None) -> Index:
    return DenseIndex(BLOCK) if index is None else index


def cudnn_attention(q: Array, k: Array, v: Array) -> Array:
    """The causal attention of cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def index_of(mask: SlashMask, max_slashes: int, max_verticals: int) -> VerticalSlashIndex:
    """An index of batch 1 with the given capacities."""
    seq_len = mask.num_blocks * BLOCK
    arrays = []
    for lists, capacity, padding in (
        (mask.diagonals, max_slashes, mask.num_blocks), (mask.verticals, max_verticals, seq_len),
    ):  # fmt: skip
        arrays.append(jnp.asarray(padded(lists, capacity, padding)[None]))
        arrays.append(jnp.asarray([[len(x) for x in lists]], jnp.int32))
    return VerticalSlashIndex(*arrays, BLOCK, mask.num_blocks)


def index_like(mask: SlashMask, index: VerticalSlashIndex) -> VerticalSlashIndex:
    """An index of a mask with the capacities of another index."""
    return index_of(mask, index.slash_blocks.shape[-1], index.vertical_tokens.shape[-1])


def abstract_inputs(shape: Shape) -> list[jax.ShapeDtypeStruct]:
    """Shapes of q, k, v and dout."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return [jax.ShapeDtypeStruct((1, shape.seq_len, n, shape.dim), jnp.bfloat16) for n in heads]


def random_inputs(key: Array, shape: Shape) -> list[Array]:
    """Normal bf16 q, k, v and output gradient of batch 1."""
    keys = jax.random.split(key, 4)
    return [_normal(k, x.shape[1:]) for k, x in zip(keys, abstract_inputs(shape), strict=True)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], pieces: int = 16) -> Array:
    """Drawn in pieces, so that drawing takes less memory than what is measured."""
    piece = (shape[0] // pieces, *shape[1:])
    keys = jax.random.split(key, pieces)
    drawn = jax.lax.map(lambda k: jax.random.normal(k, piece, jnp.bfloat16), keys)
    return drawn.reshape(1, *shape)
