"""One process of a host tokenizes for all of them."""

import gc
import gzip
import json
import os
import subprocess
import sys

import pytest

from mtraining_jax.data import token_cache
from tests.data.common import section, sequences
from tests.data.test_sources import save_tokenizer

# Starts processes that open the same data, the first one a little earlier. Prints a JSON list of
# what each found: the number of processes that read documents, and the ids or the error.
PROCESSES = """
import json, os, resource, signal, sys, time
import numpy as np
from mtraining_jax.data import token_cache
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.utils.errors import UserError

folder, case, count = os.environ["TMPDIR"], sys.argv[1], int(sys.argv[2])
token_cache.REPORT_AFTER = 0.15

def documents(number):
    open(f"{folder}/reader-{number}", "w").close()
    size = 50_000 if case == "killed" and number == 0 else 5000
    yield MaskedTokens(np.arange(size, dtype=np.uint16))
    if number == 0:
        time.sleep(0.4)
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "invalid":
            raise UserError("line 7 is bad")
    yield MaskedTokens(np.array([7, 8], np.uint16), np.array([False, True]), "with a mask")

def found(number):
    if case == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        part, lengths, notes = token_cache.tokenized(
            lambda: documents(number), np.dtype(np.uint16), "the data", "key"
        )
    except UserError as error:
        return {"error": str(error)}
    maps = [line.split() for line in open("/proc/self/maps") if "mtraining-tokens" in line]
    return {
        "ids": int(part.ids.sum()), "trained": int(part.trained.sum()), "notes": notes,
        "lengths": lengths.tolist(), "files": [line[4] for line in maps],
        "permissions": [line[1] for line in maps],
    }

children = []
for number in range(count):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(found(number)).encode())
        os._exit(0)
    os.close(write)
    children.append(read)
    while number == 0 and not os.path.exists(f"{folder}/reader-0"):
        time.sleep(0.01)
answers = [os.read(read, 100_000) for read in children]
print(json.dumps([json.loads(answer) for answer in answers if answer]))
"""
IDS = sum(range(5000)) + 15


def processes(folder, case: str, count: int) -> tuple[list, int, str]:
    """What the processes found, how many of them read documents, and what they print."""
    command = [sys.executable, "-c", PROCESSES, case, str(count)]
    env = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout), len(list(folder.glob("reader-*"))), done.stderr


def test_one_process_tokenizes_and_all_map_its_file(tmp_path):
    found, readers, printed = processes(tmp_path, "good", 8)
    assert readers == 1 and len(found) == 8
    assert all(each == found[0] for each in found)  # the same inode
    assert len(set(found[0].pop("files"))) == 1 and set(found[0].pop("permissions")) == {"r--s"}
    notes = {"": 1, "with a mask": 1}
    assert found[0] == {"ids": IDS, "trained": 5001, "notes": notes, "lengths": [5000, 2]}
    assert printed.count("note: waited 0 s for another process of this host that tokenizes") >= 7
    assert "MB of token ids so far" in printed
    assert [path.name for path in tmp_path.glob("mtraining-*/*")] == ["key.tokens"]


def test_another_process_takes_over_from_a_killed_one(tmp_path):
    found, readers, printed = processes(tmp_path, "killed", 4)
    assert [each["ids"] for each in found] == [IDS] * 3 and readers == 2
    ended = "note: the process that tokenized the data ended too early; this one starts over\n"
    assert printed.count(ended) == 1


def test_all_report_an_invalid_document_that_one_has_read(tmp_path):
    found, readers, _ = processes(tmp_path, "invalid", 4)
    assert found == [{"error": "line 7 is bad"}] * 4 and readers == 1
    assert not list(tmp_path.glob("mtraining-*/*"))


def test_full_disk(tmp_path):
    found, _, _ = processes(tmp_path, "full", 3)
    problem = f"the temporary folder {tmp_path} cannot hold the token ids of the data; set TMPDIR"
    assert len(found) == 3 and all(each["error"].startswith(problem) for each in found)
    assert not list(tmp_path.glob("mtraining-*/*"))


# ---- files and keys ----------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Lists the stored files in a new temporary folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return lambda: sorted(temporary.glob("mtraining-tokens-*/*"))


def jsonl(path, *texts):
    path.write_text("".join(json.dumps({"text": text, "other": text * 2}) + "\n" for text in texts))
    return {"source": "jsonl", "paths": (str(path),)}


def read(**fields) -> list[list[int]]:
    return sequences(**fields)[0]


def test_a_long_tokenization_is_reported(tmp_path, stored, monkeypatch, capsys):
    """Also of a small file that inflates to blank lines."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 3 * 10**5 + b'{"text": "abcd"}\n'))
    data = {"source": "jsonl", "paths": (str(path),)}
    assert read(**data) == [[*b"abcd"]] and capsys.readouterr().err == ""
    stored()[0].unlink()
    monkeypatch.setattr(token_cache, "REPORT_AFTER", 0.01)
    assert read(**data) == [[*b"abcd"]]
    note = f'note: tokenizing data.source = "jsonl" (data.paths = ["{path}"]) for 0 s: 0.0 MB of to'
    assert capsys.readouterr().err.count(note) >= 2


def test_the_key_has_files_tokenizer_and_options(tmp_path, stored):
    path = tmp_path / "a.jsonl"
    data = jsonl(path, "abcd", "efg")
    texts = [*b"abcd", 256, *b"efg"]
    assert read(**data) == [texts[:4], texts[4:]]
    first = stored()
    assert read(**data, seq_len=2) == [texts[:2], texts[2:4], texts[4:6], texts[6:]]
    assert stored() == first and len(first) == 1
    # The same size and date.
    date = path.stat().st_mtime_ns
    jsonl(path, "abcd", "xyz")
    os.utime(path, ns=(date, date))
    assert read(**data) == [texts[:4], [256, *b"xyz"]]
    assert read(**data, eos=0) == [texts[:4], [0, *b"xyz"]]
    assert read(**data, text_field="other")[0] == [*b"abcd"]
    assert read(**data, text_field="other")[1] == [*b"abcd"]
    assert read(**data, mode="exact") == [[*b"abcd"]]
    assert read(**data, mode="exact", seq_len=3) == [[*b"xyz"]]
    tokenizer = tmp_path / "tokenizer.json"
    for number in (1, 2):
        save_tokenizer(tokenizer, [(0, "?"), (3, "</s>"), (number, "abcd")])
        assert read(**data, tokenizer=str(tokenizer), seq_len=2) == [[number, 3], [0, 3]]


def test_a_new_file_of_a_folder_is_read(tmp_path, stored):
    (tmp_path / "text").mkdir()
    data = {"source": "text", "paths": (str(tmp_path / "text"),), "seq_len": 2}
    (tmp_path / "text/b").write_text("b")
    assert read(**data) == [[98, 256]]
    (tmp_path / "text/a").write_text("a")
    assert read(**data) == [[97, 256], [98, 256]]


def test_files_that_no_process_maps_are_deleted(tmp_path, stored):
    corpora = []
    for number in range(3):
        corpora.append(sequences(**jsonl(tmp_path / f"{number}.jsonl", f"text {number}"))[1])
    assert len(stored()) == 3
    del corpora
    gc.collect()
    sequences(**jsonl(tmp_path / "3.jsonl", "text 3"))
    assert len(stored()) == 1


def test_a_damaged_file_is_made_again_and_an_intact_one_is_used(tmp_path, stored, capsys):
    data = jsonl(tmp_path / "a.jsonl", "abcd")
    expected = read(**data)
    (path,) = stored()
    made, of = path.read_bytes(), f'data.source = "jsonl" (data.paths = ["{tmp_path}/a.jsonl"])'
    assert made[:2] == b"a\0" and not capsys.readouterr().err
    flipped = (made[:i] + bytes([made[i] ^ 1]) + made[i + 1 :] for i in range(0, len(made), 3))
    for damaged in (*flipped, made[:-1], made[:4], b""):
        path.write_bytes(damaged)
        assert read(**data) == expected
        note = f"note: {path} is damaged, so the token ids of {of} are made again\n"
        assert capsys.readouterr().err == note
    assert read(**data) == expected
    note = capsys.readouterr().err
    assert note.startswith(f"note: the token ids of {of} are those of {path}, made 20")


@pytest.mark.parametrize("case", ["no folder", "another user"])
def test_without_a_folder_each_process_makes_its_own(tmp_path, stored, monkeypatch, capsys, case):
    data = jsonl(tmp_path / "a.jsonl", "abcd")
    expected = read(**data)
    folder = stored()[0].parent
    if case == "another user":
        folder.rename(folder.with_name(folder.name.replace(f"-{os.getuid()}-", "-4242-")))
        monkeypatch.setattr("os.getuid", lambda: 4242)
    else:
        stored()[0].unlink()
        folder.rmdir()
        folder.write_text("a file")
    reason = "it belongs to another user" if case == "another user" else "File exists"
    assert read(**data) == expected
    error = capsys.readouterr().err
    assert error.startswith("note: the processes of this host cannot share the token ids of data.")
    assert f"({reason}), so this one makes its own" in error


def test_sources_of_unknown_files_are_not_stored(stored):
    data = section(source="tests.data.own_source:Counting", eos=0)
    assert len(data.source_options.open(data, 257).stream) == 40
    assert not stored()
