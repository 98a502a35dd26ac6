"""The scoreboard of JAX packages, with this library and packages that are made up."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks import workers
from benchmarks.kernels.rows import OWN
from benchmarks.peers.problems import INPUTS, read_input, samples
from benchmarks.scoreboard import __main__ as command
from benchmarks.scoreboard.cases import CASES, Case, exact, folder_of, write
from benchmarks.scoreboard.packages import PACKAGES, dot_product_attention
from pallas_kernels import BlockMaskIndex
from pallas_kernels.reference import reference_attention

SHAPE = "768,2/1,D8"
MASKS = "dense", "documents256", "window200", "lists2"
TOKENS = np.arange(768)
DISTANCE = TOKENS[:, None] - TOKENS


def pairs_of(case, seed):
    """The pairs of a mask: bool [1, H, S, S]."""
    if case.mask == "lists":
        return np.asarray(BlockMaskIndex(jnp.asarray(case.bits(seed)), 6, 128).to_mask())
    documents = np.kron(np.eye(3), np.ones((256, 256))) if case.mask == "documents" else 1
    farthest = 200 if case.mask == "window" else 768
    seen = (DISTANCE >= 0) & (DISTANCE < farthest) & (documents == 1)
    return np.broadcast_to(seen, (1, 2, 768, 768))


@jax.jit
def both_passes(q, k, v, dout, pairs):
    """Output and gradients of the reference."""
    out, vjp = jax.vjp(lambda *x: reference_attention(*x, pairs)[0], q, k, v)
    return out, *vjp(dout)


def test_exact_samples_are_those_of_the_reference(tmp_path):
    cases = [Case.parse(f"{SHAPE},{mask}") for mask in MASKS]
    write(cases, tmp_path, seed=3)
    for case in cases:
        folder = folder_of(tmp_path, case)
        inputs = [read_input(folder, x).view(ml_dtypes.bfloat16).astype("f4") for x in INPUTS]
        found, passes = np.load(folder / "exact-True.npz"), both_passes(*inputs, pairs_of(case, 3))
        for name, array in zip(("out", "dq", "dk", "dv"), map(np.asarray, passes), strict=True):
            places = samples(case.problem, name)
            for sample, (_, head, block) in zip(found[name], places, strict=True):
                expected = array[0, block * 128 : block * 128 + 128, head]
                np.testing.assert_allclose(sample, expected, atol=3e-5)
    again = exact(cases[-1], dict(zip(INPUTS, inputs, strict=True)), seed=4)
    assert not np.allclose(again["out"], found["out"])  # other lists


def test_cases_have_names_and_lists_a_sixteenth_of_the_pairs():
    assert [Case.parse(case.name) for case in CASES] == CASES
    assert [x.size for x in CASES if x.mask == "lists"] == [2, 8, 32]
    bits = CASES[3].bits(0)
    listed = np.unpackbits(bits.view(np.uint8)).sum()
    assert listed == 16 * (1 + 63 * 2)


def test_the_whole_road(tmp_path, monkeypatch, capsys):
    """Right, wrong, failing, and missing packages; a second call measures what is left."""
    calls = []

    def made_up(wrong):
        def attention(case, backend):
            calls.append(case.name)

            def call(q, k, v, mask=None, **options):
                if wrong == "fails":
                    raise ValueError("no kernel for this\nand more")
                if wrong == "leaks":
                    options.pop("local_window_size", None)
                options["implementation"] = "xla"
                return jax.nn.dot_product_attention(q, k, v, mask=mask, **options)

            return dot_product_attention(case, call)

        known = dict(PACKAGES["tokamax"].calls)
        known.pop("lists" if wrong == "fails" else "dense")
        options = dict(modules=("jax",), attention=attention, calls=known)
        return dataclasses.replace(PACKAGES["tokamax"], **options)

    for name, package in {
        "right": made_up(""), "leaks": made_up("leaks"), "fails": made_up("fails"),
        "missing": dataclasses.replace(PACKAGES["tokamax"], modules=("none_a", "none_b")),
    }.items():  # fmt: skip
        monkeypatch.setitem(PACKAGES, name, package)
    names = [OWN, "right", "leaks", "fails", "missing", "Transformer Engine"]
    cases = [f"{SHAPE},{mask}" for mask in ("window200", "lists2")]
    argv = ["--results", str(tmp_path / "rows"), "--scratch", str(tmp_path / "scratch")]
    argv += ["--repeats", "1", "--workers", "0", "--packages", *names, "--cases", *cases]
    earlier = dict(problem=cases[1], kernels=OWN, error="RuntimeError: an earlier call's")
    (tmp_path / "rows").write_text(json.dumps(earlier) + "\n")
    text = command.main(argv)
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines()]
    rows = {tuple(row[:3]): row[3:] for row in rows if len(row) == 9}
    for mask, who in [("window 200", OWN), ("window 200", "right"), ("lists 2", "right")]:
        forward, both, memory, bits, errors, how = rows["768", mask, who]
        assert float(forward) > 0 and float(both) > 0 and memory == "0.00" and bits == "yes, yes"
        assert all(1e-4 < float(x) < 1e-2 for x in errors.split(", "))
        assert how == PACKAGES[who].calls[mask.split()[0]]
    forward, both, *_, errors, how = rows["768", "window 200", "leaks"]
    assert (forward, both) == ("–", "–") and float(errors.split(", ")[0]) > 0.03
    assert how == "`local_window_size`; wrong results"
    assert rows["768", "lists 2", "leaks"][0] != "–"
    assert rows["768", "lists 2", OWN][-1].endswith("RuntimeError: an earlier call's")
    failed = "`local_window_size`; ValueError: no kernel for this"
    assert rows["768", "window 200", "fails"] == [*"–––", "–, –", "–", failed]
    assert rows["768", "lists 2", "fails"] == [*"–––––", "no call for it"]
    why = "not installed: no module `none_a` and `none_b`"
    assert rows["all", "all", "missing"] == [*"–––––", why]
    assert rows["all", "all", "Transformer Engine"][-1].endswith("compiled with CUDA and cuDNN")
    assert len(calls) == 5 and not (tmp_path / "scratch").exists()
    assert command.main(argv) == text and len(calls) == 5
    lines = (tmp_path / "rows").read_text().splitlines(keepends=True)
    removed = dict(problem=cases[0], kernels="right")
    left = [x for x in lines if not removed.items() <= json.loads(x).items()]
    (tmp_path / "rows").write_text("".join(left) + lines[0][:20])  # as an abort leaves it
    command.main(argv)
    assert calls[5:] == cases[:1] and len(command.read(tmp_path / "rows")) == 7
    assert "measured" in capsys.readouterr().err


def test_processes_that_end_without_a_result_are_rows(tmp_path, monkeypatch):
    """One compiles for too long, one crashes while it measures, and one after it."""

    def measured(jobs, at_once, receive, log, seconds):
        assert (at_once, seconds) == (5, 70)
        assert jobs[0][0] == "inputs of 768 tokens"
        assert json.loads(jobs[0][1][-1])["cases"] == [f"{SHAPE},dense", f"{SHAPE},window200"]
        for fate, (name, started) in zip(fates, jobs[1:], strict=True):
            job = json.loads(started[-1])
            assert started[-2] == "benchmarks.scoreboard.measure"
            row = {x: job[x] for x in ("problem", "kernels")}
            if fate == "measures, then crashes":
                receive(row | {"out": 1e-3, "forward": 2.0})
                receive(row | {"total": 8.0})
            log(f"FAILED to {fate.split()[0].removesuffix('s')}: {name}")

    fates = ["compile", "measure", "measures, then crashes"]
    monkeypatch.setattr(workers, "measure", measured)
    argv = ["--results", str(tmp_path / "rows"), "--scratch", str(tmp_path / "scratch")]
    argv += ["--workers", "5", "--seconds", "70", "--packages", OWN, "jax.nn, cuDNN"]
    done = {"problem": f"{SHAPE},dense", "kernels": "jax.nn, cuDNN", "error": "RuntimeError: no"}
    (tmp_path / "rows").write_text(json.dumps(done) + "\n")
    text = command.main([*argv, "--cases", f"{SHAPE},dense", f"{SHAPE},window200"])
    reasons = [line.rpartition("; ")[2] for line in text.splitlines() if line.startswith("| 768")]
    assert reasons[:3] == [
        "FAILED to compile: crashed, or took more than 70 seconds |", "RuntimeError: no |",
        "FAILED to measure: crashed, or took more than 70 seconds |",
    ]  # fmt: skip
    assert "| 2.00 | 8.00 |" in reasons[3]


@pytest.mark.slow
def test_real_workers(tmp_path):
    argv = ["--results", str(tmp_path / "rows"), "--scratch", str(tmp_path / "scratch")]
    argv += ["--workers", "2", "--repeats", "1", "--packages", OWN, "--cases", f"{SHAPE},dense"]
    command.main([*argv, "--out", str(tmp_path / "page.md")])
    row = command.read(tmp_path / "rows")[f"{SHAPE},dense", OWN]
    assert {"forward", "total"} < row.keys() and row["gradients"] < 1e-2
    assert f"| 768 | dense | {OWN} |" in (tmp_path / "page.md").read_text()
