"""Data sources, and how their documents become sequences."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from mtraining_jax.config import Config, help_text
from mtraining_jax.config.load import fields_with
from mtraining_jax.data.sources import SOURCES
from mtraining_jax.data.sources.text import library_files
from mtraining_jax.data.tokenizer import make_tokenizer
from tests.data.common import VOCAB, error_of, loader_of, section, sequences
from tests.data.contract import SourceContract
from tests.data.own_source import Counting

EOS = 256
# Four tokens each, so that every text is a sequence in mode exact.
TEXTS = ["abcd", "efgh", "ijkl", "mnop"]


def ids_of(text):
    return list(text.encode())


def save_tokenizer(path, words):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in words}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(max_length=1)  # must be ignored
    tokenizer.save(str(path))
    return str(path)


# ---- the contract ------------------------------------------------------------------------------


class TestPythonStdlib(SourceContract):
    source = "python_stdlib"
    bad = (({"eos": "</s>"}, 'data.eos = "</s>" must be an id'),)

    def fields(self, folder, monkeypatch):
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.py").write_text(text)
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(folder))
        return {}


class TestSynthetic(SourceContract):
    source = "synthetic"
    modes = ("concat",)
    bad = (({"eos": "</s>"}, 'data.eos = "</s>" must be an id: data.source = "synthetic"'),)


class TestText(SourceContract):
    source = "text"
    bad = (({"tokenizer": "/no/file"}, 'data.tokenizer = "/no/file" does not exist'),)

    def fields(self, folder, monkeypatch):
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
        return {"paths": (str(folder),)}


class TestJsonl(SourceContract):
    source = "jsonl"
    bad = (({"text_field": "text"}, 'no field of data.text_field = "text"; it has "body"'),)

    def fields(self, folder, monkeypatch):
        (folder / "a.jsonl").write_text("\n".join(json.dumps({"body": t}) for t in TEXTS))
        return {"paths": (str(folder),), "text_field": "body"}


class TestParquet(SourceContract):
    source = "parquet"
    bad = (
        ({"text_field": "x"}, 'lacks the column of data.text_field = "x"; it has "text", "ids"'),
        ({"token_field": "text"}, "is string, not a list of integers"),
    )

    def fields(self, folder, monkeypatch):
        table = pa.table({"text": TEXTS, "ids": [ids_of(text) for text in TEXTS]})
        pq.write_table(table, folder / "a.parquet")
        return {"paths": (str(folder),)}


class TestParquetOfTokens(TestParquet):
    bad = (({"eos": "</s>"}, 'data.eos = "</s>" must be an id: data.source = "parquet"'),)

    def fields(self, folder, monkeypatch):
        return super().fields(folder, monkeypatch) | {"token_field": "ids"}


class TestTokens(SourceContract):
    source = "tokens"
    bad = (
        ({"mode": "exact", "eos": None}, "data.eos is not set"),
        ({"mode": "exact", "eos": "</s>"}, 'data.eos = "</s>" must be an id: data.source'),
    )

    def fields(self, folder, monkeypatch):
        np.array([1, 2, 3, 4, 0] * 4, np.uint16).tofile(folder / "a.bin")
        return {"paths": (str(folder),)}


OWN = "tests.data.own_source:Counting"


@pytest.fixture
def own_source(monkeypatch):
    """Isolates the registry of sources."""
    monkeypatch.setattr(SOURCES, "_loaded", dict(SOURCES._loaded))


@pytest.mark.usefixtures("own_source")
class TestOwn(SourceContract):
    source = OWN
    bad = (
        ({"count_to": 0}, "data.count_to = 0 is not allowed: it must be an integer (at least"),
        ({"count_to": VOCAB}, f"document 0: token id {VOCAB} at position {VOCAB - 1} is outside"),
    )

    def test_its_options_are_known_if_it_is_selected(self):
        overrides = {"data.source": OWN, "data.count_to": 7}
        config = Config.load("tiny", overrides)
        assert config.data.source_options == Counting(count_to=7)
        text = config.to_toml()
        assert f'source = "{OWN}"' in text and "\ncount_to = 7\n" in text
        assert Config.from_dict(config.to_dict(), "a dict") == config
        rows, _ = sequences(source=OWN, count_to=7, seq_len=7)
        assert rows == [list(range(1, 8))] * 8
        assert "  --data.count_to  an integer (at least 1); default 4\n" in help_text(
            fields_with("tiny", overrides)
        )


@pytest.mark.usefixtures("own_source")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:X", "No module named 'no_such_module'"),
        ("tests.data.own_source:Missing", "tests.data.own_source has no 'Missing'"),
        ("tests.data.own_source:np", "is not a data source"),
    ],
)
def test_invalid_source_names(name, reason):
    message = error_of(source=name)
    assert message.startswith(f'a test: data.source: "{name}" ') and reason in message


def test_options_of_a_source_are_unknown_without_it():
    assert error_of(count_to=3).startswith("a test: data.count_to is not a field")


# ---- content -----------------------------------------------------------------------------------


def test_python_stdlib_is_deterministic_and_has_no_tests():
    data = section(seq_len=4096 * 256)
    loader = loader_of(data)
    assert loader.corpus.vocab_size == 257
    assert loader.description.startswith("python_stdlib: ")
    # Files are sorted by path: __future__.py is always first.
    first = next(loader)["tokens"][0, :40]
    assert loader.corpus.tokenizer.decode(first).startswith('"""Record of phased-in incompatible')
    files = library_files()
    assert files == library_files() and files[0].name == "__future__.py"
    assert not any("test" in path.parts or "tests" in path.parts for path in files)


def test_text_files_are_joined_with_eos_in_order_of_names(tmp_path):
    (tmp_path / "b.txt").write_text("éa", encoding="utf-8")
    (tmp_path / "a.txt").write_text("xy\r\n", encoding="utf-8", newline="")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("z")
    (tmp_path / ".hidden").write_text("never")
    (tmp_path / "empty.txt").touch()
    expected = [*ids_of("xy\r\n"), EOS, *ids_of("éa"), EOS, *ids_of("z"), EOS]
    rows, corpus = sequences(source="text", paths=[str(tmp_path)], seq_len=len(expected))
    assert rows == [expected]
    assert "3 documents, 11 tokens" in corpus.summary


def test_text_supports_globs_and_reads_each_file_once(tmp_path):
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "c.md").write_text("c")
    paths = [str(tmp_path / "b.txt"), str(tmp_path / "*.txt")]
    rows, _ = sequences(source="text", paths=paths)
    assert rows == [[*ids_of("b"), EOS, *ids_of("a"), EOS]]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=3, max_size=8),
    seq_len=st.integers(2, 5),
)
def test_concat_drops_only_the_last_incomplete_sequence(tmp_path_factory, texts, seq_len):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    texts = [*texts, "enough"]
    path.write_text("\n".join(json.dumps({"body": t}) for t in texts) + "\n\n")
    rows, _ = sequences(source="jsonl", paths=(str(path),), text_field="body", seq_len=seq_len)
    stream = [i for text in texts if text for i in [*ids_of(text), EOS]]
    whole = len(stream) // seq_len * seq_len
    assert [i for row in rows for i in row] == stream[:whole]


def test_exact_keeps_only_documents_of_the_length(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["four", "three", "", "4444", "fourfour"]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    rows, corpus = sequences(source="jsonl", paths=(str(path),), mode="exact")
    assert rows == [ids_of("four"), ids_of("4444")]
    assert "5 documents, 8 tokens" in corpus.summary


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_text(tmp_path, kind):
    table = pa.table({"body": pa.array(["ab", "c"] * 20, kind), "other": list(range(40))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    rows, _ = sequences(source="parquet", paths=(str(tmp_path),), text_field="body", seq_len=5)
    assert rows == [[*ids_of("ab"), EOS, *ids_of("c"), EOS]] * 20


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 3)]
)
def test_parquet_tokens_end_with_eos_once(tmp_path, kind):
    table = pa.table({"input_ids": pa.array([[5, 6, 7], [8, 9, 1]] * 10, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    fields = {"source": "parquet", "paths": (str(tmp_path),), "token_field": "input_ids"}
    rows, corpus = sequences(vocab_size=100_000, eos=1, seq_len=7, **fields)
    assert rows == [[5, 6, 7, 1, 8, 9, 1]] * 10
    assert corpus.vocab_size == 100_000
    rows, _ = sequences(vocab_size=10, seq_len=6, **fields)
    assert rows == [[5, 6, 7, 8, 9, 1]] * 10
    rows, _ = sequences(vocab_size=10, seq_len=3, mode="exact", **fields)
    assert rows == [[5, 6, 7], [8, 9, 1]] * 10


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_1d_token_files_are_concatenated(tmp_path, dtype):
    np.arange(6, dtype=dtype).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.arange(6, 13, dtype=np.int64))
    rows, corpus = sequences(
        source="tokens", paths=(str(tmp_path),), token_dtype=dtype, seq_len=5, vocab_size=13
    )
    assert rows == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert corpus.summary == "2 files, 13 tokens"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_ids_are_not_taken_for_wider_ones(tmp_path, dtype):
    """Also not those of padding, or of a small vocabulary."""
    drawn, number = np.random.default_rng(0).integers(0, 50_000, 301), np.arange(301)
    alternating = np.where(number % 2, drawn % 16, drawn)
    # Nothing is wider than int64, and of a few ids every second one is small by chance.
    alternating = alternating if dtype in ("uint8", "int64") else alternating[:127]
    for ids in (drawn, drawn % 16, np.where(number < 280, 0, drawn), alternating):
        ids.astype(dtype).tofile(tmp_path / "a.bin")
        _, corpus = sequences(
            source="tokens", paths=(str(tmp_path),), token_dtype=dtype, vocab_size=50_000
        )
        assert corpus.summary == f"1 file, {len(ids)} tokens"


def test_rows_of_2d_files_are_documents(tmp_path):
    table = np.arange(12, dtype=np.uint32).reshape(3, 4)
    np.save(tmp_path / "a.npy", table)
    fields = {"source": "tokens", "paths": (str(tmp_path),), "vocab_size": 12}
    for mode in ("exact", "concat"):
        rows, corpus = sequences(mode=mode, **fields)
        assert rows == table.tolist() and "joined" not in corpus.summary
    rows, corpus = sequences(mode="concat", seq_len=6, **fields)
    assert rows == table.reshape(2, 6).tolist()
    # The summary mentions that sequences cross rows, which may be unexpected.
    assert corpus.summary == "1 file with rows of 4 joined, 12 tokens"


def test_exact_finds_documents_between_eos(tmp_path):
    ids = [9, 1, 2, 3, 4, 9, 9, 5, 6, 9, 1, 1, 1, 2]
    np.asarray(ids, np.uint16).tofile(tmp_path / "a.bin")
    np.asarray([7, 7, 7, 7, 9], np.uint16).tofile(tmp_path / "b.bin")
    rows, corpus = sequences(
        source="tokens", paths=(str(tmp_path),), mode="exact", eos=9, vocab_size=10
    )
    assert rows == [[1, 2, 3, 4], [1, 1, 1, 2], [7, 7, 7, 7]]
    assert "2 files, 4 documents, 19 tokens" in corpus.summary


@pytest.mark.parametrize("eos, kept", [(9, [1, 2, 5]), (None, [2, 4])])
def test_exact_finds_documents_in_a_file_of_lengths(tmp_path, eos, kept):
    documents = [[9], [1, 9, 2, 3, 9], [1, 9, 9, 4], [], [1, 9, 2, 9], [5, 6, 7, 8, 9], [4, 4]]
    np.save(tmp_path / "a.npy", np.concatenate(documents).astype(np.uint16))
    with (tmp_path / "a.npy.lengths").open("wb") as file:
        np.save(file, [len(ids) for ids in documents])
    fields = {"source": "tokens", "paths": (str(tmp_path),), "vocab_size": 10}
    rows, corpus = sequences(mode="exact", eos=eos, **fields)
    assert rows == [documents[number][:4] for number in kept]
    assert f"1 file, {5 if eos else 6} documents, 21 tokens" in corpus.summary


@pytest.mark.parametrize("ids", [[1, 2, 9, 3, 4, 5], [1, 2, 9, 3, 4, 9]])
def test_the_last_document_may_lack_its_end_token(tmp_path, ids):
    np.save(tmp_path / "a.npy", ids)
    fields = {"source": "tokens", "paths": (str(tmp_path),), "eos": 9, "vocab_size": 10}
    data = section(mode="pack", seq_len=8, **fields)
    starts, lengths = loader_of(data, 10, block_size=1).packs.pieces(0)
    documents = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    assert sorted(documents) == [ids[:3], ids[3:]]
    short = ids[3 : 6 - ids[3:].count(9)]  # mode exact does not count end tokens
    rows, _ = sequences(mode="exact", seq_len=len(short), **fields)
    assert short in rows


def test_hugging_face_tokenizer(tmp_path):
    words = [(0, "?"), (1, "a"), (7, "b"), (3, "<eos>")]
    name = save_tokenizer(tmp_path / "tokenizer.json", words)
    (tmp_path / "a.txt").write_text("a b a nothing")
    rows, corpus = sequences(
        source="text", paths=(str(tmp_path / "a.txt"),), tokenizer=name, seq_len=5, vocab_size=8
    )
    assert rows == [[1, 7, 1, 0, 3]]
    assert corpus.vocab_size == 8  # the largest id is 7, though there are four words
    assert make_tokenizer(name, eos="b").eos == 7
    assert make_tokenizer(name, eos=1).eos == 1


@given(text=st.text(st.characters(codec="utf-8")))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_bytes_round_trip(text):
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(np.append(ids, tokenizer.eos)) == text
    assert tokenizer.eos == 256 and tokenizer.vocab_size == 257
