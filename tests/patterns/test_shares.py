"""Options that are overridden for each sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.sharded import select_pairs
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.collectives import all_rows
from mtraining_jax.selection.context import SelectionContext
from tests.patterns import inputs

BLOCK, NUM_BLOCKS, HEADS, RANKS = 8, 16, 3, 4
SEQ_LEN = BLOCK * NUM_BLOCKS
AXES = ("node", "device")
LENGTHS = [[70, 9, 40], [128]]
OPTIONS = dict(block_size=BLOCK, local_blocks=1, min_sparse_tokens=16)
SLASH = VerticalSlash(
    top_p=0.5, max_verticals=SEQ_LEN, num_probe_queries=8, sink_tokens=1,
    min_verticals=2, min_slashes=1,
    **OPTIONS,
)  # fmt: skip
# For documents and whole sequences, with a value hit by both roundings of a row's rule.
PATTERNS = {
    "rows": (SampledRows(tau=0.55, probe_queries_per_block=2, **OPTIONS), True),
    "slashes": (SLASH, True),
    "whole": (SLASH, False),
}


def documents_of(packed):
    return Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK) if packed else None


@functools.cache
def arrays():
    q, k = inputs.random(0, len(LENGTHS), SEQ_LEN, HEADS, 1, 16)
    return 2 * q, k


@functools.cache
def untuned(name):
    """The pairs kept by the pattern's own fraction, on one device: bool [B, Hq, S, S]."""
    pattern, packed = PATTERNS[name]

    @jax.jit
    def run(q, k, documents):
        context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)
        return select_pairs(pattern, q, k, context).index

    return run(*arrays(), documents_of(packed)).to_mask(SEQ_LEN)


@functools.cache
def tuned(name):
    """A jitted function from shares int32 [B], on ranks, to the index of rank 0."""
    pattern, packed = PATTERNS[name]
    ((option, bits),) = pattern.overridable().items()
    layout = Layout("striped", SEQ_LEN, RANKS, BLOCK, 2)

    def local(q, k, documents, shares):
        own = layout.block_ids(jax.lax.axis_index(AXES))
        context = SelectionContext(own, NUM_BLOCKS, AXES, documents=documents, overrides=shares)
        index = select_pairs(pattern, q, k, context).index
        return jax.tree.map(lambda x: x[None], all_rows(index, own, NUM_BLOCKS, AXES))

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(1, 2, 2),
            in_specs=(P("data", AXES), P("data", AXES), P(), P()),
            out_specs=P(AXES),
            check_vma=False,
        )
    )
    order = layout.permutation()
    q, k = (x[:, order] for x in arrays())

    def keep(shares):
        shares = {option: jnp.array([round(x * (1 << bits)) for x in shares], jnp.int32)}
        index = run(q, k, documents_of(packed), shares)
        return np.asarray(jax.tree.map(lambda x: x[0], index).to_mask(SEQ_LEN))

    return keep, run


@pytest.mark.parametrize("name", PATTERNS)
def test_the_pattern_own_fraction_is_bit_identical_and_a_larger_one_keeps_more(name):
    keep, run = tuned(name)
    (option,) = PATTERNS[name][0].overridable()
    own = getattr(PATTERNS[name][0], option)
    np.testing.assert_array_equal(keep([own, own]), untuned(name))
    found = [keep([share, own]) for share in (0.2, own, 0.7, 1.0)]
    pairs = np.stack([mask[0].sum((-2, -1)) for mask in found])
    assert (np.diff(pairs.sum(1)) > 0).all() and (pairs[-1] > pairs[1]).all()  # in every head
    for less, more in zip(found[:-1], found[1:], strict=True):
        assert not (less & ~more).any()
        np.testing.assert_array_equal(less[1], more[1])  # the other sequence is unchanged
    assert run._cache_size() == 1


def test_options_that_cannot_be_overridden_raise():
    paper = VerticalSlash(preset="paper")
    context = SelectionContext(jnp.arange(2), 2, overrides={"top_p": jnp.zeros(1, jnp.int32)})
    with pytest.raises(ValueError, match="overrides of top_p are not supported by VerticalSlash"):
        select_pairs(paper, *(jnp.zeros((1, 256, 1, 16)),) * 2, context)
