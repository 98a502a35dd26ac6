"""Computes on every device what has known or equal bits, and moves data over every link."""

import functools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.attention.api import sparse_attention
from mtraining_jax.config import Config
from mtraining_jax.models.huggingface.checksums import checksum
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.tools.cluster.rates import Watch, link_rates
from mtraining_jax.tools.cluster.verdict import wrong_results
from mtraining_jax.training.processes.agreement import collect, run_on_process_0
from mtraining_jax.utils.errors import UserError

_PERIOD = 7
_SECONDS = 30.0  # of each GPU


def verify(config: Config, watch: Watch, timeout: int) -> None:
    """Tests what all devices compute and all links move; all processes call it together.

    Raises:
        UserError: some of it is wrong; in all processes.
    """
    facts: dict[str, Any] = {"host": socket.gethostname(), "devices": verified_devices(watch)}
    facts["links"] = link_rates(config.parallel.devices_per_node, watch, timeout)
    every = collect(facts, timeout)

    def judge() -> None:
        if found := [problem.sentence for problem in wrong_results(every)]:
            raise UserError("; ".join(found))

    run_on_process_0(judge, timeout)


def verified_devices(watch: Watch) -> list[dict[str, Any]]:
    """The results of each device of this process, all computing at the same time."""
    devices = jax.local_devices()
    seconds = 0.0 if devices[0].platform == "cpu" else _SECONDS
    with watch("verifying what the devices compute"), ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(lambda device: results_of_device(device, seconds), devices))


def results_of_device(device: Any, seconds: float) -> dict[str, Any]:
    """Repeats products and attention on a device for some seconds, at least twice each.

    Returns:
        `passes`, their number; `wrong`, how many products had a wrong element; `attention`,
        checksums of outputs and gradients, one unless passes differ; or `error`.
    """
    on_cpu = device.platform == "cpu"
    width, tokens = (128, 256) if on_cpu else (8192, 16384)
    wrong, passes, digests, begin = 0, 0, set(), time.perf_counter()
    try:
        with jax.default_device(device):
            while passes < 2 or time.perf_counter() - begin < seconds:
                wrong += int(_wrong_elements(width, jnp.asarray(_product(width))) > 0)
                digests.add(int(_attention_checksum(tokens)))
                passes += 1
    except Exception as error:  # of the runtime, by its driver or by memory
        return {"error": (str(error).splitlines() or [type(error).__name__])[0][:200]}
    return {"passes": passes, "wrong": wrong, "attention": sorted(digests)}


def _product(width: int) -> np.ndarray:
    """The distinct elements [7, 7] of the product that `_wrong_elements` computes."""
    x = np.add.outer(np.arange(_PERIOD) * width, np.arange(width)) % _PERIOD - 3
    by_row = np.add.outer(np.arange(width) * width, np.arange(_PERIOD)) % _PERIOD - 3
    return (x @ by_row).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _wrong_elements(width: int, right: Array) -> Array:
    """Number of wrong elements in a product of small integers, exact in any order of sums."""
    x = (jnp.arange(width**2).reshape(width, width) % _PERIOD - 3).astype(jnp.bfloat16)
    product = jnp.dot(x, x, preferred_element_type=jnp.float32)
    places = jnp.arange(width) % _PERIOD
    return jnp.sum(product != right[places][:, places])


@functools.partial(jax.jit, static_argnums=0)
def _attention_checksum(tokens: int) -> Array:
    """The checksum of attention with selected blocks, and of its gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (1, tokens, 4, 128), (1, tokens, 2, 128), (1, tokens, 2, 128), (1, tokens, 4, 128)
    q, k, v, gradient = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )

    def attend(*qkv: Array) -> Array:
        return cast(Array, sparse_attention(*qkv, pattern=SampledRows(tau=0.9)))

    out, pull = jax.vjp(attend, q, k, v)
    return checksum(jnp.stack([checksum(x) for x in (out, *pull(gradient))]))
