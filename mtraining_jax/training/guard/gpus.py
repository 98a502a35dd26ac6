"""Facts about the GPUs of this host that identify a faulty one."""

import csv
import os
import socket
import subprocess
from typing import Any

import jax

_FIELDS = (
    "index", "name", "uuid", "serial", "pci.bus_id", "driver_version", "vbios_version",
    "temperature.gpu", "temperature.memory", "power.draw", "clocks.sm",
    "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
_SECONDS = 20


def gpus_of_host() -> dict[str, Any]:
    """The host, devices of this process, and what nvidia-smi and the kernel say, if they can."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "process": jax.process_index(),
        "devices": [x.id for x in jax.local_devices()],
    }
    if jax.local_devices()[0].platform != "gpu":
        return facts
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    some = [f"--id={visible}"] if visible else []
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader", *some]
    rows = csv.reader(_lines(query), skipinitialspace=True)
    facts["gpus"] = [dict(zip(_FIELDS, row, strict=False)) for row in rows]
    facts["xid"] = [line for line in _lines(["dmesg"]) if "Xid" in line][-8:]
    return facts


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
