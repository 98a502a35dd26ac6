"""Runs that receive a stop signal, and runs that may not start.

In test_processes.py several processes stop together.
"""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import types

import pytest

from mtraining_jax.training.checkpoint import newest_step, run_folder, run_lock
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.checkpoint.run_lock import only_run_in
from mtraining_jax.training.processes import agreement
from mtraining_jax.training.processes.agreement import check_same_data, differences
from mtraining_jax.training.run import agreed_resume_step
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import EXIT_STOPPED, Stopped, StopSignals
from tests.training.common import changed, losses, run, written
from tests.training.processes.test_processes import started_together


def test_before_the_first_step_a_signal_interrupts():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM received before the first step"), StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(
    os.environ.get("MTRAINING_TEST_OPTIMISED") != "1", reason="runs in tests/test_optimised.py"
)
def test_a_run_alone_saves_its_state_and_goes_on(plain_config):
    """SIGTERM during the second of four steps."""
    config = changed(plain_config, run={"steps": 4})
    whole = run(changed(config, run={"name": "whole"}))
    with StopSignals() as signals:
        stop_at_2 = Raise(signals, 2)
        with pytest.raises(Stopped, match=r"at step 2; .* the checkpoint of step 2"):
            run(config, stop_at_2)
    assert newest_step(checkpoint_folder(config)) == 2
    assert [record["step"] for record in written(config)] == [1, 2]
    rest = run(config)
    assert list(losses(rest)) == list(losses(whole[2:]))


class Raise:
    """Stop signals; the one for this process arrives while a step is running."""

    def __init__(self, signals, step):
        self._signals, self._left = signals, step
        self.stop_after_a_step = signals.stop_after_a_step

    @property
    def requested(self):
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGINT)
        return self._signals.requested


# The main thread does not return, as in a compilation or a collective; or Python ignores what the
# handler raises, as in a callback of garbage collection.
HANGS = """
import gc, sys, threading
from mtraining_jax.utils import signals
signals._PATIENCE = 0.2
def wait(*_):
    print("hangs", flush=True)
    threading.Event().wait(60)
with signals.StopSignals() as own:
    if sys.argv[1] == "later":
        own.stop_after_a_step()
    if sys.argv[1] == "collecting":
        gc.callbacks.append(wait)
    while True:
        try:  # the signal may come at once
            gc.collect() if sys.argv[1] == "collecting" else wait()
        except signals.Stopped:
            pass
"""


@pytest.mark.parametrize(
    ("when", "status"), [("now", EXIT_STOPPED), ("collecting", EXIT_STOPPED), ("later", 130)]
)
def test_a_stuck_process_is_ended(when, status):
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, when],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGINT)
        if when == "later":
            assert "SIGINT: stopping after the current step" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, error
    assert error.startswith("stopped: SIGINT ") and error.count("\n") == 1


# Joins a cluster of one process, and hangs after JAX has agreed on the step to stop at.
HANGS_TOGETHER = """
import sys, threading, time
import jax
from jax.experimental import multihost_utils
from mtraining_jax.utils import signals
jax.config.update("jax_platforms", "cpu")
with signals.StopSignals() as own:
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
    own.stop_together()
    own.stop_after_a_step()
    print("joined", flush=True)
    step = 0
    while not multihost_utils.reached_preemption_sync_point(step := step + 1):
        time.sleep(0.01)
    print("hangs", flush=True)
    while True:
        threading.Event().wait(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_one_of_several_processes(number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS_TOGETHER, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "joined\n"
        process.send_signal(number)
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, error
    assert f"stopped: {number.name} received twice, exited immediately\n" in error


@pytest.mark.slow
def test_processes_with_different_configurations_name_the_field(plain_config, tmp_path):
    config = changed(plain_config, parallel={"devices_per_node": 2, "cpu_devices": 1})
    processes = started_together(config, tmp_path, [[], ["--optimizer.lr=0.5"]])
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    (error,) = outputs[0].splitlines()  # once for both
    assert "error: optimizer.lr = 0.01 in process 0 but 0.5 in process 1; it must" in error
    assert not outputs[1]
    assert not config.run.folder.exists()


def test_differences_are_named():
    assert differences({"a": 1, "b": None}, {"a": 1, "b": None}, 3) == {}
    found = differences({"a": 1, "b": "x"}, {"a": 1}, 3)
    assert found.keys() == {"b"} and 'b = "x" in process 0 but null in process 3' in found["b"]


def test_processes_that_read_other_data_are_refused(monkeypatch):
    """Runs both processes one after the other, with a hand-filled key-value store."""
    texts = {}
    store = types.SimpleNamespace(
        key_value_set=texts.__setitem__, blocking_key_value_get=lambda key, _: given.pop(0)
    )
    monkeypatch.setattr(agreement.jax_distributed.global_state, "client", store)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    own = {"data.seq_len": 8, "number of tokens": 100, "digest": [1, 2]}
    monkeypatch.setattr("jax.process_index", lambda: 1)
    given = ["done: null"]
    check_same_data(own, "data")
    ((_, sent),) = texts.items()
    monkeypatch.setattr("jax.process_index", lambda: 0)
    given = [sent]
    check_same_data(own, "data")
    assert list(texts.values())[1:] == ["done: null"]
    given = [sent]
    wanted = "^data: number of tokens = 99 in process 0 but 100 in process 1; it must be the same"
    with pytest.raises(UserError, match=wanted):
        check_same_data(own | {"number of tokens": 99}, "data")
    monkeypatch.setattr("jax.process_index", lambda: 1)
    given = [list(texts.values())[-1]]
    with pytest.raises(UserError, match=wanted):
        check_same_data(own, "data")


def test_processes_resume_from_the_step_of_the_first(monkeypatch, plain_config):
    """Runs each process alone, with a hand-filled key-value store."""
    sent, given = [], []
    store = types.SimpleNamespace(
        key_value_set=lambda key, text: sent.append(text),
        blocking_key_value_get=lambda key, _: given.pop(0),
    )
    monkeypatch.setattr(agreement.jax_distributed.global_state, "client", store)
    monkeypatch.setattr(run_folder, "_FILE_SYSTEM_DELAY", 0)
    monkeypatch.setattr("jax.process_count", lambda: 2)

    def resume_step(process, *answers):
        monkeypatch.setattr("jax.process_index", lambda: process)
        sent.clear()
        given[:] = answers
        return agreed_resume_step(plain_config)

    folder = checkpoint_folder(plain_config)
    (folder / "4").mkdir(parents=True)
    assert resume_step(1, "done: 4", "done: null") == 4
    (same,) = sent
    assert resume_step(0, same) == 4 and sent == ["done: 4", "done: null"]
    (folder / "8").mkdir()  # process 1 would resume from it alone
    refused = r"newest checkpoint in .* = 4 in process 0 but 8 in process 1; it must be the same"
    with pytest.raises(UserError, match="the answer of process 0"):
        resume_step(1, "done: 4", "error: the answer of process 0")
    (other,) = sent
    (folder / "8").rmdir()
    with pytest.raises(UserError, match=refused):
        resume_step(0, other)


def test_a_second_run_in_a_folder_is_refused(plain_config):
    folder = plain_config.run.folder
    with only_run_in(folder) as note:
        assert note is None
        before = sorted(folder.parent.iterdir())
        with pytest.raises(UserError, match=rf"another run writes into .*process {os.getpid()} on"):
            run(plain_config)
        assert sorted(folder.parent.iterdir()) == before
    assert list(folder.parent.iterdir()) == []
    with only_run_in(folder):  # the lock ends with its holder
        pass


def test_a_lock_file_that_another_run_made_again_is_locked_anew(tmp_path, monkeypatch):
    path, flock = tmp_path / ".run.lock", fcntl.flock

    def made_again(file, operation):
        monkeypatch.undo()
        path.unlink()
        path.touch()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", made_again)
    with only_run_in(tmp_path / "run"):
        with pytest.raises(UserError, match="another run writes into"):
            with only_run_in(tmp_path / "run"):
                pass


@pytest.mark.parametrize("supported", [True, False])
def test_a_run_warns_where_locks_are_not_supported(plain_config, monkeypatch, capsys, supported):
    def flock(*_):
        if not supported:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock, "fcntl", types.SimpleNamespace(**vars(fcntl) | {"flock": flock}))
    with pytest.raises(UserError, match="nowhere"):
        run(changed(plain_config, data={"paths": ["nowhere"]}))
    printed = capsys.readouterr().out.splitlines()
    assert any(x.startswith("warning: no lock on ") for x in printed) != supported
    assert "None" not in printed


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = f"""if True:
        import os
        from pathlib import Path
        from mtraining_jax.training.checkpoint.run_lock import only_run_in
        with only_run_in(Path({str(tmp_path / "run")!r})):
            os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".run.lock").exists()
    with only_run_in(tmp_path / "run") as note:
        assert note is None
    assert not (tmp_path / ".run.lock").exists()
