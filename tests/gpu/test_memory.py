"""Fragmented GPU memory is detected before a step runs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Two sevenths of the memory stay in use, in the middle: two and three sevenths remain around it.
PROGRAM = """
import types

import jax
import jax.numpy as jnp

from mtraining_jax.utils.errors import UserError
from mtraining_jax.training.memory_check import check_memory

device = jax.devices()[0]
seventh = device.memory_stats()["bytes_limit"] // 7
arrays = [jnp.zeros((2 * seventh - 2**20,), jnp.uint8) for _ in range(3)]
jax.block_until_ready(arrays)
arrays[0].delete()
arrays[2].delete()
for sevenths in (2, 4):
    sizes = types.SimpleNamespace(
        temp_size_in_bytes=sevenths * seventh, output_size_in_bytes=0, alias_size_in_bytes=0
    )
    try:
        check_memory(types.SimpleNamespace(memory_analysis=lambda: sizes), [device])
    except UserError as error:
        print(sevenths, "refused:", error)
    else:
        print(sevenths, "fit")
"""


def test_insufficient_contiguous_memory_is_reported():
    few = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | few,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "2 fit"
    assert second.startswith("4 refused: a training step needs ") and "in one block" in second
