"""Pre-tokenizing a corpus: deterministic, with any number of processes and interruptions."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtraining_jax.cli.tokenize_corpus import main
from mtraining_jax.data import documents as data_documents
from mtraining_jax.data.documents import pretokenize_hint
from mtraining_jax.data.sources.tokens import TokenFiles
from mtraining_jax.tools.corpus.tokenizing import parts, tokenize_corpus
from mtraining_jax.utils.errors import UserError
from tests.data.common import VOCAB, loader_of, section, sequences
from tests.training import common
from tests.training.common import tiny_config

TEXTS = [chr(97 + i % 26) * (i * 7 % 23) for i in range(40)]
PART = 60  # bytes of documents


@pytest.fixture
def corpus(tmp_path):
    return written(tmp_path)


def written(folder):
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return section(source="jsonl", paths=(str(path),))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Token files of the corpus, written by two processes."""
    folder = tmp_path_factory.mktemp("whole")
    data = written(folder)
    run(data, folder / "out", processes=2)
    return folder / "out"


def run(data, folder, processes=1, **arguments):
    return tokenize_corpus(data, VOCAB, folder, processes, part_bytes=PART, **arguments)


def parts_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}


def test_parts_depend_on_documents_only(corpus):
    found = list(parts(corpus.source_options, PART))
    read = [document for documents, _, _ in found for _, document in documents]
    assert [x if isinstance(x, str) else x.ids.tolist() for x in read] == [x or [] for x in TEXTS]
    assert all(size >= PART for _, _, size in found[:-1]) and len(found) > 3
    again = [checksum for _, checksum, _ in parts(corpus.source_options, PART)]
    assert again == [checksum for _, checksum, _ in found]


def test_empty_documents_at_the_end_of_a_part_belong_to_it(tmp_path):
    """A part of empty documents only would be a token file that runs refuse."""
    texts = ["", "a" * PART, "", "", "b" * PART, ""]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = parts(section(source="jsonl", paths=(str(path),)).source_options, PART)
    assert [len(documents) for documents, _, _ in found] == [4, 2]


def test_token_files_match_the_tokens_of_a_run(corpus, whole, tmp_path):
    totals = run(corpus, tmp_path / "one")
    tokens = sum(len(text) + 1 for text in TEXTS if text)
    assert (totals.documents, totals.tokens, totals.found) == (len(TEXTS), tokens, 0)
    assert parts_of(tmp_path / "one") == parts_of(whole)
    expected, _ = sequences(source="jsonl", paths=corpus.source_options.paths, seq_len=8)
    found, _ = sequences(source="tokens", paths=(str(tmp_path / "one"),), seq_len=8)
    assert found == expected
    # Documents are known without data.eos.
    fields = {"mode": "pack", "seq_len": 32, "shuffle": False, "batch_size": 5}
    batches = [
        next(loader_of(section(**fields, **of), block_size=4))
        for of in (
            {"source": "jsonl", "paths": corpus.source_options.paths},
            {"source": "tokens", "paths": (str(tmp_path / "one"),)},
        )
    ]
    jax.tree.map(np.testing.assert_array_equal, *batches)


def test_documents_of_token_ids(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4))
    with pytest.raises(UserError, match='data.source = "tokens" has no documents to tokenize'):
        run(section(source="tokens", paths=(str(tmp_path / "a.npy"),)), tmp_path / "out")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"ids": [[1, 2], [], [3, 0], [4]]}), path)
    data = section(source="parquet", paths=(str(path),), token_field="ids", eos=0)
    totals = tokenize_corpus(data, 100_000, tmp_path / "out", 1)
    ids = np.load(tmp_path / "out" / "part-00000.npy")
    assert ids.dtype == np.uint32 and ids.tolist() == [1, 2, 0, 3, 0, 4, 0]
    assert np.load(tmp_path / "out" / "part-00000.npy.lengths").tolist() == [3, 0, 2, 2]
    assert (totals.documents, totals.tokens) == (4, 7)


def test_a_killed_command_resumes(corpus, whole, tmp_path):
    folder, script = tmp_path / "killed", tmp_path / "script.py"
    script.write_text(
        "if __name__ == '__main__':\n"
        "    import sys, time\n"
        "    from pathlib import Path\n"
        "    from mtraining_jax.config import Config\n"
        "    from mtraining_jax.tools.corpus.tokenizing import tokenize_corpus\n"
        "    options = {'data.source': 'jsonl', 'data.paths': f'[\"{sys.argv[1]}\"]'}\n"
        "    data = Config.load('tiny', options).data\n"
        "    def wait(totals, read): time.sleep(0.2)\n"
        f"    tokenize_corpus(data, {VOCAB}, Path(sys.argv[2]), 1, wait, part_bytes={PART})\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), corpus.source_options.paths[0], str(folder)],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        end = time.monotonic() + 60
        while not (folder / "part-00001.json").exists() and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    records = sorted(path.name for path in folder.glob("part-*.json"))
    assert 2 <= len(records) < len(list(whole.glob("part-*.json")))
    with pytest.raises(UserError, match="is incomplete: .* tokenize-corpus has not finished"):
        TokenFiles(paths=(str(folder),)).open(section(), VOCAB)
    # The worst interruption: a part without its record, and a truncated file.
    (folder / records[-1]).unlink()
    (folder / records[-1].replace("json", "npy")).write_bytes(b"half")
    (folder / ".part-00009.npy.1").write_bytes(b"half")
    kept = {name: at for name, at in times(folder).items() if name[:10] < records[-1][:10]}
    assert run(corpus, folder).found == len(records) - 1
    assert kept.items() <= times(folder).items()
    assert parts_of(folder) == parts_of(whole) and not list(folder.glob(".*"))


def test_a_second_call_rewrites_only_changed_parts(corpus, tmp_path):
    folder = tmp_path / "out"
    first = run(corpus, folder)
    before = times(folder)
    assert run(corpus, folder).found == first.parts and times(folder) == before
    path = tmp_path / "corpus.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:20], lines[20].replace('"}', 'x"}')]))
    second = run(corpus, folder)
    assert second.documents == 21 and 0 < second.found < second.parts < first.parts
    assert len(list(folder.glob("part-*.json"))) == second.parts
    expected, _ = sequences(source="jsonl", paths=corpus.source_options.paths, seq_len=8)
    assert sequences(source="tokens", paths=(str(folder),), seq_len=8)[0] == expected


def test_a_folder_with_other_content_is_rejected(corpus, tmp_path):
    folder = tmp_path / "out"
    run(corpus, folder)
    other = section(source="jsonl", paths=corpus.source_options.paths, eos=7)
    with pytest.raises(UserError, match=r"was started with data.eos = 256, but now it is 7"):
        run(other, folder)
    with pytest.raises(UserError, match='data.paths: "nowhere" does not exist'):
        run(section(source="jsonl", paths=("nowhere",)), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="has other files: choose an empty folder"):
        run(corpus, tmp_path)
    (folder / "token_parts.json").write_text("{}")
    with pytest.raises(UserError, match=r"token_parts.json cannot be read \('version'\)"):
        run(corpus, folder)


def test_error_if_a_process_is_killed(corpus, tmp_path):
    def kill(totals, read):
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(UserError, match="a tokenizer process was killed, possibly out of memory"):
        run(corpus, tmp_path / "out", report=kill)


def test_errors_locate_invalid_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    data = section(source="jsonl", paths=(str(path),))
    with pytest.raises(UserError, match="line 2 has text that is not valid Unicode"):
        run(data, tmp_path / "out")
    path.write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="has no documents with tokens"):
        run(data, tmp_path / "empty")


def test_the_command(corpus, tmp_path, capsys):
    arguments = [
        "--config=tiny",
        "--data.source=jsonl",
        f"--data.paths=['{corpus.source_options.paths[0]}']",
    ]
    out = tmp_path / "out"
    assert main([f"--out={out}", "--processes=1", *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"{out}: 40 documents, 484 tokens in 1 part, 2 without content " in printed
    assert f"--data.source=tokens --data.paths='[\"{out}\"]'" in printed
    assert "tokens in 1 part" in printed
    for bad, words in (
        ([], "--out FOLDER, the folder for the token files, is missing"),
        ([f"--out={out}"], "--config NAME is missing; choose one of "),
        (
            [f"--out={out}", "--processes=0", *arguments],
            "--processes: 0 must be an integer of at least 1",
        ),
        ([f"--out={out}", "--processes=x"], "--processes: x must be an integer"),
        ([f"--out={out}", "--config=tiny", "--data.pat=a"], "data.pat is not a field"),
    ):
        assert main(bad) == 2 and words in capsys.readouterr().err
    assert main(["--help"]) == 0 and "usage: " in capsys.readouterr().out


def test_hint_for_a_large_corpus(corpus, monkeypatch):
    assert pretokenize_hint(corpus) is None and pretokenize_hint(section()) is None
    monkeypatch.setattr(data_documents, "LARGE", 100)
    line = pretokenize_hint(corpus)
    assert line.startswith("one process of each host tokenizes data.paths (0 MiB) at startup")
    assert "mtraining_jax tokenize-corpus --help" in line


def test_a_run_prints_the_hint_first(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 100}))
    data = {"source": "jsonl", "paths": [str(path)]}
    config = tiny_config(tmp_path, data=data, model={"vocab_size": VOCAB})
    for large, printed in ((2**20, False), (10, True)):
        monkeypatch.setattr(data_documents, "LARGE", large)
        with pytest.raises(UserError, match="data.seq_len = 128 is more than the 101 tokens"):
            common.run(config)
        assert ("mtraining_jax tokenize-corpus --help" in capsys.readouterr().out) == printed
