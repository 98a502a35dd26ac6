"""If one process of a run dies, the others stop with a message."""

import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from mtraining_jax.config.sections import DistributedConfig
from mtraining_jax.training.processes import distributed
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import EXIT_FAILED, EXIT_STOPPED

ROOT = Path(__file__).resolve().parents[3]
HEARTBEAT_TIMEOUT = 4

# Works with the other process until that one dies; or waits forever, as in a collective of GPUs; or
# leaves, which waits for the other process too.
PROCESS = """
import sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mtraining_jax.config.sections import DistributedConfig
from mtraining_jax.training.processes import distributed
from mtraining_jax.training.processes.peers import PeerWatch

port, number, timeout, wait = sys.argv[1:]
distributed.initialize(DistributedConfig(
    coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=int(number),
    heartbeat_timeout_seconds=int(timeout),
))
peers = PeerWatch(int(timeout))
peers.advice = lambda: "how to resume"
mesh = Mesh(np.array(jax.devices()), "x", axis_types=(AxisType.Auto,))
everyone = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
x = jax.make_array_from_callback(
    (2,), NamedSharding(mesh, P("x")), lambda _: np.ones(1, np.float32)
)
try:
    for step in range(10**6):
        everyone(x).block_until_ready()
        if step == 3:
            print("works", flush=True)
            if wait == "leave":
                distributed.shutdown(peers)
            if wait:
                time.sleep(300)
except Exception as error:
    distributed.abort(peers, error)
"""


def started(port, lost, then):
    """Starts a process that will be lost, and the other one of its run."""
    waits = "wait" if then else ""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(port), str(n), str(HEARTBEAT_TIMEOUT)]
            + [waits if n == lost else then],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for n in range(2)
    ]
    return processes[lost], processes[1 - lost]


LOST = f"process 1 was lost: it did not answer for {HEARTBEAT_TIMEOUT} s"
ABORTED = "aborted by XLA, most likely because process 0"


@pytest.mark.parametrize(
    ("lost", "then", "message"),
    [
        (1, "", LOST),
        pytest.param(1, "leave", LOST, marks=pytest.mark.slow),
        pytest.param(0, "", ABORTED, marks=pytest.mark.slow),
        pytest.param(0, "leave", ABORTED, marks=pytest.mark.slow),
    ],
)
def test_the_other_stops_with_a_message(lost, then, message):
    """While it works, or while it leaves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    victim, survivor = started(port, lost, then)
    try:
        for process in (victim, survivor):
            assert any("works" in line for line in process.stdout)
        victim.kill()
        killed = time.monotonic()
        output, _ = survivor.communicate(timeout=60)
        seconds = time.monotonic() - killed
    finally:
        for process in (victim, survivor):
            process.kill()
            process.communicate()
    assert survivor.returncode == EXIT_STOPPED, output
    last = output.splitlines()[-1]
    assert f"stopped: {message}" in last and last.endswith("; how to resume"), output
    assert "Traceback" not in output
    assert seconds < 10 * HEARTBEAT_TIMEOUT  # allows for a busy machine


def test_an_error_of_this_process_alone_ends_it_with_its_traceback(monkeypatch, capsys):
    def leave_python(status):
        raise SystemExit(status)

    announced = []
    peers = types.SimpleNamespace(announce=announced.append)
    monkeypatch.setattr(os, "_exit", leave_python)
    with pytest.raises(SystemExit) as left:
        distributed.abort(peers, RuntimeError("out of ideas"))
    assert left.value.code == EXIT_FAILED and announced == ["out of ideas"]
    assert "RuntimeError: out of ideas" in capsys.readouterr().err


def test_a_failed_collective_waits_for_the_verdict(monkeypatch, capfd):
    """Also where the error of a user hides it, as one of a checkpoint does."""

    def leave_python(status):
        raise SystemExit(status)

    asked = []
    peers = types.SimpleNamespace(
        wait_for_verdict=lambda: asked.append(1), advice=lambda: "how to resume"
    )
    monkeypatch.setattr(os, "_exit", leave_python)
    failed = RuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    hidden = UserError("a checkpoint could not be written")
    hidden.__cause__ = ValueError("from Orbax")
    hidden.__cause__.__cause__ = failed
    for end, error in ((distributed.abort, failed), (distributed.shutdown, hidden)):
        with pytest.raises(SystemExit) as left:
            end(peers, error)
        assert left.value.code == EXIT_FAILED and asked.pop()
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("stopped: a collective between the processes of the run failed (")
        assert line.endswith("; how to resume")


def test_jax_waits_longer_for_a_heartbeat(monkeypatch):
    calls = []
    monkeypatch.setattr("jax.distributed.initialize", lambda **arguments: calls.append(arguments))
    config = DistributedConfig(
        coordinator="a:1", num_processes=2, process_id=0, heartbeat_timeout_seconds=7
    )
    assert distributed.initialize(config, {})
    assert calls[0]["heartbeat_timeout_seconds"] == 67
