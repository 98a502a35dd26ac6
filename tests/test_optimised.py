"""Runs tests of bit-identical results again with the optimizations of a release.

Tests compile without optimization (tests/conftest.py), so without contracted multiply-adds and
XLA's new fusion emitters. Here some of them run again in a process without those flags.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from tests.patterns import inputs

ROOT = Path(__file__).parent.parent
OPTIMISED = os.environ.get("MTRAINING_TEST_OPTIMISED") == "1"
_ANY_RANKS = "test_the_index_is_the_same_on_eight_ranks_and_computes_its_pairs"
AGAIN = (
    "tests/test_optimised.py::test_this_process_optimises",
    # The index is bit-identical on any number of ranks: lists, and vertical-slash.
    f"tests/patterns/test_patterns.py::TestSampledRows::{_ANY_RANKS}",
    "tests/test_optimised.py::test_columns_and_diagonals_are_those_of_one_device",
    # Losses of a stopped and resumed run are bit-identical.
    "tests/training/loop/test_stopping.py::test_a_run_alone_saves_its_state_and_goes_on",
)


@pytest.mark.skipif(not OPTIMISED, reason="for the process that the next test starts")
def test_this_process_optimises():
    assert "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]
    assert jax.default_backend() == "cpu"


@pytest.mark.skipif(not OPTIMISED, reason="for the process that the next test starts")
def test_columns_and_diagonals_are_those_of_one_device():
    """A smaller version of tests/selection/test_distributed.py."""
    seq_len, block, ranks = 256, 16, 2
    layout = Layout("zigzag", seq_len, ranks, block)
    small = dict(
        block_size=block, num_probe_queries=15, sink_tokens=4, min_verticals=8, min_slashes=3
    )
    pattern = VerticalSlash(0.6, 64, 12, **small)
    choose = functools.partial(select_index, pattern=pattern, num_blocks=seq_len // block)

    def local(q, k):
        where = layout.block_ids(jax.lax.axis_index("device"))
        index = choose(q, k, block_ids=where, axis_names=("device",))
        return jax.tree.map(lambda x: x[None], index)  # the index of every rank

    shards = P("data", "device")
    run = jax.shard_map(
        local,
        mesh=make_mesh(1, 1, ranks),
        in_specs=shards,
        out_specs=P("device", "data"),
        check_vma=False,
    )
    alone = jax.jit(lambda q, k: choose(q, k, block_ids=jnp.arange(seq_len // block)))
    together, order = jax.jit(run), layout.permutation()
    counts = set()
    for seed in range(5):
        q, k = inputs.random(seed, 1, seq_len, 4, 2, 32, jnp.float32)
        expected = jax.device_get(alone(q, k))
        found = jax.device_get(together(q[:, order], k[:, order]))
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, np.broadcast_to(y, x.shape)),
            found,
            expected,
        )
        counts |= set(expected.slash_count.ravel().tolist())
    assert len(counts) > 2


@pytest.mark.slow
@pytest.mark.skipif(OPTIMISED, reason="in the process that this test starts")
def test_the_same_bits_with_ordinary_optimisation():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q", *AGAIN],
        env=environment | {"MTRAINING_TEST_OPTIMISED": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{len(AGAIN)} passed" in done.stdout
