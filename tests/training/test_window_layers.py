"""Training models with windows in some or all layers: the same on one device and on eight."""

import os

import numpy as np
import pytest

from mtraining_jax.planning.cost import count_flops
from mtraining_jax.planning.documents import planned_pairs
from mtraining_jax.training.loop import run
from mtraining_jax.utils.errors import UserError
from tests.training.common import tiny_config
from tests.training.conftest import use_shared_programs
from tests.training.test_step import Parts

WINDOW = 21
MODELS = {
    "mistral": {"sliding_window": WINDOW, "num_layers": 1},
    # The first layer has a window, the second one has not.
    "gemma3_text": {
        "sliding_window": WINDOW, "full_attention_interval": 2, "window_rope_theta": 1e4,
        "query_pre_attn_scalar": 24,
    },
}  # fmt: skip
DENSITY = (WINDOW * 128 - WINDOW * (WINDOW - 1) / 2) / (128 * 129 / 2)
ONE = {"nodes": 1, "devices_per_node": 1}
pytestmark = pytest.mark.usefixtures("drawn_alone")


def config_of(folder, family, **sections):
    model = MODELS[family] | {"family": family, "remat": "none"}
    return tiny_config(folder, model=model, **{"parallel": ONE} | sections)


def trained(config):
    parts = Parts(config)
    metrics, _ = parts.train(2)
    parts.batches.close()
    return metrics


@pytest.mark.parametrize("family", MODELS)
def test_eight_devices_equal_one(tmp_path, family):
    common = {"data": {"batch_size": 1}, "sparsity": {"kind": "dense"}}
    eight = {"nodes": 1, "devices_per_node": 8, "fsdp": True}
    one = trained(config_of(tmp_path, family, **common))
    for found, expected in zip(
        trained(config_of(tmp_path, family, parallel=eight, **common)), one, strict=True
    ):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, err_msg=name)
        density = [DENSITY, 1] if family == "gemma3_text" else [DENSITY]
        np.testing.assert_allclose(found["layers"]["density"], density, rtol=1e-5)


def test_layers_with_a_window_are_not_audited(tmp_path):
    where = {"output_dir": str(tmp_path / "runs"), "steps": 1}
    where["compile_cache_dir"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
    config = config_of(tmp_path, "gemma3_text", run=where, audit={"interval": 1})
    (record,) = run(config)
    use_shared_programs()
    for name in ("recall", "local_gradient_cosine"):
        windowed, full = record[f"{name}_per_layer"]
        assert windowed is None and 0 < full == record[name] < 1
    assert (
        record["density_per_layer"][0] == pytest.approx(DENSITY) != record["density_per_layer"][1]
    )


def test_a_dry_run_counts_windows(tmp_path):
    config = config_of(tmp_path, "gemma3_text", sparsity={"kind": "dense"})
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
        config_of(tmp_path, "gemma3_text", **sections)
