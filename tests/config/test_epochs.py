"""The length of a run in epochs instead of steps."""

import pytest

from mtraining_jax.cli.train import main
from mtraining_jax.config import Config
from mtraining_jax.config.load import with_steps
from mtraining_jax.data.loader import Loader
from mtraining_jax.utils.errors import UserError


@pytest.fixture
def load(tmp_path):
    """Loads a configuration of 7 sequences in batches of 2."""
    (tmp_path / "text.txt").write_text("x" * (7 * 256 - 1))
    (tmp_path / "base.toml").write_text("base = 'tiny'\n[run]\nepochs = 3\n")
    path = tmp_path / "mine.toml"
    data = "[optimizer]\nwarmup_steps = 0\n[data]\nsource = 'text'\nseq_len = 256\nbatch_size = 2"

    def load(*overrides, run="", base="base.toml"):
        text = f"base = '{base}'\n[run]\n{run}\n{data}\npaths = ['{tmp_path}/text.txt']"
        path.write_text(text)
        return Config.load(path, dict(overrides))

    return load


def test_epochs_become_steps(load):
    for epochs, steps in (("3", 11), ("2", 7), ("0.3", 2), ("1e-9", 1)):
        config = with_steps(load(("run.epochs", epochs)))
        assert (config.run.steps, config.run.epochs) == (steps, None)
    packed = with_steps(load(("data.mode", "pack"), ("data.batch_size", "1")))
    assert packed.run.steps == 3 * 7
    assert with_steps(packed) is packed


def test_the_latter_of_steps_and_epochs_counts(load, tmp_path):
    assert load().run.epochs == 3 and load(base="tiny").run.steps == 120
    assert load(run="steps = 5").run.epochs is None
    assert load(("run.epochs", "2"), run="steps = 5").run.epochs == 2
    assert load(("run.epochs", "none"), base="tiny").run.steps == 120
    assert load(("run.steps", "none")).run.epochs == 3
    changed = load(("run.steps", "5"))
    assert (changed.run.steps, changed.run.epochs) == (5, None)
    with pytest.raises(UserError) as caught:
        load(run="steps = 5\nepochs = 2")
    assert str(caught.value).endswith(
        "mine.toml: run.steps = 5 and run.epochs = 2 are alternatives; remove one of them"
    )
    (tmp_path / "printed.toml").write_text(load().to_toml())
    assert Config.load(tmp_path / "printed.toml") == load()


def test_epochs_that_are_not_possible(load):
    endless = Config.load("tiny", {"data.source": "synthetic", "run.epochs": "3"})
    with pytest.raises(UserError, match='epochs = 3 is not possible with data.source = "synth'):
        with_steps(endless)
    late = load(("profile.start", "12"), ("run.log_interval", "1"))
    with pytest.raises(UserError, match="^run.epochs = 3 is 11 steps of 7 sequences: profile.sta"):
        with_steps(late)


def test_a_dry_run_counts_them(load, tmp_path, capsys):
    load()  # writes the files
    command = f"--config={tmp_path}/mine.toml --data.mode=pack --sparsity.dense_warmup_steps=2"
    assert main([*command.split(), "--dry-run=estimate"]) == 0
    printed = capsys.readouterr().out
    for text in ("data is only counted", "documents in ", "2: 2 of 11 steps"):
        assert text in printed


def test_a_run_prints_its_epochs(load):
    def printed(config):
        data = config.data
        loader = Loader(data, permutation=range(data.seq_len), vocab_size=257)
        return loader.description_for(11)

    assert printed(load()).endswith("shuffled with seed 0, 2 per batch; 11 steps = 3.14 epochs")
    assert printed(load(("data.batch_size", "8"))).endswith(
        "; warning: data.batch_size = 8 repeats sequences in each batch"
    )
    assert "epochs" not in printed(Config.load("tiny", {"data.source": "synthetic"}))
