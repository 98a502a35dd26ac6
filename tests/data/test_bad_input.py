"""Invalid input raises an error that names the field or the file."""

import dataclasses
import gzip
import io
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


@pytest.mark.parametrize("mode", ["concat", "exact"])
def test_too_little_data(text, mode):
    message = error_of(**text, seq_len=11, mode=mode)
    assert "data.seq_len = 11" in message
    assert ("use a smaller data.seq_len" if mode == "concat" else "9 to 9") in message


def npy(content):
    file = io.BytesIO()
    np.save(file, content)
    return file.getvalue()


def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def safetensors(size=4096):
    return (100).to_bytes(8, "little") + b'{"w": {"dtype": "F32"}}' + bytes(size)


EIGHT, IDS = npy(np.arange(8)), {"token_field": "ids"}
WIDE_IDS = np.random.default_rng(0).integers(0, 151_936, 300)
WIDE_IDS[7] = 0  # one id 0 does not make them int64
WORDS = 'is text, which data.source = "text" or "jsonl"'
# Of each source, files with bad content, the fields of the section, and what the error says.
# "PATH" is the file, "FOLDER" its folder.
FILES = {
    "text": [
        ("a.txt", b"", {"paths": ("FOLDER",)}, "data.paths: FOLDER: all files are empty"),
        ("a.txt", b"abc\xff", {}, "PATH is not UTF-8 text (byte 3); convert it"),
    ],
    "jsonl": [
        ("a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n", {}, f"PATH, line 3{reason}")
        for line, reason in [
            (
                b'{"text": "cut of',
                " is not valid JSON (Unterminated string starting at: character ",
            ),
            (b'{"text": "\xff"}', " is not valid JSON (not UTF-8 at byte 11)"),
            (b"[" * 100_000, " is not valid JSON"),
            (b'["text"]', " is an array, not a JSON object"),
            (
                b'{"body": "x", "id": 3}',
                ' has no field of data.text_field = "text"; it has "body", "id"',
            ),
            (b"{}", ' has no field of data.text_field = "text"; it has no fields'),
            (b'{"text": 3}', ': the field of data.text_field = "text" is a number, not text'),
            (b'{"text": [null]}', ': the field of data.text_field = "text" is an array, not text'),
            (
                b'{"id": {"text": 1}, "text": "a", "text": "b"}',
                ' is not valid JSON (an object has two fields named "text")',
            ),
            (b'{"text": "\\ud800"}', " has text that is not valid Unicode"),
        ]
    ],
    "tokens": [
        ("a.npy", npy(np.arange(3)), {}, "data.seq_len = 4 is more than the 3 tokens"),
        ("a.npy", npy(np.arange(8.0)), {}, "PATH has float64, not integer"),
        ("a.npy", npy(np.zeros((2, 2, 2), int)), {}, "PATH has 3 axes"),
        ("a.npy", npy(np.zeros((0, 4), int)), {}, "PATH is empty (shape (0, 4))"),
        ("a.npy", npy(np.asfortranarray(np.zeros((4, 4), int))), {}, "PATH is in Fortran order"),
        ("a.npy", npy(np.array([{}, {}])), {}, "PATH has object"),
        *(("a.npy", EIGHT[:keep], {}, "PATH is truncated") for keep in (4, 20)),
        (
            "a.npy",
            EIGHT[:-1],
            {},
            "PATH is truncated: shape (8,) of int64 needs 192 bytes, but the file has 191",
        ),
        ("a.bin", b"12345", {}, 'PATH is truncated or not of data.token_dtype = "uint16": its 5 b'),
        *(
            (
                "a.bin",
                WIDE_IDS.astype(has).tobytes(),
                {"token_dtype": said},
                f'data.paths: PATH has wider ids than data.token_dtype = "{said}": every second one'
                f' would be below 16; set "{has}", or save the ids as .npy',
            )
            for said, has in [("uint16", "uint32"), ("uint16", "int64"), ("uint32", "int64")]
        ),
        ("a.txt", b"text of an even size", {}, "PATH has neither the suffix .npy nor .bin; data.s"),
        *(
            ("a.bin", content, {"token_dtype": "uint8"}, f"data.paths: PATH is {kind}")
            for content, kind in [
                (safetensors(), "a safetensors file of model weights"),
                (safetensors()[:33], "a safetensors file of model weights"),
                (b"PAR1" + bytes(60), 'a Parquet file, which data.source = "parquet" reads'),
                (b"\x93NUMPY\x01\x00" + bytes(60), "a NumPy file without the suffix .npy"),
                (b"PK\x03\x04" + bytes(60), "a zip archive"),
                (gzip.compress(bytes(60), mtime=0), "compressed with gzip"),
                (bytes(257) + b"ustar" + bytes(250), "a tar archive"),
                (b"MMIDIDX\x00\x00" + bytes(9), "a Megatron index"),
            ]
        ),
        ("a.bin", b"Text of ASCII characters, in English.\n", {}, f"data.paths: PATH {WORDS}"),
        *(
            (
                "b.npy",
                npy(np.asarray([1, 2, bad, 4])),
                {"vocab_size": 10},
                f"PATH: token id {bad} at position 2 is outside the vocabulary "
                "(0 to 9, from model.vocab_size)",
            )
            for bad in (-1, 10, 2**40)
        ),
        ("a.npy", npy(np.arange(5)), {"mode": "exact", "eos": None}, "data.eos is not set"),
        ("a.npy", npy(np.arange(5)), {"mode": "exact", "eos": "</s>"}, "must be an id"),
        (
            "a.npy",
            npy(np.zeros((3, 7), int)),
            {"mode": "exact"},
            'data.mode = "exact" keeps documents of exactly data.seq_len = 4 tokens, but none '
            "of 3 documents matches (7 to 7 tokens)",
        ),
    ],
    "parquet": [
        ("a.parquet", content, fields, reason)
        for content, fields, reason in [
            (
                parquet(body=["x"]),
                {},
                'PATH lacks the column of data.text_field = "text"; it has "body"',
            ),
            (parquet(text=[1]), {}, 'the column of data.text_field = "text" is int64, not text'),
            (parquet(text=["x"]), IDS, 'lacks the column of data.token_field = "ids"'),
            (parquet(ids=["x"]), IDS, "is string, not a list of integers"),
            (parquet(ids=[[0.5]]), IDS, "not a list of integers"),
            (
                parquet(ids=[[1], [2, None]]),
                IDS,
                'PATH, row 1: the column of data.token_field = "ids" has a null',
            ),
            (
                parquet(ids=[[1, 2], [3, 257]]),
                IDS,
                "PATH, row 1: token id 257 at position 1 is outside",
            ),
            (parquet(ids=[[1, 2]]), IDS | {"eos": 257}, "data.eos = 257 is outside"),
            (parquet(ids=[[1, 2]]), IDS | {"eos": "</s>"}, "must be an id"),
            (parquet(text=["some text"] * 100)[:-20], {}, "PATH is not a valid Parquet file"),
        ]
    ],
}


@pytest.mark.parametrize(
    ("source", "name", "content", "fields", "reason"),
    [(source, *case) for source, cases in FILES.items() for case in cases],
    ids=[f"{source}-{n}" for source, cases in FILES.items() for n in range(len(cases))],
)
def test_bad_content_of_a_file(tmp_path, source, name, content, fields, reason):
    path = tmp_path / name
    path.write_bytes(content)
    fields = {"paths": (str(path),)} | fields
    fields["paths"] = tuple(x.replace("FOLDER", str(tmp_path)) for x in fields["paths"])
    wanted = reason.replace("PATH", str(path)).replace("FOLDER", str(tmp_path))
    assert wanted in error_of(source=source, **fields)


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


def test_a_long_npy_header_is_not_quoted_whole(tmp_path):
    path, header = tmp_path / "a.npy", b"'" + 2000 * b"x" + b"'"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert len(error_of(source="tokens", paths=(str(path),))) < 400


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


def write_parquet(tmp_path, **columns):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    return path


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
