"""Runs with a replayed density on synthetic data, and runs that trace some steps."""

import contextlib
import io
import os

import jax
import numpy as np
import pytest

from benchmarks.step.trace_summary import find_traces, read_trace
from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step
from tests.training.common import changed, run, tiny_config, written
from tests.training.conftest import use_shared_programs


@pytest.fixture(scope="module")
def replayed(shared, tmp_path_factory):
    """Two layers on one device, with 256 blocks: enough for the sparsest head.

    Returns the configuration, the records of the run and its output.
    """
    config = tiny_config(
        shared,
        run={
            "name": "replay",
            # A process of pytest-xdist may set up this fixture twice.
            "output_dir": str(tmp_path_factory.mktemp("replay")),
            "steps": 2,
            "compile_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
        },
        model={"max_position_embeddings": 1024},
        sparsity={
            "kind": "benchmarks.replay:Replay",
            "replay_density": 0.3,
            "block_size": 4,
            "num_probe_queries": 4,
            "max_slashes": 128,
        },
        parallel={"nodes": 1, "devices_per_node": 1},
        data={"source": "synthetic", "paths": (), "seq_len": 1024, "batch_size": 1},
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        records = run(config)
    use_shared_programs()
    return config, records, printed.getvalue()


# tests/reporting/test_records.py has its lines, tests/benchmarks/test_replay.py its densities.
@pytest.mark.slow
def test_a_run_says_what_it_replays(replayed):
    config, records, printed = replayed
    assert written(config) == records
    # 30 % over two layers, as different as 0.4 % and 12.7 %.
    expected = np.array([0.4, 12.7]) / (0.4 + 12.7) * 0.6
    for record in records:
        assert record["sparsity"] == "replayed density, not chosen"
        assert record["replayed_density"] == pytest.approx(0.3, rel=0.02)
        found = np.sort(record["replayed_density_per_layer"])
        np.testing.assert_allclose(found, expected, rtol=0.03)
        assert found.tolist() == sorted(records[0]["replayed_density_per_layer"])
    # The selected density changes with the weights; the replayed one does not.
    estimated = [record["estimated_density_per_layer"] for record in records]
    assert estimated[0] != records[0]["replayed_density_per_layer"]
    lines = [line for line in printed.splitlines() if "density" in line or "causal pairs" in line]
    assert len(lines) == 1 + 2 + 2  # banner, steps, summary
    assert all("replayed density, not chosen" in line for line in lines)


@pytest.mark.slow
def test_rematerialization_and_the_estimate_change_no_number(replayed):
    config, (record, *_), _ = replayed
    assert config.model.remat == "attention" and "estimated_density_per_layer" in record
    config = changed(config, model={"remat": "full"}, sparsity={"replay_estimate": False})
    mesh, layout = build_mesh(config), build_layout(config)
    builder, batches = StateBuilder(config, mesh), DeviceBatches(config, mesh, layout)
    pattern = build_pattern(config)
    attention = build_attention(config, mesh, layout, pattern)
    step = make_train_step(config, builder, attention, mesh, AttentionInputs(pattern))
    _, metrics = step(builder.fresh(), next(batches))
    batches.close()
    metrics = jax.device_get(metrics)
    np.testing.assert_allclose(metrics["loss"], record["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], record["grad_norm"], rtol=1e-5)
    np.testing.assert_array_equal(
        metrics["layers"]["density"], np.float32(record["replayed_density_per_layer"])
    )
    assert "estimated_density" not in metrics["layers"]


def test_a_run_traces_its_window_and_says_when_it_is_past(plain_config, capsys):
    """Short and dense, because reading a trace takes longer with more operations."""
    config = changed(plain_config, run={"steps": 5}, profile={"start": 2, "steps": 3})
    records = run(config)
    assert [record.get("profiled", False) for record in records] == [False, True, True, True, False]
    folder = config.run.folder / "profile"
    assert f"trace of steps 2 to 4 written to {folder}" in capsys.readouterr().out
    (trace,) = find_traces(folder)
    assert read_trace(trace).steps == 3

    (record,) = run(changed(config, run={"steps": 6}, profile={"start": 3, "steps": 1}))
    sentence = "no trace is written: profile.start = 3 is before the next step"
    assert sentence in capsys.readouterr().out
    assert "profiled" not in record and find_traces(folder) == [trace]
