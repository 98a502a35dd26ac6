"""An audited step with the Hopper kernels: trains like a plain one, and measures like XLA."""

import functools

import jax
import numpy as np

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.config import Config
from mtraining_jax.tools.audit.auditing import build_audit
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step
from tests.gpu.test_step import SMALL


@functools.cache
def first_step(backend, audited, **changes):
    """Loss, gradient norm and metrics of the first step."""
    fields = SMALL | {
        "data.source": "synthetic",
        "parallel.devices_per_node": 1,
        "parallel.backend": backend,
        # With random weights attention is flat: a larger fraction would keep nearly everything.
        "sparsity.tau": 0.3,
        "audit.interval": int(audited),
        **changes,
    }
    config = Config.load("qwen3b_512k", fields)
    mesh, layout = build_mesh(config), build_layout(config)
    pattern = build_pattern(config)
    batches, builder = DeviceBatches(config, mesh, layout), StateBuilder(config, mesh)
    attention = build_attention(config, mesh, layout, pattern)
    how = AttentionInputs(pattern), build_audit(config)
    step = make_train_step(config, builder, attention, mesh, *how)
    _, metrics = step(builder.fresh(), next(batches))
    batches.close()
    return jax.device_get(metrics)


def test_an_audited_step_trains_as_a_plain_one():
    plain, audited = (first_step("mosaic_gpu", audited) for audited in (False, True))
    # bf16 keeps 8 bits, and another program may round at other places.
    np.testing.assert_allclose(audited["loss"], plain["loss"], rtol=2e-3)
    np.testing.assert_allclose(audited["grad_norm"], plain["grad_norm"], rtol=2e-2)
    assert "audit" not in plain


def test_metrics_match_the_reference_backend():
    kernels, reference = (first_step(name, True)["audit"] for name in ("mosaic_gpu", "xla"))
    assert kernels.keys() == reference.keys()
    for name, values in reference.items():
        # Kernels and XLA sum scores in different orders, which may change the selection among
        # blocks of nearly equal mass.
        np.testing.assert_allclose(kernels[name], values, atol=0.05, err_msg=name)
    assert 0.1 < reference["recall"].min() <= reference["recall"].max() < 0.9
