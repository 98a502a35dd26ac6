"""The trained model as a Hugging Face checkpoint, and a run that starts from one."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.tools.evaluate.load import load
from mtraining_jax.tools.export.state import exported_files
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import read_state
from mtraining_jax.training.checkpoint.end_tokens import end_tokens
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils.errors import UserError
from tests.data.chat.chat_folders import template_of, write_folder
from tests.data.tokenizer_folders import write_tokenizer
from tests.models.common import CHECKPOINTS
from tests.training.common import changed, run

_LENGTHS = "model_max_length", "max_length"
QWEN2 = CHECKPOINTS / "qwen2_tiny"
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
        data={"eos": 7},
    )
    run(config)
    folder = config.run.folder / "hf"
    assert str(folder) in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    written = json.loads((folder / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16" and written["eos_token_id"] == 7
    assert_rounded(exported_parameters(config), saved_parameters(config, 1))

    # A resumed run replaces it, and remembers what was trained before.
    config = changed(config, data={"eos": None})
    run(changed(config, run={"steps": 2}))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 7
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

    # Also when the checkpoint that it started from is gone.
    shutil.rmtree(start)
    run(changed(tuned, model={"init_from": None}))
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 60
    assert load(tuned.run.folder, "dense").stop_ids == load(out, "dense").stop_ids == {60}


def files_of(config):
    return exported_files(config, end_tokens(config))


def test_the_tokenizer_of_training_is_exported_whatever_its_name(plain_config, tmp_path):
    path = tmp_path / "words.json"
    path.write_text("{}")
    start = shutil.copytree(QWEN2, tmp_path / "start")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "NOTICE"):
        (start / name).write_text("{}")
    own = changed(plain_config, data={"tokenizer": str(path)})
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert files_of(own) == {"tokenizer.json": path, "tokenizer_config.json": plain}
    tuned = {"init_from": str(start), "max_position_embeddings": 256}
    tuned = dataclasses.replace(own.model, **tuned)
    of_start = {name: start / name for name in ("generation_config.json", "NOTICE")}
    ends = {"generation_config.json": {"eos_token_id": [7]}}
    of_tokenizer = {"tokenizer.json": path, "tokenizer_config.json": plain}
    config = dataclasses.replace(changed(own, data={"eos": 7}), model=tuned)
    assert files_of(config) == of_tokenizer | of_start | ends
    # Training reads the settings and templates next to a tokenizer of any name.
    for name in ("chat_template.jinja", "tokenizer_config.json", "vocab.json"):
        (tmp_path / name).write_text("{}")
    near = {name: tmp_path / name for name in ("chat_template.jinja", "tokenizer_config.json")}
    assert files_of(own) == {"tokenizer.json": path, **near}
    adjacent = changed(own, data={"tokenizer": str(start / "tokenizer.json")})
    names = "tokenizer.json", "tokenizer_config.json"
    assert files_of(adjacent) == {name: start / name for name in names}
    assert files_of(plain_config) == {}
    # Token ids need no tokenizer, but text as bytes is not for that of the checkpoint.
    ids = dataclasses.replace(plain_config, model=tuned)
    assert files_of(ids) == of_start | {name: start / name for name in names}
    text = changed(plain_config, data={"source": "text", "tokenizer": "bytes"})
    assert files_of(dataclasses.replace(text, model=tuned)).keys() == of_start.keys()


@pytest.mark.parametrize(
    ("kind", "bos", "ids"),
    [("llama3", False, [256]), ("llama3", None, [262, 256]), ("qwen2", 263, [263, 256])],
)
def test_an_exported_tokenizer_begins_texts_as_training_did(plain_config, tmp_path, kind, bos, ids):
    path = write_tokenizer(tmp_path, kind)
    config = changed(plain_config, data={"tokenizer": path, "bos": bos})
    file = exported_files(config, [])["tokenizer.json"]
    content = json.dumps(file) if isinstance(file, dict) else file.read_text()
    assert Tokenizer.from_str(content).encode("he").ids == ids
    assert make_tokenizer(path, bos=bos).encode("he").tolist() == ids


@pytest.mark.parametrize(
    ("context", "settings", "expected"),
    [
        (256, {"model_max_length": 128, "max_length": 128}, (256, 256)),
        (256, {"model_max_length": 100, "max_length": 100}, (256, 100)),
        (256, {"model_max_length": 200, "max_length": 200}, (256, 256)),
        (256, {"model_max_length": 10**30, "max_length": 300}, (10**30, 300)),
        (256, {}, (None, None)),
        (64, {"model_max_length": 128, "max_length": 128}, (64, 64)),
        (64, {"model_max_length": 60, "max_length": 60}, (64, 60)),
        (128, {"model_max_length": 100, "max_length": 100}, (100, 100)),
    ],
)
def test_lengths_follow_the_context(plain_config, tmp_path, context, settings, expected):
    start = shutil.copytree(QWEN2, tmp_path / "start")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    (start / "tokenizer.json").write_text("{}")
    names = "tokenizer_config.json", "generation_config.json"
    for name in names:
        (start / name).write_text(json.dumps(settings))
    config = changed(plain_config, data={"tokenizer": str(start / "tokenizer.json")})
    of_model = {"init_from": str(start), "max_position_embeddings": context}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **of_model))
    files = files_of(config)
    found = (content_of(files[name]).get(x) for name, x in zip(names, _LENGTHS, strict=True))
    assert tuple(found) == expected
    assert all(content_of(files[name]).keys() == settings.keys() for name in names)


def content_of(file):
    return file if isinstance(file, dict) else json.loads(file.read_text())


def chats(folder, config, template="smollm2", **settings):
    """A run on conversations, from a base model with other end tokens, in `folder`."""
    start = shutil.copytree(QWEN2, folder / "base")
    write_folder(folder / "t", template_of(template, marked=False))
    path = folder / "t" / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | settings
    (start / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(folder / "t" / "tokenizer.json", start)
    (start / "generation_config.json").write_text('{"eos_token_id": [266, 5]}')
    config = changed(
        config,
        data={
            "source": "jsonl", "messages_field": "messages", "paths": ["x"],
            "tokenizer": str(start / "tokenizer.json"),
        },
    )  # fmt: skip
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, init_from=str(start))
    )


TURN, EOT = 268, 271


def test_end_tokens_are_those_of_the_start_and_those_that_training_teaches(plain_config, tmp_path):
    talk = chats(tmp_path, plain_config)
    assert end_tokens(talk) == [266, 5, TURN] and end_tokens(talk, [9, 5]) == [9, 5, 266, TURN]
    data = {"source": "jsonl", "paths": ["x"], "tokenizer": talk.data.tokenizer, "eos": "<|eot|>"}
    text = dataclasses.replace(changed(plain_config, data=data), model=talk.model)
    assert end_tokens(text) == [266, 5, EOT]
    data["messages_field"] = "messages"
    named = changed(plain_config, data=data)  # conversations do not end with data.eos
    assert end_tokens(named) == [TURN]
    part = {"source": "jsonl", "paths": ["x"], "messages_field": "messages"}
    parts = {"talk": part, "text": {"source": "jsonl", "paths": ["x"]}}
    data = {"source": "mixture", "parts": parts, "tokenizer": talk.data.tokenizer}
    mixed = changed(plain_config, data=data | {"eos": "<|eot|>"})
    assert end_tokens(mixed) == [TURN, EOT]
    with pytest.raises(UserError, match=r"eos_token_id = \[\] must be an id or a non-empty list"):
        (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": []}')
        end_tokens(talk)


def test_end_tokens_of_token_files(plain_config, tmp_path):
    """Folders of tokenize_corpus know what their documents are."""
    talk = chats(tmp_path, plain_config)
    np.save(tmp_path / "part-00000.npy", np.arange(9, dtype=np.uint16))
    data = {"paths": [str(tmp_path)], "tokenizer": talk.data.tokenizer}
    config = dataclasses.replace(changed(plain_config, data=data), model=talk.model)
    assert end_tokens(config) == [266, 5]
    identity = {"data.messages_field": "messages", "data.eos": 3}
    for known, ends in [(identity, [266, 5, TURN]), ({"data.eos": 3}, [266, 5, 3])]:
        manifest = {"version": 1, "complete": True, "identity": known}
        (tmp_path / "token_parts.json").write_text(json.dumps(manifest))
        assert end_tokens(config) == ends
    data["tokenizer"] = "bytes"
    identity = json.dumps({"version": 1, "complete": True, "identity": identity})
    (tmp_path / "token_parts.json").write_text(identity)
    assert end_tokens(changed(plain_config, data=data)) == []


def test_the_end_of_a_turn_becomes_the_end_token_of_a_base_model(plain_config, tmp_path):
    def settings_of(name, **how):
        (tmp_path / name).mkdir()
        config = chats(tmp_path / name, plain_config, **how)
        return content_of(files_of(config)["tokenizer_config.json"]), config

    settings, config = settings_of("base")
    assert settings["eos_token"] == "<|im_end|>"
    # A template may insert the end token where no turn ends.
    inserts = template_of("smollm2", marked=False) + "{# eos_token #}"
    assert settings_of("inserts", chat_template=inserts)[0]["eos_token"] == "<|endoftext|>"
    # The checkpoint is a chat model.
    start = Path(config.model.init_from)
    (start / "generation_config.json").write_text('{"eos_token_id": [266, 268]}')
    assert files_of(config)["tokenizer_config.json"] == start / "tokenizer_config.json"
    assert files_of(config)["generation_config.json"] == start / "generation_config.json"
