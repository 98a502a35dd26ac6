"""Checks before a program runs whether it fits on its devices."""

import math
from collections.abc import Iterable
from typing import Any

import jax

from mtraining_jax.errors import UserError
from mtraining_jax.platform import host_memory


def check_memory(
    program: Any, devices: Iterable[Any], what: str = "a training step"
) -> None:
    """Stops a run whose step would run out of memory.

    On several GPUs such a step does not fail cleanly: one device has no memory, and the others
    wait for it in a collective.

    Args:
        program: `jax.stages.Compiled`.
        devices: those of this process that the program runs on. Devices of the CPU share the
            memory of the machine; others that do not report theirs are assumed to have enough.
        what: the program in words.

    Raises:
        UserError: if a device has less memory left than the program takes beyond its arguments.
    """
    sizes = program.memory_analysis()
    if sizes is None:
        return
    needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    _check_room(needed, devices, what, " besides parameters and optimizer state")


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
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        left = stats["bytes_limit"] - stats["bytes_in_use"]
        if needed > left:
            raise UserError(
                f"{what} needs {_gib(needed)} on each device{besides}, but {device} has "
                f"{_gib(left)} left of {_gib(stats['bytes_limit'])}; the same command with "
                "--dry-run says what would make it less"
            )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
