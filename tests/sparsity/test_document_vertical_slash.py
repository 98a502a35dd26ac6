"""Vertical-slash chooses in a pack what it chooses for each document alone, on any ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.sparsity import Shards, VerticalSlash
from mtraining_jax.sparsity.documents import Documents
from tests.pallas_kernels.brute_force import index_mask
from tests.sparsity import inputs

BLOCK, NUM_BLOCKS, DIM = 16, 16, 16
SEQ_LEN = BLOCK * NUM_BLOCKS
# A token and a block, which are dense; fewer tokens than queries in the last block, a whole block
# at the end, and padding behind. In the other sequence one document only, with padding in it.
LENGTHS = [[1, 16, 66, 64, 40], [247]]
OPTIONS = dict(last_q=8, block_size=BLOCK, dense_below=3 * BLOCK, sink_tokens=2, local_blocks=1)
FEW = dict(min_verticals=4, min_slashes=1, max_slashes=2)
PATTERNS = {
    "safe": VerticalSlash(top_p=0.6, max_verticals=SEQ_LEN, **FEW, **OPTIONS),
    "paper": VerticalSlash(
        top_p=0.5, preset="paper", max_slashes=2, max_verticals=SEQ_LEN, **OPTIONS
    ),
    "joint": VerticalSlash(top_p=0.7, preset="joint", max_verticals=SEQ_LEN, **OPTIONS),
}
# Of 256 tokens at 2 columns a block: a document of 5 blocks has room for 10.
CAPPED = VerticalSlash(top_p=1.0, max_verticals=16, **FEW, **OPTIONS)


def spans(lengths):
    blocks = [-(-n // BLOCK) for n in lengths]
    return list(zip(np.cumsum([0, *blocks[:-1]]).tolist(), blocks, strict=True))


@functools.cache
def arrays():
    """Queries and keys of large logits, so that few keys hold much."""
    q, k = inputs.random(0, len(LENGTHS), SEQ_LEN, 4, 2, DIM)
    return 3 * q, k


@functools.partial(jax.jit, static_argnums=0)
def choose(pattern, q, k, documents=None, valid_len=None):
    documents = None if documents is None else documents.blocks()
    shards = Shards(
        jnp.arange(NUM_BLOCKS), NUM_BLOCKS, valid_len=valid_len, documents=documents
    )
    return pattern.choose(q, k, shards)


@functools.cache
def pack(pattern):
    documents = Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK)
    return jax.device_get(choose(pattern.for_documents(), *arrays(), documents))


@pytest.mark.parametrize("preset", PATTERNS)
def test_a_pack_chooses_what_each_document_chooses_alone(preset):
    pattern = PATTERNS[preset]
    found, saved = index_mask(pack(pattern).index, SEQ_LEN), []
    wanted = np.zeros_like(found)
    noise = jax.random.normal(jax.random.key(1), (SEQ_LEN, 1, 1)) * 5
    for row, lengths in enumerate(LENGTHS):
        for (start, blocks), length in zip(spans(lengths), lengths, strict=True):
            own = slice(start * BLOCK, (start + blocks) * BLOCK)
            size = blocks * BLOCK
            wanted[row, :, own, own] = np.tri(size, dtype=bool)
            if blocks < 3:
                continue
            counts = np.arange(SEQ_LEN)[:, None, None] < length
            alone = [
                jnp.where(counts, jnp.roll(x[row], -start * BLOCK, 0), noise)[None]
                for x in arrays()
            ]
            choice = jax.device_get(choose(pattern, *alone, None, jnp.int32(length)))
            mask = index_mask(choice.index, SEQ_LEN)[0, :, :size, :size]
            assert not mask.all((1, 2)).any() and mask.sum() < 4 * np.tri(size).sum()
            wanted[row, :, own, own] = mask
            saved.append([row, choice.statistics.get("saved_heads", np.zeros((1, 4)))[0]])
    np.testing.assert_array_equal(found, wanted)
    if preset == "paper":
        for row, share in enumerate(pack(pattern).statistics["saved_heads"]):
            of_documents = [x for at, x in saved if at == row]
            np.testing.assert_allclose(share, np.mean(of_documents, 0), rtol=1e-6)


def test_documents_share_the_room_for_columns_by_their_lengths():
    # Each of its last queries sees the last key it can: all columns have mass, so caps decide.
    index = pack(CAPPED).index
    marks = index.column_marks[..., 0][..., None] >> np.arange(BLOCK) & 1
    for row, lengths in enumerate(LENGTHS):
        for start, blocks in spans(lengths):
            most = 0 if blocks < 3 else min(max(2 * blocks, 4), 16)
            own = marks[row, :, start : start + blocks].sum((1, 2))
            np.testing.assert_array_equal(own, most)
    assert index.max_columns == 128
    capacity = CAPPED.for_documents().capacities
    assert capacity(NUM_BLOCKS)[1] == 128
    # 512 blocks: room for 32 columns in all, and at least 4 of each of 170 documents.
    assert capacity(512)[1] == 768
    assert VerticalSlash().for_documents().capacities(4096)[1] == 8192 + 64 * 128


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_choose_the_rows_of_one(ranks):
    pattern, layout = PATTERNS["paper"], Layout("striped", SEQ_LEN, ranks, BLOCK)
    rows = np.stack([layout.block_ids(rank) for rank in range(ranks)]).astype(np.int32)
    documents = Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK)

    def on_rank(q, k, block_ids):
        shards = Shards(block_ids, NUM_BLOCKS, ("rank",), documents=documents.blocks())
        return pattern.for_documents().choose(q, k, shards)

    blocks = [x.reshape(len(LENGTHS), NUM_BLOCKS, BLOCK, *x.shape[2:]) for x in arrays()]
    dealt = [jnp.moveaxis(x[:, rows], 1, 0) for x in blocks]
    dealt = [x.reshape(ranks, len(LENGTHS), -1, *x.shape[4:]) for x in dealt]
    many, one = jax.jit(jax.vmap(on_rank, axis_name="rank"))(*dealt, rows), pack(pattern)
    for name in ("bits", "column_marks", "column_start"):
        found, wanted = (np.asarray(getattr(x.index, name)) for x in (many, one))
        np.testing.assert_array_equal(np.moveaxis(found, 0, 3)[:, :, range(rows.shape[1])],
                                      np.moveaxis(wanted[:, :, rows], 2, 3), name)
    for share in many.statistics["saved_heads"]:
        np.testing.assert_array_equal(share, one.statistics["saved_heads"])
