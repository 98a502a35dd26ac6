"""Training a model with windows in some layers: the same on one device and on eight."""

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
# The first layer has a window, the second one has not.
MODEL = {
    "family": "gemma3_text", "sliding_window": WINDOW, "full_attention_interval": 2,
    "window_rope_theta": 1e4, "query_pre_attn_scalar": 24, "remat": "none",
}  # fmt: skip
DENSITY = (WINDOW * 128 - WINDOW * (WINDOW - 1) / 2) / (128 * 129 / 2)
ONE = {"nodes": 1, "devices_per_node": 1}
pytestmark = pytest.mark.usefixtures("drawn_alone")


def config_of(folder, **sections):
    return tiny_config(folder, model=MODEL, **{"parallel": ONE} | sections)


def test_audited_on_one_device_and_on_eight(tmp_path):
    where = {"output_dir": str(tmp_path / "runs"), "steps": 2}
    where["compile_cache_dir"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
    common = {"data": {"batch_size": 1}}
    records = run(config_of(tmp_path, run=where, audit={"interval": 1}, **common))
    use_shared_programs()
    eight = {"nodes": 1, "devices_per_node": 8, "fsdp": True}
    parts = Parts(config_of(tmp_path, parallel=eight, **common))
    found, _ = parts.train(2)
    parts.batches.close()
    for record, metrics in zip(records, found, strict=True):
        for name in ("recall", "local_gradient_cosine"):
            windowed, full = record[f"{name}_per_layer"]
            assert windowed is None and 0 < full == record[name] < 1
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(metrics[name], record[name], rtol=2e-5, err_msg=name)
        density = record["density_per_layer"]
        assert density[0] == pytest.approx(DENSITY) != density[1]
        np.testing.assert_allclose(metrics["layers"]["density"], density, rtol=1e-5)


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
