"""The configurations of Qwen2.5: their sizes as they are, and a slice of each that takes a step."""

import math

import jax
import numpy as np
import pytest

from mtraining_jax.config import available_configs, load_config
from mtraining_jax.models import abstract_state
from mtraining_jax.training import parts
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step

# Parameters of the published checkpoints.
SIZES = {"0_5b": 494_032_768, "3b": 3_085_938_688, "7b": 7_615_616_512}
CONFIGS = [name for name in available_configs() if name.startswith("qwen")]

VOCAB = 61
TINY = {
    "model.vocab_size": VOCAB, "model.hidden_size": 32, "model.num_layers": 2,
    "model.num_heads": 2, "model.num_kv_heads": 1, "model.head_dim": 16,
    "model.intermediate_size": 48, "model.mlp_chunk_size": 16, "loss.chunk_size": 16,
    "sparsity.block_size": 8, "sparsity.last_q": 8, "sparsity.sink_tokens": 2,
    "sparsity.local_blocks": 1, "sparsity.min_verticals": 2, "sparsity.min_slashes": 2,
    "sparsity.max_verticals": 4, "sparsity.max_slashes": 4,
    "data.seq_len": 128, "parallel.cpu_devices": 8, "parallel.devices_per_node": 2,
}  # fmt: skip


def test_all_are_here():
    assert set(CONFIGS) >= {
        "qwen0_5b_512k", "qwen3b_512k", "qwen3b_512k_dense", "qwen3b_512k_4x8", "qwen7b_512k",
        "qwen3b_2m",
    }  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_published_model(name):
    config = load_config(name, [])
    size = name.removeprefix("qwen").split("_512k")[0].split("_2m")[0]
    shapes = jax.tree.leaves(abstract_state(config.model))
    assert sum(math.prod(x.shape) for x in shapes) == SIZES[size]
    model, scaling = config.model, config.model.rope_scaling
    assert config.data.seq_len == model.max_position_embeddings
    assert config.data.seq_len == scaling.factor * scaling.original_max_position_embeddings
    assert config.run.name == name
    assert config.parallel.fsdp
    # The local tokens are cut into whole chunks, on 8 devices as on 4.
    for ranks in {config.parallel.nodes * config.parallel.devices_per_node, 4}:
        tokens = config.data.seq_len // ranks
        assert tokens % model.mlp_chunk_size == tokens % config.loss.chunk_size == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_two_tiny_layers_take_a_step(name):
    tiny = TINY | ({"parallel.nodes": 2} if name.endswith("4x8") else {})
    config = load_config(name, [(field, str(value)) for field, value in tiny.items()])
    mesh, layout = parts.build_mesh(config), parts.build_layout(config)
    batches, builder = parts.Batches(config, mesh, layout), StateBuilder(config, mesh)
    attention = parts.build_attention(config, mesh, layout, parts.build_pattern(config))
    step = make_train_step(config, builder, attention, mesh)
    state, batch = builder.fresh(), next(batches)
    batches.close()
    before = jax.device_get(state.parameters)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], math.log(VOCAB), rtol=0.05)
    density = np.asarray(metrics["layers"]["density"])
    assert np.all(density == 1) if name.endswith("dense") else np.all(density < 1)
    for parameter, value in state.parameters.items():
        assert not np.array_equal(value, before[parameter]), parameter
    up = state.parameters["layers.mlp.up_proj.weight"]
    assert up.addressable_shards[0].data.size == up.size // mesh.size
