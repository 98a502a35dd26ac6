"""Sizes of models have limits, checked before anything is made of them."""

import json

import pytest

from mtraining_jax.config import Config
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.utils.errors import UserError
from tests.models.common import CHECKPOINTS

LARGEST = {
    "vocab_size": 2**24, "hidden_size": 2**24, "intermediate_size": 2**24, "num_layers": 2**12,
    "num_heads": 2**16, "num_kv_heads": 2**16, "head_dim": 2**16, "num_experts": 2**16,
}  # fmt: skip
NAMES = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}  # fmt: skip


@pytest.mark.parametrize("name", LARGEST)
def test_a_size_without_end_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=f"model.{name} = 1000000000 .* at most {LARGEST[name]}"):
        Config.load("tiny", {f"model.{name}": "1000000000"})
    folder = "qwen3_moe_tiny" if name == "num_experts" else "llama3_tiny"
    values = json.loads((CHECKPOINTS / folder / "config.json").read_text())
    values[NAMES.get(name, name)] = 10**9
    values.pop("num_local_experts", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    message = f"config.json: {name} = 1000000000 must be at most {LARGEST[name]}"
    with pytest.raises(UserError, match=message):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("folder", ["gemma3_tiny", "gpt_oss_tiny"])
def test_layers_without_end_do_not_match_their_kinds(folder, tmp_path):
    values = json.loads((CHECKPOINTS / folder / "config.json").read_text())
    assert "layer_types" in values
    values["num_hidden_layers"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="is unsupported; it must have sliding_attention"):
        read_hf_config(tmp_path)


def test_a_batch_without_end_is_refused():
    with pytest.raises(UserError, match="data.batch_size = 1000000000 .* at most 1048576"):
        Config.load("tiny", {"data.batch_size": "1000000000"})
