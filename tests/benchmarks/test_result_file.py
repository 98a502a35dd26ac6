"""Result files of the benchmarks after a process that was killed while it wrote a line."""

import json

import pytest

from benchmarks import workers
from benchmarks.kernels.rows import OWN
from benchmarks.peers import __main__ as peers
from benchmarks.result_file import append_lines, read_lines
from mtraining_jax.utils.errors import UserError


def test_a_cut_last_line_is_ignored_and_replaced(tmp_path):
    path = tmp_path / "folder" / "rows.jsonl"
    assert read_lines(path) == []
    rows = [{"text": "naïve\u2028", "x": 1.5}, [1, None]]
    append_lines(path, rows[:1])
    append_lines(path, rows[1:])
    assert read_lines(path) == rows
    whole = path.read_bytes()
    for size in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:size])
        assert read_lines(path) == rows[:1]
        append_lines(path, rows[1:])
        assert path.read_bytes() == whole
    path.write_bytes(b"[1]\n[2\n[3]\n")
    with pytest.raises(UserError, match=r"rows.jsonl, line 2 is not JSON"):
        read_lines(path)


def test_peers_resume_after_a_cut_line(tmp_path, monkeypatch):
    """The next row is not glued to a line that an abort cut."""

    def measured(jobs, at_once, receive, log, seconds):
        for _, command in jobs:
            job = json.loads(command[-1])
            ran.append(job["kernels"])
            if job["kernels"]:
                row = {"problem": job["problem"], "kernels": job["kernels"], "error": "no GPU"}
                receive(row)

    ran = []
    monkeypatch.setattr(workers, "measure", measured)
    path = tmp_path / "rows.jsonl"
    argv = ["--results", str(path), "--scratch", str(tmp_path / "scratch"), "--kernels", OWN]
    argv += ["--problems", "256x1,2/1,D64,1", "512x1,2/1,D64,2"]
    text = peers.main(argv)
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second[:-9])
    assert peers.main(argv) == text and ran == ["", OWN, "", OWN, "", OWN]
    assert path.read_text() == first + second
    assert peers.main(argv) == text and len(ran) == 6
