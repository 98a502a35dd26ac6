"""The benchmark of windows at a length for a CPU."""

from benchmarks.kernels import windows


def test_a_table_compares_windows_with_dense_attention(tmp_path):
    tiny = ["--heads", "1", "--kv-heads", "1", "--head-dim", "16", "--repeats", "1"]
    out = tmp_path / "found.md"
    text = windows.main(["--seq-len", "512", "--windows", "200", *tiny, "--out", str(out)])
    assert out.read_text() == text
    dense, window = (line.strip("| ").split(" | ") for line in text.splitlines()[-2:])
    assert dense[:2] == ["512", "dense"] and dense[4:] == ["1.00", "1.00"]
    assert window[:2] == ["512", "200"] and all(float(x) > 0 for x in window[2:4])
