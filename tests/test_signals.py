"""Signals as a process of its own gets them."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

WAITS = """
import fcntl, signal, sys, termios, time
from mtraining_jax.signals import StopSignals

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
stuck = sys.argv[2] == "True"
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal is this process's own
with StopSignals() as signals:
    signals.stop_after_a_step()
    print("ready", flush=True)
    end = time.monotonic() + 60
    while (stuck or not signals.requested) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    print("goes on", flush=True)
    sys.stderr.write("and saves")
open(sys.argv[1], "w").write(str(signals.requested))
"""


@pytest.fixture
def waiting(tmp_path, stuck):
    """A process that waits for a signal on a terminal, its file, and the terminal's other end.

    A stuck one does not mind that it is asked to stop.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path / "saved"), str(stuck)], stdin=theirs,
        stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    read = b""
    while b"ready\r\n" not in read:  # all of it, or its writing may fail with the terminal
        read += os.read(ours, 1024)
    yield process, tmp_path / "saved", ours
    process.kill()
    process.wait()


@pytest.mark.parametrize("stuck", [False])
def test_a_terminal_that_is_gone_stops_a_run_which_saves(waiting):
    process, saved, terminal = waiting
    os.close(terminal)
    # A shell tells its jobs as well, which is no second wish.
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert saved.read_text() == "True"


@pytest.mark.parametrize("stuck", [True])
def test_a_signal_after_it_ends_the_run_where_it_stands(waiting):
    process, saved, terminal = waiting
    os.close(terminal)
    while process.poll() is None:  # the first one may be heard before the terminal's
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.returncode == 128 + signal.SIGTERM
    assert not saved.exists()
