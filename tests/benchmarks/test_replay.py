"""Replayed density: the requested density, including the cost of selecting an index."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.replay import Replay
from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.attention.sharded import make_attention, select_index
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.base import ModelSizes
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.metrics import density
from mtraining_jax.utils.errors import UserError
from pallas_kernels.index import VerticalSlashIndex
from pallas_kernels.reference import reference_attention
from tests.pallas_kernels.helpers.brute_force import index_mask
from tests.patterns.contract import PatternContract

LIKE = VerticalSlash()
SMALL = VerticalSlash(
    top_p=0.4, max_verticals=24, max_slashes=12, num_probe_queries=8, block_size=8, sink_tokens=2,
    local_blocks=1, min_verticals=4, min_slashes=2,
)  # fmt: skip
SMALL_LEN = 256


class TestReplayOfLists(PatternContract):
    settings = Replay(
        replay_of="sampled_rows",
        replay_density=0.3,
        probe_queries_per_block=2,
        **{**dataclasses.asdict(SMALL), "top_p": 0.9},
    )


def densities(replay, seq_len):
    """Densities of every layer and head."""
    index = VerticalSlashIndex(
        replay.slash_blocks,
        replay.slash_count,
        replay.vertical_tokens,
        replay.vertical_count,
        replay.block_size,
    )
    return np.asarray(jax.jit(density, static_argnums=1)(index, seq_len))


def drawn(seq_len=524288, num_layers=36, num_heads=16, **options):
    like = options.pop("like", LIKE)
    fields = {x.name: getattr(like, x.name) for x in dataclasses.fields(like)}
    sizes = ModelSizes(num_layers, num_heads, seq_len, options.pop("seed", 0))
    return Replay(**fields, **options).bind(sizes)


@pytest.mark.parametrize(
    "seq_len, num_layers, num_heads", [(131072, 24, 14), (524288, 36, 16), (524288, 1, 1)]
)
def test_the_density_is_as_requested(seq_len, num_layers, num_heads):
    found = densities(drawn(seq_len, num_layers, num_heads), seq_len)
    layers = found.mean(1)
    assert found.mean() == pytest.approx(0.063, rel=0.005)
    if num_layers > 2:
        # The paper: sparsity 93.7 +- 3.9 %, layers from 87.3 % to 99.6 %.
        assert layers.min() == pytest.approx(0.004, rel=0.02)
        assert layers.max() == pytest.approx(0.127, rel=0.02)
        assert 0.03 < layers.std() < 0.045
        assert not (np.diff(layers) > 0).all()  # in random order
    if num_heads > 1:
        spread = found / layers[:, None]
        np.testing.assert_allclose(spread.min(1), 0.5, rtol=0.05)
        np.testing.assert_allclose(spread.max(1), 1.5, rtol=0.05)


def test_every_head_has_near_and_far_diagonals_and_few_columns():
    replay = drawn()
    assert (replay.slash_blocks[..., 0] == 0).all()  # no row is empty
    for blocks, count, columns, number in zip(
        *(x.reshape(36 * 16, -1) for x in (replay.slash_blocks, replay.slash_count)),
        *(x.reshape(36 * 16, -1) for x in (replay.vertical_tokens, replay.vertical_count)),
        strict=True,
    ):
        count, number = int(count[0]), int(number[0])
        near = int((np.diff(blocks[:count]) == 1).argmin()) + 1
        assert 1 <= near < count / 1.5
        assert (np.diff(blocks[:count]) > 0).all() and blocks[count - 1] > 100
        assert (np.diff(columns[:number]) > 0).all() and columns[number - 1] < 524288
        assert (blocks[count:] == 4096).all() and (columns[number:] == 524288).all()
    without = dataclasses.replace(replay, vertical_count=np.zeros_like(replay.vertical_count))
    share = 1 - densities(without, 524288).mean() / densities(replay, 524288).mean()
    assert 0.05 < share < 0.15  # mask B: 8 % at this length
    # Mask B has 3000 columns at about this density.
    typical = np.abs(densities(replay, 524288) - 0.063) < 0.002
    assert 2850 < replay.vertical_count[typical].mean() < 3150


def test_an_impossible_density_raises():
    with pytest.raises(UserError) as error:
        drawn(65536)
    assert str(error.value).startswith(
        "sparsity.replay_density = 0.063 gives 0.200% of the causal pairs to its sparsest head, "
        "fewer than two of the 512 block diagonals of data.seq_len = 65536 (0.391%); set "
        "sparsity.replay_density=0.1231, or use a longer sequence or smaller blocks"
    )
    drawn(65536, replay_density=0.1231)
    with pytest.raises(UserError, match=r"\(1\.562%\); use a longer"):
        drawn(16384)
    like = dataclasses.replace(LIKE, local_blocks=8)
    lists = {"replay_of": "sampled_rows", "like": like, "num_layers": 2}
    with pytest.raises(UserError, match=r"set sparsity\.replay_density=0\.1285, or use"):
        drawn(16384, **lists)
    drawn(16384, replay_density=0.1285, **lists)
    few = dataclasses.replace(LIKE, max_slashes=200)
    with pytest.raises(UserError, match="sparsity.max_slashes = 200 has room for 402"):
        drawn(like=few)


def test_lists_have_their_density_and_forced_blocks():
    settings = Replay(
        replay_of="sampled_rows",
        replay_density=0.3,
        replay_estimate=False,
        block_size=8,
        num_probe_queries=8,
        probe_queries_per_block=2,
        sink_blocks=2,
    )
    assert (
        settings.sharded_by_query(documents=False) and "lists for each row" in settings.describe()
    )
    whole = settings.bind(ModelSizes(num_layers=2, num_heads=4, seq_len=2048))
    layers, q = [], jnp.zeros((1, 2048, 4, 1))

    @jax.jit
    def selected(pattern):
        index = select_index(q, q, pattern, block_ids=jnp.arange(256), num_blocks=256)
        return density(index, 2048), index.bits

    for layer in range(2):
        found, bits = selected(jax.tree.map(lambda x: jnp.asarray(x[layer]), whole))  # noqa: B023
        layers.append(np.asarray(found)[0])
        listed = np.asarray(bits)[0, :, :, np.arange(256) // 32].transpose(1, 2, 0)
        listed = listed >> (np.arange(256) % 32) & 1
        rows, blocks = np.arange(256)[:, None], np.arange(256)
        forced = (blocks <= rows) & ((blocks < 2) | (rows - blocks < 2))
        assert (listed[:, forced] == 1).all() and (listed[:, blocks > rows] == 0).all()
    layers = np.array(layers)
    assert layers.mean() == pytest.approx(0.3, rel=0.02)
    assert layers[0].mean() != pytest.approx(layers[1].mean(), rel=0.2)
    # Forced pairs: 256 blocks on the diagonal, 1 and 2 more in the next rows, 3 in all others.
    least = (256 * 8 * 9 / 2 + (1 + 2 + 253 * 3) * 8**2) / (2048 * 2049 / 2)
    only = dataclasses.replace(settings, replay_density=least).bind(ModelSizes(1, 1, 2048))
    assert not only.thresholds.any()
    with pytest.raises(UserError, match="0.15 is below the density of the blocks that are always"):
        dataclasses.replace(settings, replay_density=0.15, sink_blocks=60).bind(
            ModelSizes(num_layers=1, num_heads=1, seq_len=2048)
        )


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    shapes = (1, SMALL_LEN, 4, 16), (1, SMALL_LEN, 2, 16), (1, SMALL_LEN, 2, 16)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def layer_of(estimate):
    replay = drawn(SMALL_LEN, 1, 4, like=SMALL, replay_density=0.3, replay_estimate=estimate)
    return jax.tree.map(lambda x: jnp.asarray(x[0]), replay)


def compiled(estimate):
    layout = Layout("striped", SMALL_LEN, 2, SMALL.block_size)
    attention = make_attention(make_mesh(1, 1, 2), layout, Dense(SMALL.block_size))
    arguments = [x[:, layout.permutation()] for x in inputs()]
    arguments.append(AttentionInputs(layer_of(estimate)))
    program = jax.jit(attention).lower(*arguments).compile()
    out, stats = program(*arguments)
    return program.as_text(), out[:, layout.inverse()], stats


def test_the_replayed_index_is_computed_and_the_estimate_is_not_removed():
    layer = layer_of(True)
    with_text, with_out, with_stats = compiled(True)
    without_text, without_out, without_stats = compiled(False)

    # The replayed index is computed.
    index = VerticalSlashIndex(*(x[None] for x in jax.tree.leaves(layer)), layer.block_size)
    expected, _ = reference_attention(*inputs(), index.to_mask(SMALL_LEN))
    np.testing.assert_allclose(with_out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(with_out, without_out)
    assert with_stats["density"] == without_stats["density"]

    # The reported estimate is that of the selected index.
    q, k, _ = inputs()
    select = functools.partial(select_index, block_ids=jnp.arange(32), num_blocks=32)
    chosen = jax.jit(select, static_argnums=2)(q, k, SMALL)
    share = float(density(chosen, SMALL_LEN).mean())
    assert with_stats["estimated_density"] == pytest.approx(share)
    assert share != pytest.approx(float(with_stats["density"]), rel=0.05)
    assert "estimated_density" not in without_stats

    # Ranks exchange scores and the selection in sums over all ranks.
    sums = "all-reduce("
    assert with_text.count(sums) > without_text.count(sums)


def test_a_pack_replays_the_pairs_within_its_documents():
    settings = Replay(
        replay_of="sampled_rows",
        replay_density=0.3,
        block_size=8,
        num_probe_queries=8,
        probe_queries_per_block=2,
        min_sparse_tokens=64,
        replay_estimate=False,
    )
    lists = settings.bind(ModelSizes(1, 4, SMALL_LEN))
    lists = jax.tree.map(lambda x: jnp.asarray(x[0]), lists)
    columns = dataclasses.replace(layer_of(True), min_sparse_tokens=64)
    documents = Documents.from_lengths([[100, 1, 90]], SMALL_LEN, 8)

    @functools.partial(jax.jit, static_argnames="packed")
    def select(q, k, columns, lists, packed):
        own = documents if packed else None
        context = SelectionContext(jnp.arange(32), 32, documents=own)
        found = [pattern.select(q, k, context) for pattern in (columns, lists)]
        if packed:
            alone = columns.replayed().select(q, k, context).index
            return found, density(alone, SMALL_LEN, documents=own).mean()
        return found

    q, k, _ = inputs()
    found, share = select(q, k, columns, lists, packed=True)
    whole = select(q, k, columns, lists, packed=False)
    within = np.zeros((SMALL_LEN, SMALL_LEN), bool)
    of_first = np.zeros_like(within)  # the first block, which lists always include
    for start, end in [(0, 104), (104, 112), (112, 208)]:
        within[start:end, start:end] = True
        of_first[start:end, start : start + 8] = True
    within &= np.tri(SMALL_LEN, dtype=bool)
    for packed, alone, forced in zip(found, whole, [False, of_first], strict=True):
        wanted = (index_mask(alone.index, SMALL_LEN) | forced) & within
        np.testing.assert_array_equal(index_mask(packed.index, SMALL_LEN), wanted)
        assert not wanted[0, :, within].all()
    assert found[0].statistics["estimated_density"] == pytest.approx(float(share))
