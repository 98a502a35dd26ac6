"""Rates of devices, and of the links between them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.training.processes.agreement import collect, meet, run_on_process_0

_MAX_ROUNDS = 6  # of pairs of nodes; each node has a partner in each round
_SECONDS = 0.1  # of a measurement of links
Watch = Callable[[str], AbstractContextManager[Any]]


class _Sizes(NamedTuple):
    """Width of a matrix, bytes of a copy and of a transfer, repeats; of GPUs."""

    width: int = 8192
    copy: int = 2**30
    transfer: int = 2**26
    repeats: int = 20


def _sizes() -> _Sizes:
    return _Sizes(128, 2**20, 2**14, 2) if jax.default_backend() == "cpu" else _Sizes()


def rates_of_device(device: Any) -> dict[str, Any]:
    """Measures one device.

    Returns:
        `matmul` (FLOP/s of bf16 matrix products), `memory` and `from_host` (bytes/s); or `error`.
    """
    size = _sizes()
    try:
        with jax.default_device(device):
            a, b = jax.random.normal(jax.random.key(0), (2, size.width, size.width), jnp.bfloat16)
            in_memory, on_host = jnp.zeros(size.copy // 4), np.ones(size.copy // 4, np.uint8)
            b = b / size.width**0.5
            work = size.repeats * np.array([2 * size.width**3, 2 * size.copy])
            return {
                "matmul": work[0] / _fastest(lambda: _products(a, b, size.repeats)),
                "memory": work[1] / _fastest(lambda: _copies(in_memory, size.repeats)),
                "from_host": on_host.size / _fastest(lambda: jax.device_put(on_host, device)),
            }
    except Exception as error:  # of the runtime, by its driver or by memory
        return {"error": (str(error).splitlines() or [type(error).__name__])[0][:200]}


def _fastest(run: Callable[[], Array]) -> float:
    seconds = []
    for _ in range(4):  # the first one compiles
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@jax.jit
def _products(a: Array, b: Array, repeats: int) -> Array:
    return lax.fori_loop(0, repeats, lambda _, x: x @ b, a)


@jax.jit
def _copies(x: Array, repeats: int) -> Array:  # a fixed number of repeats could be unrolled
    return lax.fori_loop(0, repeats, lambda _, y: y + 1, x)


def rounds_of_pairs(number: int) -> list[list[int]]:
    """Partners in rounds, so that each meets each other one once; itself where it has a break."""
    last, rounds = number - 1 + number % 2, []
    for turn in range(last):
        # All but the last one sit in a circle, and those opposite each other are partners.
        partners = [(2 * turn - i) % last for i in range(last)]
        partners[turn] = last
        partners = [x if x < number else i for i, x in enumerate([*partners, turn])]
        rounds.append(partners[:number])
    return rounds


def link_rates(per_node: int, watch: Watch, timeout: int) -> list[tuple[str, int, int, float]]:
    """Measures links between all devices; all processes call it together.

    Args:
        per_node: devices of a node; devices are ordered by process.
        watch: entered around each measurement, with a description of it.
        timeout: seconds in which the other processes reach a measurement.

    Returns:
        Kind, device, other device, and bytes/s in each direction, of the devices of this process.
        "pair" and "pair of nodes": both exchange data, while other pairs do. "ring" and "ring of
        nodes": each sends to the next one. "wrong": the other device received wrong bytes.
    """
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    number, size, found = len(devices), _sizes().transfer, []
    for suffix, count, stride in (("", per_node, 1), (" of nodes", number // per_node, per_node)):
        pairs = rounds_of_pairs(count) if count > 1 else []
        if suffix:
            pairs = pairs[:: -(-len(pairs) // _MAX_ROUNDS) or 1]
        rounds = [("pair", partners) for partners in pairs]
        rounds += [("ring", [*range(1, count), 0])] * (count > 1)
        for turn, (kind, partners) in enumerate(rounds, 1):
            places = [i // stride % count for i in range(number)]
            to = [i + (partners[at] - at) * stride for i, at in enumerate(places)]
            with watch(f"{kind}{suffix}, transfer {turn} of {len(rounds)}"):
                exchange, wrong = _exchange(devices, to, size, timeout)
                found += [("wrong", sender, i, 0.0) for sender, i in wrong()]  # connects
                fits = min(max(int(_SECONDS / max(exchange(1).values())), 1), 64)
                all_fits = collect(fits, timeout)
                repeats = run_on_process_0(lambda all_fits=all_fits: min(all_fits), timeout)
                first, second = exchange(repeats), exchange(repeats)
            for i, seconds in first.items():
                if to[i] != i:
                    rate = repeats * size / min(seconds, second[i])
                    found.append((kind + suffix, i, to[i], rate))
    return found


def _exchange(
    devices: Sequence[Any], to: Sequence[int], size: int, timeout: int
) -> tuple[Callable[[int], dict[int, float]], Callable[[], list[tuple[int, int]]]]:
    """Functions that send data from each device to the one that `to` names.

    The first one does so repeatedly, and returns seconds by place of each device of this process,
    which only depend on its partners. The second one compares what these received with the host's
    own copy, and returns senders and receivers of other data.
    """
    mesh = Mesh(np.array(devices), "x")

    def repeated(x: Array, repeats: Array) -> Array:
        return lax.fori_loop(0, repeats, lambda _, y: lax.ppermute(y, "x", list(enumerate(to))), x)

    specs = {"in_specs": (P("x"), P()), "out_specs": P("x"), "check_vma": False}
    run = jax.jit(jax.shard_map(repeated, mesh=mesh, **specs))
    sharding, shape = NamedSharding(mesh, P("x")), (len(devices) * size // 4,)
    local = [(i, x) for i, x in enumerate(devices) if x.process_index == jax.process_index()]
    shards = [jax.device_put(_data(i, size), device) for i, device in local]
    data = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    pool = ThreadPoolExecutor(len(data.addressable_shards))

    def seconds(repeats: int) -> dict[int, float]:
        jax.block_until_ready(data)
        meet(timeout)
        begin = time.perf_counter()

        def wait(shard: Any) -> tuple[int, float]:
            jax.block_until_ready(shard.data)
            return devices.index(shard.device), time.perf_counter() - begin

        return dict(pool.map(wait, run(data, np.int32(repeats)).addressable_shards))

    def wrong() -> list[tuple[int, int]]:
        received = {devices.index(x.device): x for x in run(data, np.int32(1)).addressable_shards}
        transfers = ((to.index(i), i, shard) for i, shard in received.items())
        return [
            (sender, i)
            for sender, i, shard in transfers
            if not np.array_equal(np.asarray(shard.data), _data(sender, size))
        ]

    return seconds, wrong


def _data(place: int, size: int) -> np.ndarray:
    """What a device sends, uint32 [size / 4]."""
    return np.arange(size // 4, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(place)
