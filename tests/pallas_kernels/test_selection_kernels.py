"""Which kernels select an index, and what happens to shapes that they do not support."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backends
from pallas_kernels.triton import device
from tests.pallas_kernels.helpers.described import A100, H200, gpu, target
from tests.pallas_kernels.mosaic_gpu.hopper_backends import registered

G = 128
Q = jax.ShapeDtypeStruct((1, G, 1, 64), jnp.bfloat16)
FEW = 65536  # key blocks; the most that the score kernels support


def _last(count):
    return jax.ShapeDtypeStruct((1, 1, count, 64), jnp.bfloat16)


def _rows(blocks, columns=16, length=64):
    return jax.ShapeDtypeStruct((1, 1, blocks, columns, length), jnp.bfloat16)


def _by_last_queries(name, supported):
    return backends.estimate_kernels(name, _last(64 if supported else 32), G)


def _by_rows(name, supported):
    return backends.block_score_kernels(name, Q, G, _rows(2), _rows(FEW + (not supported)))


REASONS = {
    _by_last_queries: "32 last queries (must be 64)",
    _by_rows: "65537 blocks of keys (must be at most 65536, which is 8388608 tokens)",
}
COSTS = {_by_last_queries: "several times slower", _by_rows: "an order of magnitude slower"}


@pytest.fixture(params=["mosaic_gpu", "triton"])
def selected(request, monkeypatch, caplog):
    """The name of the backend that is selected automatically on the described GPU."""
    monkeypatch.setattr(device, "find_spec", lambda name: True)
    monkeypatch.setattr(device, "unfit_triton", lambda: None)
    backends._log_once.cache_clear()
    caplog.set_level("INFO")
    with target(H200 if request.param == "mosaic_gpu" else A100):
        yield request.param


@pytest.mark.parametrize("ask", REASONS)
def test_a_named_backend_selects_supported_shapes(ask, selected, caplog):
    for name in (None, "auto", selected):
        assert ask(name, True) is not None
    assert not caplog.records


@pytest.mark.parametrize("ask", REASONS)
def test_a_named_backend_refuses_other_shapes(ask, selected, caplog):
    with pytest.raises(ValueError) as error:
        ask(selected, False)
    text = str(error.value)
    assert text.startswith(f"backend={selected!r} has no kernel for this index selection: ")
    assert REASONS[ask] in text and COSTS[ask] in text and 'backend="auto"' in text
    assert not caplog.records


@pytest.mark.parametrize("ask", REASONS)
def test_automatic_selection_leaves_other_shapes_to_xla_with_one_warning(ask, selected, caplog):
    for name in (None, "auto", None):
        assert ask(name, False) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("index selection runs on the portable XLA backend, which is ")
    assert REASONS[ask] in record.message and COSTS[ask] in record.message


@pytest.mark.parametrize("ask", REASONS)
def test_xla_by_name_selects_every_shape_without_a_message(ask, selected, caplog):
    for supported in (True, False):
        assert ask("xla", supported) is None
    assert not caplog.records


@pytest.mark.parametrize("ask", REASONS)
@pytest.mark.parametrize("name", [None, "auto"])
def test_without_a_gpu_xla_selects_without_a_warning(name, ask, caplog):
    backends._log_once.cache_clear()
    assert ask(name, False) is None
    assert all(record.levelname == "INFO" for record in caplog.records)


def test_an_interpreted_backend_counts_as_named():
    name = registered("cannot score", interpret=plgpu.InterpretGPUParams())
    rows = _rows(1, columns=4, length=80)
    with pytest.raises(ValueError, match=r"rows of 80 components \(must be a multiple of 64\)"):
        backends.block_score_kernels(name, Q, G, rows, rows)
    with target(gpu("NVIDIA B200", "10.0")), pytest.raises(ValueError, match="not a Hopper GPU"):
        _by_rows("mosaic_gpu", True)
