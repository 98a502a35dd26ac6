"""The benchmark of selection at a length for a CPU."""

import pytest

from benchmarks.kernels import selection
from mtraining_jax.utils.errors import UserError

TINY = ["--seq-len", "512", "--heads", "1", "--kv-heads", "1", "--head-dim", "16", "--repeats", "1"]


def test_a_table_has_the_time_of_every_part(tmp_path):
    out = tmp_path / "found.md"
    text = selection.main([*TINY, "--patterns", "xattention,tau=1.0", "--out", str(out)])
    assert out.read_text() == text
    cells = text.splitlines()[-1].strip("| ").split(" | ")
    mass = "100 % of attention mass per row of blocks"
    assert cells[:2] == ["512", f"XAttention, stride 8, {mass}"]
    assert all(float(x) > 0 for x in (cells[2], *cells[4:7])) and cells[8] == "1.000"
    assert cells[3] == "–"


def test_the_scores_of_the_probe_queries_are_timed_alone():
    text = selection.main([*TINY, "--patterns", "vertical_slash,top_p=1.0", "--backend", "xla"])
    cells = text.splitlines()[-1].strip("| ").split(" | ")
    assert float(cells[2]) > 0 and float(cells[3]) > 0
    assert cells[4:7] == ["–"] * 3 and cells[7:] == ["0.00", "1.000"]


def test_other_patterns_are_refused():
    with pytest.raises(UserError, match='"dense" does not select lists of blocks'):
        selection.main([*TINY, "--patterns", "dense"])
