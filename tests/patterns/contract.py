"""Requirements for every pattern, as a base class of each pattern's test."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mtraining_jax import sparse_attention
from mtraining_jax.attention.sharded import select_index
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.base import ModelSizes, Pattern
from mtraining_jax.tools.plan import pattern_costs
from mtraining_jax.utils.fields import fields_of
from pallas_kernels.index import Index
from pallas_kernels.reference import reference_attention
from tests.patterns import inputs

SEQ_LEN, BLOCK, HEADS, KV_HEADS, DIM, LAYERS = 256, 8, 6, 3, 16, 1
NUM_BLOCKS = SEQ_LEN // BLOCK
AXES = ("node", "device")


def total(attend):
    """A scalar that depends on all outputs of attention; with auxiliary results and gradients."""

    def value(q, k, v):
        out, more = attend(q, k, v)
        return jnp.sin(out).sum(), more

    return jax.value_and_grad(value, (0, 1, 2), has_aux=True)


@jax.jit
def oracle(q, k, v, mask):
    """`total` of attention over the pairs of a mask; one compilation for all patterns."""
    (value, _), gradients = total(lambda *qkv: reference_attention(*qkv, mask))(q, k, v)
    return value, gradients


@functools.cache
def first_layer(settings):
    """Returns the pattern of the first layer."""
    pattern = settings.bind(ModelSizes(LAYERS, HEADS, SEQ_LEN))
    return jax.tree.map(lambda x: x[0], pattern) if pattern.arrays else pattern


@functools.cache
def chosen_by(settings):
    """Returns the index selected on one device, and its computed pairs. Cached."""
    select = functools.partial(
        select_index, block_ids=jnp.arange(NUM_BLOCKS), num_blocks=NUM_BLOCKS
    )

    @jax.jit
    def chosen(q, k):
        index = select(q, k, first_layer(settings))
        return index, index.computed_pairs(SEQ_LEN)

    return chosen(*queries_and_keys())


@functools.cache
def attended_by(settings):
    """Returns the same from attention that selects it, and `total` of that attention. Cached."""
    q, k = queries_and_keys()

    def attend(q, k, v):
        out, (_, index) = sparse_attention(
            q, k, v, pattern=first_layer(settings), return_residuals=True
        )
        return out, (index, index.computed_pairs(SEQ_LEN))

    (value, chosen), gradients = jax.jit(total(attend))(q, k, jnp.roll(k, 1, axis=1))
    return *chosen, (value, gradients)


@functools.cache
def queries_and_keys():
    """The common inputs of all patterns."""
    return inputs.random(0, 2, SEQ_LEN, HEADS, KV_HEADS, DIM)


class ChoiceContract:
    """Requirements for a selection; for patterns that reuse the attention of another pattern."""

    settings: Pattern
    # Whether every token is guaranteed to see something.
    rows_may_be_empty = False

    @property
    def pattern(self) -> Pattern:
        return first_layer(self.settings)

    def chosen(self):
        """The index selected on one device, and its computed pairs."""
        return chosen_by(self.settings)

    def test_the_settings_describe_themselves(self):
        assert all(field.doc for field in fields_of(type(self.settings)).values())
        assert isinstance(self.settings.describe(), str) and self.settings.describe()
        for tokens in (SEQ_LEN, 2**20):
            share, why = pattern_costs.expected_density(self.settings, tokens)
            assert 0 < share <= 1 and why
        assert hash(self.settings) == hash(dataclasses.replace(self.settings))

    def test_the_index_is_the_same_on_eight_ranks_and_computes_its_pairs(self):
        (q, k), (expected, pairs) = queries_and_keys(), self.chosen()
        assert isinstance(expected, Index) and expected.block_size == BLOCK
        layout = Layout("striped", SEQ_LEN, 8, BLOCK, 2)

        def local(q, k):
            shards = layout.block_ids(jax.lax.axis_index(AXES))
            where = dict(block_ids=shards, num_blocks=NUM_BLOCKS, axis_names=AXES)
            index = select_index(q, k, self.pattern, **where)
            return jax.tree.map(lambda x: x[None], index)  # the index of every rank

        run = jax.shard_map(
            local,
            mesh=make_mesh(1, 2, 4),
            in_specs=P("data", AXES),
            out_specs=P(AXES, "data"),
            check_vma=False,
        )
        order = layout.permutation()
        found = jax.jit(run)(q[:, order], k[:, order])
        assert expected.sharded_by_query == self.pattern.sharded_by_query(documents=False)
        if expected.sharded_by_query:  # the rows of all ranks, concatenated
            rows = np.argsort(order[::BLOCK] // BLOCK)
            found = jax.tree.map(
                lambda x: np.concatenate(list(np.asarray(x)), axis=2)[:, :, rows], found
            )
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
        mask = np.broadcast_to(expected.to_mask(SEQ_LEN), (2, HEADS, SEQ_LEN, SEQ_LEN))
        np.testing.assert_array_equal(np.broadcast_to(pairs, (2, HEADS)), mask.sum((-1, -2)))
        assert not np.triu(np.ones((SEQ_LEN, SEQ_LEN), bool), 1)[None, None][mask[:1, :1]].any()
        if not self.rows_may_be_empty:
            assert mask.any(-1).all()
        density, why = pattern_costs.expected_density(self.settings, SEQ_LEN)
        if why.startswith("exact"):
            np.testing.assert_allclose(pairs, density * SEQ_LEN * (SEQ_LEN + 1) / 2, rtol=0.02)

    def test_an_index_has_the_capacity_assumed_by_memory_estimates(self):
        index, _ = self.chosen()
        numbers, columns = pattern_costs.capacities(self.settings, NUM_BLOCKS)
        room = sum(np.prod(leaf.shape[2:], dtype=int) for leaf in jax.tree.leaves(index))
        assert room <= numbers and columns <= numbers


class PatternContract(ChoiceContract):
    """Subclasses provide the settings, with blocks of `BLOCK` tokens."""

    def chosen(self):
        """The index returned by attention, and its computed pairs."""
        return attended_by(self.settings)[:2]

    def test_attention_computes_the_pairs_and_the_selection_has_no_gradient(self):
        q, k = queries_and_keys()
        index, _, found = attended_by(self.settings)
        mask = jnp.broadcast_to(index.to_mask(SEQ_LEN), (2, HEADS, SEQ_LEN, SEQ_LEN))
        wanted = oracle(q, k, jnp.roll(k, 1, axis=1), mask)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, wanted
        )
