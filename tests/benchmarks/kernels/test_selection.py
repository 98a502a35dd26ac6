"""The benchmark of selection at a length for a CPU."""

from benchmarks.kernels import selection

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
