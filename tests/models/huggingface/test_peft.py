"""Adapters of PEFT; golden losses by PEFT 0.21.2."""

import dataclasses
import functools
import json
import math
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.peft import peft_config, read_peft_config
from mtraining_jax.models.huggingface.read import load_parameters, load_peft
from mtraining_jax.models.lora.adapters import LoraSpec, is_adapter
from mtraining_jax.models.sharding import named_shapes, parameter_names
from mtraining_jax.models.transformer import abstract_state, graph_definition
from mtraining_jax.tools.export.write import save_peft
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.hub import repository
from tests.models.common import CHECKPOINTS, next_token_loss, tiny_spec

BASE = CHECKPOINTS / "llama3_tiny"
QV = ["q_proj", "v_proj"]


def write(folder, **fields):
    """Adapters of rank 4 for the queries and values of both layers."""
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(2):
        for module, rows in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            tensors[name + "A.weight"] = rng.normal(size=(4, 32)).astype(np.float32) * 0.3
            tensors[name + "B.weight"] = rng.normal(size=(rows, 4)).astype(np.float32) * 0.3
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": QV}
    (folder / "adapter_config.json").write_text(json.dumps(usual | fields))
    return folder


@functools.cache
def loss_of(lora):
    spec = read_hf_config(BASE, dtype="float32", remat="none", lora=lora)
    graphdef = graph_definition(spec)
    return spec, jax.jit(lambda state, tokens: next_token_loss(graphdef, state, tokens)[0])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 6.083431),
        ({"target_modules": r".*self_attn\.[qv]_proj"}, 6.083431),
        ({"target_modules": [*QV, "up_proj"], "exclude_modules": ["up_proj"]}, 6.083431),
        ({"rank_pattern": {}, "kasa_config": None, "qalora_group_size": 16}, 6.083431),
        ({"use_rslora": True}, 6.111123),
    ],
)
def test_the_loss_is_that_of_peft(tmp_path, fields, expected):
    lora, _ = read_peft_config(write(tmp_path, **fields), "llama")
    spec, loss = loss_of(lora)
    state = abstract_state(spec)
    wanted = named_shapes(state, jax.tree.map(lambda _: CPU, state))
    adapters = {name: x for name, x in wanted.items() if is_adapter(name)}
    others = {name: x for name, x in wanted.items() if name not in adapters}
    base = load_parameters(BASE, spec, others)
    found = base | load_peft(tmp_path, spec, adapters, base)
    state = jax.tree.map(lambda name: found[name], parameter_names(state))
    golden = np.load(BASE / "golden.npz")
    np.testing.assert_allclose(loss(state, golden["input_ids"]), expected, rtol=2e-6)


CPU = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora = true must be null"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"] must be null'),
        ({"layers_to_transform": [1]}, "layers_to_transform = [1] must be null"),
        ({"bias": "all"}, 'bias = "all" must be "none"'),
        ({"peft_type": "IA3"}, 'peft_type = "IA3" must be "LORA"'),
        ({"kasa_config": {"k": 1}}, 'kasa_config = {"k": 1} must be null'),
        ({"of_the_future": 2}, "of_the_future = 2 must be null"),
        ({"init_lora_weights": "olora"}, 'init_lora_weights = "olora" may change the base model'),
    ],
)
def test_other_adapters_are_refused_with_a_way_out(tmp_path, fields, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_peft_config(write(tmp_path, **fields), "llama")
    assert "merge_and_unload().save_pretrained(NEW_FOLDER)" in str(caught.value)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_ranks_and_alphas_that_differ_are_refused(tmp_path, name, family):
    targets = ("q_proj", "k_proj", "v_proj")
    spec = tiny_spec(family=family, lora=LoraSpec(4, 6.0, targets))
    # The patterns of a fused projection are right together, and wrong alone.
    pattern = peft_config(spec, None)[name] or {"q_proj": 8}
    folder = write(tmp_path, target_modules=list(targets), **{name: pattern})
    state = abstract_state(spec)
    wanted = named_shapes(state, jax.tree.map(lambda _: CPU, state))
    message = f"{name} = .*are not supported.* same rank and alpha; merge the adapters"
    with pytest.raises(UserError, match=message):
        load_peft(folder, spec, wanted, {})


def test_fused_adapters_that_were_trained_further_are_refused(tmp_path):
    """PEFT trains the whole B, but only its blocks belong to projections here."""
    spec = tiny_spec(family="phi3", lora=LoraSpec(4, 6.0, ("q_proj", "k_proj", "v_proj")))
    rng, state = np.random.default_rng(0), abstract_state(spec)
    wanted = named_shapes(state, jax.tree.map(lambda _: CPU, state))
    wanted = {name: x for name, x in wanted.items() if is_adapter(name)}
    arrays = {n: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype) for n, x in wanted.items()}
    base = {"norm.weight": jax.numpy.ones(32)}
    folder = save_peft(tmp_path / "adapter", spec, arrays, base=base, base_name="b")
    found = load_peft(folder, spec, wanted, base)
    assert all(np.array_equal(found[name], x) for name, x in arrays.items())
    config = folder / "adapter_config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"use_rslora": True}))
    with pytest.raises(UserError, match="rank_pattern = .*are not supported"):
        load_peft(folder, spec, wanted, base)
    config.write_text(json.dumps(written))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"
    tensors[name][0, 4] = 1e-3
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"{name} is not block-diagonal, .*its 3 projections"):
        load_peft(folder, spec, wanted, base)


def test_saved_adapters_replace_older_ones_only(tmp_path):
    spec = tiny_spec(lora=LoraSpec(2, 3.0, ("q_proj",)))
    zeros = {name: np.zeros(x.shape, np.float32) for name, x in spec.parameters.items()}
    layer = {f"layers.{name}": x for name, x in spec.layer.items() if is_adapter(name)}
    zeros |= {x: np.zeros((3, *y.shape), np.float32) for x, y in layer.items()}
    arrays = jax.tree.map(jax.numpy.asarray, zeros)
    base = {"norm.weight": jax.numpy.ones(32)}
    folder = tmp_path / "adapter"
    save_peft(folder, spec, arrays, base=base, base_name="first")
    (folder / "stale").write_text("")
    save_peft(folder, spec, arrays, base=base, base_name="second")
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert read_peft_config(folder)[1] == "second"
    (folder / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        save_peft(folder, spec, arrays, base=base, base_name="third")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_missing_alpha_is_that_of_peft(tmp_path):
    fields = json.loads((write(tmp_path) / "adapter_config.json").read_text())
    del fields["lora_alpha"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    assert read_peft_config(tmp_path, "llama")[0].alpha == 8


def test_rslora_divides_by_the_root_of_the_rank(tmp_path):
    lora, _ = read_peft_config(write(tmp_path, use_rslora=True), "llama")
    assert lora == LoraSpec(4, 12.0, ("q_proj", "v_proj"))
    assert lora.scale == 6 / math.sqrt(4)
    assert dataclasses.replace(lora, alpha=6.0) == read_peft_config(write(tmp_path), "llama")[0]


def test_a_base_with_a_revision_is_a_name_unless_it_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "local").mkdir(parents=True)
    for name, revision, base in (
        ("acme/base", "v1", "hf://acme/base@v1"),
        ("acme/base", None, "acme/base"),
        ("acme/local", "v1", "acme/local"),
        ("/acme/missing", "v1", "/acme/missing"),
        (None, "v1", None),
    ):
        folder = write(tmp_path, base_model_name_or_path=name, revision=revision)
        assert read_peft_config(folder)[1] == base


def test_only_a_name_with_a_commit_is_a_repository_and_its_revision():
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert repository(f"hf://acme/base@{commit}") == ("acme/base", commit)
    for name in (
        "hf://acme/base",
        "hf://acme/base@main",
        f"hf://acme/base@{commit}/folder",
        "acme",
    ):
        assert repository(name) is None
