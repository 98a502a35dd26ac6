"""The trainer's attention over a mesh: index, ring and statistics together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.attention.sharded import make_attention, select_index
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.budgets import FixedBudget
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from pallas_kernels.reference import reference_attention
from tests.parallel import indices

NODES, DEVICES, DATA = 2, 2, 2
PATTERN = VerticalSlash(
    top_p=0.4,
    max_verticals=24,
    max_slashes=12,
    num_probe_queries=8,
    block_size=indices.BLOCK_SIZE,
    sink_tokens=2,
    local_blocks=1,
    min_verticals=4,
    min_slashes=2,
)
BUDGET = FixedBudget(
    verticals=np.array([0, 5, 20, 9, 6, 2], np.int32),
    slashes=np.array([30, 3, 0, 12, 6, 2], np.int32),
    max_verticals=24, max_slashes=32, num_probe_queries=8, block_size=indices.BLOCK_SIZE,
    sink_tokens=2, sliding_window=4,
)  # fmt: skip


def layout_of(kind="striped"):
    nodes = NODES if kind == "striped" else 1
    return Layout(kind, indices.SEQ_LEN, NODES * DEVICES, indices.BLOCK_SIZE, nodes)


def run(pattern, inputs=None, **options):
    """Returns the output in sequence order, and stats; no gradients, to compile less."""
    layout = layout_of()
    attention = make_attention(make_mesh(DATA, NODES, DEVICES), layout, pattern, **options)
    q, k, v, _ = (x[:, layout.permutation()] for x in indices.inputs())
    out, stats = jax.jit(attention)(q, k, v, inputs)
    return out[:, layout.inverse()], stats


@functools.cache
def chosen(pattern_name):
    """Returns the index that one device selects, and its mask."""
    q, k, *_ = indices.inputs()
    blocks = jnp.arange(indices.NUM_BLOCKS, dtype=jnp.int32)
    pattern = {"top_p": PATTERN, "fixed": BUDGET}[pattern_name]
    index = jax.jit(
        lambda q, k: select_index(q, k, pattern, block_ids=blocks, num_blocks=indices.NUM_BLOCKS)
    )(q, k)
    return np.asarray(index.to_mask(indices.SEQ_LEN))


def check(out, stats, mask):
    q, k, v, _ = indices.inputs()
    expected, _ = reference_attention(q, k, v, jnp.asarray(mask))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    causal = np.tril(np.ones((indices.SEQ_LEN,) * 2, bool))
    assert stats["density"] == pytest.approx(mask.sum() / causal.sum() / mask[:, :, 0, 0].size)
    assert stats["density"] <= stats["executed"]
    assert {x.dtype for x in jax.tree.leaves(stats)} == {jnp.dtype(jnp.float32)}


def test_per_layer_budgets_can_be_passed_as_an_argument():
    out, stats = run(BUDGET, AttentionInputs(BUDGET))
    check(out, stats, chosen("fixed"))


def test_a_given_index_is_used_unchanged():
    index = indices.sparse()
    out, stats = run(Dense(indices.BLOCK_SIZE), AttentionInputs(index), ring="gather")
    check(out, stats, np.asarray(index.to_mask(indices.SEQ_LEN)))


def test_dense_executes_whole_tiles():
    out, stats = run(Dense(indices.BLOCK_SIZE))
    check(out, stats, np.asarray(indices.dense().to_mask(indices.SEQ_LEN)))
    assert stats["density"] == 1
    blocks, size = indices.NUM_BLOCKS, indices.BLOCK_SIZE
    ratio = blocks * (blocks + 1) * size**2 / (indices.SEQ_LEN * (indices.SEQ_LEN + 1))
    assert stats["executed"] == pytest.approx(ratio)


def test_a_layout_for_another_number_of_ranks_raises():
    with pytest.raises(ValueError, match="num_ranks=4, but the mesh axes .* have 8 devices"):
        make_attention(make_mesh(1, 2, 4), layout_of(), PATTERN)


def test_documents_with_more_pairs_than_an_int32_holds_are_measured():
    seq_len, block = 131072, 2048
    attention = make_attention(
        make_mesh(1, 1, 1),
        Layout("striped", seq_len, 1, block),
        SampledRows(block_size=block),
        by_length=True,
    )
    documents = Documents.from_lengths([[seq_len // 2]], seq_len, block)
    q = jax.ShapeDtypeStruct((1, seq_len, 1, 8), jnp.float32)
    out, stats = jax.eval_shape(attention, q, q, q, AttentionInputs(documents=documents))
    assert out.shape == q.shape
    assert {"document_pairs", "pairs_of_length_class_5"} <= set(stats)
