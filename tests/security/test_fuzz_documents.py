"""Corrupt and hostile files of documents: MDS shards, Arrow and Parquet files.

`MTRAINING_FUZZ=1000` sets the number of files per reader.
"""

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.data.sources.jsonl import JsonLines
from mtraining_jax.tools.corpus.arrow import HuggingFaceOnDisk, Parquet
from mtraining_jax.tools.corpus.mds import Damaged, MosaicShards, decoded
from tests.data.mds_writer import array_bytes, packers, write_mds
from tests.security.fuzzing import FUZZ, damaged, otherwise, result_of

pytestmark = pytest.mark.usefixtures("no_gigabytes")

TEXTS = ["abcd", "bücher", "", "mnop", "q" * 100]
IDS = [np.arange(i, 2 * i, dtype=np.int32) for i in (4, 1, 0, 7, 100)]
TABLE = pa.table({"text": TEXTS, "input_ids": IDS, "other": [[{"a": None}]] * 5})
BOTH = [{}, {"token_field": "input_ids"}]


def read(source):
    """Reads all documents entirely."""
    found = []
    for where, document in source.documents():
        assert where
        ids = document.ids if isinstance(document, MaskedTokens) else document
        found.append(ids if isinstance(ids, str) else ids.tolist())
    return found


def expected(fields):
    # A text without content has no tokens.
    return [ids.tolist() for ids in IDS] if fields else [text or [] for text in TEXTS]


def arrow_bytes(writer, **options):
    sink = pa.BufferOutputStream()
    with writer(sink, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(TABLE, max_chunksize=2)
    return sink.getvalue().to_pybytes()


ARROW = {
    "stream": arrow_bytes(pa.ipc.new_stream),
    "file": arrow_bytes(pa.ipc.new_file),
    "zstd": arrow_bytes(pa.ipc.new_stream, compression="zstd"),
    "lz4": arrow_bytes(pa.ipc.new_file, compression="lz4"),
}


@pytest.fixture(scope="module", autouse=True)
def library_is_loaded(tmp_path_factory):
    """Starts threads and memory pool of pyarrow, which take address space on first use."""
    path = tmp_path_factory.mktemp("first") / "a.parquet"
    pq.write_table(TABLE, path)
    assert read(Parquet(paths=(str(path),))) == expected({})


ZSTD = b"\x28\xb5\x2f\xfd"  # magic bytes of a compressed buffer


def save(folder, content, state=None):
    folder.mkdir(exist_ok=True)
    (folder / "data.arrow").write_bytes(content)
    (folder / "state.json").write_text(json.dumps(state or STATE))


STATE = {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": None}


@pytest.mark.parametrize("fields", BOTH)
@pytest.mark.parametrize("kind", ARROW)
def test_valid_arrow_files(folder, kind, fields):
    save(folder / "hf", ARROW[kind])
    assert read(HuggingFaceOnDisk(paths=(str(folder / "hf"),), **fields)) == expected(fields)


@pytest.mark.parametrize("kind", ARROW)
@FUZZ
@given(data=st.data(), fields=st.sampled_from(BOTH))
def test_arrow_files(folder, kind, data, fields):
    save(folder / "hf", data.draw(damaged(ARROW[kind])))
    result_of(lambda: read(HuggingFaceOnDisk(paths=(str(folder / "hf"),), **fields)))


# Counts, lengths and offsets are little-endian numbers of 4 or 8 bytes.
LARGE = st.sampled_from([0, 1, 2**16, 2**30, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1])


def with_numbers(whole: bytes) -> st.SearchStrategy[bytes]:
    """Strategy: some aligned numbers of the file are replaced."""
    change = st.tuples(st.integers(0, len(whole) // 4 - 2), LARGE, st.sampled_from([4, 8]))

    def apply(changes):
        content = bytearray(whole)
        for place, value, size in changes:
            content[4 * place : 4 * place + size] = struct.pack("<Q", value)[:size]
        return bytes(content)

    return st.lists(change, min_size=1, max_size=3).map(apply)


@pytest.mark.parametrize("kind", ARROW)
@FUZZ
@given(data=st.data(), fields=st.sampled_from(BOTH))
def test_numbers_in_arrow_files(folder, kind, data, fields):
    save(folder / "hf", data.draw(with_numbers(ARROW[kind])))
    result_of(lambda: read(HuggingFaceOnDisk(paths=(str(folder / "hf"),), **fields)))


@pytest.mark.parametrize("writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_other_columns_are_not_decompressed(folder, writer):
    batch = pa.record_batch({"other": [[7] * 5000], "text": ["abcd"]})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with writer(sink, batch.schema, options=options) as out:
        out.write_batch(batch)
    whole = sink.getvalue().to_pybytes()
    packed = whole.index(ZSTD)  # the first buffer is of the first column
    save(folder / "hf", whole[:packed] + bytes(4) + whole[packed + 4 :])
    assert read(HuggingFaceOnDisk(paths=(str(folder / "hf"),))) == ["abcd"]
    other = HuggingFaceOnDisk(paths=(str(folder / "hf"),), token_field="other")
    assert result_of(lambda: read(other)) is None


@FUZZ
@given(state=otherwise(STATE))
def test_states_of_data_sets(folder, state):
    save(folder / "hf", ARROW["stream"], state)
    found = result_of(lambda: read(HuggingFaceOnDisk(paths=(str(folder / "hf"),))))
    assert found in (None, expected({}))


@pytest.fixture(scope="module", params=["none", "snappy", "zstd", "gzip"])
def parquet(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("parquet") / "whole.parquet"
    pq.write_table(TABLE, path, compression=request.param, row_group_size=2)
    return path.read_bytes()


@FUZZ
@given(data=st.data(), fields=st.sampled_from(BOTH))
def test_parquet(folder, parquet, data, fields):
    path = folder / "a.parquet"
    path.write_bytes(data.draw(damaged(parquet) | with_numbers(parquet)))
    result_of(lambda: read(Parquet(paths=(str(path),), **fields)))


PACKERS = packers()
COLUMNS = [("input_ids", "ndarray", None), ("length", "int", 8), ("text", "str", None)]
SAMPLES = [
    {"input_ids": array_bytes(ids), "length": bytes(8), "text": text.encode()}
    for text, ids in zip(TEXTS, IDS, strict=True)
]


@pytest.fixture(scope="module", params=[None, "gz", "bz2", "zstd"])
def shard(request, tmp_path_factory):
    """A data set with one shard: folder, index, path and bytes of the shard."""
    home = tmp_path_factory.mktemp("mds")
    packing = request.param
    (path,) = write_mds(home, COLUMNS, [SAMPLES], packing, pack=PACKERS.get(packing))
    return home, json.loads((home / "index.json").read_text()), path, path.read_bytes()


@pytest.mark.parametrize("fields", BOTH)
def test_valid_shards(shard, fields):
    home, index, path, whole = shard
    (home / "index.json").write_text(json.dumps(index))
    path.write_bytes(whole)
    assert read(MosaicShards(paths=(str(home),), **fields)) == expected(fields)


@FUZZ
@given(data=st.data(), fields=st.sampled_from(BOTH))
def test_mds_shards(shard, data, fields):
    home, index, path, whole = shard
    content = data.draw(damaged(whole) | with_numbers(whole))
    path.write_bytes(content)
    entry = index["shards"][0]
    size = len(content) if path.suffix == ".mds" else data.draw(LARGE | st.just(len(whole)))
    new_size = {"raw_data": entry["raw_data"] | {"bytes": size}}
    (home / "index.json").write_text(json.dumps({"version": 2, "shards": [entry | new_size]}))
    result_of(lambda: read(MosaicShards(paths=(str(home),), **fields)))


@FUZZ
@given(data=st.data(), fields=st.sampled_from(BOTH))
def test_indices_of_mds(shard, data, fields):
    home, index, path, whole = shard
    path.write_bytes(whole)
    (home / "index.json").write_text(json.dumps(data.draw(otherwise(index))))
    result_of(lambda: read(MosaicShards(paths=(str(home),), **fields)))


@pytest.mark.parametrize("packing", PACKERS)
def test_decompression_bombs_are_rejected(folder, packing):
    many = PACKERS[packing](bytes(2**26)) * 64  # concatenated compressed parts: 4 GiB
    (path,) = write_mds(folder / packing, COLUMNS, [SAMPLES], packing, pack=lambda _: many)
    assert result_of(lambda: read(MosaicShards(paths=(str(path.parent),)))) is None


@pytest.mark.parametrize("packing", [None, *PACKERS])
@FUZZ
@given(data=st.data())
def test_json_lines(folder, packing, data):
    whole = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    content = PACKERS.get(packing, bytes)(whole)
    (folder / "a.jsonl").write_bytes(content)
    source = JsonLines(paths=(str(folder / "a.jsonl"),))
    assert read(source) == expected({})
    (folder / "a.jsonl").write_bytes(data.draw(damaged(content)) or b"\n")
    result_of(lambda: read(source))


AXES = st.lists(st.sampled_from(["1", "2", "0", "-1", " ", str(2**40)]), max_size=4) | st.integers(
    60, 70
).map(lambda n: ["1"] * n)
ENCODINGS = st.builds(
    lambda kind, name, axes: ":".join([kind, name, ",".join(axes)]),
    st.sampled_from(["ndarray"] * 4 + ["", "str"]),
    st.sampled_from(["", "uint8", "int32", "object", "\0"]),
    AXES,
)


@FUZZ
@given(content=st.binary(max_size=24) | st.just(bytes(4)), encoding=ENCODINGS | st.just("ndarray"))
def test_arrays_of_mds(content, encoding):
    try:
        found = decoded(np.frombuffer(content, np.uint8), encoding)
    except Damaged as error:
        assert str(error)
        return
    assert found.nbytes <= len(content)
    found.tolist()
