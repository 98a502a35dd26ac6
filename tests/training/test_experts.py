"""Training a mixture of experts: the same on one device and on eight."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.training.loop import run
from tests.training.common import tiny_config
from tests.training.conftest import use_shared_programs
from tests.training.test_step import Parts

# gpt-oss also has windows, sinks and biases.
MODEL = {
    "family": "gpt_oss", "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24,
    "router_aux_loss_coef": 0.1, "mlp_chunk_size": 24, "num_heads": 8, "sliding_window": 21,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("drawn_alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


def config_of(folder, **sections):
    """Dense attention on one device, unless `sections` say otherwise."""
    sections["model"] = MODEL | sections.get("model", {})
    defaults = {"sparsity": {"kind": "dense"}, "parallel": {"nodes": 1, "devices_per_node": 1}}
    return tiny_config(folder, data={"batch_size": 4}, **defaults | sections)


@pytest.fixture(scope="module")
def one(folder):
    parts = Parts(config_of(folder))
    yield parts, *parts.train(3)
    parts.batches.close()


def test_eight_devices_equal_one(folder, one):
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    config = config_of(
        folder,
        run={"steps": 3, "compile_cache_dir": cache, "output_dir": str(folder / "runs")},
        parallel={"replicas": 2, "nodes": 1, "devices_per_node": 4, "fsdp": True},
        optimizer={"accumulation_steps": 2},
    )
    records = run(config)
    use_shared_programs()
    for name in ("self_attn.sinks", "mlp.gate_proj.bias", "mlp.gate.bias"):
        assert np.abs(one[2].parameters[f"layers.{name}"]).max() > 1e-2  # they start at 0
    for record, metrics in zip(records, one[1], strict=True):
        for name in ("loss", "grad_norm", "auxiliary_loss"):
            np.testing.assert_allclose(record[name], metrics[name], rtol=2e-5, err_msg=name)
        load = metrics["layers"]["expert_load"]
        np.testing.assert_allclose(record["expert_load_per_layer"], load, rtol=1e-5)


def test_the_auxiliary_loss_has_a_gradient_but_is_not_part_of_the_loss(one):
    """In a batch without labels nothing else has a gradient."""
    parts, earlier, _ = one
    assert earlier[0]["auxiliary_loss"] > 2  # experts per token, if they were used evenly
    batch = next(parts.batches)
    unlabeled = batch | {"labels": jnp.full_like(batch["labels"], IGNORE_LABEL)}
    _, metrics = parts.step(parts.builder.fresh(), unlabeled)
    assert metrics["loss"] == 0 and metrics["grad_norm"] > 0
