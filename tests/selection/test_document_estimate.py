"""The estimate for packed documents by kernels, in Pallas' GPU interpreter, against XLA."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from mtraining_jax.documents import Documents
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import estimate
from mtraining_jax.selection.segments import sparse_segments
from pallas_kernels.mosaic_gpu.kernels.estimate import HopperEstimate
from tests.pallas_kernels.helpers.quick_pallas import quicken_callbacks


def test_kernels_score_each_block_by_its_own_document(monkeypatch):
    """A document of one and a half blocks, one shorter than its queries, and padding."""
    quicken_callbacks(monkeypatch)
    rng, blocks, size, heads = np.random.default_rng(0), 4, 128, 2
    q = jnp.asarray(rng.normal(size=(1, blocks * size, heads, 64)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(1, blocks * size, 1, 64)), jnp.bfloat16)
    documents = Documents.from_lengths([[192, 30]], blocks * size, size)
    kernels = HopperEstimate(plgpu.InterpretGPUParams(detect_races=False))

    def scores(chosen):
        monkeypatch.setattr(estimate.backends, "estimate_kernels", lambda *_: chosen)

        @jax.jit
        def of(q, k, documents):
            context = SelectionContext(jnp.arange(blocks), blocks, documents=documents)
            segments = sparse_segments(context, 3, size)
            q_last = estimate.last_queries(q, context, segments, 64)
            return estimate.softmax_scores(q_last, k, context, segments)

        return of(q, k, documents)

    found, wanted = scores(kernels), scores(None)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype == jnp.int32 and x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=2**30 * 1e-4)
        assert not np.asarray(x)[:, :, 3].any()
    sums = np.asarray(found[0], np.float64).sum(-1)
    np.testing.assert_allclose(sums[..., :2].sum(-1), 2.0**30, rtol=1e-4)
    np.testing.assert_allclose(sums[..., 2], 2.0**30 * 30 / 64, rtol=1e-4)
