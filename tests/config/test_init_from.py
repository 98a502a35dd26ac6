"""Model fields from a checkpoint's config.json."""

import json
import shutil

import pytest

from mtraining_jax.config import Config
from mtraining_jax.config.notes import notes
from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.families.llama import Llama
from mtraining_jax.models.huggingface.config import check_same_model
from mtraining_jax.utils.errors import UserError
from tests.models.common import CHECKPOINTS

SIZES = {
    "family": "llama", "vocab_size": 288, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 64, "rope_theta": 5e5,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "initializer_range": 0.02,
}  # fmt: skip
REST = "[sparsity]\nblock_size = 32\n[data]\nseq_len = 128\n"


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(
        CHECKPOINTS / "llama3_tiny", tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.npz")
    )


@pytest.fixture
def load(tmp_path, checkpoint):
    """Loads a configuration with some lines in its [model]."""

    def load(model="", **overrides):
        path = tmp_path / "mine.toml"
        path.write_text(f"[model]\ninit_from = '{checkpoint}'\n{model}\n{REST}")
        return Config.load(path, {f"model.{x}": value for x, value in overrides.items()})

    return load


def refusal(load, *arguments, **overrides):
    with pytest.raises(UserError) as caught:
        load(*arguments, **overrides)
    return str(caught.value)


def test_sizes_may_be_omitted(load):
    model = load().model
    assert {name: getattr(model, name) for name in SIZES} == SIZES
    scaling = model.rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == (
        "llama3",
        8.0,
        64,
    )


def test_printed_configuration_loads_back(load, tmp_path):
    for config in (load(), load("override = ['rope_scaling', 'rope_theta']\nrope_theta = 7.0")):
        text = config.to_toml()
        path = tmp_path / "printed.toml"
        path.write_text(text)
        assert Config.load(path) == config
        assert Config.from_dict(config.to_dict(), "a dict") == config
    assert config.model.rope_theta == 7.0 and config.model.rope_scaling is None


def test_a_wrong_rope_theta_is_an_error(load, checkpoint):
    # Regression: training used to continue with a higher loss, without a message.
    assert refusal(load, rope_theta="1e6") == (
        f"command line: model.rope_theta = 1000000.0 differs from {checkpoint}/config.json, which "
        'has 500000.0: remove it, or keep it with model.override = ["rope_theta"]'
    )
    assert load(rope_theta="1e6", override="rope_theta").model.rope_theta == 1e6
    assert load(rope_theta="500_000").model.rope_theta == 5e5


def test_every_field_that_differs_is_reported(load, tmp_path):
    lines = refusal(load, "num_layers = 3\nfamily = 'qwen2'\ntie_word_embeddings = true")
    lines = [line.removeprefix(f"{tmp_path}/mine.toml: ") for line in lines.splitlines()]
    differs = f"differs from {tmp_path}/checkpoint/config.json, which has"
    assert set(lines) == {
        f'model.family = "qwen2" {differs} "llama": remove it',
        f"model.num_layers = 3 {differs} 2: remove it",
        f"model.tie_word_embeddings = true {differs} false: remove it",
    }


def test_rope_scaling_is_compared_by_value(load):
    same = "rope_scaling = {type = 'llama3', factor = 8, original_max_position_embeddings = 64}"
    assert load(same) == load()
    said = refusal(load, rope_scaling="none")
    assert "model.rope_scaling = none differs from " in said
    assert '{"type": "llama3", "factor": 8.0' in said
    said = refusal(load, "rope_scaling = {factor = 16.0}")
    assert 'keep it with model.override = ["rope_scaling"]' in said
    wrong = refusal(load, "rope_scaling = {type = 'llama3', factor = 'x'}")
    assert "model.rope_scaling.factor" in wrong and "is not allowed" in wrong


def test_a_longer_context_needs_an_override(load, checkpoint):
    raw = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 64}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    said = refusal(load)
    assert said.startswith("data.seq_len = 128 is more than model.max_position_embeddings = 64, ")
    assert 'add it to model.override: ["max_position_embeddings"] or' in said
    assert load(override="max_position_embeddings").model.max_position_embeddings == 32768


def test_the_tokenizer_is_that_of_the_checkpoint(load, checkpoint, tmp_path):
    (line,) = notes(load(), [])
    assert line.startswith(f"{checkpoint} has no tokenizer.json, so text is tokenized to bytes; ")
    (checkpoint / "tokenizer.json").write_text("{}")
    config = load()
    assert config.data.tokenizer == f"{checkpoint}/tokenizer.json" and notes(config, []) == []
    path = tmp_path / "mine.toml"
    for own in ("bytes", "other.json"):
        chosen = Config.load(path, {"data.tokenizer": own})
        assert chosen.data.tokenizer == own and notes(chosen, []) == []
    held_out = {"eval.data.source": "text", "eval.data.paths": "held.txt"}
    assert Config.load(path, held_out).eval.data.tokenizer == config.data.tokenizer


def test_sizes_cannot_be_overridden(load):
    said = refusal(load, "num_layers = 3\noverride = ['num_layers']")
    assert "model.num_layers = 3 differs from " in said
    said = refusal(load, "override = ['num_layers']")
    assert said == (
        'model.override: "num_layers" cannot be overridden; choose from rope_theta, rope_scaling,'
        " max_position_embeddings, rms_norm_eps, initializer_range, router_aux_loss_coef"
    )


def test_a_folder_without_config_json(load, checkpoint):
    (checkpoint / "config.json").unlink()
    said = refusal(load)
    assert said.startswith(f"model.init_from = {checkpoint}: cannot read {checkpoint}/config.json")
    assert "a run that resumes from its own checkpoint does not need it" in said
    (checkpoint / "checkpoints").mkdir()
    assert f"the folder of a run; give {checkpoint}/hf, its export with" in refusal(load)


def test_names_and_files_instead_of_a_folder(load, checkpoint):
    assert refusal(load, init_from="Qwen/Qwen2.5-3B") == (
        "model.init_from = Qwen/Qwen2.5-3B is not a folder; if it is on Hugging Face, "
        "give hf://Qwen/Qwen2.5-3B"
    )
    path = checkpoint / "model.safetensors"
    path.touch()
    assert refusal(load, init_from=str(path)) == (
        f"model.init_from = {path} is a file; give its folder, {checkpoint}"
    )


def test_a_model_of_an_unknown_type(load, checkpoint):
    (checkpoint / "config.json").write_text('{"model_type": "mamba"}')
    said = refusal(load)
    assert said.endswith(
        "(model_type mamba); supported model types are " + ", ".join(sorted(FAMILIES.names))
    )


class Rescaled(Llama):
    """A custom family with a new model_type."""

    model_type = "rescaled"
    architecture = "RescaledForCausalLM"


def test_a_custom_family_reads_its_checkpoints(load, checkpoint):
    raw = json.loads((checkpoint / "config.json").read_text())
    raw |= {"model_type": Rescaled.model_type, "architectures": [Rescaled.architecture]}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    own = f"{__name__}:Rescaled"
    model = load(family=own).model
    assert (model.family, model.hidden_size) == (own, 32)
    check_same_model(model, checkpoint)
    assert "(model_type rescaled); supported model types are" in refusal(load)


# ---- RoPE scaling in the configuration ---------------------------------------------------------

SMALL = """
[model]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
intermediate_size = 64
"""


def test_lists_of_numbers_survive_text(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        f"{SMALL}[model.rope_scaling]\ntype = 'longrope'\nfactor = 8\n"
        "original_max_position_embeddings = 512\n"
        "short_factor = [1, 1.5, 2, 3]\nlong_factor = [1, 2, 3, 4]\n"
    )
    config = Config.load(path)
    assert config.model.rope_scaling.short_factor == (1.0, 1.5, 2.0, 3.0)
    path.write_text(config.to_toml())
    assert Config.load(path) == config
    path.write_text(path.read_text().replace("[1.0, 1.5, 2.0, 3.0]", '["a"]'))
    with pytest.raises(UserError, match="short_factor = .* it must be a list of finite numbers"):
        Config.load(path)
