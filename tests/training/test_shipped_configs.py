"""Configurations of published models: their full sizes, and small versions that take a step."""

import math

import jax
import numpy as np
import pytest

from mtraining_jax.config import Config, available_configs
from mtraining_jax.models.transformer import abstract_state
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step

pytestmark = pytest.mark.usefixtures("drawn_alone")

# Parameter counts of the published checkpoints.
SIZES = {
    "qwen0_5b": 494_032_768, "qwen3b": 3_085_938_688, "qwen7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360, "llama3_8b": 8_030_261_248, "qwen3_30b_a3b": 30_532_122_624,
    "gemma3_4b": 3_880_263_168, "mistral_7b": 7_241_732_096, "gpt_oss_20b": 20_914_757_184,
    "smollm2_135m": 134_515_008,
}  # fmt: skip
CONFIGS = [name for name in available_configs() if not name.startswith("tiny")]
# With small sizes, the others are the same program as one of these, except qwen7b_512k: it has an
# untied output layer, as in test_step.py.
OVER_NODES = "qwen3b_512k_4x8"
# Attention and ring are the same for all families: one device and dense attention compile in a
# third of the time.
FAMILIES = ["qwen3_8b_1m", "llama3_8b_512k"]
ALONE = {"parallel.devices_per_node": 1, "parallel.fsdp": False, "sparsity.kind": "dense"}

SPARSE = {
    "parallel.nodes": 2, "sparsity.probe_queries_per_block": 4, "sparsity.tau": 0.5,
}  # fmt: skip

VOCAB = 61
TINY = {
    "model.vocab_size": VOCAB, "model.hidden_size": 32, "model.num_layers": 2,
    "model.num_heads": 2, "model.num_kv_heads": 1, "model.head_dim": 16,
    "model.intermediate_size": 48, "model.mlp_chunk_size": 16, "loss.chunk_size": 16,
    "sparsity.block_size": 8, "data.seq_len": 128, "parallel.cpu_devices": 8,
    "parallel.devices_per_node": 2,
}  # fmt: skip


def test_all_are_here():
    assert set(CONFIGS) >= {
        "qwen0_5b_512k",
        "qwen3b_512k",
        "qwen3b_512k_dense",
        "qwen3b_512k_4x8",
        "qwen7b_512k",
        "qwen3b_2m",
        "qwen3_8b_1m",
        "llama3_8b_512k",
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_published_model(name):
    config = Config.load(name, {})
    size = next(size for size in SIZES if name.startswith(f"{size}_"))
    shapes = jax.tree.leaves(abstract_state(config.model))
    assert sum(math.prod(x.shape) for x in shapes) == SIZES[size]
    model, scaling = config.model, config.model.rope_scaling
    extended = size != "smollm2_135m"
    assert config.data.seq_len == (model.max_position_embeddings if extended else 2048)
    if extended and model.sliding_window is None:  # else the checkpoint's RoPE is not changed
        # Llama 3.1 was extended before: its 8192 tokens with factor 8 give 131072.
        stretch = scaling.factor * (2 if scaling.type == "llama3" else 1)
        assert config.data.seq_len == stretch * scaling.original_max_position_embeddings
        assert model.override == ("rope_scaling", "max_position_embeddings")
    assert config.run.name == name
    assert config.parallel.fsdp or config.devices == 1
    # Local tokens are split into equal chunks, on 8 devices as on 4.
    for ranks in {config.parallel.nodes * config.parallel.devices_per_node, 4}:
        tokens = config.data.seq_len // ranks
        assert tokens % model.mlp_chunk_size == tokens % config.loss.chunk_size == 0


@pytest.mark.parametrize("name", [pytest.param(OVER_NODES, marks=pytest.mark.slow), *FAMILIES])
def test_two_tiny_layers_take_a_step(name):
    tiny = TINY | (SPARSE if name == OVER_NODES else ALONE)
    config = Config.load(name, tiny)
    mesh, layout = build_mesh(config), build_layout(config)
    batches, builder = DeviceBatches(config, mesh, layout), StateBuilder(config, mesh)
    attention = build_attention(config, mesh, layout, build_pattern(config))
    step = make_train_step(config, builder, attention, mesh)
    state, batch = builder.fresh(), next(batches)
    batches.close()
    before = jax.device_get(state.parameters)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], math.log(VOCAB), rtol=0.05)
    density = np.asarray(metrics["layers"]["density"])
    assert np.all(density < 1) if name == OVER_NODES else np.all(density == 1)
    for parameter, value in state.parameters.items():
        assert not np.array_equal(value, before[parameter]), parameter
    up = state.parameters["layers.mlp.up_proj.weight"]
    assert up.addressable_shards[0].data.size == up.size // mesh.size
