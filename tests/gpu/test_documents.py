"""Packed documents with the Hopper kernels: against the oracle, alone, and on eight ranks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import Dense, Documents, FixedBudget, VerticalSlash, sparse_attention
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.block_topk import BlockTopK
from mtraining_jax.patterns.budgets import MInference
from mtraining_jax.patterns.flex_prefill import FlexPrefill
from mtraining_jax.patterns.moba import MoBA
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.context import SelectionContext
from pallas_kernels.index import BlockMaskIndex
from tests.gpu.ring_errors import own_device
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.expected import compare, compare_lse, oracle

BLOCK, NUM_BLOCKS, BACKEND = 128, 32, "mosaic_gpu"
SIZE = Size(1, 4, 2, NUM_BLOCKS, NUM_BLOCKS, block_size=BLOCK, dim=128)
# One token, a block, a block and a token, short and long ones, at odd blocks; then padding.
LENGTHS = [1, 128, 129, 600, 1700, 900]
DENSE_BELOW = 1000
PATTERNS = [
    SampledRows(tau=0.6, min_sparse_tokens=DENSE_BELOW),
    XAttention(tau=0.6, min_sparse_tokens=DENSE_BELOW),
    Dense(),
    SampledRows(tau=0.6, columns=100, min_sparse_tokens=DENSE_BELOW),
    BlockTopK(top_blocks=4),
    MoBA(chunk_size=256, top_k=3),
    FlexPrefill(gamma=0.5, min_budget=256, min_sparse_tokens=DENSE_BELOW),
]  # fmt: skip
VERTICAL_SLASH = [
    VerticalSlash(top_p=0.6, max_slashes=4, min_slashes=1, min_sparse_tokens=DENSE_BELOW)
]
NUMBERS = [np.array(own, np.int32) for own in ((40, 0, 100, 200), (4, 8, 100, 0))]
BUDGETS = [
    FixedBudget(*NUMBERS, max_verticals=200, max_slashes=100, min_sparse_tokens=DENSE_BELOW),
    MInference(
        *NUMBERS, sinks=np.full(4, 30, np.int32), windows=np.full(4, 100, np.int32),
        max_verticals=200, max_slashes=100, max_sinks=30, min_sparse_tokens=DENSE_BELOW,
    ),
]  # fmt: skip
EVERY = [*PATTERNS, *VERTICAL_SLASH, *BUDGETS]


@functools.cache
def inputs():
    """q, k, v and dout with large logits, so that few blocks hold most of the mass."""
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(0), SIZE, "bfloat16")
    return 4 * q, k, v, dout


def spans():
    padded = [-(-n // BLOCK) for n in LENGTHS]
    return list(zip(np.cumsum([0, *padded[:-1]]).tolist(), padded, strict=True))


def blocks_of(index):
    """Bool [Hq, NB, NB]: the blocks that rows of the only sequence see, without columns."""
    if isinstance(index, BlockMaskIndex):
        index = dataclasses.replace(index, column_marks=None)
    every = jnp.arange(NUM_BLOCKS)
    return np.tril(np.asarray(index.computes(every * BLOCK, every))[0, ..., 0])


@functools.partial(jax.jit, static_argnums=0)
def run(number, q, k, v, dout, documents):
    """Runs a pattern of `EVERY`; patterns with arrays could not be static arguments."""
    pattern = EVERY[number]

    def results(q, k, v):
        return sparse_attention(
            q, k, v, pattern=pattern, documents=documents, backend=BACKEND, return_residuals=True
        )

    out, pullback, (lse, index) = jax.vjp(results, q, k, v, has_aux=True)
    return {"out": out, **dict(zip(("dq", "dk", "dv"), pullback(dout), strict=True))}, lse, index


@functools.partial(jax.jit, static_argnums=0)
def select(number, q, k, documents):
    context = SelectionContext(
        jnp.arange(NUM_BLOCKS), NUM_BLOCKS, backend=BACKEND, documents=documents
    )
    return EVERY[number].select(q, k, context).index


def name(number):
    pattern = EVERY[number]
    return f"{type(pattern).__name__}-{getattr(pattern, 'preset', '')}"


@pytest.mark.parametrize("number", range(len(EVERY)), ids=name)
def test_a_pack_is_correct_and_selects_the_same_as_each_document_alone(number):
    with jax.default_device(own_device()):
        q, k, v, dout = inputs()
        documents = Documents.from_lengths([LENGTHS], SIZE.seq_len, BLOCK)
        found, lse, index = run(number, q, k, v, dout, documents)
        mask = np.asarray(index.to_mask(SIZE.seq_len))
        expected = oracle(q, k, v, dout, mask)
        for name, x in found.items():
            compare(name, x, expected[name], jnp.bfloat16)
        compare_lse(lse, expected["lse"])
        bits = blocks_of(index)
        wanted, pairs = np.zeros_like(bits), np.zeros_like(mask)
        for (start, size), length in zip(spans(), LENGTHS, strict=True):
            own = [jnp.roll(x, -start * BLOCK, 1) for x in (q, k)]
            alone = Documents.from_lengths([[length]], SIZE.seq_len, BLOCK)
            alone = select(number, *own, alone)
            computed = np.asarray(alone.to_mask(SIZE.seq_len))
            alone = blocks_of(alone)
            assert not alone[:, size:].any()
            at = slice(start, start + size)
            wanted[:, at, at] = alone[:, :size, :size]
            tokens, to = slice(start * BLOCK, (start + size) * BLOCK), size * BLOCK
            pairs[:, :, tokens, tokens] = computed[:, :, :to, :to]
        np.testing.assert_array_equal(bits, wanted)
        np.testing.assert_array_equal(mask, pairs)  # including columns
        whole = sum(size * (size + 1) // 2 for _, size in spans())
        assert isinstance(EVERY[number], Dense) == (bits.sum((1, 2)) == whole).all()


@pytest.mark.parametrize(
    "number", [0, *(len(PATTERNS) - n for n in (2, 1, 0)), len(EVERY) - 2], ids=name
)
def test_eight_ranks_select_the_rows_of_one(number):
    layout = Layout("striped", SIZE.seq_len, 8, BLOCK)
    rows = np.stack([layout.block_ids(rank) for rank in range(8)]).astype(np.int32)
    with jax.default_device(own_device()):
        q, k = inputs()[:2]
        documents = Documents.from_lengths([LENGTHS], SIZE.seq_len, BLOCK)
        one = jax.tree.leaves(select(number, q, k, documents))

        def on_rank(q, k, block_ids):
            context = SelectionContext(
                block_ids, NUM_BLOCKS, ("device",), backend=BACKEND, documents=documents
            )
            return EVERY[number].select(q, k, context).index

        blocks = [x.reshape(1, NUM_BLOCKS, BLOCK, *x.shape[2:]) for x in (q, k)]
        per_rank = [jnp.moveaxis(x[:, rows], 1, 0) for x in blocks]
        per_rank = [x.reshape(8, 1, -1, *x.shape[4:]) for x in per_rank]
        many = jax.jit(jax.vmap(on_rank, axis_name="device"))(*per_rank, rows)
        for found, whole in zip(jax.tree.leaves(many), one, strict=True):
            for rank in range(8):
                np.testing.assert_array_equal(found[rank], np.asarray(whole)[:, :, rows[rank]])
