import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.training.common import changed, tiny_config


def use_shared_programs():
    """Goes back to the programs of all tests, where a run has used others."""
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    compilation_cache.reset_cache()


@pytest.fixture(scope="package")
def shared(tmp_path_factory):
    """A folder for data that several runs read."""
    return tmp_path_factory.mktemp("training")


@pytest.fixture
def config(shared, tmp_path):
    """A run that writes into a folder of its own."""
    yield tiny_config(
        shared,
        run={
            "name": "test",
            "output_dir": str(tmp_path / "runs"),
            "steps": 4,
            "compile_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
        },
    )
    use_shared_programs()


@pytest.fixture
def plain_config(config):
    """The same with dense attention on one device, for what does not depend on it.

    It compiles in a third of the time.
    """
    return changed(
        config, sparsity={"kind": "dense"}, parallel={"nodes": 1, "devices_per_node": 1}
    )
