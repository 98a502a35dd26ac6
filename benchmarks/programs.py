"""The programs that the attention benchmark compiles and times: ours and cuDNN's."""

import contextlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array

import pallas_kernels
from benchmarks.masks import BLOCK
from mtraining_jax.sparsity import VerticalSlash, choose_index
from pallas_kernels import BlockSparseIndex, DiagonalTiles, VerticalSlashIndex
from pallas_kernels.backends import resolve
from pallas_kernels.mosaic_gpu import backend as hopper
from pallas_kernels.mosaic_gpu.configs import configs_for
from pallas_kernels.mosaic_gpu.schedule import key_work, query_work

PATTERN = VerticalSlash(top_p=0.9, max_verticals=4096, max_slashes=4096)
Index = VerticalSlashIndex | BlockSparseIndex | None  # None: dense causal


def choose(q: Array, k: Array, backend: str | None = None) -> VerticalSlashIndex:
    """Chooses an index as a training step does."""
    num_blocks = q.shape[1] // BLOCK
    block_ids = jnp.arange(num_blocks, dtype=jnp.int32)
    return choose_index(
        q, k, PATTERN, block_ids=block_ids, num_blocks=num_blocks, backend=backend
    )


class Ours:
    """One attention call of ours in parts: build, forward, backward."""

    def __init__(self, backend: str | None):
        """Runs on a backend of `pallas_kernels`; None is the best one here."""
        self.backend = backend

    def build(self, q: Array, k: Array, v: Array, index: Index) -> Any:
        """Everything that the kernels of both passes read beside q, k, v and dout."""
        heads, blocks, columns = q.shape[2], q.shape[1] // BLOCK, None
        if index is None:
            tiles = DiagonalTiles.full(q.shape[0], heads, blocks, blocks, BLOCK, True)
        elif isinstance(index, BlockSparseIndex):
            tiles = index
        else:
            tiles = DiagonalTiles.from_index(index)
            tokens = pallas_kernels.pad_columns(index)
            columns = pallas_kernels.vertical_columns(
                index, pallas_kernels.gather_columns(k, tokens),
                pallas_kernels.gather_columns(v, tokens),
                jnp.arange(blocks, dtype=jnp.int32), blocks,
            )
        lists = None
        if resolve(self.backend, q, BLOCK) is hopper:
            lists = work_lists(tiles, columns, q, k)
        return tiles, columns, lists

    def forward(self, q: Array, k: Array, v: Array, built: Any) -> tuple[Array, Array]:
        """Output and lse."""
        tiles, columns, lists = built
        with given_lists(lists):
            return pallas_kernels.forward(q, k, v, tiles, columns, backend=self.backend)

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array, built: Any
    ) -> tuple[Array, Array, Array]:
        """Gradients of q, k and v in their dtype, those of columns added where they belong."""
        tiles, columns, lists = built
        delta = pallas_kernels.delta_of(out, dout)
        with given_lists(lists):
            grads = pallas_kernels.backward(
                q, k, v, dout, lse, delta, tiles, columns, dq_dtype=q.dtype, key_dtype=k.dtype,
                backend=self.backend,
            )
        return grads.dq, grads.dk, grads.dv

    def attention(self, q: Array, k: Array, v: Array, index: Index) -> Array:
        """The whole call, through the public function."""
        if index is None:
            return pallas_kernels.dense_attention(q, k, v, backend=self.backend)
        if isinstance(index, BlockSparseIndex):
            return pallas_kernels.block_sparse_attention(q, k, v, index, backend=self.backend)
        return pallas_kernels.vertical_slash_attention(q, k, v, index, backend=self.backend)

    def together(self, q: Array, k: Array, v: Array, dout: Array, index: Index) -> Any:
        """What a layer does in a training step: choose an index, then output and gradients.

        The chosen index is only returned; `index` is computed, so that its density is known.
        """
        chosen = choose(q, k, self.backend) if isinstance(index, VerticalSlashIndex) else None
        out, vjp = jax.vjp(lambda q, k, v: self.attention(q, k, v, index), q, k, v)
        return chosen, out, *vjp(dout)


def work_lists(tiles: Any, columns: Any, q: Array, k: Array) -> dict[str, Any]:
    """What the Hopper kernels read, by the function that gives it; only shapes of q, k matter.

    Lists of a forward kernel and of two backward kernels, or of the one that does their work.
    """
    sizes = (q.shape[0], q.shape[2], q.shape[1] // BLOCK, k.shape[1] // BLOCK, k.shape[2])
    lists = {"query_work": query_work(tiles, columns, *sizes)}
    config = hopper.fused_config(q, tiles, configs_for(q.shape[-1]), whole=True)
    if config is None:
        return lists | {"key_work": key_work(tiles, columns, *sizes)}
    work = hopper.fused_work(tiles, columns, *sizes, config=config)
    return lists | {"fused_work": work}


@contextlib.contextmanager
def given_lists(lists: dict[str, Any] | None):
    """Calls of the Hopper backend take these work lists and build none of their kind."""
    if not lists:
        yield
        return
    given = {name: lambda *_, work=work, **__: work for name, work in lists.items()}
    with mock.patch.multiple(hopper, **given):
        yield


def cudnn_attention(q: Array, k: Array, v: Array) -> Array:
    """cuDNN's causal attention."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def cudnn_forward(q: Array, k: Array, v: Array) -> Any:
    """cuDNN's causal attention: the output, and the function that gives gradients."""
    return jax.vjp(cudnn_attention, q, k, v)


def cudnn_backward(vjp: Any, dout: Array) -> tuple[Array, Array, Array]:
    """Gradients of q, k, v from what `cudnn_forward` gave."""
    return vjp(dout)


def random_inputs(key: Array, seq_len: int, heads: int, kv_heads: int, dim: int) -> list[Array]:
    """Normal bf16 q, k, v and output gradient of batch 1."""
    shapes = [(seq_len, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [_normal(k, s) for k, s in zip(jax.random.split(key, 4), shapes, strict=True)]


def _normal(key: Array, shape: tuple[int, ...], pieces: int = 16) -> Array:
    """Drawn in pieces, so that drawing takes less memory than what is measured."""
    keys = jax.random.split(key, pieces)
    piece = (shape[0] // pieces, *shape[1:])
    draw = jax.jit(
        lambda keys: jax.lax.map(lambda k: jax.random.normal(k, piece, jnp.bfloat16), keys)
    )
    return draw(keys).reshape(1, *shape)
