"""A step that does not end is reported, and ends the run."""

import json
import re
import threading
import time
import types

import pytest

from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.processes import peers
from mtraining_jax.utils.signals import EXIT_FAILED
from tests.training.common import changed
from tests.training.processes.test_processes import started_together


class Watched:
    """A watchdog with short times, and its messages."""

    def __init__(self, limit=60.0, slow=60.0):
        self.reported, self.left, self.heard = [], [], threading.Event()
        self.longest = []

        def slow_after(longest):
            self.longest.append(longest)
            return slow

        self.watch = HangWatchdog(limit, self._tell, self._leave, slow_after, tick=0.05)

    def _tell(self, sentence):
        self.reported.append(sentence)
        self.heard.set()

    def _leave(self, sentence):
        self.left.append(sentence)
        self.heard.set()


def test_a_step_that_does_not_end_ends_the_run():
    watched = Watched(limit=0.2)
    watched.watch.begin(12)
    assert watched.heard.wait(10)
    watched.watch.close()
    assert watched.reported == []
    [sentence] = watched.left
    assert sentence.startswith("step 12 did not end within 0 s (run.step_timeout_seconds)")


def test_a_slow_step_is_reported_once_and_may_end():
    watched = Watched(slow=0.1)
    watched.watch.begin(3)
    assert watched.heard.wait(10)
    time.sleep(0.3)
    watched.watch.end()
    watched.watch.close()
    assert watched.left == []
    [sentence] = watched.reported
    assert re.match(r"warning: step 3 has taken \d s so far; a device", sentence)
    assert "The run stops at 60 s (run.step_timeout_seconds)" in sentence


def test_a_step_counts_from_the_end_of_the_one_before():
    watched = Watched(limit=1.0)
    for step in range(1, 6):
        watched.watch.begin(step)
        if step > 1:
            time.sleep(0.3)
            watched.watch.end()  # of the previous step
    watched.watch.end()
    time.sleep(1.1)  # no step is running
    watched.watch.close()
    assert watched.reported == watched.left == []
    assert watched.longest[0] is None and 0.2 < watched.longest[-1] < 1.0


def test_time_in_which_the_process_was_suspended_does_not_count():
    left, suspended = [], [0.0]
    watch = HangWatchdog(
        60.0, left.append, left.append, clock=lambda: time.perf_counter() + suspended[0], tick=0.1
    )
    watch.begin(1)
    time.sleep(0.3)
    suspended[0] = 1000.0  # as after SIGSTOP and SIGCONT
    time.sleep(0.5)
    assert left == []
    watch.end()
    watch.close()
    assert left == []


def test_without_a_command_a_stuck_step_is_only_reported():
    heard = threading.Event()
    watch = HangWatchdog(0.1, lambda sentence: heard.set(), None)
    watch.begin(1)
    assert heard.wait(10)
    watch.end()
    watch.close()


def test_a_block_that_does_not_end_ends_the_run_also_while_a_step_runs():
    watched = Watched(limit=0.4)
    watched.watch.begin(1)
    with watched.watch.watch("the evaluation after step 1"):
        watched.watch.end()
        watched.watch.begin(2)
        time.sleep(0.2)
        watched.watch.end()
        assert watched.heard.wait(10)
    watched.watch.close()
    [sentence] = watched.left
    assert sentence.startswith("the evaluation after step 1 did not end within 0 s (run.step_time")


def test_a_block_that_makes_progress_does_not_end_the_run():
    watched = Watched(limit=1.0)
    with watched.watch.watch("the evaluation after step 1") as restart:
        for _ in range(4):
            time.sleep(0.3)
            restart()
    time.sleep(1.1)  # nothing is watched
    watched.watch.close()
    assert watched.reported == watched.left == []


# Process 1 never reads its second batch; process 0 waits for it in the second step.
HANGS = """
import sys, threading
from mtraining_jax.cli import train as cli
from mtraining_jax.training.device_batches import DeviceBatches

read, calls = DeviceBatches.__next__, []

def hangs(self):
    calls.append(None)
    if len(calls) == 2 and "--distributed.process_id=1" in sys.argv:
        threading.Event().wait()
    return read(self)

DeviceBatches.__next__ = hangs
sys.exit(cli.main())
"""


@pytest.mark.slow  # in parts above and below
def test_processes_that_hang_name_the_slowest_and_say_how_to_resume(plain_config, tmp_path):
    config = changed(
        plain_config,
        run={"steps": 3, "step_timeout_seconds": 5},
        parallel={"devices_per_node": 2, "cpu_devices": 1},
        checkpoint={"interval": 1, "async_save": False},
    )
    (program := tmp_path / "hangs.py").write_text(HANGS)
    processes = started_together(config, tmp_path, program=program)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_FAILED] * 2, outputs
    for output in outputs:
        last = output.splitlines()[-1]
        assert re.search(r"(step|the batch of step) 2 did not end within 5 s \(run.ste", last)
        assert "; slowest: process 1 (reading the batch of step 2); see the output" in last
        assert last.endswith("; run the same command again to resume from the checkpoint of step 1")


def test_the_processes_that_are_behind_are_named(monkeypatch):
    """With a hand-filled key-value store."""
    given = {
        0: {"progress": 7, "phase": "step 2"},
        1: {"progress": 7, "phase": "step 2"},
        2: {"progress": 6, "phase": "reading the batch of step 2"},
    }
    entries = [(f"{peers._COUNTERS}{n}", json.dumps(x)) for n, x in given.items()]
    watch = peers.PeerWatch.__new__(peers.PeerWatch)
    watch._store = types.SimpleNamespace(key_value_dir_get=lambda _: entries)
    monkeypatch.setattr("jax.process_count", lambda: len(entries))
    assert watch.slowest() == "; slowest: process 2 (reading the batch of step 2)"
    del entries[2]
    assert watch.slowest() == "; all 2 processes are at the same point"
    watch._store = None  # it has ended with process 0
    assert watch.slowest() == ""


def test_work_without_a_limit_is_only_reported():
    watched = Watched(limit=0.1, slow=0.05)
    with watched.watch.watch("compiling", limited=False):
        assert watched.heard.wait(10)
        assert watched.watch.phase() == "compiling" and watched.watch.progress == 1
        time.sleep(0.2)
    watched.watch.close()
    assert watched.left == [] and watched.watch.progress == 2
    [sentence] = watched.reported
    assert sentence.endswith("a device or process may be waiting for another one")
