"""Runs the examples as a user would; one of them in a separate process."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_alone(name):
    """Returns the output of an example in a separate process, where warnings are errors."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns the output of an example in this process, to save the seconds of its imports."""

    def printed(name, *arguments):
        path = str(ROOT / "examples" / name)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize("name", ["nnx_attention.py", "linen_attention.py"])
def test_a_flax_module_with_sparse_attention_learns(name, run):
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run(name, "--steps", "8"))]
    assert len(losses) == 8
    assert losses[-1] < 0.8 * losses[0]


def test_the_ring_of_a_user_equals_one_device():
    found = dict(
        re.findall(
            r"(\w+): largest difference .* ([\d.e+-]+) \(relative\)", run_alone("ring_attention.py")
        )
    )
    assert set(found) == {"output", "gradients"}
    assert all(float(difference) < 1e-5 for difference in found.values())


def test_the_index_example_prints_a_table_and_draws(run, tmp_path):
    png = tmp_path / "masks.png"
    table = run("look_at_index.py", "--tokens", "512", "--png", str(png))
    assert "recall" in table and len(table.splitlines()) == 6
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_a_denoiser_searches_at_some_steps_and_reuses_its_index(run):
    options = "--train 0 --steps 4 --search 1 --layers 1 --heads 2 --block 16 --sparsity 0.5"
    lines = run("dit_adaspa.py", "--grid", "2", "8", "8", *options.split()).splitlines()
    steps = [line.split() for line in lines if re.match(r" +\d+ +(dense|search|reuse) ", line)]
    assert [step[1] for step in steps] == ["dense", "search", "reuse", "reuse"]
    assert float(steps[0][-1]) == 0
    for step in steps[1:]:  # half of the blocks keep more than half of the mass
        mean, worst, error = map(float, step[-3:])
        assert 0.5 < worst <= mean < 1 and 0 < error < 0.3
