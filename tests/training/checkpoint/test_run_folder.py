"""The folder of a run, and the compilation cache."""

import jax

from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.loop import programs as programs_of_runs
from mtraining_jax.training.run import use_compile_cache
from mtraining_jax.training.step import make_train_step
from tests.training.common import changed, run


def test_a_second_start_compiles_nothing(plain_config, tmp_path, monkeypatch):
    monkeypatch.setattr(programs_of_runs, "make_train_step", make_train_step)  # not shared
    where = {"steps": 1, "compile_cache_dir": str(tmp_path / "compiled")}
    # Programs that this process compiled earlier would not be written to this folder.
    config = changed(plain_config, run=where, model={"intermediate_size": 56})
    run(config)

    def programs():
        return {path.name for path in (tmp_path / "compiled").glob("*-cache")}

    kept = programs()
    assert any("train_step" in name for name in kept)
    run(changed(config, run={"name": "again"}))
    assert programs() == kept


def test_the_last_step_is_not_saved_on_request(plain_config, capsys):
    config = changed(plain_config, run={"steps": 3}, checkpoint={"interval": 2, "last_step": False})
    assert len(run(config)) == 3
    assert newest_step(checkpoint_folder(config)) == 2
    printed = capsys.readouterr().out
    assert "checkpoints" not in printed and "train on" not in printed


def test_nothing_is_kept_on_a_cpu_unless_asked(config, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)  # undoes the setting of all tests
    use_compile_cache(changed(config, run={"compile_cache_dir": "auto"}))
    assert jax.config.jax_compilation_cache_dir is None
    use_compile_cache(changed(config, run={"compile_cache_dir": "never"}))
    assert jax.config.jax_compilation_cache_dir is None


def test_programs_are_cached_next_to_the_runs_on_a_gpu(config, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = changed(config, run={"compile_cache_dir": "auto", "output_dir": str(tmp_path / "out")})
    use_compile_cache(config)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "out" / "compiled")
    assert (tmp_path / "out" / "compiled").is_dir()
