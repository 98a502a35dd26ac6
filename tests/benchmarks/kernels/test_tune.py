"""The tuner of the kernels: its candidates, and what it prints."""

from benchmarks.kernels import tune


def test_the_table_has_times_and_says_what_does_not_run(monkeypatch, tmp_path):
    found = iter([3.0, ValueError("too much shared memory\nfor this GPU"), 2.0])

    def median_ms(run, repeats):
        ms = next(found)
        if isinstance(ms, Exception):
            raise ms
        return ms

    monkeypatch.setattr(tune, "median_ms", median_ms)
    monkeypatch.setattr(tune.device, "capability", lambda: 80)
    monkeypatch.setitem(tune.HEADS, 64, (1, 1))

    class Attention:
        def __init__(self, backend):
            assert backend == "triton"

        def build(self, q, k, v, index):
            return q, k

    monkeypatch.setattr(tune, "Attention", Attention)
    out = tmp_path / "tuned.md"
    options = ["--backend=triton", "--kernel=dq", "--head-dim=64", "--masks=D", "--seq-len=2048"]
    tune.main([*options, f"--out={out}"])
    lines = out.read_text().splitlines()
    assert lines[2] == "dq, D = 64, mask D" and lines[6:] == [
        "| rows=64, keys=64, warps=4, stages=3 (in configs.py) | 3.000 | 0 |",
        "| rows=128, keys=64, warps=8, stages=3 | too much shared memory | – |",
        "| rows=64, keys=64, warps=4, stages=2 | 2.000 | 0 |",
        "",
        "Fastest: rows=64, keys=64, warps=4, stages=2",
    ]
