"""Configures the devices and memory of JAX before it starts."""

import os
import re
from pathlib import Path

from mtraining_jax.utils.errors import UserError

# Default fraction of GPU memory for JAX; the rest is for NCCL and the CUDA context.
MEMORY_FRACTION = 0.92
# Memory limit of the container (Linux).
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")


def host_memory() -> int:
    """Bytes of host memory, or of the container's limit if smaller."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole


def free_host_memory() -> int:
    """Bytes of host memory that are available, or up to the container's limit if fewer."""
    whole, folder = host_memory(), _CGROUP_LIMIT.parent
    available = _number(_MEMINFO, "MemAvailable:")
    free = whole if available is None else min(whole, 1024 * available)
    if (used := _number(folder / "memory.current", "")) is None:
        return free
    # A container's cached files can be evicted.
    return min(free, whole - used + (_number(folder / "memory.stat", "inactive_file") or 0))


def _number(path: Path, name: str) -> int | None:
    """The number after a name at the beginning of a line of a file of the system."""
    try:
        found = re.search(rf"^{name} *(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def set_platform(cpu_devices: int | None, pinned_gib: int | None = None) -> None:
    """Sets up virtual CPU devices; None: the memory limits of GPUs and host.

    `pinned_gib` limits the pinned host memory of each GPU, None: all of it.

    Must run before JAX starts a backend: later it may raise a RuntimeError. Environment variables
    of the user take precedence.
    """
    if cpu_devices is None:
        # JAX defaults to 75 % of a GPU and 64 GiB of host memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
        limit = host_memory() // 2**30
        limit = limit if pinned_gib is None else min(limit, pinned_gib)
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(limit))
        return
    # XLA runs virtual devices on a thread pool with one thread per processor. A collective blocks
    # its thread until all devices join, so a small pool can deadlock: use several per device.
    os.environ.setdefault("NPROC", str(4 * cpu_devices))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices)


def abort_stuck_collectives(seconds: int) -> None:
    """Sets XLA's own limits of programs that wait for other GPUs; also before JAX starts.

    They abort the process, without saying how to resume, so they only back up a watchdog that ends
    it earlier. XLA_FLAGS of the user take precedence.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name, value in {
        "xla_gpu_nccl_termination_timeout_seconds": f"{seconds}",  # GPUs that do not connect
        "xla_gpu_execution_terminate_timeout": f"{seconds}s",  # programs that are not launched
    }.items():
        if name not in flags:
            flags += f" --{name}={value}"
    os.environ["XLA_FLAGS"] = flags.strip()


def check_devices() -> None:
    """Starts JAX on the devices of this machine."""
    import jax

    if jax.config.jax_disable_jit:
        raise UserError("JAX_DISABLE_JIT is set, but training requires compilation: unset it")
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no platform is available"])[0].rstrip(". ")
        allowed = os.environ.get("JAX_PLATFORMS")
        way = "use --parallel.cpu_devices=1 to run on the CPU"
        if allowed:
            way = f"JAX_PLATFORMS={allowed} in the environment excludes other platforms"
        raise UserError(f"JAX finds no device to run on ({reason}); {way}") from error
