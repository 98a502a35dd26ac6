"""States and their checkpoints, without a step."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mtraining_jax.tools.audit.auditing import build_audit
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import Checkpoints, check_intact, newest_step, read_state
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import key_of_step
from tests.training.common import changed, tiny_config

HF_FOLDER = Path(__file__).resolve().parents[1] / "checkpoints" / "qwen2_tiny"


def builder_of(config):
    return StateBuilder(config, build_mesh(config))


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_fresh_state_does_not_depend_on_the_mesh(tmp_path):
    config = tiny_config(tmp_path)
    one = builder_of(config).fresh()
    sharded = changed(
        config, parallel={"replicas": 2, "nodes": 1, "devices_per_node": 4, "fsdp": True}
    )
    assert_equal(one, builder_of(sharded).fresh())
    other = builder_of(changed(config, run={"seed": 1})).fresh()
    name = "layers.mlp.up_proj.weight"
    assert not np.array_equal(one.parameters[name], other.parameters[name])
    assert not np.array_equal(one.rng, other.rng)


def test_the_generator_of_a_state_does_not_depend_on_the_default_one(tmp_path):
    config = tiny_config(tmp_path)
    state = builder_of(config).fresh()
    with jax.default_prng_impl("rbg"):
        other = builder_of(config)
        assert other.abstract().rng.shape == state.rng.shape == (2,)
        np.testing.assert_array_equal(other.fresh().rng, state.rng)
        audited = changed(config, audit={"interval": 1, "num_queries": 4})
        rows = build_audit(audited).draw(key_of_step(state))
    assert_equal(rows, build_audit(audited).draw(key_of_step(state)))


def test_checkpoint_is_read_onto_another_mesh_bit_by_bit(tmp_path):
    config = tiny_config(tmp_path)
    state = builder_of(config).fresh()
    # Every leaf its own values: moments start at 0, where a mix-up would not show.
    leaves, structure = jax.tree.flatten(state)
    state = structure.unflatten([x + jnp.asarray(i + 1, x.dtype) for i, x in enumerate(leaves)])
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2, async_save=True)
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"place": step}, config)
    checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]

    (folder / "9.orbax-checkpoint-tmp-0").mkdir()  # a run was cut off while saving
    assert newest_step(folder) == 3
    other = changed(config, parallel={"nodes": 4, "devices_per_node": 2, "fsdp": True})
    abstract = builder_of(other).abstract()
    restored, record = read_state(folder, 3, abstract, other)
    assert record["loader"] == {"place": 3}
    assert_equal(restored, state)
    shardings = jax.tree.map(lambda x: x.sharding, restored)
    assert shardings == jax.tree.map(lambda x: x.sharding, abstract)
    moment = restored.opt_state[0].mu["layers.mlp.up_proj.weight"]
    assert moment.addressable_shards[0].data.size == moment.size // 8


def test_frozen_matrices_are_saved_in_bf16_and_read_from_older_checkpoints(tmp_path):
    config = tiny_config(
        tmp_path,
        model={"dtype": "bfloat16"},
        optimizer={"trainable": ["self_attn"]},
        parallel={"nodes": 1},
    )
    builder = builder_of(config)
    state = builder.fresh()
    all_fp32 = builder_of(changed(config, optimizer={"trainable": []})).fresh().parameters
    folder, name = tmp_path / "checkpoints", "layers.mlp.up_proj.weight"
    checkpoints = Checkpoints(folder, keep=2, async_save=False)
    for step, parameters in enumerate((state.parameters, all_fp32)):
        checkpoints.save(step, dataclasses.replace(state, parameters=parameters), None, config)
    checkpoints.close()
    for step in (0, 1):
        restored, _ = read_state(folder, step, builder.abstract(), config)
        assert restored.parameters[name].dtype == jnp.bfloat16
        assert_equal(restored, state)
        check_intact(folder, step)


def test_moments_are_read_onto_the_host_and_in_another_dtype(tmp_path):
    config = tiny_config(tmp_path, parallel={"nodes": 1})
    state = builder_of(config).fresh()
    adam, *others = state.opt_state
    adam = adam._replace(mu={name: x + 1 / 3 for name, x in adam.mu.items()})
    state = dataclasses.replace(state, opt_state=(adam, *others))
    other = changed(config, optimizer={"offload": True, "mu_dtype": "bfloat16"})
    folder = tmp_path / "checkpoints"
    for step, (start, end) in enumerate(((config, other), (other, config))):
        checkpoints = Checkpoints(folder, keep=2, async_save=True)
        checkpoints.save(step, state, None, start)
        checkpoints.close()
        builder = builder_of(end)
        state, _ = read_state(folder, step, builder.abstract(), end)
        fresh = builder.fresh()
        for get in (lambda x: x.dtype, lambda x: x.sharding):
            assert jax.tree.map(get, state) == jax.tree.map(get, fresh)
        found = np.unique(np.asarray(state.opt_state[0].mu["norm.weight"], np.float32))
        np.testing.assert_array_equal(found, np.float32(jnp.bfloat16(1 / 3)))
    assert state.opt_state[0].mu["norm.weight"].dtype == jnp.float32


@pytest.mark.parametrize("fsdp", [False, True])
def test_fresh_state_from_a_hugging_face_checkpoint(tmp_path, fsdp):
    model = {
        "vocab_size": 288, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "init_from": str(HF_FOLDER),
    }  # fmt: skip
    config = tiny_config(
        tmp_path, model=model, parallel={"nodes": 2, "devices_per_node": 2, "fsdp": fsdp}
    )
    parameters = builder_of(config).fresh().parameters
    tensors = load_file(HF_FOLDER / "model.safetensors")
    np.testing.assert_array_equal(
        parameters["embed_tokens.weight"], tensors["model.embed_tokens.weight"]
    )
    for layer in range(3):
        np.testing.assert_array_equal(
            parameters["layers.mlp.up_proj.weight"][layer],
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"],
        )
