"""Checks before a program runs whether it fits on its devices."""

from collections.abc import Iterable
from typing import Any

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
    devices = list(devices)
    on_host = sum(device.platform == "cpu" for device in devices)
    if on_host * needed > host_memory():
        raise UserError(
            f"{what} needs {_gib(needed)} on each of {on_host} devices of the CPU besides "
            f"parameters and optimizer state, and this machine has {_gib(host_memory())}; "
            f"the same command with --dry-run says what would make it less"
        )
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        left = stats["bytes_limit"] - stats["bytes_in_use"]
        if needed > left:
            raise UserError(
                f"{what} needs {_gib(needed)} on each device besides parameters and "
                f"optimizer state, but {device} has {_gib(left)} left of "
                f"{_gib(stats['bytes_limit'])}; the same command with --dry-run says what would "
                "make it less"
            )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
