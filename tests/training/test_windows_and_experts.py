"""Training windows and experts in the layers of one model: the same on one device and on four."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.tools.plan.cost import count_flops
from mtraining_jax.tools.plan.documents import planned_pairs
from mtraining_jax.utils.errors import UserError
from tests.training.common import run, tiny_config
from tests.training.conftest import use_shared_programs
from tests.training.test_step import Parts

WINDOW = 21
# The first layer has a window, the second one has not. gpt-oss also has sinks and biases.
MODEL = {
    "family": "gpt_oss", "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24,
    "router_aux_loss_coef": 0.1, "mlp_chunk_size": 24, "num_heads": 8, "num_kv_heads": 2,
    "sliding_window": WINDOW, "full_attention_interval": 2,
}  # fmt: skip
OTHERS = {
    # Windows have a RoPE of their own.
    "gemma3_text": {
        "sliding_window": WINDOW, "full_attention_interval": 2, "window_rope_theta": 1e4,
        "query_pre_attn_scalar": 24,
    },
    "mistral": {"sliding_window": WINDOW},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
}  # fmt: skip
DENSITY = (WINDOW * 128 - WINDOW * (WINDOW - 1) / 2) / (128 * 129 / 2)
pytestmark = pytest.mark.usefixtures("drawn_alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


def config_of(folder, **sections):
    """A run on one device, unless `sections` say otherwise."""
    parallel = {"nodes": 1, "devices_per_node": 1}
    defaults = {"model": MODEL, "data": {"batch_size": 4}, "parallel": parallel}
    return tiny_config(folder, **defaults | sections)


@pytest.fixture(scope="module")
def four(folder):
    parts = Parts(
        config_of(
            folder,
            parallel={"replicas": 2, "nodes": 1, "devices_per_node": 2, "fsdp": True},
            optimizer={"accumulation_steps": 2},
        )
    )
    yield parts, *parts.train(2)
    parts.batches.close()


def test_four_devices_equal_an_audited_one(folder, four):
    where = {"output_dir": str(folder / "runs"), "steps": 2}
    where["compile_cache_dir"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
    records = run(config_of(folder, run=where, audit={"interval": 1}))
    use_shared_programs()
    _, found, state = four
    for name in ("self_attn.sinks", "mlp.gate_proj.bias", "mlp.gate.bias"):
        assert np.abs(state.parameters[f"layers.{name}"]).max() > 1e-2  # they start at 0
    for record, metrics in zip(records, found, strict=True):
        for name in ("loss", "grad_norm", "auxiliary_loss"):
            np.testing.assert_allclose(metrics[name], record[name], rtol=2e-5, err_msg=name)
        for name in ("expert_load", "density"):
            expected = record[f"{name}_per_layer"]
            np.testing.assert_allclose(metrics["layers"][name], expected, rtol=1e-5, err_msg=name)
        density = record["density_per_layer"]
        assert density[0] == pytest.approx(DENSITY) != density[1]
        for name in ("recall", "local_gradient_cosine"):
            windowed, full = record[f"{name}_per_layer"]
            assert windowed is None and 0 < full == record[name] < 1


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_on_eight_devices_equal_one(folder, family):
    """Those with experts read documents with padding."""
    model, found = {"family": family, "remat": "none"} | OTHERS[family], []
    documents = {"mask_documents": True, "eos": 14, "shuffle": False}
    data = {"batch_size": 1} | (documents if "num_experts" in model else {})
    for devices in (1, 8):
        parallel = {"nodes": 1, "devices_per_node": devices, "fsdp": devices > 1}
        sections = {"data": data, "sparsity": {"kind": "dense"}}
        parts = Parts(config_of(folder, model=model, parallel=parallel, **sections))
        names = "loss", "grad_norm", "auxiliary_loss", "real_tokens"
        steps = parts.train(2)[0]
        found.append([[m[name] for name in names if name in m] for m in steps])
        assert ("num_experts" in model) == (steps[0]["real_tokens"] < 128)
        parts.batches.close()
    np.testing.assert_allclose(*found, rtol=2e-5)


def test_the_auxiliary_loss_has_a_gradient_but_is_not_part_of_the_loss(four):
    """In a batch without labels nothing else has a gradient."""
    parts, earlier, _ = four
    assert earlier[0]["auxiliary_loss"] > 2  # experts per token, if they were used evenly
    batch = next(parts.batches)
    unlabeled = batch | {"labels": jnp.full_like(batch["labels"], IGNORE_LABEL)}
    _, metrics = parts.step(parts.builder.fresh(), unlabeled)
    assert metrics["loss"] == 0 and metrics["grad_norm"] > 0


def test_a_dry_run_counts_windows(tmp_path):
    config = config_of(tmp_path, sparsity={"kind": "dense"})
    pairs = planned_pairs(config)
    assert pairs.density == pairs.dense == pytest.approx((DENSITY + 1) / 2)
    assert pairs.why == "dense; windows of 21 tokens in 1 of 2 layers"
    flops = count_flops(config)
    assert flops.attention_model == pytest.approx(6 / 7 * flops.attention_dense * pairs.density)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sparsity": {"tune": "mean"}}, 'sparsity.tune = "mean" cannot be combined with model.s'),
        ({"audit": {"masks": ["0.0"]}}, 'audit.masks has "0.0", but layer 0 has a sliding window'),
    ],
)
def test_unsupported_combinations_are_refused(tmp_path, sections, message):
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, **sections)
