"""The benchmark of whole steps: arms at a tiny size, resuming, and what the table says."""

import importlib.util
import json
import threading
import types

import jax
import pytest

from benchmarks.step.peers import __main__ as command
from benchmarks.step.peers import flax_step, measure
from benchmarks.step.peers.arms import ARMS

MEMORY_ANALYSIS = jax.stages.Compiled.memory_analysis
PARAMETERS = 256 * 64 + 2 * (64 * 64 * 3 + 3 * 64 * 128)  # of the tiny model, in matrices
DONE = {"model": "tiny", "date": "2026-11-29", "device": "GPU", "versions": "jax 1", "used": None}


def row(arm, tokens, attempt=False, **found):
    """A row of results."""
    return DONE | {"arm": arm, "tokens": tokens, "attempt": attempt} | found


def timed(arm, tokens, seconds):
    """A row with a time."""
    sizes = {"peak": 3 * 2**30, "density": 1.0, "losses": [5.5, 5.4], "steps": 3}
    return row(arm, tokens, seconds=seconds, spread=[seconds, seconds], **sizes)


def of_a_program_from_the_cache(program):
    """Memory statistics of a program that was loaded from JAX's cache on a GPU: without a peak."""
    names = "argument", "output", "alias", "temp", "host_temp", "host_argument"
    known = MEMORY_ANALYSIS(program)
    sizes = {f"{x}_size_in_bytes": getattr(known, f"{x}_size_in_bytes") for x in names}
    return types.SimpleNamespace(**sizes, peak_memory_in_bytes=0)


def in_this_process(jobs, at_once, receive, log, seconds=0):
    """What `workers.measure` does, without processes."""
    for name, words in jobs:
        job = json.loads(words[-1])
        if job["compile"]:
            continue
        try:
            step = measure.prepare(job)
        except ImportError as missing:
            log(f"no {name} ({missing})")
            continue
        receive(measure.measure(job, step))


def run(folder, monkeypatch, arms, *options):
    """Runs the command; returns its rows and its table."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, "")  # of workers; restored after the test
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(command.workers, "measure", in_this_process)
    text = command.main([
        "--model", "tiny", "--lengths", "1024", "--results", str(folder / "rows.jsonl"),
        "--cache", str(folder), "--out", str(folder / "table.md"), "--arms", *arms, *options,
    ])  # fmt: skip
    assert (folder / "table.md").read_text() == text
    return command.read(folder / "rows.jsonl", "tiny"), text


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_every_arm_begins_with_the_loss_of_random_logits_and_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(flax_step, "CHUNK", 256)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", of_a_program_from_the_cache)
    has_torch = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
    arms = ["flax", "flax-chunked", "sparse", *["transformers"] * bool(has_torch)]
    rows, text = run(tmp_path, monkeypatch, arms, "--attempts")
    assert {x["arm"] for x in rows} == set(arms)
    for found in rows:
        assert "error" not in found
        first, *_, last = found["losses"]
        assert first == pytest.approx(5.556, abs=0.02)  # ln 256, and half the variance of logits
        assert last < first - 0.004
        assert 0 < found["seconds"] and found["spread"][0] <= found["seconds"] <= found["spread"][1]
    by_arm = {x["arm"]: x for x in rows}
    state = 3 * 4 * PARAMETERS
    assert all(state < by_arm[x]["peak"] < 100 * state for x in arms if ARMS[x].compiled)
    whole, chunked = (by_arm[x]["losses"] for x in ("flax", "flax-chunked"))
    assert whole == pytest.approx(chunked, abs=1e-4)
    assert by_arm["flax"]["density"] == 1 and 0.25 < by_arm["sparse"]["density"] < 0.35
    again, same = run(tmp_path, monkeypatch, arms, "--attempts")
    assert (again, same) == (rows, text)  # nothing was repeated
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(arms)


def test_unknown_memory_is_a_dash_and_never_zero():
    rows = [
        timed("dense", 8192, 1.0) | {"peak": 0},
        timed("transformers", 8192, 1.0) | {"peak": None},
        row("sparse", 262144, attempt=True, unfinished=12, peak=0),
    ]
    text = command.table("tiny", rows)
    assert "| 8192 | mtraining-jax, dense | 1.000 | 1.000 | 1.000 to 1.000 | 8,192 | – |" in text
    assert "| 8192 | transformers | 1.000 | 1.000 | 1.000 to 1.000 | 8,192 | – |" in text
    assert "*mtraining-jax, dense*: 8192 fits." in text
    assert "*mtraining-jax, sparse*: 262144 still ran after 12 s." in text


class Fake:
    """A step that fails, or waits."""

    def __init__(self, error=None, waits=False):
        self.error, self.ends = error, threading.Event()
        if not waits:
            self.ends.set()

    def load(self):
        return {"device": "GPU", "versions": "jax 1"}

    def run(self, steps):
        self.ends.wait()
        if self.error:
            raise self.error
        return [5.5] * steps, [7.0, *range(1, steps)]

    def peak(self):
        return 2**30

    def density(self):
        return 1.0


def test_a_worker_records_times_lack_of_memory_errors_and_steps_that_do_not_end():
    job = {"model": "tiny", "arm": "flax", "tokens": 512, "attempt": False, "steps": 3}
    found = measure.measure(job, Fake())
    assert (found["seconds"], found["spread"], found["losses"]) == (2, [1, 3], [5.5] * 4)
    full = [
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 80 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 80.00 GiB"),
    ]
    assert [measure.measure(job, Fake(x))["error"] for x in full] == ["out of memory"] * 2
    early = [measure.measure(job, x)["error"] for x in (ValueError("no\nkernel"), full[0])]
    assert early == [
        f"{x} before its first step" for x in ("ValueError: no kernel", "out of memory")
    ]
    attempt, waits = job | {"attempt": True, "limit": 0.05}, Fake(waits=True)
    found = measure.measure(attempt, waits)
    waits.ends.set()
    assert (found["unfinished"], found["peak"]) == (0.05, 2**30) and "seconds" not in found
    assert measure.measure(attempt, Fake())["seconds"] == 7


def test_what_is_left_has_short_lengths_first_and_repeats_failures():
    arms = ["transformers", "transformers-liger", "dense"]
    jobs = command.plan(arms, [131072, 8192], [262144, 524288], 30, [])
    found = [(job["arm"], job["tokens"], job.get("steps", job.get("limit"))) for job in jobs]
    assert found[:3] == [(x, 8192, 10) for x in arms] and found[3:6] == [
        (x, 131072, 3) for x in arms
    ]
    assert found[6:] == [
        ("dense", 262144, 12), ("dense", 524288, 12),
        ("transformers-liger", 262144, 30), ("transformers-liger", 524288, 120),
    ]  # fmt: skip
    done = [
        timed("dense", 8192, 1.0),
        row("transformers", 131072, error="out of memory before its first step"),
        row("transformers-liger", 131072, error="RuntimeError: lost"),
        row("dense", 262144, attempt=True, unfinished=12, peak=1),
        row("transformers-liger", 262144, attempt=True, unfinished=20, peak=1),
    ]
    left = command.plan(arms, [131072, 8192], [262144, 524288], 30, done)
    done_now = [job for job in jobs if job not in left]
    assert [(job["arm"], job["tokens"]) for job in done_now] == [
        ("dense", 8192), ("transformers", 131072), ("dense", 262144),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((1.5, 2.0, 3.0), "faster at every measured length"),
        ((0.5, 2.0, 3.0), "faster from about 510 tokens on"),
        ((0.25, 0.5, 2.0), "faster from about 2000 tokens on"),
        ((2.0, 0.5, 0.25), "slower at the longest measured length"),
    ],
)
def test_the_length_from_which_one_is_faster_is_interpolated(ratios, said):
    text = command.crossing([256, 1024, 4096], ratios)
    assert said in text and f"{ratios[0]:.2f} (256)" in text


def test_the_table_says_what_fits_and_who_is_faster():
    rows = [
        timed("transformers-liger", 8192, 0.5),
        timed("dense", 8192, 1.0),
        timed("transformers-liger", 131072, 24.0),
        timed("dense", 131072, 12.0),
        row("flax", 131072, error="out of memory"),
        row("dense", 262144, attempt=True, unfinished=12, peak=70 * 2**30),
        row("transformers-liger", 524288, attempt=True, error="out of memory"),
        row("sparse", 8192, error="KeyError: q"),
    ]
    text = command.table("tiny", rows, ["no transformers, 8192 tokens (no torch)"])
    liger = ARMS["transformers-liger"].title
    assert f"| 131072 | {liger} | 1.000 | 24.000 | 24.000 to 24.000 | 5,461 | 3.0 | 5.500 |" in text
    assert "| 131072 | Flax | – | out of memory |" in text
    assert "*mtraining-jax, dense*: 8192 fits, 3.0 GiB; 131072 fits, 3.0 GiB; 262144 still ran" in (
        text
    )
    assert "70.0 GiB reserved at its start" in text and "524288 out of memory." in text
    assert f"dense against {liger}: times as fast, by length: 0.50 (8192), 2.00 (131072)" in text
    assert "faster from about 33000 tokens on" in text
    assert text.endswith(
        "- mtraining-jax, sparse, 8192 tokens: KeyError: q\n"
        "- no transformers, 8192 tokens (no torch)\n"
    )


def test_a_length_that_is_no_power_of_two_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--results", "rows.jsonl", "--lengths", "10000"])
    assert "10000 is not a power of two of at least 1024" in capsys.readouterr().err
