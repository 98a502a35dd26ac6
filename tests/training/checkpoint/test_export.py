"""The trained model as a Hugging Face checkpoint, and a run that starts from one."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import read_state
from mtraining_jax.training.checkpoint.export import _eos, _tokenizer_files
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.loop import run
from mtraining_jax.training.state import StateBuilder
from tests.training.common import changed

pytestmark = pytest.mark.usefixtures("drawn_alone")


def saved_parameters(config, step):
    """The fp32 parameters in a checkpoint of the run."""
    builder = StateBuilder(config, build_mesh(config))
    state, _ = read_state(checkpoint_folder(config), step, builder.abstract(), config)
    return state.parameters


def exported_parameters(config):
    """The exported parameters, under our names."""
    builder = StateBuilder(config, build_mesh(config))
    return builder.flatten(load_hf(config.run.folder / "hf", config.model))


def assert_rounded(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        rounded = np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(np.asarray(actual[name]), rounded, err_msg=name)


def test_a_run_exports_its_last_state_and_another_starts_from_it(plain_config, capsys, tmp_path):
    config = changed(
        plain_config,
        run={"steps": 1},
        parallel={"devices_per_node": 2, "fsdp": True},
        checkpoint={"export_hf": True},
        optimizer={"trainable": ("self_attn",)},
    )
    run(config)
    folder = config.run.folder / "hf"
    assert str(folder) in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    written = json.loads((folder / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16" and written["eos_token_id"] is None
    assert_rounded(exported_parameters(config), saved_parameters(config, 1))

    # A resumed run replaces it.
    run(changed(config, run={"steps": 2}))
    assert_rounded(exported_parameters(config), saved_parameters(config, 2))

    # A complete run is exported without a step.
    shutil.rmtree(folder)
    assert run(changed(config, run={"steps": 2})) == []
    assert f"wrote      {folder}" in capsys.readouterr().out
    assert_rounded(exported_parameters(config), saved_parameters(config, 2))
    assert sorted(path.name for path in config.run.folder.iterdir()) == [
        "checkpoints",
        "config.toml",
        "hf",
        "metrics.jsonl",
        "starts.jsonl",
    ]

    # Frozen parameters and the tokenizer come out unchanged.
    start = shutil.copytree(folder, tmp_path / "start")
    (start / "tokenizer.json").write_text("{}")
    (start / "generation_config.json").write_text('{"eos_token_id": 60}')
    (start / "optimizer.pt").write_text("of no use")
    tuned = changed(config, run={"name": "tuned"}, model={"init_from": str(start)})
    run(tuned)
    out = tuned.run.folder / "hf"
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (out / "generation_config.json").read_text() == '{"eos_token_id": 60}'
    assert read_hf_config(out) == read_hf_config(start)
    before, after = (load_file(path / "model.safetensors") for path in (start, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert np.array_equal(after[name], tensor) == ("self_attn" not in name), name


def test_the_tokenizer_of_training_is_exported_whatever_its_name(plain_config, tmp_path):
    path = tmp_path / "words.json"
    path.write_text("{}")
    start = tmp_path / "start"
    start.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (start / name).write_text("{}")
    own = changed(plain_config, data={"tokenizer": str(path)})
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert _tokenizer_files(own) == {"tokenizer.json": path, "tokenizer_config.json": plain}
    model = dataclasses.replace(own.model, init_from=str(start))
    assert _tokenizer_files(dataclasses.replace(own, model=model)) == {
        "tokenizer.json": path,
        "tokenizer_config.json": plain,
        "generation_config.json": start / "generation_config.json",
    }
    adjacent = changed(own, data={"tokenizer": str(start / "tokenizer.json")})
    assert set(_tokenizer_files(adjacent)) == {path.name for path in start.iterdir()}
    assert _tokenizer_files(adjacent)["tokenizer_config.json"] == start / "tokenizer_config.json"
    assert _tokenizer_files(plain_config) == {}


def test_the_end_token_of_documents(plain_config):
    assert _eos(plain_config) is None  # token ids, for which it is unknown
    assert _eos(changed(plain_config, data={"eos": 7})) == 7
    text = changed(plain_config, data={"source": "text", "tokenizer": "bytes"})
    assert _eos(text) == 256
