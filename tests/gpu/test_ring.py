"""The ring on all GPUs of the host: the same as on one, for all layouts, rings and processes.

Most of the time is tracing. With one process per test the total time is that of the longest test:

    export MTRAINING_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m pytest tests/gpu/test_ring.py -n 8
"""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, SEQUENCE_AXES, make_mesh
from pallas_kernels import head_loop
from pallas_kernels.index import DenseIndex
from tests.gpu import ring_problem
from tests.gpu.ring_errors import INDICES, NAMES, assert_as_exact_as_one, assert_right
from tests.gpu.ring_problem import SIZE, Ring

ROOT = Path(__file__).resolve().parents[2]


def rings() -> dict[str, tuple[str, str, int]]:
    """Layout, ring and nodes of every case that the host has enough GPUs for."""
    count = jax.device_count()
    found = {
        "zigzag flat": ("zigzag", "flat", 1),
        "zigzag hierarchical": ("zigzag", "hierarchical", 2),
        "zigzag gather": ("zigzag", "gather", 1),
        "striped hierarchical": ("striped", "hierarchical", 2),
        "striped gather": ("striped", "gather", 1),
        "striped flat": ("striped", "flat", 1),
    }
    if count > 2:
        found["striped gather in nodes"] = ("striped", "gather", 2)
    return found


CASES = (
    "striped flat",
    "striped hierarchical",
    "striped gather",
    "striped gather in nodes",
    "zigzag flat",
    "zigzag hierarchical",
    "zigzag gather",
)
# Cases with separate programs: the ring's case and the index.
OTHER_INDICES = {
    "dense index": ("striped flat", lambda: DenseIndex(SIZE.block_size)),
    "block lists": ("striped gather", ring_problem.block_index),
}
# A zigzag has three kernel calls per stripe call: tracing its gradients takes a minute.
FORWARD_ONLY = ("zigzag hierarchical", "zigzag gather")


@pytest.fixture(scope="module", autouse=True)
def several(_hopper_missing) -> int:
    """Number of GPUs."""
    if _hopper_missing:
        pytest.skip(_hopper_missing)
    if jax.device_count() < 2:
        pytest.skip("needs at least 2 GPUs")
    return jax.device_count()


@pytest.fixture(scope="module")
def processes(several, tmp_path_factory):
    """One process per GPU, started before this one compiles the same ring."""
    if several % 2:
        yield None
        return
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    # This process may have reserved most of the memory.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.gpu.ring_problem",
                coordinator,
                str(several),
                str(number),
                str(folder),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for number in range(several)
    ]
    try:
        yield folder, started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@functools.cache
def program(case: str):
    """The ring of a case and its compiled program; other cases are not compiled."""
    case, index = OTHER_INDICES.get(case, (case, ring_problem.sparse_index))
    ring = Ring(*rings()[case], jax.devices())
    lower = ring.lower_forward if case in FORWARD_ONLY else ring.lower_both
    return ring, lower(index()).compile()


def results(case: str, index) -> dict[str, np.ndarray]:
    """out and, if the program has them, dq, dk and dv in sequence order."""
    ring, compiled = program(case)
    inputs = ring.arrays()[: len(compiled.in_avals[0]) - 1]
    arrays = jax.tree.leaves(compiled(*inputs, ring.replicated(index)))
    inverse = ring.layout.inverse()
    return {what: np.asarray(x)[:, inverse] for what, x in zip(NAMES, arrays, strict=False)}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_match_one_gpu(case):
    if case not in rings():
        pytest.skip(f"{case} needs more than {jax.device_count()} GPUs")
    for name, index in INDICES.items():  # one test: with a process per test, each compiles once
        found = results(case, index())
        assert len(found) == (1 if case in FORWARD_ONLY else 4)
        assert_right(case, found, name)


def test_a_dense_index_is_dense():
    found = results("dense index", OTHER_INDICES["dense index"][1]())
    assert_as_exact_as_one("dense index", found, "dense")


def test_block_lists_over_gathered_keys_match_one_gpu():
    found = results("block lists", ring_problem.block_index())
    assert_right("block lists", found, "blocks")


def test_results_are_bit_identical_twice():
    index = ring_problem.sparse_index()
    first, second = (results("striped hierarchical", index) for _ in range(2))
    for what in NAMES:
        assert first[what].tobytes() == second[what].tobytes(), what


@pytest.mark.parametrize("case", OTHER_INDICES)
def test_heads_one_after_another_give_bit_identical_results(case, monkeypatch):
    index = OTHER_INDICES[case][1]()
    together = results(case, index)
    monkeypatch.setattr(head_loop, "_PART_BYTES", 1)
    program.cache_clear()
    in_parts = results(case, index)
    program.cache_clear()
    for what in NAMES:
        assert in_parts[what].tobytes() == together[what].tobytes(), what


def test_one_process_per_gpu_is_bit_identical_to_a_single_process(processes):
    if processes is None:
        pytest.skip(f"two nodes cannot share {jax.device_count()} GPUs")
    folder, started = processes
    ring, compiled = program("striped hierarchical")
    for process in started:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    out, *_ = compiled(*ring.arrays(), ring.replicated(ring_problem.sparse_index()))
    context = {shard.device: shard.data for shard in out.addressable_shards}
    for number, device in enumerate(ring.mesh.devices.flat):
        theirs = np.load(folder / f"{number}.npy")
        assert np.asarray(context[device]).tobytes() == theirs.tobytes(), f"rank {number}"


def chosen(layout: Layout, devices: list[jax.Device]):
    """The index that the devices select together."""
    mesh = make_mesh(1, 1, len(devices), devices)

    def select(q, k):
        return select_index(
            q,
            k,
            ring_problem.PATTERN,
            block_ids=layout.block_ids(lax.axis_index(SEQUENCE_AXES)),
            num_blocks=layout.num_blocks,
            axis_names=SEQUENCE_AXES,
            backend=ring_problem.BACKEND,
        )

    sharded = jax.jit(
        jax.shard_map(select, mesh=mesh, in_specs=(HEADS, HEADS), out_specs=P(), check_vma=False)
    )
    order = layout.permutation()
    per_rank = (x[:, order] for x in ring_problem.estimate_inputs())
    return sharded(*(jax.device_put(x, NamedSharding(mesh, HEADS)) for x in per_rank))


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_selection_on_all_gpus_is_bit_identical_to_one(layout):
    devices = jax.devices()
    one = chosen(Layout("striped", SIZE.seq_len, 1, SIZE.block_size), devices[:1])
    assert len(set(np.asarray(one.vertical_count).ravel().tolist())) > 1  # heads differ
    for ranks in sorted({2, len(devices)}):
        many = chosen(Layout(layout, SIZE.seq_len, ranks, SIZE.block_size), devices[:ranks])
        for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            for shard in x.addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.asarray(y).tobytes()
