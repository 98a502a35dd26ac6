"""What JAX runs on, set before it starts: virtual CPU devices, or the memory of GPUs."""

import os
from pathlib import Path

from mtraining_jax.errors import UserError

# The share of a GPU's memory that JAX takes in a run, unless the environment says otherwise. The
# rest is for NCCL and the CUDA context.
MEMORY_FRACTION = 0.92


# Where Linux says how much memory the programs of a container may take.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory() -> int:
    """Bytes of memory of this machine, or of the container that runs here, if that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole


def set_platform(cpu_devices: int | None) -> None:
    """Gives JAX virtual CPU devices, or the memory of GPUs and of their host.

    Must run before JAX starts a backend. Variables of the environment that the user has set stay
    as they are.

    Args:
        cpu_devices: how many virtual devices of the CPU to run on; None for the devices that JAX
            finds.

    Raises:
        RuntimeError: if JAX has started one with other devices.
    """
    if cpu_devices is None:
        # By itself JAX takes 75 % of a GPU and 64 GiB of the host, whatever there is.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
        host_gib = host_memory() // 2**30
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_gib))
        return
    # XLA runs virtual devices on a pool of as many threads as there are processors. A collective
    # holds its thread until all devices are there, so a small pool can run dry: give each device
    # several, whatever the machine has. XLA reads this when it starts.
    os.environ.setdefault("NPROC", str(4 * cpu_devices))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices)


def check_devices() -> None:
    """Starts JAX on the devices of this machine.

    Raises:
        UserError: if it finds none that it may run on, or may not compile.
    """
    import jax

    if jax.config.jax_disable_jit:
        raise UserError(
            "JAX_DISABLE_JIT is set, and programs are compiled before they run: unset it"
        )
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["none of its platforms is here"])[0].rstrip(". ")
        allowed = os.environ.get("JAX_PLATFORMS")
        way = (
            f"JAX_PLATFORMS={allowed} in the environment allows nothing else"
            if allowed
            else "--parallel.cpu_devices=1 would run on the CPU"
        )
        raise UserError(f"JAX finds no device to run on ({reason}); {way}") from error
