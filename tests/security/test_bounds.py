"""Size limits of untrusted files, and the file names in them."""

import json
import os

import pytest

from mtraining_jax.config import Config
from mtraining_jax.data.files import find_files
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import Tensors
from mtraining_jax.patterns.budgets import load_budgets
from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.utils import file_limits
from mtraining_jax.utils.errors import UserError


def sparse_file(path, size):
    """A sparse file."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("name", "limit", "read"),
    [
        ("run.toml", file_limits.LARGEST_CONFIG, Config.load),
        ("config.json", file_limits.LARGEST_CONFIG, lambda path: read_hf_config(path.parent)),
        ("budgets.json", file_limits.LARGEST_CONFIG, load_budgets),
        ("model.safetensors.index.json", file_limits.LARGEST_INDEX, lambda p: Tensors(p.parent)),
        ("tokenizer.json", file_limits.LARGEST_TOKENIZER, lambda path: make_tokenizer(str(path))),
    ],
)
def test_oversized_files_are_not_read(tmp_path, name, limit, read):
    with pytest.raises(UserError, match=rf"{name} is .* MiB; the limit is .* MiB"):
        read(sparse_file(tmp_path / name, limit + 2**20))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run.toml", Config.load),
        ("config.json", lambda path: read_hf_config(path.parent)),
        ("model.safetensors", lambda path: Tensors(path.parent)),
        ("model.safetensors.index.json", lambda path: Tensors(path.parent)),
        ("tokenizer.json", lambda path: make_tokenizer(str(path))),
        ("text.txt", lambda path: find_files([str(path)], ())),
    ],
)
def test_pipes_are_rejected(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is not a regular file"):
        read(tmp_path / name)


def test_depth_is_bounded(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError, match="is not valid JSON: it is nested too deeply"):
        read_hf_config(tmp_path)
    (tmp_path / "run.toml").write_text("a = " + "[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError, match="is not valid TOML"):
        Config.load(tmp_path / "run.toml")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b", 7, None]
)
def test_shards_cannot_leave_the_folder_of_their_checkpoint(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(UserError, match="not a plain file name"):
        Tensors(tmp_path)


def test_only_folders_named_by_a_run_are_checkpoints(tmp_path):
    for name in ("12", "0012", "²", "٣", "13.orbax-checkpoint-tmp", "-14"):
        (tmp_path / name).mkdir()
    (tmp_path / "99").write_text("no folder")
    assert newest_step(tmp_path) == 12
