"""The benchmark that takes training steps with every pattern."""

import pytest

from benchmarks.step import patterns
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.utils.fields import options


@options
class Broken(Dense):
    """A pattern that cannot choose."""

    def select(self, q, k, context):
        raise ValueError("no index today")


def test_a_pattern_that_fails_leaves_the_others_their_steps(tmp_path, capsys):
    out = tmp_path / "table.md"
    sizes = {
        "parallel.cpu_devices": 8, "parallel.nodes": 1, "parallel.devices_per_node": 1,
        "data.seq_len": 128, "model.num_layers": 1, "model.intermediate_size": 64,
    }  # fmt: skip
    overrides = [f"--{field}={value}" for field, value in sizes.items()]
    broken = f"{__name__}:Broken"
    with pytest.raises(SystemExit, match="1 patterns failed: .*no index today"):
        patterns.main([
            "--config", "tiny", "--patterns", broken, "dense", "--steps", "2", "--out", str(out),
            *overrides,
        ])  # fmt: skip
    rows = [line.split(" | ") for line in out.read_text().splitlines()[-2:]]
    assert "failed: ValueError" in rows[0][1]
    assert rows[1][0] == "| dense" and rows[1][1] == "1.0000"
    first, second = map(float, rows[1][3].split())
    assert second < first < 6
    assert capsys.readouterr().out.splitlines() == out.read_text().splitlines()
