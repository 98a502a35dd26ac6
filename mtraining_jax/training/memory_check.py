"""Checks that a program fits into device memory before it runs."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from mtraining_jax.training.state import PINNED_HOST
from mtraining_jax.utils.errors import DoesNotFit, UserError
from mtraining_jax.utils.jax_platform import free_host_memory, host_memory

_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_WIDTH = 1 << 18  # row length, in 4-byte numbers, of a trial allocation


def allocate(size: int, device: Any) -> None:
    """Allocates one contiguous block of device memory, in bytes, and frees it."""
    shape = -(-size // (4 * _WIDTH)), _WIDTH
    make = jax.jit(lambda: jnp.zeros(shape, jnp.uint32), out_shardings=SingleDeviceSharding(device))
    jax.block_until_ready(make()).delete()


def check_memory(
    program: Any,
    devices: Iterable[Any],
    what: str = "a training step",
    *,
    is_step: bool = True,
    take: Callable[[int, Any], None] = allocate,
) -> None:
    """Stops a run if a program (a `jax.stages.Compiled`, named `what`) would run out of memory.

    `is_step` says that the dry run predicts its memory, so that settings which fit are known.

    On several GPUs such a step does not fail cleanly: one device has no memory, and the others
    wait for it in a collective forever. Devices without memory statistics are assumed to have
    enough, except CPUs, which share the memory of the host.
    """
    sizes = program.memory_analysis()
    if sizes is None:
        return
    devices = list(devices)
    needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    _check_room(needed, devices, what, is_step)
    pinned = _pinned_bytes(program, devices)
    if pinned > (free := free_host_memory()):
        left = min((left for _, left, _ in _memory_of(devices)), default=needed)
        raise DoesNotFit(
            f"{what} needs {_gib(pinned)} of host memory for offloaded activations or gradients, "
            f"but this machine has only {_gib(free)} free of {_gib(host_memory())}",
            excess=needed - left if is_step else None,
        )
    if pinned:
        _check_pool(sizes.host_temp_size_in_bytes + sizes.host_argument_size_in_bytes, what)
    # XLA allocates temporary memory as one block, and free memory may be fragmented.
    block = sizes.temp_size_in_bytes
    for device, left, _ in _memory_of(devices):
        try:
            take(block, device)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"{what} needs {_gib(block)} in one block on each device, but {device} has no free "
                f"block of that size ({_gib(left)} free in total); another program may be using "
                "the device, or XLA_PYTHON_CLIENT_PREALLOCATE=false has fragmented its memory (by "
                "default JAX allocates one large block at startup)"
            ) from error


def _pinned_bytes(program: Any, devices: Iterable[Any]) -> int:
    """Bytes of host memory that a program needs pinned, for all devices of this process."""
    sizes = program.memory_analysis()
    on_gpus = sum(device.platform != "cpu" for device in devices)
    return on_gpus * sizes.host_temp_size_in_bytes if sizes is not None else 0


def pinning_notice(program: Any, devices: Iterable[Any]) -> str | None:
    """How much host memory the first run of a program pins; None if it offloads nothing."""
    devices = list(devices)
    if not (pinned := _pinned_bytes(program, devices)):
        return None
    sizes, limit = program.memory_analysis(), int(os.environ.get(_POOL, "64"))
    temp, state = sizes.host_temp_size_in_bytes, sizes.host_argument_size_in_bytes
    # XLA's blocks are powers of two, each as large as those before, and its limit cuts the last.
    block = min(1 << (max(temp, state) - 1).bit_length(), 2**30 * limit - state)
    most = pinned // temp * max(temp, block)
    # Two hosts: benchmarks/results/offload-h100-2026-11-25.md, offload-h200-2026-11-26.md.
    text = (
        f"its first run pins {_gib(pinned)} of host memory, up to {_gib(most)} with unused parts "
        f"of XLA's blocks, which takes {pinned / 2**30 / 1.9:.0f} to {most / 2**30 / 0.9:.0f} s"
    )
    if most > (free := free_host_memory()):
        text += (
            f"; {_gib(free)} are free: if the system kills the process, lower the environment "
            f"variable {_POOL} = {limit} (GiB for each GPU), which cuts the last block"
        )
    return text


def check_state_memory(state: Any, devices: Iterable[Any]) -> None:
    """Stops a run if a state of `jax.ShapeDtypeStruct` would not fit, before it is created."""
    # Otherwise the operating system may kill the process without a message.
    what, devices = "the training state (parameters and Adam moments)", list(devices)
    _check_room(shard_bytes(state), devices, what)
    pinned = len(devices) * shard_bytes(state, on_host=True)
    if pinned and pinned > (free := free_host_memory()):
        raise DoesNotFit(
            f"optimizer.offload needs {_gib(pinned)} of host memory for the training state, but "
            f"this machine has only {_gib(free)} free of {_gib(host_memory())}",
            free=min((left for _, left, _ in _memory_of(devices)), default=host_memory()),
        )
    if pinned and devices[0].platform != "cpu":
        _check_pool(shard_bytes(state, on_host=True), "optimizer.offload")


def _check_pool(needed: int, what: str) -> None:
    """Compares bytes of one GPU with XLA's limit, which is in GiB."""
    if needed > 2**30 * int(limit := os.environ.get(_POOL, "64")):
        raise UserError(
            f"{what} needs {_gib(needed)} of pinned host memory for each GPU, but the environment "
            f"variable {_POOL} = {limit} (GiB); raise it, with a reserve for unused parts of blocks"
        )


def check_pool_error(error: Exception, way: str) -> None:
    """Raises an error that ends with `way` if XLA found no free block of pinned host memory."""
    if found := re.search(r"allocate (\S+) with allocator xla_gpu_host_bfc", str(error)):
        raise UserError(
            f"XLA found no free block of {found[1]} in pinned host memory; raise the environment "
            f"variable {_POOL} = {os.environ.get(_POOL, '64')} (GiB for each GPU, including unused "
            f"parts of blocks) or free host memory; {way}"
        ) from error


def shard_bytes(tree: Any, *, on_host: bool = False) -> int:
    """Bytes of one device's shards of arrays or `jax.ShapeDtypeStruct`, on it or on the host."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if (x.sharding.memory_kind == PINNED_HOST) == on_host
    )


def _check_room(needed: int, devices: list[Any], what: str, is_step: bool | None = None) -> None:
    """Raises DoesNotFit; `is_step` None: for a state."""
    extra = "" if is_step is None else " in addition to parameters and optimizer state"

    def error(text: str, left: int) -> DoesNotFit:
        excess = needed - left if is_step else None
        return DoesNotFit(text, excess=excess, free=left if is_step is None else None)

    on_host = sum(device.platform == "cpu" for device in devices)
    if on_host * needed > host_memory():
        raise error(
            f"{what} needs {_gib(needed)} on each of {on_host} CPU devices{extra}, but this "
            f"machine has {_gib(host_memory())} in total",
            host_memory() // on_host,
        )
    for device, left, limit in _memory_of(devices):
        if needed > left:
            raise error(
                f"{what} needs {_gib(needed)} on each device{extra}, but {device} has only "
                f"{_gib(left)} free of {_gib(limit)}",
                left,
            )


def _memory_of(devices: list[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yields devices that report their memory, with their free and total bytes."""
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            limit = stats["bytes_limit"]
            yield device, limit - stats["bytes_in_use"], limit


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
