"""Sets the devices that every test sees, before JAX starts a backend.

Tests run on 8 virtual CPU devices. With `MTRAINING_TEST_GPU=1` JAX chooses the platform itself, for
the tests under tests/gpu.
"""

import os

import jax

# Virtual devices wait for each other in collectives, each on a thread of XLA's pool: with as many
# threads as a small machine has processors the pool can run dry.
os.environ.setdefault("NPROC", "32")
jax.config.update("jax_num_cpu_devices", 8)
if os.environ.get("MTRAINING_TEST_GPU") != "1":
    jax.config.update("jax_platforms", "cpu")
    # Programs of tests are too small to gain from optimisation, which takes a quarter of the time,
    # or from several threads that compile one. Processes that tests start inherit it.
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def pytest_xdist_auto_num_workers() -> int | None:
    """One process on a GPU: several would each reserve its memory. None is a process a core."""
    return 0 if os.environ.get("MTRAINING_TEST_GPU") == "1" else None
