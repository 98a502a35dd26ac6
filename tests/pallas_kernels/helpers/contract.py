"""Requirements for every attention backend, as one test class against the oracle.

Test modules subclass `AttentionContract` and set its parameters. Two kinds of tests complement each
other. Comparisons with the oracle on normal inputs measure accuracy. Counting tests use logits of 0
and small integer values: in any dtype, the results are then exact sums of integers, and a single
missing or additional key shows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import pallas_kernels
from pallas_kernels import (
    BlockMaskIndex,
    Columns,
    DenseIndex,
    Gradients,
    VerticalSlashIndex,
    WindowIndex,
)
from pallas_kernels.index import Segment
from pallas_kernels.tiles import COLUMN_TILE, NO_DIAGONAL, Tiles
from tests.pallas_kernels.helpers import brute_force, cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.expected import (
    FP32_EPS,
    Expected,
    assert_same_bits,
    compare,
    compare_lse,
    exact_sums,
    oracle,
)
from tests.pallas_kernels.helpers.striped import (
    collect,
    seen_by,
    segmented_step,
    split,
    striped_step,
)


@functools.partial(jax.jit, static_argnames=("scale", "out_dtype", "backend"))
def forward(q, k, v, tiles, columns=None, column_kv=None, *, backend, **options):
    """Plans and executes a forward pass."""
    plan = pallas_kernels.plan(q, k, tiles, columns, backend=backend)
    return pallas_kernels.forward(q, k, v, plan, column_kv, **options)


@functools.partial(jax.jit, static_argnames=("scale", "key_dtype", "backend"))
def backward(
    q, k, v, dout, lse, delta, tiles, columns=None, column_kv=None, *, backend, **options
) -> Gradients:
    """Plans and executes a backward pass."""
    plan = pallas_kernels.plan(q, k, tiles, columns, backend=backend)
    return pallas_kernels.backward(q, k, v, dout, lse, delta, plan, column_kv, **options)


class AttentionContract:
    """Subclass as `Test...` and set `backend`; the other attributes scale the problems."""

    backend: str
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # the first is the main one
    block_size: int = 8
    other_block_sizes: tuple[int, ...] = ()
    dim: int = 16
    other_dims: tuple[int, ...] = (64, 128)
    batch: int = 2
    num_blocks: int = 24  # even
    heads: tuple[int, int] = (6, 2)  # query heads, key/value heads
    group_heads: tuple[tuple[int, int], ...] = ((2, 2), (4, 2), (5, 1), (14, 2), (8, 1))
    max_slashes: int = 4
    max_verticals: int = 16

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Turns the attributes into parameters of the tests that use them."""
        knobs = {
            "dtype": self.dtypes,
            "other_dim": self.other_dims,
            "other_block_size": self.other_block_sizes,
            "group": range(len(self.group_heads)),
        }
        for name, values in knobs.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    # Every pair is counted exactly once.

    def test_vertical_slash_counts_each_pair_once(self, group: int) -> None:
        heads, kv_heads = self.group_heads[group]
        size = dataclasses.replace(self._size(), heads=heads, kv_heads=kv_heads)
        self._count_vertical_slash(size, self.dtypes[group % len(self.dtypes)], seed=group)

    def test_the_first_column_of_a_second_tile_is_counted_once(self) -> None:
        size, capacity = self._size(), COLUMN_TILE + 1
        self._count_vertical_slash(size, self.dtypes[0], seed=20, max_verticals=capacity)

    def test_other_block_sizes_count_each_pair_once(self, other_block_size: int) -> None:
        size = dataclasses.replace(self._size(), block_size=other_block_size)
        self._count_vertical_slash(size, self.dtypes[0], seed=21)

    @pytest.mark.parametrize("causal", [True, False])
    def test_block_sparse_counts_each_pair_once(self, causal: bool) -> None:
        rng, size = np.random.default_rng(30 + causal), self._size()
        if not causal:
            size = dataclasses.replace(size, query_blocks=size.key_blocks // 2)
        index = cases.block_sparse(rng, size, causal=causal, garbage=np.random.default_rng(0))
        tiles = index.tiles()
        self._count(rng, size, tiles, brute_force.block_sparse_mask(index))

    def test_listed_blocks_of_gathered_keys_count_each_pair_once(self) -> None:
        """Queries of one of two ranks, keys of both: the positions of masked tiles are data."""
        rng, size, ranks, rank = np.random.default_rng(32), self._size(), 2, 1
        index = cases.block_sparse(rng, size, causal=True, garbage=np.random.default_rng(0))
        mask = brute_force.block_sparse_mask(index)
        local = size.key_blocks // ranks

        @jax.jit
        def gathered(sources):
            shards = index.shards(size.batch, size.heads, ranks, size.key_blocks)
            return shards.gathered(Segment(rank, ranks, local), sources, skip_own=False)

        for sources in ([0, 1], [1, 0]):
            tiles = gathered(np.asarray(sources, np.int32))
            assert int(tiles.diagonal) == -sources.index(rank) * local
            rows, columns = (
                np.concatenate([_tokens(r, ranks, size) for r in of]) for of in ([rank], sources)
            )
            pairs = mask[:, :, rows][..., columns]
            self._count(rng, dataclasses.replace(size, query_blocks=local), tiles, pairs)

    def test_listed_blocks_and_columns_count_each_pair_once(self) -> None:
        """Columns inside and outside of listed blocks, in unlisted own blocks, and no columns."""
        rng, size = np.random.default_rng(33), self._size()
        index = cases.block_mask_with_columns(rng, size, max_columns=size.seq_len)
        tile_mask = brute_force.index_mask(
            dataclasses.replace(index, column_marks=None), size.seq_len
        )
        column_pairs = brute_force.index_mask(index, size.seq_len) & ~tile_mask
        assert column_pairs.any() and (tile_mask & column_pairs.any(2, keepdims=True)).any()
        if size.seq_len >= 2 * COLUMN_TILE:
            columns = cases.tiles_and_columns(index, size)[1]
            assert int(columns.first.max()) >= COLUMN_TILE  # kernels start with a later tile
        self._count(rng, size, index, tile_mask, column_pairs)

    def test_columns_of_documents_count_each_pair_once(self) -> None:
        """Every token is a column of its document only, so later ones start at a later tile."""
        rng, size = np.random.default_rng(34), self._size()
        index = cases.documents_of_columns(size, documents=min(3, size.key_blocks))
        columns = cases.tiles_and_columns(index, size)[1]
        assert int(columns.first.max()) >= COLUMN_TILE
        tile_mask = brute_force.index_mask(
            dataclasses.replace(index, column_marks=None), size.seq_len
        )
        column_pairs = brute_force.index_mask(index, size.seq_len) & ~tile_mask
        self._count(rng, size, index, tile_mask, column_pairs)

    @pytest.mark.parametrize("wide", [True, False])
    def test_offsets_of_unequal_shards_count_each_pair_once(self, wide: bool) -> None:
        """A shard pair of a ring step: start and stop inside longer lists, either sign."""
        rng, size = np.random.default_rng(40 + wide), self._unequal(wide)
        for diagonal in (-1, NO_DIAGONAL):
            tiles = cases.diagonal_tiles(
                rng, size, capacity=8, diagonal=int(diagonal), garbage=np.random.default_rng(1)
            )
            mask = brute_force.tile_mask(tiles, size.query_blocks, size.key_blocks)
            self._count(rng, size, tiles, mask)

    # In blocks: the window, and the keys before the first query.
    @pytest.mark.parametrize(("window", "lag"), [(0.75, 0), (1, 1), (2.5, 1)])
    def test_windows_count_each_pair_once(self, window: float, lag: int) -> None:
        rng, size = np.random.default_rng(50), self._size()
        lengths = [1, size.key_blocks - 1] if size.key_blocks < 4 else [1, -1, size.key_blocks - 2]
        documents = cases.dense_documents(size, size.batch * [lengths])
        index = WindowIndex(documents, int(window * size.block_size))
        mask = brute_force.index_mask(index, size.seq_len)[:, :, lag * size.block_size :]
        size = dataclasses.replace(size, query_blocks=size.key_blocks - lag)
        tiles, _ = index.on_one_device(size.batch, mask.shape[2], size.heads, mask.shape[3])
        self._count(rng, size, tiles, mask)

    # Accuracy against the oracle.

    def test_vertical_slash_matches_oracle(self, dtype: str) -> None:
        self._compare_vertical_slash(self._size(), dtype, seed=1)

    def test_other_head_dims_match_oracle(self, other_dim: int) -> None:
        size = dataclasses.replace(self._size(), batch=1, heads=2, kv_heads=1, dim=other_dim)
        self._compare_vertical_slash(size, self.dtypes[-1], seed=other_dim)

    def test_dense_causal_is_the_limit_of_sparse(self) -> None:
        rng, size = np.random.default_rng(2), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        index = cases.every_diagonal(size.batch, size.heads, size.seq_len, size.block_size)
        mask = np.tril(np.ones((size.seq_len, size.seq_len), bool))
        expected = oracle(q, k, v, dout, _of_heads(mask, size))
        dense = functools.partial(
            pallas_kernels.attention, index=DenseIndex(size.block_size), backend=self.backend
        )
        self._compare_gradients(_value_and_vjp(dense, q, k, v, dout), expected, q.dtype)
        sparse = self._vertical_slash(q, k, v, index, dout)
        self._compare_gradients(sparse, expected, q.dtype)

    def test_dense_non_causal_with_unequal_lengths_matches_oracle(self) -> None:
        rng, size = np.random.default_rng(3), self._unequal(wide=True)
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        mask = np.ones((q.shape[1], k.shape[1]), bool)
        every = DenseIndex(size.block_size, causal=False)
        dense = functools.partial(pallas_kernels.attention, index=every, backend=self.backend)
        expected = oracle(q, k, v, dout, _of_heads(mask, size))
        self._compare_gradients(_value_and_vjp(dense, q, k, v, dout), expected, q.dtype)

    def test_block_sparse_matches_oracle(self) -> None:
        rng, size = np.random.default_rng(4), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        index = cases.block_sparse(rng, size, causal=True)
        mask = brute_force.block_sparse_mask(index)
        attention = functools.partial(pallas_kernels.attention, index=index, backend=self.backend)
        expected = oracle(q, k, v, dout, mask)
        self._compare_gradients(_value_and_vjp(attention, q, k, v, dout), expected, q.dtype)

    def test_listed_diagonal_tiles_are_masked(self) -> None:
        """Also those after other tiles of a list."""
        rng, size = np.random.default_rng(17), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        shape = size.batch, size.heads, size.query_blocks, size.key_blocks
        index = cases.lists_of_mask(np.ones(shape, bool), size.block_size, causal=True)
        mask = brute_force.block_sparse_mask(index)
        attention = functools.partial(pallas_kernels.attention, index=index, backend=self.backend)
        expected = oracle(q, k, v, dout, mask)
        self._compare_gradients(_value_and_vjp(attention, q, k, v, dout), expected, q.dtype)

    def test_windows_match_oracle(self) -> None:
        rng, size = np.random.default_rng(15), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        sizes = size.batch, size.heads, size.query_blocks, size.block_size
        index = WindowIndex.of_sequence(*sizes, 3 * size.block_size // 2)
        mask = brute_force.index_mask(index, size.seq_len)
        attention = functools.partial(pallas_kernels.attention, index=index, backend=self.backend)
        expected = oracle(q, k, v, dout, mask)
        self._compare_gradients(_value_and_vjp(attention, q, k, v, dout), expected, q.dtype)

    def test_large_logits_stay_accurate(self) -> None:
        """Logits of several hundred: rows are nearly one-hot, and nothing overflows."""
        rng, size = np.random.default_rng(5), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        q = (q.astype(jnp.float32) * 100).astype(q.dtype)
        index = self._index(rng, size)
        actual = self._vertical_slash(q, k, v, index, dout)
        expected = oracle(q, k, v, dout, brute_force.index_mask(index, size.seq_len))
        # A logit is rounded relative to the size of the products that it sums, and the error of its
        # exponential is as large.
        norms = (np.linalg.norm(np.asarray(x, np.float32), axis=-1).max() for x in (q, k))
        rounding = float(np.prod(list(norms))) * size.dim**-0.5 * FP32_EPS
        compare("out", actual["out"], expected["out"], q.dtype, rounding)
        compare_lse(actual.pop("lse"), expected["lse"], rounding)
        for name, x in actual.items():
            assert np.isfinite(np.asarray(x, np.float32)).all(), f"{name} is not finite"

    # Running results and ring attention.

    def test_running_result_is_merged(self) -> None:
        """Two halves of the lists, one after the other, give the whole result; also empty rows."""
        rng, size = np.random.default_rng(6), self._unequal(wide=False)
        q, k, v, _ = cases.qkv_dout(rng, size, self.dtypes[0])
        whole = cases.diagonal_tiles(rng, size, capacity=8, diagonal=-1)
        middle = (whole.start + whole.stop) // 2
        first = dataclasses.replace(whole, stop=middle)
        second = dataclasses.replace(whole, start=middle)
        before = self._forward(q, k, v, first, out_dtype="float32")
        chained = self._forward(q, k, v, second, init=tuple(before))
        assert chained[0].dtype == chained[1].dtype == jnp.float32
        mask = brute_force.tile_mask(whole, size.query_blocks, size.key_blocks)
        expected = oracle(q, k, v, q, mask)
        compare("out", chained[0], expected["out"], q.dtype)
        compare_lse(chained[1], expected["lse"])

    def test_a_step_without_any_tile_changes_nothing(self) -> None:
        rng, size = np.random.default_rng(7), self._unequal(wide=False)
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        tiles = cases.diagonal_tiles(rng, size, capacity=8, diagonal=-1)
        nothing = dataclasses.replace(tiles, stop=tiles.start)
        empty = self._forward(q, k, v, nothing, out_dtype="float32")
        assert (np.asarray(empty[0]) == 0).all() and (np.asarray(empty[1]) == -np.inf).all()
        for init in (empty, self._forward(q, k, v, tiles, out_dtype="float32")):
            out, lse = self._forward(q, k, v, nothing, init=tuple(init))
            # A backend may keep lse in another base, so its last bit may move.
            np.testing.assert_allclose(out, init[0], rtol=1e-6, err_msg="out")
            np.testing.assert_allclose(lse, init[1], rtol=1e-6, atol=1e-6, err_msg="lse")
        row = (dout, lse, pallas_kernels.delta_of(out, dout))
        grads = backward(q, k, v, *row, nothing, backend=self.backend)
        for name in ("dq", "dk", "dv"):
            assert (np.asarray(getattr(grads, name)) == 0).all(), name

    def test_striped_ring_steps_add_up_to_the_whole(self) -> None:
        """Two ranks, emulated: verticals first, then each shard of keys; gradients are summed."""
        rng, size, ranks = np.random.default_rng(8), self._size(), 2
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        index, scale = self._index(rng, size), 0.3
        expected = oracle(q, k, v, dout, brute_force.index_mask(index, size.seq_len), scale)
        _, columns, column_kv = resolve_index(index, k, v)
        q_of, k_of, v_of, dout_of = (split(x, ranks, size) for x in (q, k, v, dout))
        blocks = size.key_blocks
        run = functools.partial(self._forward, scale=scale)
        outs, lses = [], []
        for rank in range(ranks):
            out, lse = run(
                q_of[rank],
                k_of[rank],
                v_of[rank],
                None,
                seen_by(rank, index, ranks, blocks),
                column_kv,
                out_dtype="float32",
            )
            for source in range(ranks):
                tiles = striped_step(index, rank, source, ranks)
                out, lse = run(q_of[rank], k_of[source], v_of[source], tiles, init=(out, lse))
            outs.append(out)
            lses.append(lse)
        compare("out", collect(outs, size), expected["out"], q.dtype)
        lse = collect([np.asarray(x).swapaxes(1, 2) for x in lses], size).swapaxes(1, 2)
        compare_lse(lse, expected["lse"])

        run = functools.partial(backward, scale=scale, backend=self.backend)
        dqs, dks, dvs = [], [0.0] * ranks, [0.0] * ranks
        of_columns = [0.0, 0.0]
        for rank in range(ranks):
            row = (dout_of[rank], lses[rank], pallas_kernels.delta_of(outs[rank], dout_of[rank]))
            own = jax.device_get(
                run(
                    q_of[rank],
                    k_of[rank],
                    v_of[rank],
                    *row,
                    None,
                    seen_by(rank, index, ranks, blocks),
                    column_kv,
                )
            )
            assert own.dk is None and own.dv is None
            of_columns = [of_columns[0] + own.dk_columns, of_columns[1] + own.dv_columns]
            dq = own.dq
            for source in range(ranks):
                tiles = striped_step(index, rank, source, ranks)
                part = jax.device_get(run(q_of[rank], k_of[source], v_of[source], *row, tiles))
                assert part.dk_columns is None and part.dv_columns is None
                dq, dks[source] = dq + part.dq, dks[source] + part.dk
                dvs[source] += part.dv
            dqs.append(dq)
        dk, dv = (
            _scatter_columns(collect(parts, size), gathered, columns.tokens)
            for parts, gathered in ((dks, of_columns[0]), (dvs, of_columns[1]))
        )
        actual = {"dq": collect(dqs, size), "dk": dk, "dv": dv}
        for name, x in actual.items():
            compare(name, x, expected[name], q.dtype)

    def test_keys_of_several_ranks_in_one_call(self) -> None:
        """Keys of two ranks, concatenated but not in sequence order."""
        rng, size, ranks, sources = np.random.default_rng(8), self._size(), 2, [1, 0]
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        index, scale = self._index(rng, size), 0.3
        expected = oracle(q, k, v, dout, brute_force.index_mask(index, size.seq_len), scale)
        _, columns, column_kv = resolve_index(index, k, v)
        q_of, k_of, v_of, dout_of = (split(x, ranks, size) for x in (q, k, v, dout))
        keys, values = (np.concatenate([x[s] for s in sources], axis=1) for x in (k_of, v_of))
        blocks = size.key_blocks
        outs, lses, dqs, dkvs, of_columns = [], [], [], [], [0.0, 0.0]
        for rank in range(ranks):
            tiles = segmented_step(index, rank, sources, ranks, blocks // ranks)
            seen = seen_by(rank, index, ranks, blocks), column_kv
            out, lse = self._forward(q_of[rank], keys, values, tiles, *seen, scale=scale)
            grads = backward(
                q_of[rank],
                keys,
                values,
                dout_of[rank],
                lse,
                pallas_kernels.delta_of(out, dout_of[rank]),
                tiles,
                *seen,
                scale=scale,
                backend=self.backend,
            )
            grads = jax.device_get(grads)
            outs.append(out)
            lses.append(np.asarray(lse).swapaxes(1, 2))
            dqs.append(grads.dq)
            dkvs.append((grads.dk, grads.dv))
            of_columns = [of_columns[0] + grads.dk_columns, of_columns[1] + grads.dv_columns]
        compare("out", collect(outs, size), expected["out"], q.dtype)
        compare_lse(collect(lses, size).swapaxes(1, 2), expected["lse"])
        compare("dq", collect(dqs, size), expected["dq"], q.dtype)
        for name, shares, gathered in zip(
            ("dk", "dv"), zip(*dkvs, strict=True), of_columns, strict=True
        ):
            parts = np.split(sum(shares), ranks, axis=1)
            total = collect([parts[sources.index(rank)] for rank in range(ranks)], size)
            total = _scatter_columns(total, gathered, columns.tokens)
            compare(name, total, expected[name], q.dtype)

    # Robustness.

    def test_padding_of_lists_is_never_read_as_an_entry(self) -> None:
        rng, size = np.random.default_rng(9), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        results = []
        for garbage in (None, np.random.default_rng(10)):
            index = self._index(np.random.default_rng(11), size, garbage=garbage)
            results.append(self._vertical_slash(q, k, v, index, dout))
        assert_same_bits(*results)

    def test_results_are_deterministic(self) -> None:
        rng, size = np.random.default_rng(12), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        index = self._index(rng, size)
        first = self._vertical_slash(q, k, v, index, dout)
        # Freed NaN arrays: memory that a kernel allocates but does not write becomes visible.
        poison = [jnp.full((*q.shape, n), jnp.nan) for n in (1, 1, 2, 2)]
        jax.block_until_ready(poison)
        del poison
        assert_same_bits(first, self._vertical_slash(q, k, v, index, dout))

    def test_rows_without_a_pair_are_empty(self) -> None:
        rng, size = np.random.default_rng(13), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        index = self._index(rng, size)
        mask = brute_force.index_mask(index, size.seq_len)
        actual = self._vertical_slash(q, k, v, index, dout)
        empty_rows = ~mask.any(-1)
        assert 0.05 < empty_rows.mean() < 0.9
        assert (np.asarray(actual["lse"])[empty_rows] == -np.inf).all()
        for x in (actual["out"], actual["dq"]):
            assert (np.asarray(x, np.float32).swapaxes(1, 2)[empty_rows] == 0).all()

    @pytest.mark.parametrize("missing", ["slashes", "verticals"])
    def test_an_index_without_capacity_for_one_kind(self, missing: str) -> None:
        rng, size = np.random.default_rng(14), self._size()
        q, k, v, dout = cases.qkv_dout(rng, size, self.dtypes[0])
        index = self._index(rng, size)
        none = jnp.zeros((size.batch, size.heads), jnp.int32)
        if missing == "slashes":
            index = dataclasses.replace(
                index, slash_blocks=index.slash_blocks[..., :0], slash_count=none
            )
        else:
            index = dataclasses.replace(
                index, vertical_tokens=index.vertical_tokens[..., :0], vertical_count=none
            )
        expected = oracle(q, k, v, dout, brute_force.index_mask(index, size.seq_len))
        self._compare_gradients(self._vertical_slash(q, k, v, index, dout), expected, q.dtype)

    # Helpers of the tests above.

    def _size(self) -> Size:
        return Size(
            self.batch, *self.heads, self.num_blocks, self.num_blocks, self.block_size, self.dim
        )

    def _unequal(self, wide: bool) -> Size:
        half = self.num_blocks // 2
        lengths = (half, half + 2) if wide else (half + 2, half)
        query_blocks, key_blocks = lengths
        return dataclasses.replace(self._size(), query_blocks=query_blocks, key_blocks=key_blocks)

    def _index(self, rng: np.random.Generator, size: Size, **options) -> VerticalSlashIndex:
        capacity = {"max_slashes": self.max_slashes, "max_verticals": self.max_verticals}
        return cases.vertical_slash(rng, size, **(capacity | options))

    def _forward(
        self, q, k, v, tiles, columns=None, column_kv=None, **options
    ) -> tuple[Array, Array]:
        return forward(q, k, v, tiles, columns, column_kv, backend=self.backend, **options)

    def _vertical_slash(self, q, k, v, index, dout) -> dict[str, Array]:
        return _vertical_slash_vjp(q, k, v, index, dout, self.backend)

    def _compare_vertical_slash(self, size: Size, dtype: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, k, v, dout = cases.qkv_dout(rng, size, dtype)
        index = self._index(rng, size)
        expected = oracle(q, k, v, dout, brute_force.index_mask(index, size.seq_len))
        actual = self._vertical_slash(q, k, v, index, dout)
        self._compare_gradients(actual, expected, q.dtype)

    def _compare_gradients(
        self, actual: dict[str, Array], expected: dict[str, Expected], dtype: jnp.dtype
    ) -> None:
        for name, x in actual.items():
            assert x.dtype == (jnp.float32 if name == "lse" else dtype), name
            if name == "lse":
                compare_lse(x, expected[name])
            else:
                compare(name, x, expected[name], dtype)

    def _count_vertical_slash(self, size: Size, dtype: str, seed: int, **options) -> None:
        rng = np.random.default_rng(seed)
        index = self._index(rng, size, garbage=np.random.default_rng(100 + seed), **options)
        no_verticals = dataclasses.replace(
            index, vertical_count=jnp.zeros_like(index.vertical_count)
        )
        tile_mask = brute_force.index_mask(no_verticals, size.seq_len)
        column_pairs = brute_force.index_mask(index, size.seq_len) & ~tile_mask
        self._count(rng, size, index, tile_mask, column_pairs, dtype=dtype)

    def _count(
        self,
        rng,
        size: Size,
        pattern,
        tile_mask: np.ndarray,
        column_pairs: np.ndarray | None = None,
        dtype: str | None = None,
    ) -> None:
        """Compares forward and backward with exact sums over the pairs of the masks."""
        q, k, v, dout = cases.counting(rng, size, dtype or self.dtypes[0])
        delta = rng.integers(-3, 4, (size.batch, size.heads, q.shape[1])).astype(np.float32)
        out, lse, grads, columns, column_kv = _both_passes(
            q, k, v, dout, delta, pattern, of_index=column_pairs is not None, backend=self.backend
        )
        column_mask = None if column_pairs is None else _columns_of(column_pairs, columns)
        expected = exact_sums(q, k, v, dout, delta, tile_mask, column_kv, column_mask)
        count = expected.pop("count")
        np.testing.assert_allclose(
            np.exp(np.asarray(lse, np.float64)), count, rtol=2e-6, err_msg="pairs of a row"
        )
        sums = np.asarray(out, np.float64) * count.swapaxes(1, 2)[..., None]
        np.testing.assert_allclose(sums, expected.pop("sum"), rtol=0, atol=0.02, err_msg="out")
        for name, x in grads._asdict().items():
            if expected[name] is None:
                assert x is None, name
                continue
            assert x.dtype == jnp.float32, name
            np.testing.assert_array_equal(np.asarray(x), expected[name], err_msg=name)


_scatter_columns = jax.jit(pallas_kernels.scatter_columns)


@functools.partial(jax.jit, static_argnames=("of_index", "backend"))
def _both_passes(q, k, v, dout, delta, pattern, *, of_index, backend):
    """Counts with tiles or an index: out, lse, gradients at lse 0, and columns."""
    tiles, columns, column_kv = resolve_index(pattern, k, v) if of_index else (pattern, None, None)
    plan = pallas_kernels.plan(q, k, tiles, columns, backend=backend)
    out, lse = pallas_kernels.forward(q, k, v, plan, column_kv, scale=1.0, out_dtype="float32")
    grads = pallas_kernels.backward(
        q, k, v, dout, jnp.zeros_like(lse), delta, plan, column_kv, scale=1.0
    )
    return out, lse, grads, columns, column_kv


@functools.partial(jax.jit, static_argnums=5)
def _vertical_slash_vjp(q, k, v, index, dout, backend):
    def attention(q, k, v):
        return pallas_kernels.attention(q, k, v, index, backend=backend, return_lse=True)

    out, vjp, lse = jax.vjp(attention, q, k, v, has_aux=True)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *vjp(dout)), strict=True))


def _value_and_vjp(attention, q, k, v, dout) -> dict[str, Array]:
    return jax.jit(functools.partial(_vjp, attention))(q, k, v, dout)


def _vjp(attention, q, k, v, dout) -> dict[str, Array]:
    out, vjp = jax.vjp(attention, q, k, v)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(dout)), strict=True))


def _columns_of(pairs: np.ndarray, columns: Columns) -> np.ndarray:
    """Converts a mask of (query, key) pairs to (query, gathered column); padding is off."""
    tokens, seq_len = np.asarray(columns.tokens), pairs.shape[-1]
    at = np.minimum(tokens, seq_len - 1)[:, :, None, :]
    return np.take_along_axis(pairs, at, axis=-1) & (tokens < seq_len)[:, :, None, :]


@jax.jit
def resolve_index(
    index: VerticalSlashIndex | BlockMaskIndex, k: Array, v: Array
) -> tuple[Tiles, Columns, tuple[Array, Array]]:
    """Tiles and columns of an index on one device, and keys and values of the columns."""
    batch, num_keys = k.shape[:2]
    num_heads = jax.tree.leaves(index)[0].shape[1]
    tiles, columns = index.on_one_device(batch, num_keys, num_heads, num_keys)
    column_kv = tuple(pallas_kernels.gather_columns(x, columns.tokens) for x in (k, v))
    return tiles, columns, column_kv


def _tokens(rank: int, ranks: int, size: Size) -> np.ndarray:
    """The positions of a striped rank's tokens."""
    blocks = np.arange(rank, size.key_blocks, ranks)
    return (blocks[:, None] * size.block_size + np.arange(size.block_size)).reshape(-1)


def _of_heads(mask: np.ndarray, size: Size) -> np.ndarray:
    return np.broadcast_to(mask, (size.batch, size.heads, *mask.shape))
