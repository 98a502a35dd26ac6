"""The benchmark of packed documents at a length that a CPU can do."""

import dataclasses
import functools

from benchmarks.kernels import documents, masks, programs
from benchmarks.kernels.masks import BLOCK
from mtraining_jax.sparsity.documents import Documents


def test_packs_fill_a_sequence():
    found = documents.packs(64 * BLOCK)
    assert list(found) == ["1 x 8192", "8 x 1024", "64 x 128", "mixed"]
    for lengths in found.values():
        ends = Documents.from_lengths([lengths], 64 * BLOCK, BLOCK).table[0, :, 1]
        assert ends.max() >= 63 and len(lengths) in (1, 8, 64, 6)


def test_every_pack_is_timed(tmp_path, monkeypatch):
    # Blocks of half the size: unoptimised programs run in a quarter of the time.
    block, whole = BLOCK // 2, documents._PATTERNS["vertical_slash"]
    for module in (masks, documents, programs):
        monkeypatch.setattr(module, "BLOCK", block)
    smaller = functools.partial(dataclasses.replace, block_size=block)
    monkeypatch.setitem(documents._PATTERNS, "vertical_slash", lambda below: smaller(whole(below)))
    seq_len, out = 8 * block, tmp_path / "found.md"
    monkeypatch.setattr(documents, "packs", lambda _: {"a pack": [100, 150], "b": [9]})
    options = ["--heads", "1", "--kv-heads", "1", "--head-dim", "16", "--repeats", "1"]
    options += ["--columns=100", "--choose", "vertical_slash", "--packs=a"]
    text = documents.main([f"--seq-len={seq_len}", *options, f"--out={out}"])
    assert out.read_text() == text
    rows = [x.strip("| ").split(" | ") for x in text.splitlines() if x.startswith("| ")]
    rows = {row[0]: row[1:] for row in rows if row[0] not in ("---", "pack")}
    names = ["no documents", "a pack"]
    kinds = "dense", "lists", "lists and columns", "vertical_slash"
    assert list(rows) == [f"{kind}, {x}" for kind in kinds for x in names]
    for name, count, tiles in (("dense, no documents", 1, 36), ("dense, a pack", 2, 3 + 6)):
        assert rows[name][0] == str(count)
        assert abs(float(rows[name][1]) / (tiles * block**2) - 1) < 0.01
    assert rows["lists, no documents"][5] == "1.00"
    assert all(float(x) > 0 for name in names for x in rows[f"vertical_slash, {name}"])
