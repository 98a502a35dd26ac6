"""Packed documents: each gives the same results as on its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image

from examples.strided_pattern import Strided
from mtraining_jax import (
    Dense,
    Documents,
    MoBA,
    SampledRows,
    Sharding,
    VerticalSlash,
    inspect,
    sequence_layout,
    sparse_attention,
    stripe,
    unstripe,
)
from mtraining_jax.parallel.mesh import make_mesh
from pallas_kernels.index import BlockMaskIndex, DenseIndex
from pallas_kernels.reference import reference_attention
from tests.attention.inputs import with_residuals
from tests.pallas_kernels.helpers.properties import repeatable
from tests.parallel import indices

SEQ_LEN, BLOCK = indices.SEQ_LEN, indices.BLOCK_SIZE
NUM_BLOCKS = SEQ_LEN // BLOCK
PATTERN = SampledRows(tau=0.6, probe_queries_per_block=2, min_sparse_tokens=32, block_size=BLOCK)
VERTICAL_SLASH = VerticalSlash(
    top_p=0.5,
    num_probe_queries=4,
    sink_tokens=2,
    min_verticals=4,
    max_verticals=SEQ_LEN,
    min_slashes=1,
    max_slashes=2,
    local_blocks=1,
    min_sparse_tokens=32,
    block_size=BLOCK,
)
MOBA = MoBA(chunk_size=2 * BLOCK, top_k=3, block_size=BLOCK)
# One token; a block; a block and a token; dense and sparse ones; with padding and without.
LENGTHS = [[1, 8, 9, 60, 101], [120, 17, 97]]
MOST = max(map(len, LENGTHS))
BATCH = 1 + MOST  # the same for all calls on one device, so that they share one program


@functools.partial(jax.jit, static_argnums=0)
def run(pattern, q, k, v, dout, dlse, documents):
    """Returns out, lse, index bits and gradients."""

    def results(q, k, v):
        out, lse, index = with_residuals(q, k, v, pattern=pattern, documents=documents)
        # An empty row has lse -inf; its cotangent must not matter.
        return (out, lse), index

    (out, lse), pullback, index = jax.vjp(results, q, k, v, has_aux=True)
    return out, lse, index, pullback((dout, dlse))


@functools.cache
def inputs():
    """q, k, v and cotangents of the output and of lse."""
    rng = np.random.default_rng(5)
    dlse = rng.standard_normal((indices.BATCH, indices.HEADS, SEQ_LEN))
    return *indices.inputs(), jnp.asarray(dlse, jnp.float32)


def spans(lengths):
    """(start, padded length) of consecutive documents."""
    padded = [-(-n // BLOCK) * BLOCK for n in lengths]
    return list(zip(np.cumsum([0, *padded[:-1]]).tolist(), padded, strict=True))


def with_each_alone(x, lengths, axis=1):
    """A pack, and each of its documents as a separate sequence starting at 0."""
    x = np.asarray(x)
    whole = np.zeros((BATCH, *x.shape[1:]), x.dtype)
    whole[0] = x[0]
    x, apart = np.moveaxis(x[0], axis - 1, 0), np.moveaxis(whole[1:], axis, 1)
    for into, (start, size) in zip(apart, spans(lengths), strict=False):
        into[:size] = x[start : start + size]
    return whole


def in_batch(x):
    """Pads sequences with zeros to the batch size."""
    return np.concatenate([x, np.zeros((BATCH - len(x), *x.shape[1:]), x.dtype)])


def table(lengths, batch=BATCH):
    """Documents with these lengths; the remaining sequences of the batch are padding."""
    lengths = [*lengths, *[[]] * (batch - len(lengths))]
    return Documents.from_lengths(lengths, SEQ_LEN, BLOCK)


def check_equal_to_alone(pattern, lengths, q, k, v, dout, dlse):
    """Compares one pack [1, S, ...] with its documents as separate sequences."""
    arrays = [with_each_alone(x, lengths) for x in (q, k, v, dout)]
    arrays.append(with_each_alone(dlse, lengths, 2))
    documents = table([lengths, *[[n] for n in lengths]])
    out, lse, index, grads = jax.device_get(run(pattern, *arrays, documents))
    bits, marks = index.bits, index.column_marks
    for x in (out, *grads):
        np.testing.assert_allclose(with_each_alone(x, lengths), x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(lse == -np.inf, (out == 0).all(-1).swapaxes(1, 2))
    end = sum(size for _, size in spans(lengths))
    assert not out[0, end:].any() and not bits[0, :, end // BLOCK :].any()
    places, bits = np.arange(NUM_BLOCKS), as_bool(bits)
    for n, (start, size) in enumerate(spans(lengths), 1):
        part = lse[0, :, start : start + size]
        np.testing.assert_allclose(part, lse[n, :, :size], rtol=1e-5, atol=1e-5)
        first, count = start // BLOCK, size // BLOCK
        # The index must match bit for bit, at the document's position.
        at = bits[0, :, first : first + count]
        moved = np.zeros_like(at)
        moved[..., first : first + count] = bits[n, :, :count, :count]
        np.testing.assert_array_equal(at, moved)
        if marks is not None:
            np.testing.assert_array_equal(marks[0, :, first : first + count], marks[n, :, :count])
            assert marks[n, :, :count].any() == (size >= pattern.min_sparse_tokens)
            assert not marks[n, :, count:].any()
        if size < pattern.min_sparse_tokens:
            below = (places >= first) & (places <= first + np.arange(count)[:, None])
            assert (at == below).all()


def as_bool(bits, num_blocks=NUM_BLOCKS):
    numbers = np.arange(num_blocks)
    return np.asarray(bits)[..., numbers // 32] >> (numbers % 32) & 1 > 0


@pytest.mark.parametrize("row", range(2))
def test_a_pack_matches_each_document_on_its_own(row):
    one = [x[row : row + 1] for x in inputs()]
    check_equal_to_alone(PATTERN, LENGTHS[row], *one)


@settings(repeatable, max_examples=5)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=MOST), st.integers(0, 1))
def test_any_pack_matches_each_document_on_its_own(lengths, row):
    while sum(size for _, size in spans(lengths)) > SEQ_LEN:
        lengths = lengths[:-1]
    check_equal_to_alone(PATTERN, lengths, *(x[row : row + 1] for x in inputs()))


def test_a_single_document_matches_a_sequence_without_documents():
    q, k, v, dout, dlse = inputs()
    start, length = 48, 101  # 13 blocks, not a power of two
    size = 104
    arrays = [in_batch(x[:1]) for x in (q, k, v, dout, dlse)]
    found = run(PATTERN, *arrays, table([[1, 8, 31, length]]))
    own = [x[:1, start : start + size] for x in (q, k, v)]
    padded = Documents.padded(length, size, BLOCK)
    attend = functools.partial(with_residuals, pattern=PATTERN, documents=padded)
    out, _, index = jax.jit(attend)(*own)
    np.testing.assert_allclose(found[0][:1, start : start + size], out, rtol=1e-5, atol=1e-5)
    first, count = start // BLOCK, size // BLOCK
    at = as_bool(found[2].bits)[:1, :, first : first + count, first : first + count]
    np.testing.assert_array_equal(at, as_bool(index.bits, count))


def same_document(documents=LENGTHS):
    """The pairs within documents, bool [B, S, S], by definition."""
    mask = np.zeros((len(documents), SEQ_LEN, SEQ_LEN), bool)
    for into, lengths in zip(mask, documents, strict=True):
        for start, size in spans(lengths):
            into[start : start + size, start : start + size] = np.tri(size, dtype=bool)
    return mask


def run_packs(arrays, pattern=PATTERN):
    """Results of one device for both packs, without the rest of the batch."""
    found = jax.device_get(run(pattern, *map(in_batch, arrays), table(LENGTHS)))
    return jax.tree.map(lambda x: x[: len(LENGTHS)], found)


@functools.cache
def packs(pattern=PATTERN):
    """Both packs, not split into documents."""
    return run_packs(inputs(), pattern)


@jax.jit
def oracle(q, k, v, mask, dout, dlse):
    """Results and gradients over the pairs of a mask; one program for all patterns."""
    results, pullback = jax.vjp(lambda *qkv: reference_attention(*qkv, mask), q, k, v)
    return results, pullback((dout, dlse))


# The recorded results of tests/golden are of packs too.
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "pattern", [PATTERN, SLOW(VERTICAL_SLASH), SLOW(MOBA)], ids=["lists", "vertical_slash", "moba"]
)
def test_results_match_the_oracle_over_pairs_within_documents(pattern):
    q, k, v, dout, dlse = inputs()
    out, lse, index, grads = packs(pattern)
    mask = jax.tree.map(jnp.asarray, index).to_mask(SEQ_LEN)
    assert not (np.asarray(mask) & ~same_document()[:, None]).any()
    dlse = jnp.where(np.asarray(mask).any(-1), dlse, 0)
    (wanted_out, wanted_lse), wanted = oracle(q, k, v, mask, dout, dlse)
    for found, expected in zip((out, lse, *grads), (wanted_out, wanted_lse, *wanted), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_dense_attention_and_a_given_index_stay_within_documents():
    q, k, v = inputs()[:3]
    call = functools.partial(with_residuals, q, k, v, documents=table(LENGTHS, 2))
    own = np.broadcast_to(same_document()[:, None], (*q.shape[:3:2], SEQ_LEN, SEQ_LEN))
    out, _, dense = call(pattern=Dense(block_size=BLOCK))
    np.testing.assert_array_equal(dense.to_mask(SEQ_LEN), own)
    wanted = reference_attention(q, k, v, own)[0]
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)
    given_index = indices.bits_and_columns()
    *_, again = call(pattern=dense, documents=table([[40, 60], [250]], 2))
    both = own & same_document([[40, 60], [250]])[:, None]
    np.testing.assert_array_equal(again.to_mask(SEQ_LEN), both)
    out, _, cut = call(pattern=given_index)
    whole = np.asarray(given_index.to_mask(SEQ_LEN))
    np.testing.assert_array_equal(cut.to_mask(SEQ_LEN), whole & own)
    wanted = reference_attention(q, k, v, whole & own)[0]
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)


def test_an_index_is_inspected_within_documents(tmp_path):
    q, k = inputs()[:2]
    index = packs()[2]
    found = inspect(index, documents=table(LENGTHS, 2))
    causal = same_document().sum((1, 2))[:, None]
    pairs = np.asarray(index.to_mask(SEQ_LEN)).sum((-1, -2))
    np.testing.assert_allclose(found.density, pairs / causal, rtol=1e-6)
    whole = BlockMaskIndex.from_block_mask(
        jnp.ones((2, indices.HEADS, NUM_BLOCKS, NUM_BLOCKS), bool), BLOCK
    )
    everything = inspect(whole, q, k, documents=table(LENGTHS, 2), rows=[3, 100, 250])
    np.testing.assert_allclose(everything.recall, 1, rtol=1e-6)  # of pairs within documents
    found.save_picture(tmp_path / "documents.png")
    as_one = dataclasses.replace(found, documents=None)  # the same numbers, without boundary lines
    as_one.save_picture(tmp_path / "one.png")
    lines, none = (image.imread(tmp_path / f"{x}.png") for x in ("documents", "one"))
    assert lines.shape == none.shape and (lines != none).any()
    with pytest.raises(ValueError, match="documents have 33 blocks of 8 tokens, but the index"):
        inspect(index, documents=Documents.from_lengths([[9]], 264, BLOCK))


def test_sequences_under_vmap_have_separate_documents():
    q, k, v = inputs()[:3]
    attend = functools.partial(sparse_attention, pattern=PATTERN)
    out = jax.vmap(lambda *x: attend(*x[:3], documents=x[3]))(q, k, v, table(LENGTHS, 2))
    np.testing.assert_allclose(out, packs()[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("pattern", "mesh", "kind"),
    [
        (PATTERN, (1, 2, 4), "striped"),
        SLOW(VERTICAL_SLASH, (2, 1, 4), "zigzag"),
        (indices.bits_and_columns, (2, 1, 4), "striped"),  # a given index
    ],
    ids=["lists", "vertical_slash", "given"],
)
def test_eight_devices_give_the_same_index_and_results(pattern, mesh, kind):
    mesh = make_mesh(*mesh)
    layout = sequence_layout(SEQ_LEN, mesh, block_size=BLOCK, kind=kind)
    sharding = Sharding(mesh, order=layout)
    q, k, v, dout, dlse = inputs()

    def over_mesh(q, k, v, dout, dlse, documents):
        def results(q, k, v):
            out, lse, index = with_residuals(
                q, k, v, pattern=pattern, sharding=sharding, documents=documents
            )
            return (out, lse), index

        if pattern is not PATTERN:  # gradients once: they take long to compile
            (out, lse), index = results(q, k, v)
            return (out,), lse, index
        (out, lse), pullback, index = jax.vjp(results, q, k, v, has_aux=True)
        return (out, *pullback((dout, dlse))), lse, index

    arrays = [stripe(x, layout) for x in (q, k, v, dout)]
    arrays.append(stripe(dlse, layout, axis=2))
    if callable(pattern):
        pattern = pattern()
        wanted_out, wanted_lse, wanted_index = with_residuals(
            q, k, v, pattern=pattern, documents=table(LENGTHS, 2)
        )
        wanted = ()
    else:
        wanted_out, wanted_lse, wanted_index, wanted = packs(pattern)
    found, lse, index = jax.jit(over_mesh)(*arrays, table(LENGTHS, 2))
    for x, expected in zip(*map(jax.tree.leaves, (index, wanted_index)), strict=True):
        np.testing.assert_array_equal(x, expected)
    for x, expected in zip(found, (wanted_out, *wanted), strict=False):
        np.testing.assert_allclose(unstripe(x, layout), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(unstripe(lse, layout, axis=2), wanted_lse, rtol=2e-5, atol=2e-5)


def test_padding_needs_no_support_of_documents_and_does_not_change_what_is_inspected():
    q, k, v = inputs()[:3]
    padded = Documents.padded(201, SEQ_LEN, BLOCK)
    *_, index = with_residuals(q, k, v, Strided(block_size=BLOCK), documents=padded)
    found, whole = (inspect(index, q, k, documents=x, rows=[3, 100]) for x in (padded, None))
    np.testing.assert_array_equal(found.density, whole.density)
    np.testing.assert_allclose(found.recall, whole.recall, rtol=1e-6)


def test_invalid_combinations_with_documents_raise():
    q, k, v = inputs()[:3]
    call = functools.partial(sparse_attention, q, k, v)
    documents = table(LENGTHS, 2)
    of_128 = Documents.from_lengths([[100]], SEQ_LEN)
    for options, message in [
        (
            dict(pattern=Strided(block_size=BLOCK)),
            "Strided does not support .*; use sampled_rows.* or set supports_documents = True",
        ),
        (
            dict(pattern=DenseIndex(BLOCK)),
            "pattern: a DenseIndex cannot be restricted to pairs within documents; use a Block",
        ),
        (dict(documents=of_128), "documents have block_size=128, but the pattern has 8"),
        (dict(documents=[[0, 8]]), "documents is a list; build it with"),
        (dict(documents=Documents(*np.zeros((3, 3, 1), int), BLOCK)), r"arrays of shape \[3, 1\]"),
        (
            dict(documents=Documents.from_lengths([[9]], 264, BLOCK)),
            r"documents have arrays of shape \[1, 33\]; expected \[2, 32\]",
        ),
        (dict(pattern=Dense(BLOCK), causal=False), "causal=True; .* would cross documents"),
        (
            dict(pattern=Dense(BLOCK), causal=False, documents=Documents.padded(9, SEQ_LEN, BLOCK)),
            "documents need causal=True; non-causal pairs would include the padding",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**dict(pattern=PATTERN, documents=documents) | options)
