"""A step that does not end is reported, and ends the run."""

import re
import threading
import time

from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.utils.signals import EXIT_FAILED
from tests.training.common import changed, start_process


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


# The dispatch of the second step never returns, as if one of several devices had failed.
HANGS = """
import sys, threading
from mtraining_jax.cli import train as cli
from mtraining_jax.training.loop import trainer

compile_programs = trainer.compile_programs

def compiled(*arguments):
    programs = compile_programs(*arguments)
    step, calls = programs["train_step"], []

    def hangs(state, batch):
        calls.append(None)
        return step(state, batch) if len(calls) < 2 else threading.Event().wait()

    programs["train_step"] = hangs
    return programs

trainer.compile_programs = compiled
sys.exit(cli.main())
"""


def test_a_command_with_a_stuck_step_ends_and_says_how_to_resume(plain_config, tmp_path):
    config = changed(
        plain_config,
        run={"steps": 3, "step_timeout_seconds": 5},
        checkpoint={"interval": 1, "async_save": False},
    )
    (program := tmp_path / "hangs.py").write_text(HANGS)
    process = start_process(config, tmp_path, program=program)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_FAILED, output
    last = output.splitlines()[-1]
    assert last.startswith("stopped: step 2 did not end within 5 s (run.step_timeout_seconds);")
    assert last.endswith("; run the same command again to resume from the checkpoint of step 1")
