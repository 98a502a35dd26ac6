"""The benchmark of attention of new tokens, at a tiny size."""

from benchmarks.kernels import decoding


def test_a_table_of_one_case(monkeypatch, tmp_path):
    monkeypatch.setattr(decoding, "CASES", ((512, 1, 4, 2),))
    monkeypatch.setattr(decoding, "KERNELS", "xla")
    monkeypatch.setattr(decoding, "_MOST_LAYERS", 2)
    monkeypatch.setattr(decoding, "_MOST_PASSES", 1)
    out = tmp_path / "table.md"
    monkeypatch.setattr("sys.argv", ["decoding", "--repeats=1", "--out", str(out)])
    decoding.main()
    rows = [x.split(" | ") for x in out.read_text().splitlines() if x.startswith("| 512")]
    assert [row[3] for row in rows] == ["100 %", "100 %", "25 %", "25 %", "50.0 %, selected"]
    assert all(row[-1] == "yes |" for row in rows)
