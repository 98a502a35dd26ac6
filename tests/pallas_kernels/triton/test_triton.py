"""The Triton kernels in Triton's interpreter: the shared contract, on any machine."""

import dataclasses
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import BlockSparseIndex, DiagonalTiles, backends
from pallas_kernels.interface import NUM_QUERIES, ProbeCall
from pallas_kernels.triton.backend import Triton
from pallas_kernels.triton.call import Call
from pallas_kernels.triton.selection import TritonBlockScores, TritonEstimate
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.block_masses import check_masses, check_masses_of_documents
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.contract import AttentionContract, backward, forward
from tests.pallas_kernels.helpers.estimate import (
    check_each_block_is_alone,
    check_sets_of_queries,
    check_sums,
)

if importlib.util.find_spec("jax_triton") is None:
    pytest.skip("needs the triton extra", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to run Triton's interpreter", allow_module_level=True)

from tests.pallas_kernels.triton.triton_interpreter import (  # noqa: E402
    InterpreterBuilder,
    interpret,
    run_interpreted,
)

INTERPRETED = "interpreted triton"
backends.register(Triton(INTERPRETED, run=run_interpreted, capability=80))


class TestInterpreted(AttentionContract):
    backend = INTERPRETED
    dtypes = ("bfloat16", "float16")
    block_size = 128
    dim = 64
    other_dims = (128,)
    batch = 1
    num_blocks = 4
    heads = (3, 1)
    group_heads = ((2, 2), (3, 1))
    max_slashes = 3
    max_verticals = 16


def test_a_key_block_listed_by_every_row_is_split_into_parts():
    """The gradients of 16 key blocks, the first one seen by all 16 query blocks."""
    size = Size(1, 1, 1, query_blocks=16, key_blocks=16, block_size=128, dim=64)
    rng = np.random.default_rng(1)
    q, k, v, dout = cases.qkv_dout(rng, size, "bfloat16")
    mask = np.zeros((1, 1, 16, 16), bool)
    mask[:, :, :, 0] = mask[:, :, [3, 7], 1] = mask[:, :, 9, 9] = True
    tiles = BlockSparseIndex.from_block_mask(jnp.asarray(mask), 128).tiles()
    plan = pallas_kernels.plan(q, k, tiles, backend=INTERPRETED)
    assert plan.work.keys.heavy.tolist() == [[[0]]]
    out, lse = forward(q, k, v, tiles, backend="xla")
    delta = pallas_kernels.delta_of(out, dout)
    found, expected = (
        backward(q, k, v, dout, lse, delta, tiles, backend=backend)
        for backend in (INTERPRETED, "xla")
    )
    for x, y in zip((found.dk, found.dv), (expected.dk, expected.dv), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * float(jnp.abs(y).max()))
    assert float(jnp.abs(found.dk[:, 2 * 128 : 9 * 128]).max()) == 0.0


@pytest.mark.parametrize(
    ("dim", "dtypes"), [(64, ("bfloat16",) * 2), (128, ("float32", "float16"))]
)
def test_delta_kernel(dim, dtypes):
    """Includes rows that do not fill a tile of the kernel."""
    rng = np.random.default_rng(dim)
    out, dout = (rng.standard_normal((2, 96, 3, dim)).astype(dtype) for dtype in dtypes)
    delta = backends.named(INTERPRETED).delta_of(jnp.asarray(out), jnp.asarray(dout))
    expected = np.einsum("bnhd,bnhd->bhn", out.astype(np.float64), dout.astype(np.float64))
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-5)
    assert delta.dtype == jnp.float32


LONG, HEADS, DIM = 2**20 + 256, 32, 64  # an array [1, LONG, HEADS, DIM] has over 2^31 elements


def _at_the_end_of_long_arrays(call: Call) -> dict[str, jax.Array]:
    """Runs a call over one block as a call over the last block of `LONG` tokens.

    Everything before it is untouched zero memory, which takes no space.
    """

    def lengthened(name: str, x: np.ndarray) -> np.ndarray:
        if x.ndim == 4:  # [1, 128, HEADS, DIM]
            long = np.zeros((1, LONG, HEADS, DIM), x.dtype)
            long[:, -128:] = x
        elif name in ("shift", "delta", "init_lse", "lse"):
            long = np.zeros((1, HEADS, LONG), x.dtype)
            long[..., -128:] = x
        elif name in ("first_entries", "last_entries"):
            long = np.zeros((1, HEADS, LONG // 128), x.dtype)
            long[..., -1:] = x
        elif name == "items":
            long = x.copy()
            long[:, 3 if call.kernel.fn.__name__ == "attention_dkdv" else 2] = LONG // 128 - 1
        else:
            long = x
        return long

    inputs = {
        name: lengthened(name, np.asarray(x)) for name, x in call.arrays.items() if x is not None
    }
    outputs = {
        name: lengthened(name, np.zeros(x.shape, x.dtype)) for name, x in call.outputs.items()
    }
    numbers = {
        name: LONG if name.endswith("length") and name != "parts_length" else x
        for name, x in call.numbers.items()
    }
    interpret(dataclasses.replace(call, numbers=numbers), inputs, outputs)
    return {
        name: jnp.asarray(x[:, -128:] if x.ndim == 4 else x[..., -128:])
        for name, x in outputs.items()
    }


def test_arrays_of_more_than_2_to_the_31_elements():
    """The last block of a million tokens is bit-identical to the block on its own."""
    long = "interpreted triton, long arrays"
    backends.register(Triton(long, run=_at_the_end_of_long_arrays, capability=80))
    assert LONG * HEADS * DIM > 2**31
    size = Size(1, HEADS, HEADS, query_blocks=1, key_blocks=1, block_size=128, dim=DIM)
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(2), size, "float16")
    tiles = DiagonalTiles.full(1, HEADS, 1, 1, 128, causal=True)
    results = []
    for backend in (INTERPRETED, long):
        plan = pallas_kernels.plan(q, k, tiles, backend=backend)
        out, lse = pallas_kernels.forward(q, k, v, plan)
        delta = jnp.zeros_like(lse)
        grads = pallas_kernels.backward(q, k, v, dout, lse, delta, plan)
        results.append([np.asarray(x) for x in (out, lse, *grads[:3])])
    for alone, at_the_end in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, at_the_end)


SCORES = TritonBlockScores(run_interpreted)


@pytest.mark.parametrize(
    ("blocks", "rows", "columns", "length", "first"),
    [(24, 16, 16, 256, 0), (3, 128, 128, 64, 1), (16, 12, 64, 64, 2)],
)
def test_masses_match_a_softmax(blocks, rows, columns, length, first):
    check_masses(SCORES, blocks, rows, columns, length, first)


def test_rows_see_no_block_before_their_document():
    check_masses_of_documents(SCORES)


ESTIMATE = TritonEstimate(run_interpreted)


# Groups of one, three and five heads. If the last queries precede padding, one block is after all
# of them and one after some.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "valid_len", "dim", "dtype"),
    [(2, 2, None, 128, "bfloat16"), (6, 2, 430, 64, "float16"), (5, 1, 430, 128, "bfloat16")],
)
def test_sums_of_the_last_queries_match_a_softmax(heads, kv_heads, valid_len, dim, dtype):
    check_sums(ESTIMATE, heads, kv_heads, valid_len, dim=dim, dtype=dtype)


def test_each_block_may_have_separate_last_queries_and_ends():
    check_sets_of_queries(ESTIMATE)


def test_the_last_queries_score_each_block_alone():
    check_each_block_is_alone(ESTIMATE)


def test_a_query_that_sees_nothing_contributes_nothing():
    """Whatever its peak: in an unused query set it is -inf."""
    q, k = (jnp.ones(x, jnp.float16) for x in ((1, 1, NUM_QUERIES, 64), (1, 128, 1, 64)))
    for peak in (-jnp.inf, 0.0, 1e30):
        call = ProbeCall(q, k, jnp.zeros(1, jnp.int32), 1, 1.0, jnp.int32(0))
        found = ESTIMATE.block_masses(call, jnp.full(q.shape[:3], peak), jnp.ones(q.shape[:3]))
        for x in found:
            np.testing.assert_array_equal(x, 0)


def test_another_number_of_last_queries_falls_back_to_xla():
    assert ESTIMATE.unsupported(jnp.zeros((1, 1, 32, 64))) == "32 last queries (must be 64)"
    assert ESTIMATE.unsupported(jnp.zeros((1, 1, NUM_QUERIES, 64))) is None


def test_the_last_block_of_more_than_2_to_the_31_elements_is_scored_correctly(monkeypatch):
    last = LONG // 128 - 1

    def at_the_end(call: Call) -> dict[str, jax.Array]:
        inputs = {name: np.asarray(x) for name, x in call.arrays.items()}
        long = np.zeros((1, LONG, *inputs["k"].shape[2:]), inputs["k"].dtype)
        long[:, -128:] = inputs["k"]
        shifts = np.zeros((1, last + 1), np.int32)
        shifts[:, -1:] = inputs["shifts"]
        outputs = {
            name: np.zeros((*x.shape[:2], last + 1, x.shape[3]), x.dtype)
            for name, x in call.outputs.items()
        }
        with monkeypatch.context() as patch:  # run only the programs of the last block
            for name, at in (("grid_dim", last + 1), ("grid_idx", last)):
                patch.setattr(
                    InterpreterBuilder,
                    f"set_{name}",
                    lambda self, x, _, z, name=name, at=at: setattr(self, name, (x, at, z)),
                )
            interpret(call, inputs | {"k": long, "shifts": shifts}, outputs)
        return {name: jnp.asarray(x[:, :, -1:]) for name, x in outputs.items()}

    assert LONG * HEADS * DIM > 2**31
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(1, HEADS, NUM_QUERIES, DIM)), jnp.float16)
    k = jnp.asarray(rng.normal(size=(1, 128, HEADS, DIM)), jnp.float16)
    row = jnp.ones(q.shape[:3], jnp.float32)
    results = []
    for kernels in (ESTIMATE, TritonEstimate(at_the_end)):
        # The end lets diagonals extend past the block.
        call = ProbeCall(q, k, jnp.zeros(1, jnp.int32), 1, 0.1, jnp.int32(200))
        masses = kernels.block_masses(call, row, row)
        results.append([*kernels.block_statistics(call), *masses])
    for alone, long in zip(*results, strict=True):
        assert np.asarray(alone).any()
        np.testing.assert_array_equal(alone, long)
