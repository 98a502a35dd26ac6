"""Sets the devices that every test sees, before JAX starts a backend.

Tests run on 8 virtual CPU devices. With `MTRAINING_TEST_GPU=1` JAX chooses the platform itself, for
the tests under tests/gpu.
"""

import gc
import importlib
import os
import shutil
import sys
import tempfile

FIRST = "PYTEST_XDIST_WORKER" not in os.environ
ON_GPU = os.environ.get("MTRAINING_TEST_GPU") == "1"
# The threads of NumPy's matrix products wait for work by looking for it, on cores that have other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if FIRST and not ON_GPU:
    # Compiled programs that the processes of this run share, and bytecode where there is none.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="mtraining-tests-")
    if sys.dont_write_bytecode:
        # Each process of pytest, and each that a test starts, would compile its imports anew.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "bytecode")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.lru_cache import LRUCache  # noqa: E402

# Virtual devices wait for each other in collectives, each on a thread of XLA's pool: with as many
# threads as a small machine has processors the pool can run dry.
os.environ.setdefault("NPROC", "32")
jax.config.update("jax_num_cpu_devices", 8)
if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")
    # Programs of tests are too small to gain from optimisation, which takes a quarter of the time,
    # or from several threads that compile one; and XLA's newer way to emit the code of fusions,
    # by MLIR, takes half of what is left. Processes that tests start inherit it.
    # What ships is optimised: some tests run so as well, in a process of tests/test_optimised.py.
    flags = (
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )
    if os.environ.get("MTRAINING_TEST_OPTIMISED") == "1":
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace(flags, "").strip()
    elif flags not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    # A program that several tests compile alike is compiled once, by one of the processes of pytest
    # or of those that tests start. A limit of the size has JAX lock the folder while it writes.
    options = {
        "jax_compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "jax_compilation_cache_max_size": 2**32,
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    for option, value in options.items():
        os.environ[option.upper()] = str(value)
        jax.config.update(option, value)
    # The limit is far, but before JAX writes a program it adds up the sizes of all: with a thousand
    # in the folder, for 0.06 s under the lock.
    LRUCache._evict_if_needed = lambda self, additional_size=0: None

if not FIRST:
    # Where there is no bytecode yet, each process begins with another of these, and writes it.
    large = ["orbax.checkpoint", "flax.nnx", "jax.experimental.pallas.mosaic_gpu", "hypothesis"]
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    for place in range(len(large)):
        importlib.import_module(large[(number + place) % len(large)])

# Tracing makes many objects that all live on: looking for cycles among them takes 4 % of the time,
# and another 1 % where the older ones are looked at as often as Python would.
gc.set_threshold(100_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Ends a worker without taking apart what it has traced, which takes seconds."""
    if hasattr(config, "workerinput") and not ON_GPU:
        # All is reported when this runs: what is added first runs last, after pytest's own.
        config.add_cleanup(lambda: os._exit(0))


def pytest_collection_finish() -> None:
    """Leaves what was imported out of all further looks for cycles."""
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Takes the compiled programs away, when the last process ends."""
    if not hasattr(config, "workerinput") and not ON_GPU:
        if sys.pycache_prefix:
            sys.dont_write_bytecode = True  # what is imported after this would make the folder anew
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def pytest_xdist_auto_num_workers() -> int:
    """One process on a GPU: several would each reserve its memory.

    Else one for each core. Another one would run where tests wait, which is seldom; but each
    imports all tests, and traces and compiles again what tests have in common.
    """
    if ON_GPU:
        return 0
    return len(os.sched_getaffinity(0))
