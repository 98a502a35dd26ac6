"""Signals, received by a separate process."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

WAITS = """
import fcntl, signal, sys, termios, time
from mtraining_jax.utils.signals import StopSignals

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
stuck = sys.argv[2] == "True"
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # makes it the controlling terminal
with StopSignals() as signals:
    signals.stop_after_a_step()
    print("ready", flush=True)
    end = time.monotonic() + 60
    while (stuck or not signals.requested) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    print("stopping", flush=True)
    sys.stderr.write("saved")
open(sys.argv[1], "w").write(str(signals.requested))
"""


@pytest.fixture
def waiting(tmp_path, stuck):
    """A process on a terminal that waits for a signal (or ignores it if `stuck`).

    Yields the process, the file that it writes and our end of the terminal.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path / "saved"), str(stuck)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    read = b""
    while b"ready\r\n" not in read:  # the entire line, before the terminal is closed
        read += os.read(ours, 1024)
    yield process, tmp_path / "saved", ours
    process.kill()
    process.wait()


@pytest.mark.parametrize("stuck", [False])
def test_a_closed_terminal_stops_and_saves_a_run(waiting):
    process, saved, terminal = waiting
    os.close(terminal)
    # Shells also send SIGHUP to their jobs; it does not count as a second signal.
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert saved.read_text() == "True"


@pytest.mark.parametrize("stuck", [True])
def test_a_second_signal_kills_the_run(waiting):
    process, saved, terminal = waiting
    os.close(terminal)
    while process.poll() is None:  # the first one may arrive before that of the terminal
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.returncode == 128 + signal.SIGTERM
    assert not saved.exists()
