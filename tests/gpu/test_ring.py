"""The ring on all GPUs of the host: as on one, whatever the layout, the ring and the processes."""

import functools
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, SEQUENCE_AXES, make_mesh
from mtraining_jax.sparsity import VerticalSlash, choose_index
from pallas_kernels.reference import mask_from_index
from tests.gpu import ring_problem
from tests.gpu.ring_problem import SIZE, Ring
from tests.pallas_kernels.expected import compare, oracle

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("out", "dq", "dk", "dv")
INDICES = {"sparse": ring_problem.sparse_index, "dense": ring_problem.dense_index}


def rings() -> dict[str, tuple[str, str, int]]:
    """Layout, ring and nodes of every case that the host has GPUs for."""
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
    "striped flat", "striped hierarchical", "striped gather", "striped gather in nodes",
    "zigzag flat", "zigzag hierarchical", "zigzag gather",
)
# A zigzag has three kernel calls where stripes have one: tracing its gradients takes a minute.
FORWARD_ONLY = ("zigzag hierarchical", "zigzag gather")


@pytest.fixture(scope="module", autouse=True)
def several(_hopper_missing) -> int:
    """Number of GPUs."""
    if _hopper_missing:
        pytest.skip(_hopper_missing)
    if jax.device_count() < 2:
        pytest.skip("needs at least 2 GPUs")
    return jax.device_count()


@pytest.fixture(scope="module", autouse=True)
def processes(several, tmp_path_factory):
    """One process a GPU, started before the first test so that they compile beside it."""
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
                sys.executable, "-m", "tests.gpu.ring_problem", coordinator, str(several),
                str(number), str(folder),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
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


@pytest.fixture(scope="module")
def programs(several, request):
    """Of selected cases, the ring and its compiled program; compilation overlaps with tracing."""
    devices, index = jax.devices(), ring_problem.sparse_index()
    of_tests = [x.callspec.params for x in request.session.items if hasattr(x, "callspec")]
    selected = {"striped hierarchical", *(x.get("case") for x in of_tests)}
    with ThreadPoolExecutor(8) as pool:
        made = {"one": Ring("striped", "flat", 1, devices[:1])}
        made |= {
            name: Ring(*case, devices) for name, case in rings().items() if name in selected
        }
        futures = {
            name: pool.submit(
                (ring.lower_forward if name in FORWARD_ONLY else ring.lower_both)(index).compile
            )
            for name, ring in made.items()
        }
        flat = Ring(*rings()["striped flat"], devices)
        futures["no index"] = pool.submit(flat.lower_both(None).compile)
        made["no index"] = flat
        return {name: (made[name], future.result()) for name, future in futures.items()}


@functools.cache
def expected(name: str):
    """The oracle's results, one key/value head after another to bound its memory."""
    mask_of = jax.jit(mask_from_index, static_argnums=1)
    index = INDICES[name]()
    q, k, v, dout = map(jnp.asarray, ring_problem.inputs())
    group, parts = SIZE.heads // SIZE.kv_heads, []
    for head in range(SIZE.kv_heads):
        own = slice(head * group, (head + 1) * group)
        mask = mask_of(jax.tree.map(lambda x, own=own: x[:, own], index), SIZE.seq_len)
        part = oracle(q[:, :, own], k[:, :, head, None], v[:, :, head, None], dout[:, :, own], mask)
        parts.append(jax.device_get({what: part[what] for what in NAMES}))
    return {
        what: jax.tree.map(lambda *x: np.concatenate(x, axis=2), *(part[what] for part in parts))
        for what in NAMES
    }


def results(program, index) -> dict[str, np.ndarray]:
    """Out and, of programs that have them, dq, dk and dv in global order."""
    ring, compiled = program
    inputs = ring.arrays()[: len(compiled.in_avals[0]) - 1]
    arrays = jax.tree.leaves(compiled(*inputs, ring.replicated(index)))
    inverse = ring.layout.inverse()
    return {what: np.asarray(x)[:, inverse] for what, x in zip(NAMES, arrays, strict=False)}


def errors(found: dict[str, np.ndarray], name: str) -> dict[str, float]:
    """Norm of the error of each result over the norm of the oracle's."""
    wanted = {what: expected(name)[what].value for what in found}
    return {
        what: float(np.linalg.norm(np.float32(found[what]) - x) / np.linalg.norm(x))
        for what, x in wanted.items()
    }


@pytest.fixture(scope="module")
def errors_of_one(programs):
    """Those of one GPU, by index."""
    return {
        name: errors(results(programs["one"], index()), name) for name, index in INDICES.items()
    }


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_one_gpu(programs, errors_of_one, case, index):
    """Right to the rounding of bf16, and at most 1.1 times as far off as one GPU is."""
    if case not in programs:
        pytest.skip(f"{case} needs more than {jax.device_count()} GPUs")
    found = results(programs[case], INDICES[index]())
    assert len(found) == (1 if case in FORWARD_ONLY else 4)
    for what in found:
        compare(what, found[what], expected(index)[what], jnp.bfloat16)
    for what, error in errors(found, index).items():
        assert error <= 1.1 * errors_of_one[index][what], what


def test_no_index_is_dense(programs, errors_of_one):
    found = results(programs["no index"], None)
    for what, error in errors(found, "dense").items():
        assert error <= 1.1 * errors_of_one["dense"][what], what


def test_results_have_the_same_bits_twice(programs):
    index = ring_problem.sparse_index()
    first, second = (results(programs["striped hierarchical"], index) for _ in range(2))
    for what in NAMES:
        assert first[what].tobytes() == second[what].tobytes(), what


def test_a_process_for_each_gpu_gives_the_bits_of_one_process(processes, programs):
    if processes is None:
        pytest.skip(f"two nodes cannot share {jax.device_count()} GPUs")
    folder, started = processes
    for process in started:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    ring, compiled = programs["striped hierarchical"]
    out, *_ = compiled(*ring.arrays(), ring.replicated(ring_problem.sparse_index()))
    shards = {shard.device: shard.data for shard in out.addressable_shards}
    for number, device in enumerate(ring.mesh.devices.flat):
        theirs = np.load(folder / f"{number}.npy")
        assert np.asarray(shards[device]).tobytes() == theirs.tobytes(), f"rank {number}"


def chosen(layout: Layout, devices: list[jax.Device]):
    """The index that the devices choose together."""
    mesh = make_mesh(1, 1, len(devices), devices)
    pattern = VerticalSlash(0.5, 4096, 100, block_size=SIZE.block_size)

    def choose(q, k):
        return choose_index(
            q, k, pattern, block_ids=layout.block_ids(lax.axis_index(SEQUENCE_AXES)),
            num_blocks=layout.num_blocks, axis_names=SEQUENCE_AXES,
            backend=ring_problem.BACKEND,
        )

    sharded = jax.jit(
        jax.shard_map(choose, mesh=mesh, in_specs=(HEADS, HEADS), out_specs=P(), check_vma=False)
    )
    order = layout.permutation()
    q, k = ring_problem.inputs()[:2]
    q = 4 * q  # large logits: few columns hold half of the mass, and not as many in each head
    q, k = (jax.device_put(x[:, order], NamedSharding(mesh, HEADS)) for x in (q, k))
    return sharded(q, k)


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_all_gpus_choose_the_bits_of_one(layout):
    devices = jax.devices()
    one = chosen(Layout("striped", SIZE.seq_len, 1, SIZE.block_size), devices[:1])
    assert len(set(np.asarray(one.vertical_count).ravel().tolist())) > 1  # heads differ
    for ranks in sorted({2, len(devices)}):
        many = chosen(Layout(layout, SIZE.seq_len, ranks, SIZE.block_size), devices[:ranks])
        for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            for shard in x.addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.asarray(y).tobytes()
