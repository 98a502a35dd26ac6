"""An index sharded by rows: the same results as on one device."""

import functools
import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import (
    Pattern,
    SampledRows,
    Sharding,
    inspect,
    sequence_layout,
    sparse_attention,
    stripe,
    unstripe,
)
from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.tools.audit.auditing import Audit
from mtraining_jax.tools.audit.figures import GRADIENT_FIGURES, AuditRows
from mtraining_jax.utils.errors import UserError
from pallas_kernels.index import BlockMaskIndex
from pallas_kernels.names import SAVED_NAMES
from tests.attention.inputs import with_residuals
from tests.parallel import indices
from tests.tools.audit import audit_oracle

PATTERN = SampledRows(tau=0.6, probe_queries_per_block=2, block_size=indices.BLOCK_SIZE)

PAGE = Path(__file__).parents[2] / "docs/attention.md"
SAVE = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


@functools.cache
def alone():
    """Returns output and index of one device."""
    q, k, v, _ = indices.inputs()
    out, _, index = jax.jit(functools.partial(with_residuals, pattern=PATTERN))(q, k, v)
    return out, index


def test_indices_are_returned_and_accepted_in_sequence_order():
    mesh = make_mesh(1, 1, 4)
    layout = sequence_layout(indices.SEQ_LEN, mesh, block_size=indices.BLOCK_SIZE)

    def attend(*qkv, **options):
        options = {"sharding": Sharding(mesh, order=layout)} | options
        return jax.jit(functools.partial(with_residuals, **options))(*qkv)

    qkv = [stripe(x, layout) for x in indices.inputs()[:3]]
    expected, of_one = alone()
    out, _, index = attend(*qkv, pattern=PATTERN)
    assert isinstance(index, BlockMaskIndex)
    np.testing.assert_array_equal(index.bits, of_one.bits)
    np.testing.assert_allclose(unstripe(out, layout), expected, rtol=2e-5, atol=2e-5)
    again, _, same = attend(*qkv, pattern=of_one)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(same.bits, of_one.bits)
    rotated, _, same = attend(
        *qkv, pattern=PATTERN, sharding=Sharding(mesh, order=layout, ring="flat")
    )
    np.testing.assert_allclose(rotated, out, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(same.bits, of_one.bits)


def test_statistics_and_an_audit_cover_the_rows_of_all_ranks():
    q, k, v, d_out = indices.inputs()
    _, index = alone()
    found = inspect(index, q, k, rows=[0])
    rows = AuditRows(jnp.array([0, 77, 100, 200, 255]), jnp.array([203, 240]))
    layout = Layout("striped", indices.SEQ_LEN, 4, indices.BLOCK_SIZE, 2)
    attention = make_attention(make_mesh(2, 2, 2), layout, PATTERN)
    order = layout.permutation()

    @jax.jit
    def run(q, k, v, d_out):
        # As in a model's layer that is rematerialized in the backward pass.
        @functools.partial(jax.checkpoint, policy=SAVE)
        def loss(grad_tap):
            inputs = AttentionInputs(observer=Audit(rows, grad_tap, mask_heads=(2, 0)))
            out, stats = attention(q, k, v, inputs)
            return (out * d_out).sum(), stats

        return jax.grad(loss, has_aux=True)(jnp.zeros((indices.HEADS, len(GRADIENT_FIGURES))))

    of_gradient, stats = run(*(x[:, order] for x in (q, k, v, d_out)))
    for name in ("density", "executed"):
        assert stats[name] == pytest.approx(getattr(found, name).mean(), rel=1e-6), name
    figures = stats["audit"] | dict(zip(GRADIENT_FIGURES, of_gradient.T, strict=True))
    mask = np.asarray(index.to_mask(indices.SEQ_LEN))
    expected = audit_oracle.figures(
        q, k, v, d_out, mask, *rows, indices.BLOCK_SIZE, indices.DIM**-0.5
    )
    assert figures.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(figures[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(stats["masks"].bits, index.bits[:1, [2, 0]])


def test_the_pattern_of_the_documents_sees_its_window_and_the_first_keys(tmp_path, monkeypatch):
    code = re.search(r"^```python\n([^`]*SinkWindow.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "documented_pattern.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    window = importlib.import_module("documented_pattern").SinkWindow
    size = indices.BLOCK_SIZE
    pattern = window(blocks=2, sinks=3, block_size=size)
    mesh = make_mesh(1, 1, 4)
    *_, index = with_residuals(*indices.inputs()[:3], pattern=pattern, sharding=Sharding(mesh))
    query, key = np.ogrid[: indices.SEQ_LEN, : indices.SEQ_LEN]
    expected = (key <= query) & ((query // size - key // size < 2) | (key < 3))
    assert (index.to_mask() == expected).all()

    class Unsaid(window):
        sharded_by_query = Pattern.sharded_by_query

    with pytest.raises(
        UserError, match=r"add to the class: def sharded_by_query\(self, documents\): r"
    ):
        sparse_attention(*indices.inputs()[:3], pattern=Unsaid(block_size=size))
