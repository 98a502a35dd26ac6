"""Workers of the benchmarks: they compile side by side, measure in turn, and may fail."""

from pathlib import Path

import pytest

from benchmarks import workers

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import workers
name, how = sys.argv[1:]
started = time.time()
print("noise")
if how == "dies early":
    sys.exit("no")
if workers.my_turn():
    turn = time.time()
    workers.send([name, started, turn])
    if how == "dies late":
        sys.exit("no")
    time.sleep(0.05)
    workers.send({{"end": time.time()}})
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return path


def measured(script, jobs, at_once, **options):
    """What workers sent, and what was said."""
    sent, said = [], []
    workers.measure(script, jobs, at_once, sent.append, said.append, **options)
    return sent, said


def test_workers_start_together_and_measure_in_order(script):
    sent, said = measured(script, [("a", ["a", "-"]), ("b", ["b", "-"])], 2)
    (a, started_a, turn_a), end_a, (b, started_b, turn_b), end_b = sent
    assert (a, b) == ("a", "b") and said == []
    assert max(started_a, started_b) < turn_a < end_a["end"] <= turn_b < end_b["end"]


def test_later_waves_start_when_earlier_ones_have_measured(script):
    sent, _ = measured(script, [(name, [name, "-"]) for name in "abc"], 2)
    ends = [x["end"] for x in sent if isinstance(x, dict)]
    started = [x[1] for x in sent if isinstance(x, list)]
    assert len(ends) == 3 and started[2] > ends[1] > started[1]


def test_workers_that_fail_are_named_and_others_go_on(script):
    jobs = [("early", ["a", "dies early"]), ("late", ["b", "dies late"]), ("good", ["c", "-"])]
    sent, said = measured(script, jobs, 3)
    assert [x[0] for x in sent if isinstance(x, list)] == ["b", "c"]
    assert said == ["FAILED to compile: early", "FAILED to measure: late"]


def test_nothing_is_measured_when_it_is_not_allowed_any_more(script):
    answers = iter([True, False])
    sent, said = measured(
        script, [("a", ["a", "-"]), ("b", ["b", "-"])], 2, allowed=lambda: next(answers)
    )
    assert [x[0] for x in sent if isinstance(x, list)] == ["a"]
    assert said == ["no time left for b"]
