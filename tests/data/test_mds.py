"""MDS shards: encodings, compression and corrupt files."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax.tools.corpus.mds import MosaicShards
from mtraining_jax.utils.errors import UserError
from tests.data.common import error_of, sequences
from tests.data.contract import SourceContract
from tests.data.mds_writer import array_bytes, packers, write_mds

IDS = [np.array(ids, np.uint32) for ids in ([1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11], [12])]


def token_columns(encoding="ndarray:uint32", size=None):
    return [("domain", "str", None), ("input_ids", encoding, size), ("length", "int", 8)]


def token_sample(ids, **omitted):
    return {
        "domain": "bücher".encode(),
        "input_ids": array_bytes(ids, **omitted),
        "length": np.int64(len(ids)).tobytes(),
    }


def write_tokens(folder, **fields):
    samples = [token_sample(ids, omit_dtype=True) for ids in IDS]
    return write_mds(folder, token_columns(), [samples[:3], samples[3:]], **fields)


def read(folder, token_field="input_ids", **fields):
    source = MosaicShards(paths=(str(folder),), token_field=token_field, **fields)
    found = ((where, getattr(ids, "ids", ids)) for where, ids in source.documents())
    return [(where, ids if isinstance(ids, str) else ids.tolist()) for where, ids in found]


def mds_error(folder, **fields):
    with pytest.raises(UserError) as caught:
        read(folder, **fields)
    message = str(caught.value)
    assert "\n" not in message and not message.endswith(".")
    return message


class TestMds(SourceContract):
    source = "mds"
    bad = (
        ({"token_field": "ids"}, 'no column of data.token_field = "ids"; it has "domain", "input'),
        ({"token_field": None}, 'no column of data.text_field = "text"; it has "domain"'),
        ({"token_field": None, "text_field": "length"}, 'column "length" is int, not text'),
        ({"token_field": "domain"}, 'sample 0 has encoding "str" instead of ndarray'),
        ({"eos": "</s>"}, 'data.eos = "</s>" must be an id: data.source = "mds" has no tokenizer'),
    )

    def fields(self, folder, monkeypatch):
        samples = [token_sample(np.arange(i, i + 4)) for i in range(1, 5)]
        write_mds(folder, token_columns("ndarray"), [samples[:1], samples[1:]])
        return {"paths": (str(folder),), "token_field": "input_ids"}


@pytest.mark.parametrize("compression", [None, "gz", "bz2", "zstd"])
def test_shards_are_read_in_order(tmp_path, compression):
    paths = write_tokens(tmp_path, compression=compression, hashes=("sha1",))
    found = read(tmp_path)
    assert [ids for _, ids in found] == [ids.tolist() for ids in IDS]
    raw = [str(path).removesuffix(f".{compression}") for path in paths]
    places = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [where for where, _ in found] == [f"{raw[i]}, sample {j}" for i, j in places]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("suffix", ["", ":dtype", ":dtype:4"])
def test_array_encodings(tmp_path, dtype, suffix):
    ids = np.array([1, 500, 3, 4], dtype)
    encoding = "ndarray" + suffix.replace("dtype", dtype)
    sample = token_sample(ids, omit_dtype="dtype" in suffix, omit_shape="4" in suffix)
    size = ids.nbytes if "4" in suffix else None
    write_mds(tmp_path, token_columns(encoding, size), [[sample, sample]])
    assert [found for _, found in read(tmp_path)] == [ids.tolist()] * 2


def test_long_arrays_and_text(tmp_path):
    ids = np.arange(70_000, dtype=np.uint32)
    write_mds(tmp_path, token_columns("ndarray"), [[token_sample(ids)]])
    assert read(tmp_path)[0][1] == ids.tolist()
    assert read(tmp_path, token_field=None, text_field="domain")[0][1] == "bücher"


@pytest.mark.parametrize(
    "spans, counted",
    [
        ([[0, 4], [4, 9]], False),
        ([[4, 9], [0, 0], [0, 4]], False),
        ([[0, 4], [3, 9]], True),
        ([[0, 8]], True),
        ([], True),
    ],
)
def test_samples_that_their_documents_do_not_cover_are_counted(tmp_path, spans, counted):
    columns = [*token_columns(), ("indices", "ndarray", None)]
    sample = token_sample(np.arange(1, 10, dtype=np.uint32), omit_dtype=True)
    whole, part = (
        sample | {"indices": array_bytes(np.array(x, np.uint32).reshape(-1, 2))}
        for x in ([[0, 9]], spans)
    )
    write_mds(tmp_path, columns, [[whole, part, part]])
    fields = {"source": "mds", "paths": (str(tmp_path),), "token_field": "input_ids"}
    _, corpus = sequences(seq_len=8, **fields)
    assert ("2 samples with tokens in no document (skipped)" in corpus.summary) == counted


def test_spans_are_documents(tmp_path):
    columns = [*token_columns(), ("indices", "ndarray", None)]
    spans = np.array([[0, 4], [4, 4], [5, 9]], np.uint32)
    sample = token_sample(np.arange(1, 10, dtype=np.uint32), omit_dtype=True)
    write_mds(tmp_path, columns, [[sample | {"indices": array_bytes(spans)}]])
    path = tmp_path / "shard.00000.mds"
    assert read(tmp_path) == [
        (f"{path}, sample 0, document 0", [1, 2, 3, 4]),
        (f"{path}, sample 0, document 1", []),
        (f"{path}, sample 0, document 2", [6, 7, 8, 9]),
    ]
    assert read(tmp_path, span_field="none")[0][1] == list(range(1, 10))
    rows, corpus = sequences(
        source="mds", paths=(str(tmp_path),), token_field="input_ids", seq_len=8, eos=0
    )
    assert rows == [[1, 2, 3, 4, 0, 6, 7, 8]]
    assert corpus.summary == (
        "3 documents, 10 tokens, 1 samples with tokens in no document (skipped) or in several "
        "(repeated), 1 without content (empty or null) skipped"
    )
    spans[2, 1] = 10
    write_mds(tmp_path, columns, [[sample | {"indices": array_bytes(spans)}]])
    assert mds_error(tmp_path) == (
        f"{path}, sample 0 has 9 tokens, but its document 2 has span 5 to 10"
    )
    write_mds(tmp_path, columns, [[sample | {"indices": array_bytes(spans[0])}]])
    assert f"{path}, sample 0 has spans of uint32 (2,), not pairs" in mds_error(tmp_path)


def test_an_outer_index_includes_inner_ones(tmp_path):
    write_tokens(tmp_path / "train" / "0")
    write_tokens(tmp_path / "train" / "1")
    assert len(read(tmp_path / "train")) == 8
    index = json.loads((tmp_path / "train" / "0" / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_data"]["basename"] = f"0/{shard['raw_data']['basename']}"
    (tmp_path / "train" / "index.json").write_text(json.dumps(index))
    assert len(read(tmp_path)) == len(read(tmp_path / "train" / "index.json")) == 4


def changed_index(folder, change):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index["shards"][0])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s["raw_data"].update(basename="../a.mds"), 'names "../a.mds", which must be'),
        (lambda s: s["raw_data"].update(basename="/etc/x"), 'names "/etc/x", which must be a fi'),
        (lambda s: s["raw_data"].update(basename="no.mds"), "no.mds does not exist"),
        (lambda s: s["raw_data"].update(bytes=2**40), "1099511627776 instead of a number from 0"),
        (lambda s: s["raw_data"].update(bytes=True), "True instead of a number from 0 to"),
        (lambda s: s["raw_data"].update(bytes=9), "bytes instead of 9"),
        (lambda s: s["raw_data"].update(hashes={"sha1": "0"}), "its sha1 does not match index"),
        (lambda s: s.update(samples=4), "does not have the expected 4 samples"),
        (lambda s: s.update(samples=-1), "-1 instead of a number from 0 to"),
        (lambda s: s.update(format="json"), 'format "json" instead of "mds"'),
        (lambda s: s.pop("samples"), "'samples' is missing"),
        (lambda s: s.update(column_names=["input_ids"]), "columns have different numbers of names"),
        (
            lambda s: s.update(column_encodings=["str", "ndarray", "int"]),
            "which do not match index.json",
        ),
    ],
)
def test_invalid_index(tmp_path, change, reason):
    write_tokens(tmp_path)
    changed_index(tmp_path, change)
    assert reason in mds_error(tmp_path)


def test_pickled_columns_are_rejected(tmp_path):
    columns = [("input_ids", "pkl", None), ("other", "pkl", None), ("text", "str", None)]
    sample = {"input_ids": b"cos\nsystem\n.", "other": b"", "text": b"ab"}
    write_mds(tmp_path, columns, [[sample]])
    assert 'column "input_ids" is pickled, and unpickling can execute' in mds_error(tmp_path)
    assert read(tmp_path, token_field=None)[0][1] == "ab"  # ignores other columns


@pytest.mark.parametrize("compression", ["gz", "bz2", "zstd"])
def test_corrupt_compressed_shards(tmp_path, compression):
    path, _ = write_tokens(tmp_path, compression=compression)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert f"{path} cannot be decompressed (" in mds_error(tmp_path)
    path.write_bytes(packers()[compression](bytes(2**20)))  # more than the index says
    assert f"{path} decompresses to more than " in mds_error(tmp_path)
    path.write_bytes(packers()[compression](bytes(20)))
    assert f"{path} decompresses to less than " in mds_error(tmp_path)
    changed_index(tmp_path, lambda s: s.update(compression="br:11"))
    assert 'is compressed with "br"; supported are zstd, gz and bz2' in mds_error(tmp_path)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="part of Python")
def test_zstd_without_its_package(tmp_path, monkeypatch):
    write_tokens(tmp_path, compression="zstd")
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    assert "pip install backports-zstd, or uv run --extra zstd" in mds_error(tmp_path)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_corrupt_byte_raises_an_error_or_is_harmless(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("mds")
    hashes = data.draw(st.sampled_from([(), ("md5",)]))
    paths = write_tokens(
        folder, hashes=hashes, compression=data.draw(st.sampled_from([None, "gz"]))
    )
    path = data.draw(st.sampled_from([*paths, folder / "index.json"]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(content)) | st.just(len(content)))
    path.write_bytes(content[:cut])
    expected = [ids.tolist() for ids in IDS]
    try:
        found = [ids for _, ids in read(folder)]
    except UserError as error:
        assert str(path.parent) in str(error) and "\n" not in str(error)
        return
    if path.name != "index.json" and hashes:
        assert found == expected


@pytest.mark.parametrize("shape", ["-2,-3", "-1,3,-2"])
def test_an_array_with_negative_axes_is_refused(tmp_path, shape):
    sample = token_sample(np.arange(6, dtype=np.uint32), omit_dtype=True, omit_shape=True)
    write_mds(tmp_path, token_columns(f"ndarray:uint32:{shape}", 24), [[sample]])
    assert "is not an array of shape (-" in mds_error(tmp_path)


def test_a_corrupt_sample_is_named(tmp_path):
    path, _ = write_tokens(tmp_path)
    content = bytearray(path.read_bytes())
    second = int(np.frombuffer(content, "<u4", 1, 8)[0])
    content[second] += 1  # size of its first column
    path.write_bytes(content)
    message = mds_error(tmp_path)
    assert f"{path}, sample 1 has 33 bytes, but its columns have 34" in message
    assert message in error_of(source="mds", paths=(str(tmp_path),), token_field="input_ids")
