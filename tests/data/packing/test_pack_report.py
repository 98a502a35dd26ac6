"""Statistics of packed sequences, and the command inspect_data."""

import sys

import numpy as np
import pytest
from matplotlib import image

from mtraining_jax.cli.inspect_data import main
from mtraining_jax.data.packing.packs import PackArrays
from mtraining_jax.tools.corpus.pack_report import PackReport, report_on
from mtraining_jax.utils.errors import UserError


@pytest.fixture
def report():
    # Two sequences of 32 tokens in blocks of 4: documents of 5 and 9 tokens, and one of 32.
    lengths = np.array([5, 9, 32])
    packs = PackArrays(np.zeros(3, np.int64), lengths, np.array([2, 3]), 32)
    return report_on(packs, 32, 4)


def test_statistics(report):
    assert report.documents_each.tolist() == [2, 1]
    assert report.padded.tolist() == [8, 12, 32]
    assert report.waste == 1 - 46 / 64
    assert report.pairs.tolist() == [(8**2 + 12**2) / 32**2, 1]
    assert report.buckets() == [
        (4, 8, 1, 5, 8),
        (8, 16, 1, 9, 12),
        (16, 32, 0, 0, 0),
        (32, 64, 1, 32, 32),
    ]


def test_table(report):
    lines = str(report).splitlines()
    assert lines[0] == "2 sequences of 32 tokens, blocks of 4: 28.12% padding"
    assert lines[1] == "documents per sequence: 1 to 2, mean 1.5, median 2"
    assert lines[2].endswith("20.3% to 100.0%, mean 60.2%")
    assert lines[4].split()[:6] == ["4", "to", "7", "1", "10.9%", "37.5%"]
    assert lines[6].split() == ["16", "to", "31", "0", "0.0%"]
    assert lines[7].split()[:6] == ["32", "to", "63", "1", "69.6%", "0.0%"]
    assert len(lines) == 8


def test_picture(report, tmp_path, monkeypatch):
    report.draw(tmp_path / "packs.png")
    assert (tmp_path / "packs.png").read_bytes().startswith(b"\x89PNG")
    # On the right, documents alternate in color, with areas as their tokens.
    right = np.split((image.imread(tmp_path / "packs.png")[..., :3] * 255).round(), 2, axis=1)[1]
    blue, orange = ((right == color).all(-1).sum() for color in ((31, 119, 180), (255, 127, 14)))
    assert blue / orange == pytest.approx((5 + 32) / 9, rel=0.02)
    for path in (tmp_path / "no" / "packs.png", tmp_path / "packs.xyz"):
        with pytest.raises(UserError, match=f"{path} cannot be written"):
            report.draw(path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="--picture needs matplotlib"):
        report.draw(tmp_path / "packs.png")


def test_the_command(tmp_path, capsys):
    for number, length in enumerate((300, 1000, 20)):
        (tmp_path / f"{number}.txt").write_text("x" * length)
    picture = tmp_path / "packs.png"
    arguments = [
        "--config=tiny",
        "--data.source=text",
        f"--data.paths=['{tmp_path}/*.txt']",
        "--data.mode=pack",
        "--data.seq_len=1024",
        "--sparsity.block_size=128",
    ]
    assert main([*arguments, f"--picture={picture}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("text: 3 documents, 1,323 tokens; 1.5 documents per sequence, ")
    assert "2 sequences of 1,024 tokens, blocks of 128: 35.40% padding" in printed
    assert f"\npicture: {picture}\n" in printed and picture.exists()
    synthetic = [x for x in arguments if not x.startswith("--data.paths")]
    synthetic += ["--data.source=synthetic", "--data.mode=concat", "--data.mask_documents"]
    assert main(synthetic) == 0
    printed = capsys.readouterr().out
    assert "1,048,576 sequences of 1,024 tokens (statistics of the first 256)" in printed
    unread = [*arguments, "--data.paths=['no such file']"]  # reported first if data are read
    for path, message in (
        (tmp_path / "no" / "packs.png", "must be a file in an existing folder"),
        (tmp_path, "must be a file in an existing folder"),
        (tmp_path / "packs.xyz", "must end in one of .png, .pdf"),
    ):
        assert main([*unread, f"--picture={path}"]) == 2
        assert f"--picture={path} {message}" in capsys.readouterr().err
    assert main([*arguments, f"--picture={picture}", "--data.mode=concat"]) == 2
    assert "--picture draws packed documents, and data.mode = " in capsys.readouterr().err
    assert main(["--picture=a.png"]) == 2 and "--config NAME is missing" in capsys.readouterr().err
    assert main(["-h"]) == 0 and "usage: python -m" in capsys.readouterr().out


def test_samples_of_sequences(tmp_path, capsys):
    for number, text in enumerate(("a" * 20 + "b" * 20, "ü\n" * 3, "c" * 24)):
        (tmp_path / f"{number}.txt").write_text(text)
    arguments = ["--config=tiny", "--sparsity.kind=dense", "--sparsity.block_size=4"]
    arguments += ["--data.source=text", f"--data.paths=['{tmp_path}/*.txt']"]
    assert main([*arguments, "--data.seq_len=32"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "text: 3 documents, 76 tokens; 2 sequences of 32 tokens (concat)",
        "sequence 0: 1 document",
        f'  32 tokens from 0: "{"a" * 20}{"b" * 12}"',
        "sequence 1: 3 documents",
        '  9 tokens from 0: "bbbbbbbb" <end>',
        '  10 tokens from 9: "ü\\nü\\nü\\n" <end>',
        '  13 tokens from 19: "ccccccccccccc"',
    ]
    assert main([*arguments, "--data.mode=pack", "--data.seq_len=64", "--samples=1"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "sequence 0: 2 documents",
        '  10 tokens from 0: "ü\\nü\\nü\\n" <end>',
        f'  41 tokens from 12: "{"a" * 16}" ... "{"b" * 16}" <end>',  # at a block
    ]
    # Token ids, without a tokenizer.
    np.save(tmp_path / "ids.npy", np.array([5, 6, 0] * 11, np.uint16))
    arguments[-2:] = ["--data.source=tokens", f"--data.paths={tmp_path}/ids.npy", "--data.eos=0"]
    assert main([*arguments, "--model.vocab_size=300", "--data.seq_len=32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "  ..." and lines[1:3] == [
        "sequence 0: 11 documents",
        "  3 tokens from 0: [5, 6] <end>",
    ]


def test_a_report_of_one_sequence():
    one = PackReport(1, 8, 4, np.array([8]), np.array([1]))
    assert one.waste == 0 and one.pairs.tolist() == [1]
