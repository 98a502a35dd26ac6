"""Errors of a ring's output and gradients, compared with the oracle and a single GPU."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.index import Index
from tests.gpu import ring_problem
from tests.gpu.ring_problem import SIZE, Ring
from tests.pallas_kernels.helpers.expected import Expected, compare, oracle

NAMES = ("out", "dq", "dk", "dv")
# Those that share one program, and others that have one each.
INDICES = {"sparse": ring_problem.sparse_index, "dense": ring_problem.dense_index}
LISTS = {"blocks": ring_problem.block_index}
ROWS = {"columns": ring_problem.mask_index}


def own_device() -> jax.Device:
    """The GPU for this process's single-GPU work; every pytest-xdist worker uses another."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return jax.devices()[worker % jax.device_count()]


def assert_right(case: str, found: dict[str, np.ndarray], name: str) -> None:
    """Checks bf16 accuracy, and errors of at most 1.1 times those of a single GPU.

    Args:
        case: label of the printed line.
        found: some of `NAMES`, in sequence order.
        name: name of the index, in `INDICES`, `LISTS` or `ROWS`.
    """
    for what in found:
        compare(what, found[what], _expected(name)[what], jnp.bfloat16)
    assert_as_exact_as_one(case, found, name)


def assert_as_exact_as_one(case: str, found: dict[str, np.ndarray], name: str) -> None:
    """Checks errors of at most 1.1 times those of a single GPU."""
    one = _errors_of_one(name)
    ratios = {what: error / one[what] for what, error in _errors(found, name).items()}
    print(f"error relative to one GPU, {case}, {name}:", ratios)
    assert max(ratios.values()) <= 1.1, ratios


def _errors(found: dict[str, np.ndarray], name: str) -> dict[str, float]:
    """Norm of the error of each result over the norm of the oracle's."""
    wanted = {what: _expected(name)[what].value for what in found}
    return {
        what: float(np.linalg.norm(np.float32(found[what]) - x) / np.linalg.norm(x))
        for what, x in wanted.items()
    }


@functools.cache
def _errors_of_one(name: str) -> dict[str, float]:
    """Errors of a single GPU with an index."""
    ring, compiled = _one("sparse" if name in INDICES else name)
    arrays = compiled(*ring.arrays(), ring.replicated(_index(name)))
    return _errors(dict(zip(NAMES, map(np.asarray, arrays), strict=True)), name)


@functools.cache
def _one(name: str) -> tuple[Ring, jax.stages.Compiled]:
    ring = Ring("striped", "flat", 1, [own_device()])
    return ring, ring.lower_both(_index(name)).compile()


def _index(name: str) -> Index:
    return (INDICES | LISTS | ROWS)[name]()


@functools.cache
def _expected(name: str) -> dict[str, Expected]:
    """The oracle's results, one query head at a time: 4 GB per process instead of 14."""
    heads = [_expected_of_head(name, head) for head in range(SIZE.heads)]
    results = {}
    for what in NAMES:
        parts = [head[what] for head in heads]
        value, size = (np.concatenate([getattr(x, y) for x in parts], 2) for y in ("value", "size"))
        if what in ("dk", "dv"):  # sums over the query heads of a group
            shape = (SIZE.batch, SIZE.seq_len, SIZE.kv_heads, -1, SIZE.dim)
            value = value.reshape(shape).sum(3)
            size = np.sqrt((size.reshape(shape) ** 2).sum(3))
        results[what] = Expected(value, size)
    return results


def _expected_of_head(name: str, head: int) -> dict[str, Expected]:
    q, k, v, dout = ring_problem.inputs()
    index = jax.tree.map(lambda x: x[:, head, None], _index(name))
    of_kv = head * SIZE.kv_heads // SIZE.heads
    parts = (x[:, :, i, None] for x, i in ((q, head), (k, of_kv), (v, of_kv), (dout, head)))
    with jax.default_device(own_device()):
        return jax.device_get(_oracle(*parts, index))


# XLA would otherwise try many kernels for each product, for two minutes.
@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
def _oracle(q, k, v, dout, index) -> dict[str, Expected]:
    result = oracle(q, k, v, dout, index.to_mask(SIZE.seq_len))
    return {what: result[what] for what in NAMES}
