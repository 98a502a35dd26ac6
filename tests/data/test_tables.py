"""Empty and null documents of tables, and columns with one name, in all sources of tables."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.chat.chat_folders import template_of, write_folder
from tests.data.common import error_of, loader_of, section
from tests.data.mds_writer import write_mds
from tests.data.test_hf_disk import save

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PACK = {"mode": "pack", "seq_len": 64}
IDS = PACK | {"token_field": "ids", "eos": 9}
CHATS = PACK | {"messages_field": "messages"}
# Options, columns, rows of which only the first has content, and the number of its tokens.
CASES = [
    (PACK, ["text"], [["ab"], [None], [""]], "3 tokens"),
    (
        PACK | {"prompt_field": "p"},
        ["text", "p"],
        [["ab", "q"], ["ab", None], [None, "q"], ["", ""]],
        "4 tokens (75.0% trained)",
    ),
    (IDS, ["ids"], [[[1, 2]], [None], [[]]], "3 tokens"),
    (
        IDS | {"mask_field": "m"},
        ["ids", "m"],
        [[[1, 2], [0, 1]], [[1, 2], None], [None, [1, 1]], [[], []]],
        "3 tokens (66.7% trained)",
    ),
    (
        CHATS,
        ["messages", "tools"],
        [[CHAT, None], [None, None], [[], None]],
        "52 tokens (3.8% trained)",
    ),
    (CHATS, ["messages"], [[json.dumps(CHAT)], [None], [""]], "52 tokens (3.8% trained)"),
]


def write(path, names, rows):
    """Writes rows as a file of a source, and returns the name of the source."""
    records = [dict(zip(names, row, strict=True)) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return "jsonl"
    table = pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return "parquet"
    save(path, table, files=1)
    return "hf_disk"


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet", "a"])
@pytest.mark.parametrize(("options", "names", "rows", "size"), CASES)
def test_empty_and_null_documents_are_skipped_and_counted(
    tmp_path, file, options, names, rows, size
):
    if "messages_field" in options:
        tokenizer = write_folder(tmp_path / "t", template_of("llama3", marked=False))
        options = options | {"tokenizer": tokenizer}
    source = write(tmp_path / file, names, rows)
    data = section(300, source=source, paths=(str(tmp_path / file),), **options)
    assert data.source_options.open(data, 300).summary.startswith(f"{len(rows)} documents, {size}")
    loader = loader_of(data, 300, block_size=1)
    assert f", {len(rows) - 1} without content (empty or null) skipped" in loader.description
    assert loader.num_sequences == 1 and f"{len(rows) - 1} with fewer" in loader.description
    loader.close()


def test_a_table_without_content(tmp_path):
    for rows in ([None], [""]):
        source = write(tmp_path / "a.jsonl", ["text"], [rows] * 2)
        message = error_of(source=source, paths=(str(tmp_path / "a.jsonl"),))
        assert "2 documents, 0 tokens, 2 without content (empty or null) skipped" in message
    # All values of a part of the data may be null.
    source = write(tmp_path / "a.parquet", ["text"], [[None]] * 3)
    paths = (str(tmp_path / "a.parquet"),)
    message = error_of(source=source, paths=paths, mode="pack", block_size=1)
    assert "have fewer than 2 tokens each" in message


def test_empty_texts_of_shards(tmp_path):
    samples = [{"text": b"abcd"}, {"text": b""}, {"text": b"efgh"}]
    write_mds(tmp_path, [("text", "str", None)], [samples])
    data = section(source="mds", paths=(str(tmp_path),))
    assert data.source_options.open(data, 257).summary == (
        "3 documents, 10 tokens, 1 without content (empty or null) skipped"
    )


@pytest.mark.parametrize("name", ["text", "p"])
def test_columns_with_one_name(tmp_path, name):
    columns = ["text", "p", name]
    table = pa.table([pa.array(["ab"])] * 3, names=columns)
    pq.write_table(table, tmp_path / "a.parquet")
    save(tmp_path / "disk", table, files=1)
    sample = dict.fromkeys(columns, b"ab")
    write_mds(tmp_path / "mds", [(column, "str", None) for column in columns], [[sample]])
    option = {"text": "text_field", "p": "prompt_field"}[name]
    for source, path in (("parquet", "a.parquet"), ("hf_disk", "disk"), ("mds", "mds")):
        fields = {"source": source, "paths": (str(tmp_path / path),), "prompt_field": "p"}
        message = error_of(**fields)
        assert str(tmp_path / path) in message and message.endswith(
            f' has 2 columns with the name of data.{option} = "{name}"; rename all but one of them'
        )
    # Other columns may have one name.
    other = pa.table([pa.array(["abcd"])] * 3, names=["text", "x", "x"])
    pq.write_table(other, tmp_path / "b.parquet")
    data = section(source="parquet", paths=(str(tmp_path / "b.parquet"),))
    stream = data.source_options.open(data, 257).stream
    assert stream.take(np.arange(5)).tolist() == [*b"abcd", 256]
