"""The compute-sanitizer runner, with a fake tool that prints recorded output.

And the counter of repetitions with different bits.
"""

import argparse
import ast
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.sanitize import repeat, sanitize, sanitizer
from benchmarks.sanitize.sanitizer import Result
from pallas_kernels.mosaic_gpu.kernels.row_products import LongRows, ShortRows

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at forward_mosaic_gpu_kernel+0x6e0
=========     and Read access at forward_mosaic_gpu_kernel+0x820 [512 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
# Version 2026.4 counts the launches that it is asked to list.
LAUNCHED = """\
========= COMPUTE-SANITIZER
========= Kernel launch: forward_mosaic_gpu_kernel
=========   Grid:   (2, 1, 1)
=========   Block:  (384, 1, 1)
=========
========= ERROR SUMMARY: 1 error
"""
KERNELS = Path(__file__).parents[2] / "pallas_kernels" / "mosaic_gpu"


@pytest.mark.parametrize(
    ("log", "output", "status", "verdict", "report"),
    [
        (CLEAN, "", 0, "clean", ""),
        (LAUNCHED, "", sanitizer.FOUND, "clean", ""),
        (LAUNCHED.replace("1 error", "2 errors"), "", sanitizer.FOUND, "2 reports", ""),
        (RACE, "", sanitizer.FOUND, "1 reports", "Error: Race reported between Write access"),
        (RACE, "", None, "timed out after 1 reports", "Error: Race"),
        (CLEAN, "different bits in dq\n", 1, "exit status 1", "different bits in dq"),
        ("", "Segmentation fault\n\n", 139, "no result", "Segmentation fault"),
        ("========= COMPUTE-SANITIZER\n========= Error: Device not supported.\n", "", 1,
         "no result", "Error: Device not supported."),
    ],
)  # fmt: skip
def test_logs_are_parsed(log, output, status, verdict, report):
    found = sanitizer.read(log, output, status, 1.0)
    assert found.verdict == verdict
    assert found.report.startswith(report) and bool(found.report) == bool(report)


def test_only_reports_of_incorrect_small_kernels_are_expected():
    clean, race = Result("clean", "", 2.0), Result("1 reports", "Error: Race", 3.0)
    wrong = sanitize.WRONG_BARRIERS[0]
    results = {
        ("racecheck", "lists-64"): race,
        ("memcheck", "lists-64"): clean,
        ("racecheck", wrong): race,
        ("racecheck", "dense-64"): Result("timed out", "", 9.0),
    }
    assert sanitize.failed(results) == [("racecheck", "lists-64"), ("racecheck", "dense-64")]
    lines = sanitize.table(("racecheck", "memcheck"), results)
    assert "| lists-64 | 1 reports (3 s) | clean (2 s) |" in lines
    assert "| dense-64 | timed out (9 s) | not run |" in lines
    assert lines[-1] == f"- Error: Race: racecheck of lists-64, racecheck of {wrong}"
    results["memcheck", wrong] = clean
    results["racecheck", sanitize.BARRIERS[0]] = race
    assert sanitize.worth(("racecheck", "memcheck"), results) == [
        f"- racecheck: right and reported: {sanitize.BARRIERS[0]}; wrong and not reported: none",
        f"- memcheck: right and reported: none; wrong and not reported: {wrong}",
    ]


def fake_sanitizer(folder: Path, log: str, version: str = "2025.3.1.0") -> str:
    path = folder / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys, pathlib\n"
        f"if '--version' in sys.argv: print('Version {version}')\n"
        "elif '--help' in sys.argv: print('--target-processes --log-file --kernel-name')\n"
        "else:\n"
        "    at = sys.argv.index('--log-file') + 1\n"
        f"    pathlib.Path(sys.argv[at]).write_text({log!r})\n"
        "    sys.exit(subprocess.call(sys.argv[sys.argv.index(sys.executable):]))\n"
    )
    path.chmod(0o755)
    return str(path)


def test_a_hanging_run_is_terminated_and_its_reports_are_kept(tmp_path):
    binary = fake_sanitizer(tmp_path, RACE)
    args = argparse.Namespace(out=tmp_path, sanitizer=binary, timeout=1.0)
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    result = sanitize._watch(args, "racecheck", "lists-64", program, 0, sys.maxsize)
    assert result.verdict == "timed out after 1 reports" and result.seconds < 20


@pytest.mark.parametrize(("log", "status", "said"), [(CLEAN, 0, "clean"), (RACE, 1, "1 reports")])
def test_problems_run_alone_and_then_under_each_tool(
    tmp_path, capsys, monkeypatch, log, status, said
):
    # Emulates a worker: stores results, then expects them.
    program = "import pathlib, sys; p = pathlib.Path('stored'); " + (
        "sys.exit(not p.exists()) if '--expect' in sys.argv else p.touch()"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sanitize, "_names", lambda: ["lists-64"])
    monkeypatch.setattr(sanitize, "_worker", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(sanitize, "_barriers", lambda _: {})
    binary = fake_sanitizer(tmp_path, log)
    assert sanitize.main([f"--out={tmp_path / 'out'}", f"--sanitizer={binary}"]) == status
    output = capsys.readouterr().out
    assert "1 of 1 problems right alone" in output
    # This version lacks one of the five tools.
    (row,) = [line for line in output.splitlines() if line.startswith("| lists-64")]
    assert row.count(said) == 4


def test_every_hopper_kernel_is_in_a_problem():
    """Checks the kernels of all files, by the functions that Pallas names them after.

    One that scores blocks is named after the class of its products.
    """
    from benchmarks.sanitize import small_problems

    reached = {name for problem in small_problems.problems() for name in problem.kernels}
    written = set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("launch", "plgpu.kernel"):
                written.add(ast.unparse(node.args[0]))
    written -= {"kernel", "body"}  # of `launch` itself
    written |= {LongRows.name, ShortRows.name}
    assert len(written) >= 8 and reached == written


def test_a_repetition_with_a_different_bit_is_counted():
    """In one of two steps; -0 differs from 0, and NaNs are equal."""
    counts = {"before": 0, "second": 0}

    def before():
        counts["before"] += 1

    def second(values):
        counts["second"] += 1
        zero = -0.0 if counts["second"] in (4, 7) else 0.0
        return {"y": values["x"] * jnp.float32(zero), "n": jnp.int32(3)}

    steps = [lambda values: {"x": values["in"] + 1}, second]
    inputs = {"in": jnp.asarray(np.array([1.0, np.nan], np.float32))}
    assert repeat.count_differences(steps, inputs, 9, before) == 2
    assert counts == {"before": 20, "second": 10}
