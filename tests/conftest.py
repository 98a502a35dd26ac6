"""Configures the devices of all tests before JAX starts a backend.

Tests run on 8 virtual CPU devices. With `MTRAINING_TEST_GPU=1` JAX selects the platform, for the
tests in tests/gpu.
"""

import contextlib
import gc
import importlib
import os
import shutil
import sys
import tempfile

FIRST = "PYTEST_XDIST_WORKER" not in os.environ
ON_GPU = os.environ.get("MTRAINING_TEST_GPU") == "1"
# OpenBLAS threads busy-wait for work, on cores that have other work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.pop("UV", None)  # messages with commands begin with "uv run" under uv
if FIRST and not ON_GPU:
    # A compilation cache shared by the processes of this run, and bytecode if there is none.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="mtraining-tests-")
    if sys.dont_write_bytecode:
        # Otherwise each pytest process, and each process of a test, compiles its imports again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "bytecode")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.lru_cache import LRUCache  # noqa: E402

# Virtual devices wait for each other in collectives, each on a thread of XLA's pool. With one
# thread per core, a small machine may run out of threads.
os.environ.setdefault("NPROC", "32")
jax.config.update("jax_num_cpu_devices", 8)
if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")
    # Test programs are too small to benefit from LLVM optimization, which takes a quarter of the
    # time, or from parallel code generation; and XLA's new MLIR fusion emitters take half of the
    # rest. Processes started by tests inherit these flags. Releases are optimized, so some tests
    # also run without these flags, in a process of tests/test_optimised.py.
    flags = (
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )
    if os.environ.get("MTRAINING_TEST_OPTIMISED") == "1":
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace(flags, "").strip()
    elif flags not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    # Equal programs of several processes are compiled once: of those that tests start, and of tests
    # of training (their conftest.py enables the cache). Programs of other tests are all different,
    # and storing them takes time. With a size limit JAX locks the folder while it writes.
    options = {
        "jax_compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "jax_compilation_cache_max_size": 2**32,
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    for option, value in options.items():
        os.environ[option.upper()] = str(value)
        jax.config.update(option, value)
    jax.config.update("jax_enable_compilation_cache", False)
    # Operations of a program carry the scopes that they are in, but not the stack of each.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # The limit is never reached, but before each write JAX sums all file sizes: with a thousand
    # files this takes 0.06 s under the lock.
    LRUCache._evict_if_needed = lambda self, additional_size=0: None

# Modules that take long to compile to bytecode.
LARGE = ["orbax.checkpoint", "flax.nnx", "jax.experimental.pallas.mosaic_gpu", "hypothesis"]

# Tracing creates many long-lived objects. Garbage collection takes 4 % of the time, and another 1 %
# with Python's default thresholds for the older generations.
gc.set_threshold(100_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Makes workers exit without freeing their traces, which takes seconds."""
    if hasattr(config, "workerinput") and not ON_GPU:
        # Everything is reported by then: the first added cleanup runs last, after pytest's own.
        config.add_cleanup(lambda: os._exit(0))


def pytest_collection(session: pytest.Session) -> None:
    """Imports what all tests need, starting in each process with other modules.

    Without bytecode, the first process that imports a module compiles it for all.
    """
    if FIRST or session.config.args != session.config.getini("testpaths"):
        return
    tests = sorted(session.config.rootpath.glob("tests/**/test_*.py"))
    names = [".".join(x.relative_to(session.config.rootpath).with_suffix("").parts) for x in tests]
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for modules in (LARGE, names):
        first = len(modules) * number // count
        for name in modules[first:] + modules[:first]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collection reports them
                importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Excludes imported objects from garbage collection."""
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Deletes the compilation cache when the last process ends."""
    if not hasattr(config, "workerinput") and not ON_GPU:
        if sys.pycache_prefix:
            sys.dont_write_bytecode = True  # later imports would create the folder again
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def pytest_xdist_auto_num_workers() -> int:
    """Returns 0 on a GPU, where several processes would each reserve its memory.

    Otherwise one per core. More processes would use the rare times when tests wait, but each one
    imports all tests, and repeats tracing and compilation that tests share.
    """
    if ON_GPU:
        return 0
    return len(os.sched_getaffinity(0))
