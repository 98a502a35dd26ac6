import contextlib
import dataclasses
import io
import json
import os
import shutil
from pathlib import Path

import jax
import pytest
from filelock import FileLock
from jax.experimental.compilation_cache import compilation_cache

from mtraining_jax.config import Config
from mtraining_jax.models.transformer import init_model, param_shardings
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.training import state
from mtraining_jax.training.loop import programs
from mtraining_jax.training.loop.watchdog import HangWatchdog
from tests.training.common import changed, run, tiny_config
from tests.training.step_memo import made_once


def use_shared_programs():
    """Restores the compilation cache of all tests after a run has set its own."""
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    # Small programs of other tests take longer to cache than to compile.
    seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()


@pytest.fixture(scope="package", autouse=True)
def _equal_programs_are_made_once():
    """Shares equal steps between the runs of a process, and programs between processes."""
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "make_train_step", made_once)
        yield
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def drawn_alone():
    """Initializes models on one device and then shards them; initializing compiles for each mesh.

    test_state.py initializes on a mesh, and checks that values do not depend on it.
    """

    def init(spec, *, seed, mesh, fsdp):
        graphdef, drawn = init_model(spec, seed=seed, mesh=make_mesh(1, 1, 1))
        return graphdef, jax.device_put(drawn, param_shardings(spec, mesh, fsdp))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "init_model", init)
        yield


@pytest.fixture
def watched(monkeypatch):
    """Names of the work that the watchdogs of runs watch, apart from steps."""
    names, watch = [], HangWatchdog.watch

    def recorded(self, name, *, limited=True):
        if limited:
            names.append(name)
        return watch(self, name, limited=limited)

    monkeypatch.setattr(HangWatchdog, "watch", recorded)
    return names


@pytest.fixture(scope="package")
def shared(tmp_path_factory):
    """A folder for data that several runs read."""
    return tmp_path_factory.mktemp("training")


@pytest.fixture
def config(shared, tmp_path):
    """A run with its own output folder."""
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


@dataclasses.dataclass(frozen=True)
class Whole:
    """A finished run with checkpoints of steps 2 and 4."""

    config: Config
    records: list[dict]
    printed: str

    def copy(self, name: str) -> Config:
        """Copies the run under another name."""
        copy = changed(self.config, run={"name": name})
        shutil.copytree(self.config.run.folder, copy.run.folder)
        return copy


@pytest.fixture(scope="package")
def whole():
    """A run on 1 x 1 x 4 devices that several tests resume from; none writes into its folder.

    The first pytest process that needs it runs it for all. Two nodes would add a third of its time;
    test_step.py audits over nodes, and tests/golden takes steps over nodes.
    """
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "whole"
    folder.mkdir(exist_ok=True)
    config = tiny_config(
        folder,
        run={"name": "whole", "compile_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"]},
        parallel={"nodes": 1, "devices_per_node": 4},
        checkpoint={"interval": 2},
        audit={"interval": 3, "num_queries": 16, "masks": ("1.0",), "alarm_recall": 1.0},
        guard={"enabled": True},
    )
    ended = folder / "records.json"
    with FileLock(folder / "lock"):
        if not ended.exists():
            shutil.rmtree(config.run.folder, ignore_errors=True)  # from a process that failed
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                records = run(config)
            use_shared_programs()
            ended.write_text(json.dumps([records, printed.getvalue()]), encoding="utf-8")
    return Whole(config, *json.loads(ended.read_text(encoding="utf-8")))


@pytest.fixture
def plain_config(config):
    """A run with dense attention on one device, which compiles in a third of the time."""
    return changed(config, sparsity={"kind": "dense"}, parallel={"nodes": 1, "devices_per_node": 1})
