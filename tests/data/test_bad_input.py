"""Invalid input raises an error that names the field or the file."""

import dataclasses
import gzip
import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mtraining_jax.data.loader import Loader
from mtraining_jax.data.sources import jsonl
from mtraining_jax.data.sources.jsonl import JsonLines
from mtraining_jax.data.sources.text import TextFiles
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value
from tests.data.common import error_of, loader_of, section
from tests.data.mds_writer import packers


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    return {"source": "text", "paths": (str(path),)}


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("mode", "packed", '"concat", "exact" or "pack"'),
        ("seq_len", 1, "at least 2"),
        ("batch_size", 0, "at least 1"),
        ("seed", -1, "at least 0 and less than 4294967296"),
        ("seed", 2**32, "at least 0 and less than 4294967296"),
        ("eos", 257, "is outside the vocabulary: model.vocab_size = 257"),
        ("eos", "</s>", "must be an id"),
    ],
)
def test_impossible_option(text, field, value, allowed):
    message = error_of(**text | {field: value})
    assert f"data.{field} = {toml_value(value)} " in message and allowed in message


def test_impossible_source_and_type(text):
    assert (
        'data.source = "json" is not allowed; did you mean "jsonl"? It must be one of "python_std'
        in error_of(source="json")
    )
    message = error_of(**text | {"source": "tokens"}, token_dtype="float32")
    assert 'data.token_dtype = "float32" is not allowed: it must be "uint8", "uint16"' in message


def test_the_loader_validates_the_section(text):
    source = TextFiles(paths=())
    data = dataclasses.replace(section(**text), source_options=source)
    with pytest.raises(UserError, match='data.source = "text" needs data.paths, the files'):
        Loader(data, permutation=np.arange(4), vocab_size=257)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "tokens"])
def test_missing_and_empty_files(tmp_path, source):
    missing = str(tmp_path / "missing.npy")
    assert error_of(source=source, paths=(missing,)) == f'data.paths: "{missing}" does not exist'
    error = f'data.paths: "{tmp_path}" has no file'
    compressed = "".join(f" or *.jsonl.{suffix}" for suffix in ("gz", "bz2", "zst"))
    wanted = {
        "jsonl": f" *.jsonl{compressed}",
        "parquet": " *.parquet",
        "tokens": " *.npy or *.bin",
    }
    assert error_of(source=source, paths=(str(tmp_path),)) == error + wanted.get(source, "")
    assert error_of(source=source, paths=(f"{tmp_path}/*.x",)) == (
        f'data.paths: "{tmp_path}/*.x" has no file'
    )
    url = "s3://bucket/*.npy"
    assert error_of(source=source, paths=(url,)) == (
        f'data.paths: "{url}" is a URL, but only local paths are supported: download it or mount '
        "its file system"
    )
    fifo, link = tmp_path / "fifo.npy", tmp_path / "link.npy"
    os.mkfifo(fifo), link.symlink_to("gone.npy")
    assert error_of(source=source, paths=(str(fifo),)) == (
        f'data.paths: "{fifo}" is not a regular file'
    )
    assert error_of(source=source, paths=(str(link),)) == (
        f'data.paths: "{link}" is a link to gone.npy, which does not exist'
    )
    empty = tmp_path / "empty.npy"
    empty.touch()
    assert error_of(source=source, paths=(str(empty),)) == f"data.paths: {empty} is empty"


def test_only_empty_files(tmp_path):
    (tmp_path / "a.txt").touch()
    assert error_of(source="text", paths=(str(tmp_path),)) == (
        f"data.paths: {tmp_path}: all files are empty"
    )


@pytest.mark.parametrize("mode", ["concat", "exact"])
def test_too_little_data(text, mode):
    message = error_of(**text, seq_len=11, mode=mode)
    assert "data.seq_len = 11" in message
    assert ("use a smaller data.seq_len" if mode == "concat" else "9 to 9") in message


def test_too_few_tokens_in_file(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(3))
    message = error_of(source="tokens", paths=(str(path),))
    assert "data.seq_len = 4 is more than the 3 tokens" in message


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    assert f"{path} is not UTF-8 text (byte 3); convert it" in error_of(
        source="text", paths=(str(path),)
    )


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "cut of', "is not valid JSON (Unterminated string starting at: character 10"),
        (b'{"text": "\xff"}', "is not valid JSON (not UTF-8 at byte 11)"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'["text"]', "is an array, not a JSON object"),
        (
            b'{"body": "x", "id": 3}',
            'has no field of data.text_field = "text"; it has "body", "id"',
        ),
        (b"{}", "it has no fields"),
        (b'{"text": 3}', "is a number, not text"),
        (b'{"text": [null]}', "is an array, not text"),
        (
            b'{"id": {"text": 1}, "text": "a", "text": "b"}',
            'is not valid JSON (an object has two fields named "text")',
        ),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_malformed_json_line(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    message = error_of(source="jsonl", paths=(str(path),))
    assert f"{path}, line 3" in message and reason in message


def test_json_lines_with_bom_and_crlf(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "fine"}\r\n{"text": "too"}\r\n')
    source = JsonLines(paths=(str(path),))
    assert [text for _, text in source.documents()] == ["fine", "too"]


@pytest.mark.parametrize(("kind", "suffix"), [("gz", "gz"), ("bz2", "bz2"), ("zstd", "zst")])
def test_compressed_json_lines(tmp_path, monkeypatch, kind, suffix):
    path, pack = tmp_path / f"a.jsonl.{suffix}", packers()[kind]
    whole = pack(b'{"text": "fine"}\n') + pack(b'{"text": "too"}')
    path.write_bytes(whole)
    assert [text for _, text in JsonLines(paths=(str(tmp_path),)).documents()] == ["fine", "too"]
    for damaged in (whole[:-3], whole[:9]):
        path.write_bytes(damaged)
        message = error_of(source="jsonl", paths=(str(path),))
        assert message.startswith(f"data.paths: {path} cannot be read (")
    path.write_bytes(pack(b"\n" + b" " * 2**20 + b"x"))
    monkeypatch.setattr(jsonl, "_LONGEST_LINE", 2**20)
    message = error_of(source="jsonl", paths=(str(path),))
    assert message == f"{path}, line 2 is longer than 1,048,576 bytes"


@pytest.mark.parametrize(
    "content, reason",
    [
        (np.arange(8.0), "has float64, not integer"),
        (np.zeros((2, 2, 2), int), "has 3 axes"),
        (np.zeros((0, 4), int), "is empty (shape (0, 4))"),
        (np.asfortranarray(np.zeros((4, 4), int)), "is in Fortran order"),
        (np.array([{}, {}]), "has object"),
    ],
)
def test_invalid_npy(tmp_path, content, reason):
    path = tmp_path / "a.npy"
    np.save(path, content)
    message = error_of(source="tokens", paths=(str(path),))
    assert str(path) in message and reason in message


def test_a_long_npy_header_is_not_quoted_whole(tmp_path):
    path, header = tmp_path / "a.npy", b"'" + 2000 * b"x" + b"'"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert len(error_of(source="tokens", paths=(str(path),))) < 400


@pytest.mark.parametrize("keep", [4, 20, -1])
def test_truncated_npy(tmp_path, keep):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(8))
    path.write_bytes(path.read_bytes()[:keep])
    message = error_of(source="tokens", paths=(str(path),))
    assert f"{path} is truncated" in message
    if keep == -1:
        assert "needs 192 bytes, but the file has 191" in message


def test_truncated_bin(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"12345")
    message = error_of(source="tokens", paths=(str(path),))
    assert f'{path} is truncated or not of data.token_dtype = "uint16": its 5 bytes' in message


def test_only_known_suffixes_are_read_as_token_ids(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("text of an even size")
    assert error_of(source="tokens", paths=(str(path),)) == (
        f'data.paths: {path} has neither the suffix .npy nor .bin; data.source = "tokens" reads '
        "NumPy files and raw token ids"
    )


def safetensors(size=4096):
    return (100).to_bytes(8, "little") + b'{"w": {"dtype": "F32"}}' + bytes(size)


@pytest.mark.parametrize(
    "content, kind",
    [
        (safetensors(), "a safetensors file of model weights"),
        (safetensors()[:33], "a safetensors file of model weights"),
        (b"PAR1" + bytes(60), 'a Parquet file, which data.source = "parquet" reads'),
        (b"\x93NUMPY\x01\x00" + bytes(60), "a NumPy file without the suffix .npy"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (gzip.compress(bytes(60), mtime=0), "compressed with gzip"),
        (bytes(257) + b"ustar" + bytes(250), "a tar archive"),
        (b"MMIDIDX\x00\x00" + bytes(9), "a Megatron index"),
    ],
)
def test_other_file_types_are_not_read_as_token_ids(tmp_path, content, kind):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    message = error_of(source="tokens", paths=(str(path),), token_dtype="uint8")
    assert message.startswith(f"data.paths: {path} is {kind}")
    path.write_bytes(b"Text of ASCII characters, in English.\n")
    message = error_of(source="tokens", paths=(str(path),))
    assert message.startswith(f'data.paths: {path} is text, which data.source = "text" or "jsonl"')


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_id_outside_the_vocabulary(tmp_path, bad):
    path = tmp_path / "b.npy"
    np.save(tmp_path / "a.npy", np.arange(5))
    np.save(path, np.asarray([1, 2, bad, 4]))
    assert error_of(source="tokens", paths=(str(tmp_path),), vocab_size=10) == (
        f"{path}: token id {bad} at position 2 is outside the vocabulary "
        "(0 to 9, from model.vocab_size)"
    )


def test_id_outside_the_vocabulary_in_a_file_that_is_validated_per_batch(tmp_path):
    path = tmp_path / "long.bin"
    place = 2**26 + 1
    with path.open("wb") as file:
        file.truncate(2 * (2**26 + 4))
        file.seek(2 * place)
        file.write(np.uint16(300).tobytes())
    loader = loader_of(section(source="tokens", paths=(str(path),)), permutation=np.arange(4)[::-1])
    next(loader)
    state = loader.get_state()
    state["iterator"] = {"next_index": 2**24}
    loader.set_state(state)
    with pytest.raises(UserError, match=f"token id 300 at position {place} is outside"):
        next(loader)


def test_an_end_token_that_the_model_lacks(tmp_path, text):
    assert error_of(**text, vocab_size=256) == (
        'data.eos = 256 of data.tokenizer = "bytes" is outside the vocabulary: model.vocab_size = '
        "256"
    )
    name = save_tokenizer(tmp_path / "tokenizer.json", ["?", "a", "</s>"])
    assert error_of(**text, tokenizer=name, vocab_size=2) == (
        f'data.eos = 2 of data.tokenizer = "{name}" is outside the vocabulary: model.vocab_size = 2'
    )


@pytest.mark.parametrize("eos, reason", [(None, "data.eos is not set"), ("</s>", "must be an id")])
def test_exact_documents_of_a_1d_file_need_eos(tmp_path, eos, reason):
    np.save(tmp_path / "a.npy", np.arange(5))
    message = error_of(source="tokens", paths=(str(tmp_path),), mode="exact", eos=eos)
    assert reason in message


def test_exact_finds_nothing_in_token_file(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 7), int))
    message = error_of(source="tokens", paths=(str(tmp_path),), mode="exact")
    assert message == (
        'data.mode = "exact" keeps documents of exactly data.seq_len = 4 tokens, but none '
        "of 3 documents matches (7 to 7 tokens)"
    )


def write_parquet(tmp_path, **columns):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    "column, token_field, reason",
    [
        ({"body": ["x"]}, None, 'lacks the column of data.text_field = "text"; it has "body"'),
        ({"text": [1]}, None, 'the column of data.text_field = "text" is int64, not text'),
        ({"text": ["x"]}, "ids", 'lacks the column of data.token_field = "ids"'),
        ({"ids": ["x"]}, "ids", "is string, not a list of integers"),
        ({"ids": [[0.5]]}, "ids", "not a list of integers"),
        (
            {"ids": [[1], [2, None]]},
            "ids",
            'row 1: the column of data.token_field = "ids" has a null',
        ),
        ({"ids": [[1, 2], [3, 257]]}, "ids", "row 1: token id 257 at position 1 is outside"),
    ],
)
def test_parquet_columns(tmp_path, column, token_field, reason):
    path = write_parquet(tmp_path, **column)
    message = error_of(source="parquet", paths=(str(path),), token_field=token_field)
    assert str(path) in message and reason in message


@pytest.mark.parametrize(
    "eos, reason", [(257, "data.eos = 257 is outside"), ("</s>", "must be an id")]
)
def test_parquet_eos(tmp_path, eos, reason):
    path = write_parquet(tmp_path, ids=[[1, 2]])
    message = error_of(source="parquet", paths=(str(path),), token_field="ids", eos=eos)
    assert reason in message


def test_truncated_parquet(tmp_path):
    path = write_parquet(tmp_path, text=["some text"] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} is not a valid Parquet file" in error_of(source="parquet", paths=(str(path),))


def test_corrupt_parquet(tmp_path):
    path = write_parquet(tmp_path, text=[f"text {i}" for i in range(100)])
    content = bytearray(path.read_bytes())
    content[4:300] = b"\xff" * 296
    path.write_bytes(content)
    message = error_of(source="parquet", paths=(str(path),))
    assert f"{path} cannot be read after row 0" in message


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = write_parquet(tmp_path, text=["some text"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = error_of(source="parquet", paths=(str(path),))
    assert "pyarrow" in message and "uv run --extra parquet" in message


def save_tokenizer(path, words):
    Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="?")).save(str(path))
    return str(path)


def test_unreadable_tokenizer(tmp_path, text):
    def error(path):
        return error_of(**text, tokenizer=str(path)).removeprefix(f'data.tokenizer = "{path}" ')

    assert error(tmp_path / "no.json").startswith('does not exist; it must be "bytes" or')
    assert error(tmp_path).startswith('is not a file; it must be "bytes" or')
    (tmp_path / "model").mkdir()
    inside = save_tokenizer(tmp_path / "model" / "tokenizer.json", ["?", "</s>"])
    assert error(tmp_path / "model") == f'is a folder; use "{inside}"'
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"model": {}}))
    assert error(broken).startswith("is not a tokenizer.json (")
    empty = save_tokenizer(tmp_path / "empty.json", [])
    assert "empty vocabulary" in error_of(**text, tokenizer=empty)
    no_unknown = save_tokenizer(tmp_path / "no_unknown.json", ["a", "</s>"])
    assert error_of(**text, tokenizer=no_unknown).startswith(
        f'data.tokenizer = "{no_unknown}" cannot encode text (WordLevel error'
    )


@pytest.mark.parametrize(
    "words, eos, reason",
    [
        (["?"], None, "has none of <|endoftext|>"),
        (["?", "</s>", "<eos>"], None, "has </s> and <eos>; set data.eos"),
        (["?"], "<eos>", 'data.eos = "<eos>" is not a token of data.tokenizer = '),
        (["?"], 1, "data.eos = 1 must be from 0 to 0, the ids of data.tokenizer"),
    ],
)
def test_eos_of_a_tokenizer(tmp_path, text, words, eos, reason):
    name = save_tokenizer(tmp_path / "tokenizer.json", words)
    assert reason in error_of(**text, tokenizer=name, eos=eos)


def test_full_temporary_folder(tmp_path, text, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    message = error_of(**text)
    assert "No space left on device" in message and "TMPDIR" in message
