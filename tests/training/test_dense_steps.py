"""Dense steps within a sparse run."""

import json
import shutil

import numpy as np
import pytest

from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.checkpoint.store import read_record
from tests.training.common import changed, losses, run, written

ONE = {"nodes": 1, "devices_per_node": 1}


@pytest.fixture
def sparse(config):
    """Four steps on one device, all audited, so a run has one sparse program."""
    return changed(
        config, parallel=ONE, audit={"interval": 1, "num_queries": 16}, checkpoint={"interval": 2}
    )


def checksums(config, step):
    """Checksums of every array of a checkpoint: parameters, moments, counters."""
    folder = checkpoint_folder(config) / str(step) / "record"
    return json.loads((folder / "metadata").read_text())["checksums"]


def without_times(record):
    return {
        name: value
        for name, value in record.items()
        if not name.startswith(("tflops", "time_share/"))
        and not name.endswith(("_per_second", "_seconds", "_by_process"))
        and name not in ("dense_step", "wall_time", "restarts")
    }


def test_they_are_at_both_ends_and_every_so_often(sparse, capsys):
    fields = {"dense_warmup_steps": 1, "dense_cooldown_steps": 1, "dense_interval": 4}
    records = run(changed(sparse, run={"steps": 7}, sparsity=fields))
    assert [record.get("dense_step", False) for record in records] == [
        True, False, False, True, False, False, True,
    ]  # fmt: skip
    for record in records:
        dense = "dense_step" in record
        assert (record["density"] == 1.0) == dense and record["density"] > 0.02
        assert ("recall" in record) != dense
        executed = record["attention_flops_executed"] / record["attention_flops_dense_equivalent"]
        # Full tiles, so slightly more than all causal pairs.
        assert (1.0 <= executed < 1.1) == dense
        assert np.isfinite(record["loss"]) and record["skipped_steps"] == 0
    printed = capsys.readouterr().out
    assert "dense      the first, the last and one in 4: 3 of 7 steps" in printed
    assert "(dense step)" in printed and "3 sparse steps after warm-up" in printed


def test_a_run_that_ends_dense_is_one_of_two_commands_to_the_bit(sparse, capsys):
    one = changed(sparse, run={"name": "one"}, sparsity={"dense_cooldown_steps": 2})
    records = run(one)
    assert [record.get("dense_step", False) for record in records] == [False, False, True, True]

    two = changed(sparse, run={"name": "two", "steps": 2})
    parts = run(two)
    parts += run(changed(two, run={"steps": 4}, sparsity={"kind": "dense"}))
    assert [without_times(x) for x in records] == [without_times(x) for x in parts]
    assert checksums(one, 4) == checksums(two, 4) != checksums(one, 2)
    for config in (one, two):  # of all steps, also before the second command
        place = read_record(checkpoint_folder(config), 4)["loader"]
        assert place["lowest_density"] == min(record["density"] for record in records)

    # A run stopped before its dense steps takes the same ones, and compiles no other program.
    shutil.rmtree(checkpoint_folder(one) / "4")
    capsys.readouterr()
    rest = run(one)
    np.testing.assert_array_equal(losses(rest), losses(records[2:]))
    assert [record["step"] for record in written(one)] == [1, 2, 3, 4]
    assert checksums(one, 4) == checksums(two, 4)
    printed = capsys.readouterr().out
    assert printed.count("compiling ") == 1
    assert "compiling the training step with dense attention" in printed
