"""Training steps on GPUs: one against several, remat policies, and too little memory."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.config import Config
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step

SMALL = {
    "model.vocab_size": 1024, "model.hidden_size": 512, "model.num_layers": 2,
    "model.num_heads": 4, "model.num_kv_heads": 2, "model.intermediate_size": 1024,
    "model.mlp_chunk_size": 512, "loss.chunk_size": 512, "data.seq_len": 8192,
    "optimizer.lr": 1e-3,
}  # fmt: skip


def train(name, **changes):
    """Loss, gradient norm and mean density of 3 steps.

    Every rounding to bf16 is kept. By default XLA omits some between operations that it fuses, and
    others if a policy saves the value between them: losses then differ by 1e-3.
    """
    fields = SMALL | {field.replace("__", "."): value for field, value in changes.items()}
    config = Config.load(name, fields)
    mesh, layout = build_mesh(config), build_layout(config)
    pattern = build_pattern(config)
    batches, builder = DeviceBatches(config, mesh, layout), StateBuilder(config, mesh)
    attention = build_attention(config, mesh, layout, pattern)
    step = make_train_step(config, builder, attention, mesh, AttentionInputs(pattern))
    state, found = builder.fresh(), []
    options = ring_compiler_options("gpu") | {"xla_allow_excess_precision": False}
    batch = next(batches)
    step = step.lower(state, batch).compile(compiler_options=options)
    for _ in range(3):
        state, metrics = step(state, batch)
        batch = next(batches)
        density = np.mean(metrics["layers"]["density"])
        found.append((float(metrics["loss"]), float(metrics["grad_norm"]), float(density)))
    batches.close()
    return np.array(found)


@pytest.fixture(scope="module")
def one_gpu(_hopper_missing):
    if _hopper_missing:
        pytest.skip(_hopper_missing)
    return train("qwen3b_512k_dense", parallel__devices_per_node=1)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_sharded_steps_match_one_gpu(one_gpu, devices):
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs, found {jax.device_count()}")
    found = train("qwen3b_512k_dense", parallel__devices_per_node=devices)
    # bf16 keeps 8 bits; products of other shapes round differently.
    np.testing.assert_allclose(found[:, 0], one_gpu[:, 0], rtol=2e-3)
    np.testing.assert_allclose(found[:, 1], one_gpu[:, 1], rtol=2e-2)
    assert one_gpu[0, 0] - one_gpu[-1, 0] > 0.05  # it learns, so that steps differ


@pytest.mark.parametrize(
    "remat", ["none", "attention", "attention_offload", "full_offload", "full"]
)
def test_remat_policies_do_not_change_the_steps(one_gpu, remat):
    found = train("qwen3b_512k_dense", parallel__devices_per_node=1, model__remat=remat)
    # The forward pass is the same program; "none" has other formulas in the MLP's backward pass.
    np.testing.assert_allclose(found[0, 0], one_gpu[0, 0], rtol=1e-5)
    np.testing.assert_allclose(found[:, 0], one_gpu[:, 0], rtol=5e-4)
    np.testing.assert_allclose(found[:, 1], one_gpu[:, 1], rtol=5e-3 if remat == "none" else 2e-3)


def test_a_replayed_density_is_the_requested_one():
    found = train(
        "qwen3b_512k",
        parallel__devices_per_node=min(4, jax.device_count()),
        sparsity__kind="benchmarks.replay:Replay",
        sparsity__replay_density=0.2,
        data__seq_len=131072,  # long enough for the sparsest head
    )
    np.testing.assert_allclose(found[:, 2], 0.2, rtol=0.1)
    assert np.all(np.isfinite(found)) and found[-1, 0] < found[0, 0]


def test_selection_at_each_step_trains_like_dense_if_it_keeps_everything(one_gpu):
    found = train(
        "qwen3b_512k",
        parallel__devices_per_node=1,
        sparsity__kind="vertical_slash",
        sparsity__top_p=1.0,
        sparsity__max_verticals=8192,
        sparsity__max_slashes=8192,
    )
    assert (found[:, 2] == 1).all()
    np.testing.assert_allclose(found[:, 0], one_gpu[:, 0], rtol=2e-3)
    assert found[-1, 0] < found[0, 0]


def test_selection_that_skips_pairs_learns_nearly_like_dense(one_gpu):
    found = train(
        "qwen3b_512k",
        parallel__devices_per_node=1,
        sparsity__kind="vertical_slash",
        sparsity__top_p=0.9,
        # With random weights attention is flat: without these limits every diagonal is kept.
        sparsity__max_verticals=1024,
        sparsity__max_slashes=16,
    )
    assert ((found[:, 2] > 0.1) & (found[:, 2] < 0.8)).all(), found[:, 2]
    np.testing.assert_allclose(found[:, 0], one_gpu[:, 0], rtol=2e-2)
    assert found[-1, 0] < found[0, 0]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_lists_of_rows_train_like_dense_if_they_keep_everything(one_gpu, devices):
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs, found {jax.device_count()}")
    found = train(
        "qwen3b_512k",
        parallel__devices_per_node=devices,
        sparsity__kind="xattention",
        sparsity__tau=1.0,
    )
    assert (found[:, 2] == 1).all()
    np.testing.assert_allclose(found[:, 0], one_gpu[:, 0], rtol=2e-3)
    assert found[-1, 0] < found[0, 0]


def test_windows_train_alike_with_kernels_with_xla_and_on_several_gpus():
    how = {"model__sliding_window": 1024, "parallel__fsdp": False}
    found = train("mistral_7b_128k", parallel__devices_per_node=1, **how)
    others = [{"parallel__devices_per_node": 1, "parallel__backend": "xla"}]
    others += [{"parallel__devices_per_node": n} for n in (2, 4, 8) if n <= jax.device_count()]
    for other in others:
        compared = train("mistral_7b_128k", **other, **how)
        np.testing.assert_allclose(compared[:, 0], found[:, 0], rtol=2e-3)
        np.testing.assert_allclose(compared[:, 1], found[:, 1], rtol=2e-2)
        np.testing.assert_allclose(compared[:, 2], found[:, 2], rtol=1e-5)
    assert found[-1, 0] < found[0, 0]


# Two sevenths of the memory stay in use, in the middle: two and three sevenths remain around it.
PROGRAM = """
import types

import jax
import jax.numpy as jnp

from mtraining_jax.utils.errors import UserError
from mtraining_jax.training.memory_check import check_memory

device = jax.devices()[0]
seventh = device.memory_stats()["bytes_limit"] // 7
arrays = [jnp.zeros((2 * seventh - 2**20,), jnp.uint8) for _ in range(3)]
jax.block_until_ready(arrays)
arrays[0].delete()
arrays[2].delete()
for sevenths in (2, 4):
    sizes = types.SimpleNamespace(
        temp_size_in_bytes=sevenths * seventh,
        output_size_in_bytes=0,
        alias_size_in_bytes=0,
        host_temp_size_in_bytes=0,
    )
    try:
        check_memory(types.SimpleNamespace(memory_analysis=lambda: sizes), [device])
    except UserError as error:
        print(sevenths, "refused:", error)
    else:
        print(sevenths, "fit")
"""


def test_insufficient_contiguous_memory_is_reported():
    few = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | few,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "2 fit"
    assert second.startswith("4 refused: a training step needs ") and "in one block" in second
