"""Workers of the benchmarks: they compile side by side, measure in turn, and may fail."""

import time

from benchmarks import workers


def measured(jobs, at_once, **options):
    """What workers sent, and what was logged."""
    sent, logged = [], []
    jobs = [(name, workers.command("tests.benchmarks.worker", *words)) for name, words in jobs]
    workers.measure(jobs, at_once, sent.append, logged.append, **options)
    return sent, logged


def test_workers_start_together_and_measure_in_order():
    sent, logged = measured([("a", ["a", "-"]), ("b", ["b", "-"])], 2)
    (a, started_a, turn_a), end_a, (b, started_b, turn_b), end_b = sent
    assert (a, b) == ("a", "b") and logged == []
    assert max(started_a, started_b) < turn_a < end_a["end"] <= turn_b < end_b["end"]


def test_workers_that_fail_are_named_and_others_continue():
    jobs = [("early", ["a", "dies early"]), ("late", ["b", "dies late"]), ("good", ["c", "-"])]
    sent, logged = measured(jobs, 3)
    assert [x[0] for x in sent if isinstance(x, list)] == ["b", "c"]
    assert logged == ["FAILED to compile: early", "FAILED to measure: late"]


def test_a_worker_that_hangs_is_killed_and_others_continue():
    jobs = [("slow", ["a", "hangs"]), ("good", ["b", "-"])]
    sent, logged = measured(jobs, 2, seconds=3)
    assert [x[0] for x in sent if isinstance(x, list)] == ["a", "b"] and len(sent) == 3
    assert logged == ["FAILED to measure: slow"]


def test_a_worker_that_compiles_too_long_is_killed_and_the_others_of_its_wave_continue():
    jobs = [("slow", ["a", "compiles too long"]), ("good", ["b", "-"]), ("next", ["c", "-"])]
    begin = time.monotonic()
    sent, logged = measured(jobs, 2, seconds=3)
    assert [x[0] for x in sent if isinstance(x, list)] == ["b", "c"] and len(sent) == 4
    assert logged == ["FAILED to compile: slow"]
    assert time.monotonic() - begin < 30
