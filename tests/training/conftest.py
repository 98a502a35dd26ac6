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
from mtraining_jax.models import init_model, param_shardings
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.training import state
from mtraining_jax.training.loop import programs, run
from tests.training.common import changed, tiny_config
from tests.training.step_memo import made_once


def use_shared_programs():
    """Goes back to the programs of all tests, where a run has used others."""
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    # A run keeps its small programs too; those of other tests take longer to keep than to compile.
    seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()


@pytest.fixture(scope="package", autouse=True)
def _equal_steps_are_made_once():
    """Runs of one process share their steps, as far as these are equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "make_train_step", made_once)
        yield


@pytest.fixture(scope="module")
def drawn_alone():
    """Models are drawn on one device and then spread, as drawing compiles anew for each mesh.

    Drawing on a mesh is in test_state.py, where values do not depend on it.
    """

    def init(spec, *, seed, mesh, fsdp):
        graphdef, drawn = init_model(spec, seed=seed, mesh=make_mesh(1, 1, 1))
        return graphdef, jax.device_put(drawn, param_shardings(spec, mesh, fsdp))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "init_model", init)
        yield


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


@dataclasses.dataclass(frozen=True)
class Whole:
    """A run that has ended; its checkpoints are of steps 2 and 4."""

    config: Config
    records: list[dict]
    printed: str

    def copy(self, name: str) -> Config:
        """The same run once more, under another name and as far."""
        copy = changed(self.config, run={"name": name})
        shutil.copytree(self.config.run.folder, copy.run.folder)
        return copy


@pytest.fixture(scope="package")
def whole():
    """One run on 1 x 1 x 4 devices, which several tests go on from; none writes into its folder.

    The first process of pytest that needs it runs it for all. Two nodes would add a third of its
    time; an audit over nodes is in test_step.py, a step in test_shipped_configs.py.
    """
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "whole"
    folder.mkdir(exist_ok=True)
    config = tiny_config(
        folder,
        run={"name": "whole", "compile_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"]},
        parallel={"nodes": 1, "devices_per_node": 4},
        checkpoint={"every_steps": 2},
        audit={"every_steps": 3, "rows": 16, "masks": ("1.0",), "alarm_recall": 1.0},
    )
    ended = folder / "records.json"
    with FileLock(folder / "lock"):
        if not ended.exists():
            shutil.rmtree(config.run.folder, ignore_errors=True)  # of a process that failed
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                records = run(config)
            use_shared_programs()
            ended.write_text(json.dumps([records, printed.getvalue()]), encoding="utf-8")
    return Whole(config, *json.loads(ended.read_text(encoding="utf-8")))


@pytest.fixture
def plain_config(config):
    """The same with dense attention on one device, for what does not depend on it.

    It compiles in a third of the time.
    """
    return changed(
        config, sparsity={"kind": "dense"}, parallel={"nodes": 1, "devices_per_node": 1}
    )
