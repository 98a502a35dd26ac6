"""Checks before a program runs whether it fits on its devices."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from mtraining_jax.errors import UserError
from mtraining_jax.platform import host_memory

_WIDTH = 1 << 18  # numbers of four bytes in a row of what is allocated on trial


def allocate(size: int, device: Any) -> None:
    """Takes memory of a device in one piece, and gives it back.

    Args:
        size: bytes.
        device: of this process.

    Raises:
        JaxRuntimeError: if there is no such piece.
    """
    shape = -(-size // (4 * _WIDTH)), _WIDTH
    make = jax.jit(lambda: jnp.zeros(shape, jnp.uint32), out_shardings=SingleDeviceSharding(device))
    jax.block_until_ready(make()).delete()


def check_memory(
    program: Any, devices: Iterable[Any], what: str = "a training step", *,
    take: Callable[[int, Any], None] = allocate,
) -> None:
    """Stops a run whose step would run out of memory.

    On several GPUs such a step does not fail cleanly: one device has no memory, and the others
    wait for it in a collective, for ever. XLA asks for a program's temporary memory in one piece,
    so on a GPU that piece is asked for on trial: what is left may be in pieces, and other programs
    may have taken some of it.

    Args:
        program: `jax.stages.Compiled`.
        devices: those of this process that the program runs on. Devices of the CPU share the
            memory of the machine; others that do not report theirs are assumed to have enough.
        what: the program in words.
        take: takes so many bytes of a device, and gives them back.

    Raises:
        UserError: if a device has less memory left than the program takes beyond its arguments, or
            has it in pieces only.
    """
    sizes = program.memory_analysis()
    if sizes is None:
        return
    devices = list(devices)
    needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    _check_room(needed, devices, what, " besides parameters and optimizer state")
    for device, left, _ in _telling(devices):
        _check_piece(sizes.temp_size_in_bytes, device, left, what, take)


def check_state_memory(state: Any, devices: Iterable[Any]) -> None:
    """Stops a run whose state would not fit, before it is made.

    A system that has no memory left ends a process without a word.

    Args:
        state: a pytree of `jax.ShapeDtypeStruct` with shardings.
        devices: those of this process, as in `check_memory`.

    Raises:
        UserError: if a device has less memory left than its part of the state takes.
    """
    shards = (
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )
    _check_room(sum(shards), devices, "the state of the run (parameters and their moments)", "")


def _check_room(needed: int, devices: Iterable[Any], what: str, besides: str) -> None:
    devices = list(devices)
    on_host = sum(device.platform == "cpu" for device in devices)
    if on_host * needed > host_memory():
        raise UserError(
            f"{what} needs {_gib(needed)} on each of {on_host} devices of the CPU{besides}, and "
            f"this machine has {_gib(host_memory())}; the same command with --dry-run says what "
            "would make it less"
        )
    for device, left, limit in _telling(devices):
        if needed > left:
            raise UserError(
                f"{what} needs {_gib(needed)} on each device{besides}, but {device} has "
                f"{_gib(left)} left of {_gib(limit)}; the same command with "
                "--dry-run says what would make it less"
            )


def _check_piece(
    needed: int, device: Any, left: int, what: str, take: Callable[[int, Any], None]
) -> None:
    try:
        take(needed, device)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"{what} needs {_gib(needed)} in one piece on each device, and {device} has none so "
            f"large, of {_gib(left)} left; another program may use it, or "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false has cut its memory into pieces "
            "(without it JAX takes its share at the start, in one)"
        ) from error


def _telling(devices: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """Devices that report their memory: what is left of it, and how much there is, in bytes."""
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            limit = stats["bytes_limit"]
            yield device, limit - stats["bytes_in_use"], limit


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
