"""Bad input ends in one sentence that names the field or the file."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mtraining_jax.data import DataOptions, build_loader
from mtraining_jax.errors import UserError


def error_of(vocab_size=257, **fields):
    """The message with which building a loader and reading one batch ends."""
    fields = {"seq_len": 4, "shuffle": False} | fields
    with pytest.raises(UserError) as caught:
        next(
            build_loader(
                DataOptions(**fields),
                permutation=np.arange(fields["seq_len"]),
                vocab_size=vocab_size,
            )
        )
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    return {"source": "text", "paths": (str(path),)}


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("source", "json", "python_stdlib, synthetic, text, jsonl, parquet, tokens"),
        ("mode", "pack", "concat, exact"),
        ("token_dtype", "float32", "uint8, uint16"),
        ("seq_len", 1, "at least 2"),
        ("batch_size", 0, "at least 1"),
        ("seed", -1, "0 to 2**32 - 1"),
        ("seed", 2**32, "0 to 2**32 - 1"),
        ("paths", (), "a file, a folder or a glob"),
        ("eos", 257, "from 0 to 256"),
        ("eos", "</s>", "a number from 0 to 256"),
    ],
)
def test_impossible_option(text, field, value, allowed):
    message = error_of(**text | {field: value})
    assert f"data.{field} is" in message and allowed in message


def test_paths_with_python_stdlib(text):
    assert "data.paths must be empty" in error_of(source="python_stdlib", paths=text["paths"])


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "tokens"])
def test_missing_and_empty_files(tmp_path, source):
    missing = str(tmp_path / "missing.npy")
    assert error_of(source=source, paths=(missing,)) == f"data.paths: {missing!r} does not exist."
    assert "holds no file" in error_of(source=source, paths=(str(tmp_path),))
    assert "holds no file" in error_of(source=source, paths=(str(tmp_path / "*.x"),))
    empty = tmp_path / "empty.npy"
    empty.touch()
    assert error_of(source=source, paths=(str(empty),)) == f"data.paths: {empty} is empty."


@pytest.mark.parametrize("mode", ["concat", "exact"])
def test_too_little_data(text, mode):
    message = error_of(**text, seq_len=11, mode=mode)
    assert "data.seq_len = 11" in message
    assert ("fewer than one sequence" if mode == "concat" else "9 to 9") in message


def test_too_few_tokens_in_file(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(3))
    assert "holds 3 tokens" in error_of(source="tokens", paths=(str(path),))


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    assert f"{path} is not UTF-8 text (byte 3)" in error_of(source="text", paths=(str(path),))


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "cut of', "is not valid JSON"),
        (b'{"text": "\xff"}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'["text"]', "is list, not a JSON object"),
        (b'{"body": "x", "id": 3}', "has no field 'text' (data.text_field); it has 'body', 'id'"),
        (b"{}", "it has no fields"),
        (b'{"text": 3}', "is int, not text"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_malformed_json_line(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    message = error_of(source="jsonl", paths=(str(path),))
    assert f"{path}, line 3" in message and reason in message


@pytest.mark.parametrize(
    "content, reason",
    [
        (np.arange(8.0), "holds float64, not integer"),
        (np.zeros((2, 2, 2), int), "has shape (2, 2, 2)"),
        (np.zeros((0, 4), int), "is empty (shape (0, 4))"),
        (np.asfortranarray(np.zeros((4, 4), int)), "column by column"),
        (np.array([{}, {}]), "holds object"),
    ],
)
def test_npy_of_something_else(tmp_path, content, reason):
    path = tmp_path / "a.npy"
    np.save(path, content)
    message = error_of(source="tokens", paths=(str(path),))
    assert str(path) in message and reason in message


@pytest.mark.parametrize("keep", [4, 20, -1])
def test_truncated_npy(tmp_path, keep):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(8))
    path.write_bytes(path.read_bytes()[:keep])
    message = error_of(source="tokens", paths=(str(path),))
    assert f"{path} is truncated" in message
    if keep == -1:
        assert "needs 192 bytes, the file has 191" in message


def test_truncated_bin(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"12345")
    message = error_of(source="tokens", paths=(str(path),))
    assert f"{path} is truncated or not of data.token_dtype uint16: its 5 bytes" in message


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_id_outside_the_vocabulary(tmp_path, bad):
    path = tmp_path / "b.npy"
    np.save(tmp_path / "a.npy", np.arange(5))
    np.save(path, np.asarray([1, 2, bad, 4]))
    assert error_of(source="tokens", paths=(str(tmp_path),), vocab_size=10) == (
        f"{path}: token id {bad} at position 2 is outside the vocabulary"
        " (0 to 9, from model.vocab_size)."
    )


def test_id_outside_the_vocabulary_of_a_file_too_long_to_check_at_the_start(tmp_path):
    path = tmp_path / "long.bin"
    place = 2**26 + 1
    with path.open("wb") as file:
        file.truncate(2 * (2**26 + 4))
        file.seek(2 * place)
        file.write(np.uint16(300).tobytes())
    options = DataOptions(source="tokens", paths=(str(path),), seq_len=4, shuffle=False)
    loader = build_loader(options, permutation=np.arange(4)[::-1], vocab_size=257)
    next(loader)
    state = loader.get_state()
    state["iterator"] = {"next_index": 2**24}
    loader.set_state(state)
    with pytest.raises(UserError, match=f"token id 300 at position {place} is outside"):
        next(loader)


def test_token_ids_need_the_vocabulary_of_the_model(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5))
    message = error_of(source="tokens", paths=(str(tmp_path),), vocab_size=None)
    assert "model.vocab_size is not given" in message


def test_tokenizer_larger_than_the_model(text):
    assert error_of(**text, vocab_size=256) == (
        "data.tokenizer bytes has 257 token ids; model.vocab_size is 256 and must be at least as"
        " many."
    )


@pytest.mark.parametrize("eos, reason", [(None, "data.eos is not set"), ("</s>", "a token id")])
def test_exact_documents_of_a_flat_file_need_eos(tmp_path, eos, reason):
    np.save(tmp_path / "a.npy", np.arange(5))
    message = error_of(source="tokens", paths=(str(tmp_path),), mode="exact", eos=eos)
    assert reason in message


def test_exact_finds_nothing_in_token_file(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 7), int))
    message = error_of(source="tokens", paths=(str(tmp_path),), mode="exact")
    assert "of 3 documents none has exactly data.seq_len = 4 tokens (they have 7 to 7)" in message


def write_parquet(tmp_path, **columns):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    "column, token_field, reason",
    [
        ({"body": ["x"]}, None, "has no column 'text' (data.text_field); it has 'body'"),
        ({"text": [1]}, None, "column 'text' (data.text_field) is int64, not text"),
        ({"text": ["x", None]}, None, "row 1: column 'text' is null"),
        ({"text": ["x"]}, "ids", "has no column 'ids' (data.token_field)"),
        ({"ids": ["x"]}, "ids", "is string, not a list of integers"),
        ({"ids": [[0.5]]}, "ids", "not a list of integers"),
        ({"ids": [[1], None]}, "ids", "row 1: column 'ids' is null"),
        ({"ids": [[1], [2, None]]}, "ids", "row 1: column 'ids' (data.token_field) has a null"),
        ({"ids": [[1, 2], [3, 257]]}, "ids", "row 1: token id 257 at position 1 is outside"),
    ],
)
def test_parquet_columns(tmp_path, column, token_field, reason):
    path = write_parquet(tmp_path, **column)
    message = error_of(source="parquet", paths=(str(path),), token_field=token_field)
    assert str(path) in message and reason in message


@pytest.mark.parametrize("eos, reason", [(257, "data.eos is 257"), ("</s>", "takes a token id")])
def test_parquet_eos(tmp_path, eos, reason):
    path = write_parquet(tmp_path, ids=[[1, 2]])
    message = error_of(source="parquet", paths=(str(path),), token_field="ids", eos=eos)
    assert reason in message


def test_truncated_parquet(tmp_path):
    path = write_parquet(tmp_path, text=["some text"] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} is not a whole Parquet file" in error_of(source="parquet", paths=(str(path),))


def test_damaged_parquet(tmp_path):
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
    assert "pyarrow" in message and "mtraining-jax[parquet]" in message


def save_tokenizer(path, words):
    Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="?")).save(str(path))
    return str(path)


def test_unreadable_tokenizer(tmp_path, text):
    missing = str(tmp_path / "no.json")
    assert f"{missing!r}, which is no file" in error_of(**text, tokenizer=missing)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"model": {}}))
    assert f"{broken} is not a tokenizer.json" in error_of(**text, tokenizer=str(broken))
    empty = save_tokenizer(tmp_path / "empty.json", [])
    assert "empty vocabulary" in error_of(**text, tokenizer=empty)


@pytest.mark.parametrize(
    "words, eos, reason",
    [
        (["?"], None, "has none of <|endoftext|>"),
        (["?", "</s>", "<eos>"], None, "has </s> and <eos>; set data.eos"),
        (["?"], "<eos>", "data.eos is '<eos>', which is not a token of"),
        (["?"], 1, "data.eos is 1; with the tokenizer"),
    ],
)
def test_end_of_document_of_a_tokenizer(tmp_path, text, words, eos, reason):
    name = save_tokenizer(tmp_path / "tokenizer.json", words)
    assert reason in error_of(**text, tokenizer=name, eos=eos)


def test_full_temporary_folder(tmp_path, text, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    message = error_of(**text)
    assert "No space left on device" in message and "TMPDIR" in message
