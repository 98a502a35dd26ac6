"""Checks of the estimate on a GPU, for any backend with kernels for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import estimate
from pallas_kernels import backends
from pallas_kernels.interface import ProbeCall
from tests.patterns import inputs

# batch, seq_len, q heads, kv heads, head_dim, dtype
SHAPES = [(1, 16384, 16, 2, 128, jnp.bfloat16), (2, 4096, 7, 1, 64, jnp.float16)]
BLOCK, LAST_Q = 128, 64


@functools.partial(jax.jit, static_argnames="backend")
def _scores(q, k, backend, valid_len=None):
    num_blocks = q.shape[1] // BLOCK
    end = q.shape[1] if valid_len is None else valid_len
    last = jax.lax.dynamic_slice_in_dim(q, end - LAST_Q, LAST_Q, 1)[:, None].swapaxes(2, 3)
    documents = None if valid_len is None else Documents.padded(valid_len, q.shape[1], BLOCK)
    context = SelectionContext(
        jnp.arange(num_blocks), num_blocks, backend=backend, documents=documents
    )
    columns, *diagonals = estimate.softmax_scores(last, k, context)
    return columns, estimate.join_diagonals(*diagonals)


def check_scores(backend: str, shape: tuple) -> None:
    """Compares scores of columns and diagonals with XLA.

    Args:
        backend: name of the backend.
        shape: one of `SHAPES`.
    """
    q, k = inputs.random(0, *shape)
    for got, want in zip(_scores(q, k, backend), _scores(q, k, "xla"), strict=True):
        got, want = (np.asarray(x, np.float64) / 2**30 for x in (got, want))
        # Units of 2^-30. XLA rounds every term (half a unit on average over the queries) and then
        # the mean down (one), the kernels only the mean (half a unit). A diagonal is the sum of two
        # such parts.
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=4 * 2.0**-30)
        np.testing.assert_allclose(got.sum((2, 3)), 1, rtol=1e-4)


def check_scores_before_padding(backend: str, valid_len: int) -> None:
    """Compares scores if the last queries precede padding; `valid_len` of 4096 tokens are valid."""
    q, k = inputs.random(3, *SHAPES[1])
    k = k.at[:, valid_len:].mul(100)  # would attract all the mass
    found = (_scores(q, k, name, jnp.int32(valid_len)) for name in (backend, "xla"))
    for got, want in zip(*found, strict=True):
        got, want = (np.asarray(x, np.float64) / 2**30 for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=4 * 2.0**-30)
        np.testing.assert_allclose(got.sum((2, 3)), 1, rtol=1e-4)
        assert not got.reshape(*got.shape[:2], -1)[..., valid_len:].any()


def check_bits_of_ranks(backend: str, shape: tuple) -> None:
    """Checks that tiles are bit-identical on every rank of every layout."""
    q, k = inputs.random(1, *shape)
    num_blocks = shape[1] // BLOCK
    kernels = backends.named(backend).estimate

    def call(*where):
        return ProbeCall(*where, num_blocks, shape[4] ** -0.5)

    statistics = jax.jit(lambda *where: kernels.block_statistics(call(*where)))
    masses = jax.jit(lambda *where, **rows: kernels.block_masses(call(*where), **rows))
    queries = q[:, -LAST_Q:].transpose(0, 2, 1, 3)
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    whole = statistics(queries, k, ids)
    rows = dict(peak=whole[0].max(2), to_mass=1 / whole[1].sum(2))
    whole += masses(queries, k, ids, **rows)
    blocks = k.reshape(shape[0], num_blocks, BLOCK, *k.shape[2:])
    for kind in ("striped", "zigzag"):
        for ranks in (2, 8):
            layout = Layout(kind, shape[1], ranks, BLOCK)
            for rank in range(ranks):
                ids = np.asarray(layout.block_ids(rank))
                local = blocks[:, ids].reshape(shape[0], -1, *k.shape[2:])
                ids = jnp.asarray(ids, jnp.int32)
                got = statistics(queries, local, ids) + masses(queries, local, ids, **rows)
                for x, expected in zip(got, whole, strict=True):
                    np.testing.assert_array_equal(x, expected[:, :, ids])


def check_order_of_blocks(backend: str) -> None:
    """Checks that the selected index does not depend on the order of blocks."""
    q, k = inputs.random(2, *SHAPES[0])
    seq_len = SHAPES[0][1]
    layout = Layout("zigzag", seq_len, 8, BLOCK)
    pattern = VerticalSlash(0.5, 8192, 100)

    @jax.jit
    def select(q, k, block_ids):
        return select_index(
            q, k, pattern, block_ids=block_ids, num_blocks=seq_len // BLOCK, backend=backend
        )

    expected = select(q, k, jnp.arange(seq_len // BLOCK))
    order = layout.permutation()
    got = select(q[:, order], k[:, order], jnp.asarray(order[::BLOCK] // BLOCK, jnp.int32))
    for count in (expected.vertical_count, expected.slash_count):
        assert len(set(np.asarray(count).ravel().tolist())) > 2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
