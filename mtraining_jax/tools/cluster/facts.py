"""What a process sees of its host, file systems and devices, as JSON values."""

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from mtraining_jax.config import Config
from mtraining_jax.data.files import errors_as
from mtraining_jax.data.source import FileSource
from mtraining_jax.tools.cluster.rates import Watch, rates_of_device
from mtraining_jax.tools.cluster.verify import verified_devices
from mtraining_jax.training.checkpoint.bucket import check_bucket
from mtraining_jax.training.checkpoint.run_folder import wait_for
from mtraining_jax.training.guard.gpus import gpus_of_host
from mtraining_jax.training.processes.agreement import meet, run_on_process_0
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import free_host_memory
from mtraining_jax.utils.text import counted
from mtraining_jax.utils.version import VERSION

# Beginnings of variables that should not differ, except those of one process.
_VARIABLES = "JAX_", "NCCL_", "XLA_"
_OWN = "JAX_PROCESS_ID", "JAX_LOCAL", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DRIVER = Path("/proc/driver/nvidia/version")
_WRITE_SECONDS, _CHUNK = 0.5, b"\1" * 2**23
_FILE_SYSTEM_DELAY = 10.0


def facts_of_process(watch: Watch, timeout: int) -> dict[str, Any]:
    """Facts about this process and its host, with the rates of its devices."""
    devices = jax.local_devices()
    # At the same time, as in training.
    with watch("measuring the devices"), ThreadPoolExecutor(len(devices)) as pool:
        rates = list(pool.map(rates_of_device, devices))
    results = verified_devices(watch)
    rates = [rate | result for rate, result in zip(rates, results, strict=True)]
    driver = _DRIVER.read_text().splitlines()[:1] if _DRIVER.exists() else []
    meet(timeout)
    return {
        "clock": time.time(),
        "host": socket.gethostname(),
        "gpus": gpus_of_host(),
        "same": {
            "kind of devices": devices[0].device_kind,
            "version of mtraining-jax": VERSION,
            "version of python": platform.python_version(),
            "version of jax": jax.__version__,
            "version of jaxlib": jaxlib.version.__version__,
            "version of the driver": "".join(driver),
            **{
                name: value
                for name, value in os.environ.items()
                if name.startswith(_VARIABLES) and not name.startswith(_OWN)
            },
        },
        "kinds": [device.device_kind for device in devices],
        "devices": rates,
        "memory": free_host_memory(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def facts_of_files(config: Config, watch: Watch, timeout: int) -> dict[str, Any]:
    """What this process sees of the data and of `run.output_dir`; all processes call it together.

    Returns:
        `data`: its files. `seen`: seconds until a folder of process 0 appears, `write`: bytes/s of
        a file there. `errors`: sentences about what fails.
    """
    facts: dict[str, Any] = {"data": "unknown", "errors": []}
    parent, folder = Path(config.run.output_dir).absolute(), None
    try:
        with watch("looking for the data"):
            source = config.data.source_options
            if isinstance(source, FileSource):
                files = counted(len(source.files()), "file")
                facts["data"] = f"{files} of {source.size():,} bytes"
    except UserError as error:
        facts["errors"].append(str(error))
    try:
        with watch("writing into run.output_dir"):
            if config.run.bucket is not None:
                check_bucket(config.run.bucket)
            else:
                folder = parent / run_on_process_0(lambda: _make(parent), timeout)
                facts |= _written(folder)
    except UserError as error:
        facts["errors"].append(f"run.output_dir = {config.run.output_dir}: {error}")
    meet(timeout)
    if jax.process_index() == 0 and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return facts


def _make(parent: Path) -> str:
    """Creates a folder with a new name, which it returns."""
    with errors_as(UserError, f"{parent} is not writable", OSError):
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".check_", dir=parent)).name


def _written(folder: Path) -> dict[str, float]:
    """Waits for a folder of process 0, and writes a file there; the rate includes the disk."""
    begin = time.monotonic()
    if not wait_for(True, folder.is_dir, _FILE_SYSTEM_DELAY):
        raise UserError("the folder that process 0 made there is missing; all hosts must share it")
    found, begin, count = time.monotonic() - begin, time.monotonic(), 0
    with (
        errors_as(UserError, f"{folder} is not writable", OSError),
        (folder / str(jax.process_index())).open("wb") as file,
    ):
        while time.monotonic() - begin < _WRITE_SECONDS:
            count += file.write(_CHUNK)
            os.fsync(file.fileno())
    return {"seen": found, "write": count / (time.monotonic() - begin)}
