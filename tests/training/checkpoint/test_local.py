"""Checkpoints on a disk of each host."""

import contextlib
import os
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.training.checkpoint import saved_steps
from mtraining_jax.training.checkpoint.local import newest_local_step, open_local
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder, record_start
from mtraining_jax.training.state import TrainState
from mtraining_jax.utils.errors import UserError
from tests.training.common import changed, losses, run, written
from tests.training.processes.test_processes import started_together


def test_a_run_resumes_from_a_disk_of_its_host(plain_config, tmp_path, capsys):
    disk = tmp_path / "disk"
    config = changed(
        plain_config,
        run={"steps": 4},
        checkpoint={"last_step": False, "local_dir": str(disk), "local_interval": 1},
    )
    whole = run(config)
    own = disk / "test" / "process_0"
    assert saved_steps(own) == [4, 3] and not saved_steps(checkpoint_folder(config))

    run(changed(config, run={"steps": 5}))
    assert (
        "resuming from the checkpoint of step 4 in checkpoint.local_dir" in capsys.readouterr().out
    )
    assert [record["step"] for record in written(config)] == [1, 2, 3, 4, 5]
    assert saved_steps(own) == [5, 4]

    # Another run of the same name has no use for them, although it would take more steps.
    shutil.rmtree(config.run.folder)
    again = run(changed(config, run={"steps": 6}))
    assert "resuming" not in capsys.readouterr().out
    np.testing.assert_array_equal(losses(again)[:4], losses(whole))
    assert saved_steps(own) == [6, 5]

    (own / "5" / "record" / "metadata").write_text("{}")  # damaged: not held
    (own / "6" / "arrays" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(UserError, match="in the run folder set checkpoint.local_dir=none$"):
        run(changed(config, run={"steps": 7}))


def test_a_run_leaves_the_local_checkpoints_of_others(plain_config, tmp_path, capsys):
    disk = tmp_path / "disk"
    first = changed(plain_config, checkpoint={"local_dir": str(disk)}, run={"steps": 9})
    other = changed(first, run={"output_dir": str(tmp_path / "other")})
    own, zero = disk / "test" / "process_0", jnp.int32(0)
    state = TrainState(zero, {"weight": zero}, (), zero, zero, zero)

    def newest(config):
        with contextlib.ExitStack() as opened:
            return newest_local_step(config, None, opened)

    def saved(config, step):
        with contextlib.ExitStack() as opened:
            newest_local_step(config, None, opened)
            with contextlib.closing(open_local(config, None)) as checkpoints:
                checkpoints.save(step, state, {}, config)

    record_start(first, None)
    saved(first, 5)
    assert newest(first) == 5
    record_start(first, 5)
    assert newest(first) == 5
    # By another start of the run, and by another run in the folder.
    starts = first.run.folder / "starts.jsonl"
    content = starts.read_text()
    starts.write_text(content.replace('"time": "2', '"time": "3'))
    assert newest(first) is None
    starts.write_text(content)

    record_start(other, None)
    refused = re.escape(
        f"checkpoint.local_dir = {disk}: {own} has the checkpoint of step 5 of another run, "
        f"{first.run.folder.absolute()}, which would resume from it; set another "
        f"checkpoint.local_dir or run.name, or delete {own}"
    )
    for resume in ("auto", False):
        with pytest.raises(UserError, match=f"^{refused}$"):
            newest(changed(other, checkpoint={"resume": resume}))
    with contextlib.ExitStack() as opened:
        newest_local_step(first, None, opened)
        with pytest.raises(UserError) as caught:
            newest(other)
    assert f"another run writes into {own} (process {os.getpid()} on " in str(caught.value)
    assert str(caught.value).endswith(
        f", run {first.run.folder.absolute()}); wait until it ends, or set another "
        "checkpoint.local_dir or run.name"
    )
    assert saved_steps(own) == [5]
    # Where the first one resumes from a later step, or is gone, the other one may delete it.
    (checkpoint_folder(first) / "5").mkdir(parents=True)
    saved(other, 2)
    assert saved_steps(own) == [2] and newest(other) == 2
    shutil.rmtree(other.run.folder)
    assert newest(first) is None

    # No link leads out of the folder.
    shutil.rmtree(own)
    kept = tmp_path / "kept"
    kept.mkdir()
    own.symlink_to(kept)
    with pytest.raises(UserError, match=rf"{own} leads to {kept} by a symbolic link"):
        newest(first)
    own.unlink()
    (file := tmp_path / "file").write_text("mine")
    lock = own.with_name(".process_0.lock")
    lock.symlink_to(file)
    with pytest.raises(UserError, match=rf"{lock} is not writable \(Too many levels of symbolic"):
        newest(first)
    assert file.read_text() == "mine"


# In the place of the training of each process; "disk" is relative to its own folder.
PROGRAM = """
import shutil
import sys
from contextlib import ExitStack, closing
import jax
import numpy as np
from mtraining_jax.cli.train import main
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import run_folder
from mtraining_jax.training.checkpoint.local import (
    newest_local_step, open_local, read_local_state
)
from mtraining_jax.training.run import run
from mtraining_jax.training.processes.agreement import run_on_process_0
from mtraining_jax.training.state import StateBuilder


def newest(config, shared):
    with ExitStack() as opened:
        return newest_local_step(config, shared, opened)


def work(config, *_):
    run_on_process_0(lambda: run_folder.record_start(config, None), 60)
    builder = StateBuilder(config, build_mesh(config))
    state = builder.fresh()
    with closing(open_local(config, None)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, {}, config)
    found = [newest(config, shared) for shared in (None, 2, 3)]
    read, _ = read_local_state(config, 3, builder.abstract(), dict)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(read), strict=True):
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
            np.testing.assert_array_equal(a.data, b.data)
    sharded = {not x.is_fully_replicated for x in jax.tree.leaves(state)}
    for lost in ("disk/test/process_1/3", "disk"):
        if jax.process_index() == 1:
            shutil.rmtree(lost)
        found += [newest(config, shared) for shared in (1, 2)]
    print(found, sharded)


sys.modules[run.__module__]._run = work
sys.exit(main())
"""


@pytest.mark.slow
def test_processes_resume_what_all_of_them_hold(plain_config, tmp_path):
    config = changed(
        plain_config,
        parallel={"replicas": 2, "cpu_devices": 1, "fsdp": True},
        checkpoint={"local_dir": "disk"},
    )
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    processes = started_together(config, tmp_path, program=program)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    # First all hold 2 and 3, then process 1 loses 3, then everything.
    found = "[3, 3, None, 2, None, None, None] {False, True}"
    assert [output.splitlines()[-1] for output in outputs] == [found] * 2
