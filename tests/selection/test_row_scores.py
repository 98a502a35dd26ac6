"""Scores of row patterns against their definitions in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mtraining_jax.documents import Documents
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores.row_scores import rows_at_once
from pallas_kernels import backends
from pallas_kernels.fp8_scores import WEIGHT_BLOCKS, Fp8Scores
from pallas_kernels.masses import ScoreTiles
from pallas_kernels.mosaic_gpu.kernels.fp8_scores import HopperFp8Scores
from tests.patterns import inputs, oracle

BLOCK, NUM_BLOCKS, DIM = 16, 8, 16
SEQ_LEN = BLOCK * NUM_BLOCKS


def antidiagonals(q, k, stride):
    """XAttention's logits of one head, fp64 [S/s, S/s]."""
    n = SEQ_LEN // stride
    q, k = (x.reshape(n, stride, DIM) for x in (q, k))
    x = np.einsum("aid,bid->ab", q[:, ::-1], k) / (DIM**0.5 * stride)
    return np.where(np.tri(n, dtype=bool), x, -np.inf)


def wanted(pattern, q, k):
    """Scores of one head: means over a block's rows of softmax masses of blocks."""
    if isinstance(pattern, XAttention):
        weights = oracle.softmax(antidiagonals(q, k, pattern.stride))
    else:
        logits = np.where(np.tri(SEQ_LEN, dtype=bool), q @ k.T / DIM**0.5, -np.inf)
        weights = oracle.softmax(logits)
        if pattern.probe_queries_per_block < BLOCK:
            assert pattern.probe_queries_per_block == 3
            places = np.arange(NUM_BLOCKS)[:, None] * BLOCK + np.array([4, 9, 15])
            weights = weights[places.reshape(-1)]
    rows = len(weights) // NUM_BLOCKS
    blocks = weights.reshape(NUM_BLOCKS, rows, NUM_BLOCKS, -1)
    return blocks.sum(-1).mean(1)


@pytest.mark.parametrize(
    "pattern",
    [
        XAttention(stride=4, block_size=BLOCK),
        SampledRows(probe_queries_per_block=BLOCK, block_size=BLOCK),
        SampledRows(probe_queries_per_block=3, block_size=BLOCK),
    ],
)
def test_scores_match_the_definition(pattern):
    q, k = inputs.random(0, 2, SEQ_LEN, 3, 1, DIM)
    rows = jnp.array([6, 1, 3], jnp.int32)  # rows of a rank, in any order
    own = q.reshape(2, NUM_BLOCKS, BLOCK, 3, DIM)[:, rows].reshape(2, -1, 3, DIM)
    context = SelectionContext(rows, NUM_BLOCKS)
    found = np.asarray(jax.jit(lambda q, k: pattern.scores(q, k, context))(own, k))
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    for b, h in np.ndindex(2, 3):
        expected = wanted(pattern, q[b, :, h], k[b, :, 0])[np.asarray(rows)]
        np.testing.assert_allclose(found[b, h], expected, atol=2e-6)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


def test_the_scores_of_a_row_are_independent_of_other_rows_on_its_rank():
    num_blocks, size = 128, 8  # two rows of blocks at a time
    assert rows_at_once(1, 2, 1, num_blocks, 1) == 2
    q, k = inputs.random(0, 1, num_blocks * size, 2, 1, DIM, jnp.bfloat16)

    @jax.jit
    def scores(q, k, rows):
        return XAttention(stride=8, block_size=size).scores(
            q, k, SelectionContext(rows, num_blocks)
        )

    rows = np.arange(1, num_blocks, 4)[:-1]  # 31: the last step has one row and padding
    own = q.reshape(1, num_blocks, size, 2, DIM)[:, rows].reshape(1, -1, 2, DIM)
    whole = scores(q, k, jnp.arange(num_blocks))
    np.testing.assert_array_equal(scores(own, k, jnp.asarray(rows)), whole[:, :, rows])


def test_the_samples_of_a_block_with_padding_are_real_queries():
    q, k = inputs.random(0, 1, SEQ_LEN, 1, 1, DIM)
    pattern = SampledRows(probe_queries_per_block=3, block_size=BLOCK)

    @jax.jit
    def of_block_five(valid_len):
        documents = Documents.padded(valid_len, SEQ_LEN, BLOCK)
        context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)
        return pattern.scores(q, k, context)[0, 0, 5]

    logits = np.asarray(q, np.float64)[0, :, 0] @ np.asarray(k, np.float64)[0, :, 0].T / DIM**0.5
    weights = oracle.softmax(np.where(np.tri(SEQ_LEN, dtype=bool), logits, -np.inf))
    for real, places in ((16, [4, 9, 15]), (7, [1, 3, 6]), (2, [0, 1]), (1, [0])):
        wanted = weights[BLOCK * 5 + np.array(places)].reshape(-1, NUM_BLOCKS, BLOCK).sum(-1)
        found = np.asarray(of_block_five(BLOCK * 5 + real))
        np.testing.assert_allclose(found / found.sum(), wanted.mean(0), atol=2e-6)


def test_strides_with_a_real_token_give_mass_and_those_of_padding_give_none():
    q, k = inputs.random(0, 1, SEQ_LEN, 1, 1, DIM)
    pattern = XAttention(stride=4, block_size=BLOCK)

    @jax.jit
    def of_block_five(valid_len):
        documents = Documents.padded(valid_len, SEQ_LEN, BLOCK)
        context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)
        return pattern.scores(q, k, context)[0, 0, 5]

    for real, strides in ((1, 1), (4, 1), (5, 2), (8, 2), (13, 4), (16, 4)):
        keep = np.arange(SEQ_LEN)[:, None] < BLOCK * 5 + real
        head = (np.where(keep, np.asarray(x, np.float64)[0, :, 0], 0) for x in (q, k))
        weights = oracle.softmax(antidiagonals(*head, 4))[20 : 20 + strides]
        wanted = weights.reshape(strides, NUM_BLOCKS, -1).sum((0, 2)) / 4
        np.testing.assert_allclose(of_block_five(BLOCK * 5 + real), wanted, atol=2e-6)


def test_invalid_settings_raise():
    with pytest.raises(ValueError, match="stride=5 must divide block_size=128"):
        XAttention(stride=5)
    with pytest.raises(
        ValueError, match="probe_queries_per_block=129 must not exceed block_size=128"
    ):
        SampledRows(probe_queries_per_block=129)
    with pytest.raises(
        ValueError, match="tau=0 must be a finite number .greater than 0 and at most 1"
    ):
        SampledRows(tau=0)


class Decoded(Fp8Scores):
    """Weights by XLA, of three query blocks at a time."""

    def tiles(self):
        return ScoreTiles(16, 128, 1)

    def rows_at_once(self, batch, heads, rows, local, blocks):
        return 3

    def weights(self, call):
        codes, means, units = call.keys
        keys = codes.astype(jnp.float32).reshape(*means.shape[:2], 128, *means.shape[2:])
        keys = keys * units[:, :, None, :, None] + means[:, :, None].astype(jnp.float32)
        logits = jnp.einsum("brhd,bnchd->bhnrc", call.q, keys) * call.scale
        numbers = jnp.arange(keys.shape[1] * 128).reshape(-1, 1, 128)
        logits = jnp.where(numbers <= call.places[:, None, None, :, None], logits, -jnp.inf)
        weights = jax.nn.logsumexp(logits, axis=-1) / np.log(2)
        return weights, jax.nn.logsumexp(logits, axis=(2, 4)) / np.log(2)


class Kept(Decoded):
    """The same weights, with the rule applied by the Hopper kernel in the interpreter."""

    def weights(self, call):
        weights, totals = super().weights(call)
        padding = -weights.shape[2] % WEIGHT_BLOCKS
        return jnp.pad(weights, ((0, 0), (0, 0), (0, padding), (0, 0))), totals

    def keeps(self, num_rows, num_blocks):
        return True

    def kept(self, weights, totals, rule):
        return HopperFp8Scores(plgpu.InterpretGPUParams()).kept(weights, totals, rule)


def test_the_kernel_keeps_the_blocks_of_the_rule(monkeypatch):
    blocks, pattern = (
        12,
        SampledRows(
            tau=0.6, sink_blocks=2, local_blocks=2, dense_prefix_tokens=384, random_block_prob=0.1
        ),
    )
    q, k = (x.astype(jnp.bfloat16) for x in inputs.random(0, 1, blocks * 128, 2, 1, 64))
    context = SelectionContext(jnp.arange(blocks, dtype=jnp.int32), blocks)

    def bits(kernels):
        monkeypatch.setattr(backends, "fp8_score_kernels", lambda *_: kernels)
        return np.asarray(jax.jit(lambda q, k: pattern.select(q, k, context).index.bits)(q, k))

    by_rule = bits(Decoded())
    assert not np.array_equal(by_rule[:, 0], by_rule[:, 1])
    np.testing.assert_array_equal(bits(Kept()), by_rule)


def test_coded_keys_of_two_ranks_select_what_those_of_one_select(monkeypatch):
    monkeypatch.setattr(backends, "fp8_score_kernels", lambda *_: Decoded())
    blocks, pattern = 16, SampledRows(tau=0.7)
    q, k = (x.astype(jnp.bfloat16) for x in inputs.random(0, 1, blocks * 128, 2, 1, 64))

    @functools.partial(jax.vmap, in_axes=(1, 1, 0), axis_name="rank")
    def on_rank(q, k, ids):
        return pattern.select(q, k, SelectionContext(ids, blocks, ("rank",))).index.bits

    def ranks(x):  # every other block
        return (
            x.reshape(1, blocks // 2, 2, 128, *x.shape[2:])
            .swapaxes(1, 2)
            .reshape(1, 2, -1, *x.shape[2:])
        )

    every = jnp.arange(blocks, dtype=jnp.int32)
    one = jax.jit(lambda q, k: pattern.select(q, k, SelectionContext(every, blocks)).index.bits)
    two = jax.jit(on_rank)(ranks(q), ranks(k), every.reshape(-1, 2).T)
    one, exact = np.asarray(one(q, k)), np.asarray(two)
    for rank in range(2):
        np.testing.assert_array_equal(exact[rank], one[:, :, rank::2])
    monkeypatch.undo()
    other = jax.jit(lambda q, k: pattern.select(q, k, SelectionContext(every, blocks)).index.bits)
    different = np.bitwise_count(np.asarray(other(q, k)) ^ one).sum()
    assert different < 0.1 * np.bitwise_count(one).sum()
