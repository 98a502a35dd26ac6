"""Hugging Face datasets written by `save_to_disk`."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax.tools.corpus.arrow import HuggingFaceOnDisk
from mtraining_jax.utils.errors import UserError
from tests.data.contract import SourceContract

TEXTS = ["abcd", "efgh", "ijkl", "mnop", "qrst"]


def save(folder, table, files=2, writer=pa.ipc.new_stream, **state):
    """Like `save_to_disk`: files with a stream of record batches each, and state.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    share = -(-table.num_rows // files)
    for number, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as sink, writer(sink, table.schema) as out:
            out.write_table(table.slice(share * number, share), max_chunksize=2)
    content = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(content | state))
    (folder / "dataset_info.json").write_text("{}")
    return [folder / name for name in names]


def table(texts=TEXTS):
    ids = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
    return pa.table({"text": texts, "input_ids": ids})


def read(*paths, **fields):
    return list(HuggingFaceOnDisk(paths=tuple(map(str, paths)), **fields).documents())


def error_of(*paths, **fields):
    with pytest.raises(UserError) as caught:
        read(*paths, **fields)
    message = str(caught.value)
    assert "\n" not in message and not message.endswith(".")
    return message


class TestHuggingFaceOnDisk(SourceContract):
    source = "hf_disk"
    bad = (
        ({"text_field": "x"}, 'lacks the column of data.text_field = "x"; it has "text", "input_'),
        ({"token_field": "text"}, "is string, not a list of integers"),
        ({"text_field": "input_ids"}, "int32>, not text"),
    )

    def fields(self, folder, monkeypatch):
        save(folder / "set", table())
        return {"paths": (str(folder / "set"),)}


class TestHuggingFaceOnDiskOfTokens(TestHuggingFaceOnDisk):
    bad = (({"eos": "</s>"}, 'data.eos = "</s>" must be an id: data.source = "hf_disk"'),)

    def fields(self, folder, monkeypatch):
        return super().fields(folder, monkeypatch) | {"token_field": "input_ids"}


@pytest.mark.parametrize("writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_rows_come_in_the_order_of_state_json(tmp_path, writer):
    first, second = save(tmp_path / "b", table(), writer=writer)
    (tmp_path / "b" / "cache-123.arrow").write_bytes(b"of an earlier map")
    save(tmp_path / "a", table(["last"]), files=1)
    found = read(tmp_path / "b", tmp_path / "a")
    assert [text for _, text in found] == [*TEXTS, "last"]
    assert [where for where, _ in found[:4]] == [
        f"{first}, row 0",
        f"{first}, row 1",
        f"{first}, row 2",
        f"{second}, row 0",
    ]
    assert [text for _, text in read(tmp_path / "*")] == ["last", *TEXTS]
    ids = [ids.tolist() for _, ids in read(tmp_path / "a", token_field="input_ids")]
    assert ids == [list(b"last")]


def test_invalid_folders(tmp_path):
    assert f"{tmp_path} was not written by save_to_disk: it has no" in error_of(tmp_path)
    for split in ("train", "test"):
        save(tmp_path / split, table())
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert error_of(tmp_path) == (
        f'data.paths: {tmp_path} has several splits, "test", "train"; use the folder of one split'
    )
    file = tmp_path / "dataset_dict.json"
    assert error_of(file) == f'data.paths: "{file}" is not a folder'
    assert error_of(tmp_path / "x*") == f'data.paths: "{tmp_path}/x*" matches no folder'


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"_data_files": [{"filename": "../a.arrow"}]}, 'names "../a.arrow", which must be a file'),
        ({"_data_files": [{"filename": "/a.arrow"}]}, 'names "/a.arrow", which must be a file'),
        ({"_data_files": [{"filename": "a.arrow"}]}, "lists a.arrow, which does not exist"),
        ({"_data_files": []}, "lists no files"),
        ({"_data_files": 3}, "cannot be read ('int' object is not iterable)"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "flatten_indices() and save it again"),
    ],
)
def test_invalid_state_json(tmp_path, state, reason):
    save(tmp_path, table(), **state)
    assert f"{tmp_path / 'state.json'}" in error_of(tmp_path)
    assert reason in error_of(tmp_path)


def test_a_stream_truncated_between_two_batches(tmp_path):
    path, _ = save(tmp_path, table())
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    assert f"{path} cannot be read after row 3 (it is truncated)" in error_of(tmp_path)


def test_missing_pyarrow(tmp_path, monkeypatch):
    save(tmp_path, table())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert 'data.source = "hf_disk" needs pyarrow' in error_of(tmp_path)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_corrupt_byte_raises_an_error_or_is_harmless(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("hf")
    path, _ = save(folder, table())
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)) | st.just(len(content)))])
    fields = data.draw(st.sampled_from([{}, {"token_field": "input_ids"}]))
    try:
        found = read(folder, **fields)
    except UserError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    else:
        assert len(found) == len(TEXTS)
