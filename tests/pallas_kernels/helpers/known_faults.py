"""What sparse backward passes of other projects got wrong in 2026, tried on these kernels.

Most tests name a report. They compare with dense fp32 attention and its automatic gradient.
Subclass as `Test...`, and set the backend and sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from mtraining_jax import Dense, Documents, sparse_attention
from pallas_kernels import BlockMaskIndex, DenseIndex
from tests.pallas_kernels.helpers import brute_force, cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.expected import (
    FP32_EPS,
    assert_same_bits,
    compare,
    compare_lse,
    oracle,
)

BLOCKS = 6


class KnownFaults:
    backend: str
    dtype: str = "bfloat16"
    block_size: int = 128
    dims: tuple[int, ...] = (64, 128)
    repetitions: int = 1000

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "dim" in metafunc.fixturenames:
            metafunc.parametrize("dim", self.dims)

    def test_lists_of_all_causal_blocks_give_dense_gradients(self, dim: int) -> None:
        """Gradients 150 to 700 times too large, heads of 64 (FlashAttention-4, issue 2623)."""
        every = np.ones((2, 2, BLOCKS, BLOCKS), bool)
        problem = self._problem(heads=2, kv_heads=2, dim=dim)
        self._check(problem, every)
        dense = self._run(problem, DenseIndex(self.block_size))
        self._compare(dense, problem, _expanded(every, self.block_size))

    def test_a_key_block_that_every_query_selects(self, dim: int) -> None:
        """Gradients of keys that many queries select, wrong by 1e10 (cuDNN frontend, 385)."""
        selected = np.zeros((2, 4, BLOCKS, BLOCKS), bool)
        selected[..., 0] = True
        self._check(self._problem(heads=4, kv_heads=1, dim=dim), selected)

    def test_rows_without_a_pair(self, dim: int) -> None:
        """Gradients from the undefined rows of empty lists (Megatron-LM, 6910)."""
        selected = self._random(heads=2)
        selected[:, :, [0, 3, BLOCKS - 1]] = False
        selected[0, 1] = False  # a head without any pair
        problem = self._problem(heads=2, kv_heads=1, dim=dim)
        result = self._check(problem, selected)
        rows = np.repeat(~selected.any(-1), self.block_size, axis=-1)
        assert (np.asarray(result["lse"])[rows] == -np.inf).all()
        for name in ("out", "dq"):
            assert (np.asarray(result[name]).swapaxes(1, 2)[rows] == 0).all(), name

    def test_rows_with_one_block_and_queries_with_one_pair(self, dim: int) -> None:
        """A softmax over one key is 1, so dS = P (dP - delta) cancels to rounding."""
        selected = np.zeros((2, 2, BLOCKS, BLOCKS), bool)
        selected[:, 0] = np.eye(BLOCKS, dtype=bool)  # the first query of a block sees itself only
        selected[:, 1, :, 1] = True
        self._check(self._problem(heads=2, kv_heads=1, dim=dim), selected)

    def test_groups_of_seven_heads_with_lists_of_their_own(self, dim: int) -> None:
        """dk and dv are sums over the query heads of a group, each with other blocks."""
        self._check(self._problem(heads=14, kv_heads=2, dim=dim), self._random(heads=14))

    def test_scale_and_gradient_of_lse(self, dim: int) -> None:
        """Options that reach the forward pass only (FlashAttention-4, pull request 2101)."""
        problem = self._problem(heads=2, kv_heads=1, dim=dim)
        selected = self._random(heads=2) | np.eye(BLOCKS, dtype=bool)
        self._check(problem, selected, scale=0.05)
        q, k, v, _ = problem
        mask = _expanded(selected, self.block_size)
        dlse = jnp.asarray(
            np.random.default_rng(1).standard_normal((2, 2, q.shape[1])), jnp.float32
        )

        def sparse(q, k):
            index = self._index(selected)
            return self._attend(q, k, v, index, None)[1]

        def dense(q, k):
            logits = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, axis=2), precision="highest")
            return jax.nn.logsumexp(logits * dim**-0.5, axis=-1, where=mask)

        found = jax.jit(jax.grad(lambda q, k: jnp.sum(sparse(q, k) * dlse), (0, 1)))(q, k)
        exact = (x.astype(jnp.float32) for x in (q, k))
        expected = jax.jit(jax.grad(lambda q, k: jnp.sum(dense(q, k) * dlse), (0, 1)))(*exact)
        eps = max(float(jnp.finfo(q.dtype).eps), 16 * FP32_EPS)
        for x, wanted in zip(found, expected, strict=True):
            assert _norm(x.astype(jnp.float32) - wanted) <= 2 * eps * _norm(wanted)

    def test_a_length_that_is_no_multiple_of_the_block(self, dim: int) -> None:
        """Large numbers in the padding must not reach any gradient."""
        q, k, v, dout = self._problem(heads=2, kv_heads=1, dim=dim)
        length = q.shape[1] - self.block_size - self.block_size // 3
        spoiled = [x.at[:, length:].set(1e4) for x in (q, k, v)]
        dout = dout.at[:, length:].set(0)

        def attend(q, k, v):
            how = {"pattern": Dense(self.block_size), "backend": self.backend}
            padded = Documents.padded(length, q.shape[1], self.block_size)
            out = sparse_attention(q, k, v, documents=padded, **how)
            return out.at[:, length:].set(0)

        found = _value_and_gradients(attend, *spoiled, dout)
        mask = np.tril(np.ones((length, length), bool))
        mask = np.broadcast_to(mask, (2, 2, length, length))
        expected = oracle(*(x[:, :length] for x in (q, k, v, dout)), mask)
        for name, x in found.items():
            compare(name, x[:, :length], expected[name], q.dtype)
            assert (np.asarray(x[:, length:]) == 0).all(), name

    def test_documents_that_end_inside_a_block(self, dim: int) -> None:
        """A document's gradients are those of the document alone, whatever its neighbors hold."""
        g, problem = self.block_size, self._problem(heads=2, kv_heads=1, dim=dim)
        lengths = [g + g // 2 + 1, 1, 2 * g - 1]
        documents = Documents.from_lengths([lengths, lengths], BLOCKS * g, g)
        real = np.zeros((BLOCKS * g, BLOCKS * g), bool)
        starts = np.cumsum([0] + [-(-n // g) * g for n in lengths])
        for start, n in zip(starts, lengths, strict=False):
            real[start : start + n, start : start + n] = np.tril(np.ones((n, n), bool))
        inside = jnp.asarray(real.any(-1))[:, None, None]
        q, k, v, dout = problem
        dout = jnp.where(inside, dout, 0)

        def attend(q, k, v):
            how = {"pattern": Dense(g), "documents": documents, "backend": self.backend}
            return jnp.where(inside, sparse_attention(q, k, v, **how), 0)

        found = _value_and_gradients(attend, q, k, v, dout)
        expected = oracle(q, k, v, dout, np.broadcast_to(real, (2, 2, *real.shape)))
        for name, x in found.items():
            compare(name, x, expected[name], q.dtype)

    def test_views_of_one_projection(self, dim: int) -> None:
        """Slices and transposes of one array, in a jitted program: strides are not the arrays'."""
        q, k, v, dout = self._problem(heads=4, kv_heads=2, dim=dim)
        index = self._index(self._random(heads=4))

        @jax.jit
        def of_views(fused, dout):
            # Heads first, as many models have them, with the batch in the middle.
            def attend(fused):
                q, k, v = jnp.split(fused.transpose(1, 2, 0, 3), [4, 6], axis=2)
                return self._attend(q, k, v, index, None)[0].transpose(2, 0, 1, 3)

            out, vjp = jax.vjp(attend, fused)
            gradients = jnp.split(vjp(dout)[0].transpose(1, 2, 0, 3), [4, 6], axis=2)
            names = ("out", "dq", "dk", "dv")
            return dict(zip(names, (out.transpose(1, 2, 0, 3), *gradients), strict=True))

        fused = jnp.concatenate([q, k, v], axis=2).transpose(2, 0, 1, 3)
        separate = self._run((q, k, v, dout), index)
        separate.pop("lse")
        assert_same_bits(of_views(fused, dout.transpose(2, 0, 1, 3)), separate)

    def test_an_empty_batch(self) -> None:
        """No launch with a grid of zero blocks (FlashAttention-4, pull request 2776)."""
        problem = [x[:0] for x in self._problem(heads=2, kv_heads=1, dim=self.dims[0])]
        with pytest.raises(ValueError, match="q has shape .* empty axes are not supported"):
            self._run(problem, DenseIndex(self.block_size))

    def test_many_launches_give_the_same_bits(self, dim: int) -> None:
        """lse and delta were read before they were written, 1 in 1000 (FlashAttention-4, 2756)."""
        problem, index = self._problem(4, 2, dim), self._index(self._random(heads=4))
        first = self._run(problem, index)

        @jax.jit
        def differs(first, *problem):
            again = self._run(problem, index)
            same = [jnp.array_equal(again[name], x, equal_nan=True) for name, x in first.items()]
            return ~jnp.stack(same).all()

        assert np.isfinite(np.asarray(first["dq"], np.float32)).all()
        different = 0
        for _ in range(self.repetitions):
            # Freed NaN arrays: memory that is read before it is written shows.
            poison = [jnp.full(problem[0].shape, jnp.nan, jnp.float32) for _ in range(2)]
            del poison
            different += differs(first, *problem)
        assert int(different) == 0

    def _problem(self, heads: int, kv_heads: int, dim: int) -> list[jax.Array]:
        size = Size(2, heads, kv_heads, BLOCKS, BLOCKS, self.block_size, dim)
        return cases.qkv_dout(np.random.default_rng(dim + heads), size, self.dtype)

    def _random(self, heads: int) -> np.ndarray:
        return np.random.default_rng(heads).random((2, heads, BLOCKS, BLOCKS)) < 0.4

    def _index(self, selected: np.ndarray) -> BlockMaskIndex:
        return BlockMaskIndex.from_block_mask(jnp.asarray(selected), self.block_size)

    def _attend(self, q, k, v, index, scale):
        how = {"scale": scale, "backend": self.backend, "return_lse": True}
        return pallas_kernels.attention(q, k, v, index, **how)

    def _run(self, problem, index, scale: float | None = None) -> dict[str, jax.Array]:
        q, k, v, dout = problem

        @jax.jit
        def run(q, k, v, dout, index):
            def attend(*qkv):
                return self._attend(*qkv, index, scale)

            (out, lse), vjp = jax.vjp(attend, q, k, v)
            gradients = vjp((dout, jnp.zeros_like(lse)))
            return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))

        return run(q, k, v, dout, index)

    def _check(self, problem, selected, scale: float | None = None) -> dict[str, jax.Array]:
        """Compares with the oracle on the listed pairs; returns what the kernels computed."""
        result = self._run(problem, self._index(selected), scale)
        self._compare(result, problem, _expanded(selected, self.block_size), scale)
        return result

    def _compare(self, result, problem, mask, scale: float | None = None) -> None:
        expected = oracle(*problem, mask, scale)
        compare_lse(result["lse"], expected["lse"])
        for name in ("out", "dq", "dk", "dv"):
            compare(name, result[name], expected[name], problem[0].dtype)


def _expanded(selected: np.ndarray, block_size: int) -> np.ndarray:
    """The causal pairs of selected blocks: bool [B, H, S, S]."""
    return np.tril(brute_force.expand(selected, block_size))


def _value_and_gradients(attend, q, k, v, dout) -> dict[str, jax.Array]:
    @jax.jit
    def run(q, k, v, dout):
        out, vjp = jax.vjp(attend, q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(dout)), strict=True))

    return run(q, k, v, dout)


def _norm(x: jax.Array) -> float:
    return float(jnp.linalg.norm(x.astype(jnp.float32)))
