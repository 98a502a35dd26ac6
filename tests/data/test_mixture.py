"""Mixtures: proportions, upsampling, exact resume, and validation losses by part."""

import json

import jax
import numpy as np
import pytest

from mtraining_jax.config import Config
from mtraining_jax.config.load import with_steps
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.data.sources.token_parts import TOKENIZER, close_folder, open_folder, write_part
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.tools.corpus.tokenizing import tokenize_corpus
from mtraining_jax.utils.errors import UserError
from tests.data.common import VOCAB, error_of, loader_of, section, tables_of
from tests.data.contract import SourceContract
from tests.data.test_sources import save_tokenizer

G, S = 4, 32


def write(folder, **lengths):
    """A JSONL file for each part, with documents of a letter; the tables of the parts."""
    parts = {}
    for letter, sizes in lengths.items():
        path = folder / f"{letter}.jsonl"
        path.write_text("\n".join(json.dumps({"text": letter * (n - 1)}) for n in sizes))
        parts[letter] = {"source": "jsonl", "paths": [str(path)]}
    return parts


def mixed(parts, weights=None, **fields):
    for name, weight in (weights or {}).items():
        parts[name] = parts[name] | {"weight": weight}
    fields = {"source": "mixture", "seq_len": S, "mode": "pack", "shuffle": True} | fields
    return {"parts": parts} | fields


def letters_of(batch):
    """The letter of each row; a row has documents of one part."""
    found = [
        np.unique(row[row > 0]) for row in np.where(batch["tokens"] == 256, 0, batch["tokens"])
    ]
    assert all(of.size == 1 for of in found)
    return [chr(of[0]) for of in found]


class TestMixture(SourceContract):
    source = "mixture"
    bad = (({"parts": {}}, 'data.source = "mixture" needs parts: add a table [data.parts.NAME]'),)

    def fields(self, folder, monkeypatch):
        return {"parts": write(folder, a=[5] * 4, b=[5] * 4)}


@pytest.mark.parametrize("mode", ["concat", "pack"])
def test_parts_have_their_shares_of_tokens(tmp_path, mode):
    parts = write(tmp_path, a=[20] * 30, b=[7] * 50, c=[32] * 5)
    data = section(**mixed(parts, {"a": 2, "b": 1, "c": 0.5}, mode=mode, batch_size=7))
    loader = loader_of(data, block_size=G)
    assert "by tokens 57.1% a (30 documents, 600 tokens), 28.6% b (" in loader.description
    counts, sequences = dict.fromkeys("abc", 0), []
    for _ in range(40):
        batch = next(loader)
        for letter, row in zip(letters_of(batch), batch["tokens"], strict=True):
            counts[letter] += int(np.count_nonzero(row))
        sequences.append(loader.sequences)
    shares = np.array([*counts.values()]) / sum(counts.values())
    np.testing.assert_allclose(shares, np.array([2, 1, 0.5]) / 3.5, atol=0.01)
    # Every part has epochs of its own.
    sequences = np.concatenate(sequences)
    of_a = sequences[loader.parts.of(sequences) == 0]
    size = len(loader.parts.sequences["a"])
    assert sorted(of_a[:size]) == list(range(size)) == sorted(of_a[size : 2 * size])
    assert of_a[:size].tolist() != of_a[size : 2 * size].tolist()
    epochs = float(loader.description_for(40).split("epochs in 40 steps: ")[1].split(" of a")[0])
    np.testing.assert_allclose(epochs, of_a.size / size, rtol=0.05)


def test_documents_of_exactly_one_sequence(tmp_path):
    parts = write(tmp_path, a=[20, 21, 3, 21], b=[7, 21])  # without eos one less
    fields = mixed(parts, mode="exact", seq_len=20, mask_documents=True, batch_size=4)
    batch = next(loader_of(section(**fields), block_size=G))
    assert sorted(letters_of(batch)) == ["a", "a", "b", "b"]
    assert (np.sort(batch["tokens"], axis=1)[:, 0] > 0).all()


def test_what_happens_to_documents_is_said_of_each_part(tmp_path):
    parts = write(tmp_path, a=[20, 70, 40], b=[20, 20], c=[1, 1, 20])
    loader = loader_of(section(**mixed(parts)), block_size=G)
    notes = "; a: 2 longer than a sequence split; c: 2 with fewer than 2 tokens skipped"
    assert loader.description.count(notes) == 1


def test_weights_of_documents_and_upsampling_of_long_ones(tmp_path):
    parts = write(tmp_path, a=[32] * 8, b=[4] * 64 + [16] * 8)
    parts["b"] |= {"upsample_tokens": 16, "upsample_factor": 3}
    fields = mixed(parts, {"a": 1, "b": 4}, weighted_by="documents", batch_size=10)
    loader = loader_of(section(**fields), block_size=G)
    found = []
    for _ in range(30):
        batch = next(loader)
        for letter, table in zip(letters_of(batch), tables_of(batch["documents"]), strict=True):
            found += [(letter, n) for first, _, n in np.unique(table[table[:, 2] > 0], axis=0)]
    of_b = [n for letter, n in found if letter == "b"]
    assert len(of_b) / len(found) == pytest.approx(0.8, abs=0.02)
    assert of_b.count(16) / len(of_b) == pytest.approx(24 / (24 + 64), abs=0.02)


def test_a_run_resumes_with_the_same_parts_and_weights(tmp_path):
    parts = write(tmp_path, a=[20] * 30, b=[7] * 50)
    loader = loader_of(section(**mixed(parts, {"a": 3})), block_size=G)
    for _ in range(5):
        next(loader)
    state = json.loads(json.dumps(loader.get_state()))
    expected = [next(loader) for _ in range(6)]
    resumed = loader_of(section(**mixed(parts, {"a": 3})), block_size=G)
    resumed.set_state(state)
    for left in expected:
        jax.tree.map(np.testing.assert_array_equal, next(resumed), left)
    other = loader_of(section(**mixed(parts, {"a": 2.5})), block_size=G)
    with pytest.raises(UserError, match=r'had weights of data.parts = \{"a": 3.0, "b": 1.0\}, but'):
        other.set_state(state)


def test_parts_may_be_masked_or_not(tmp_path):
    parts = write(tmp_path, a=[20] * 4, b=[7] * 4)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "aaa", "text": "aaaa"}) for _ in range(9)))
    parts["a"]["prompt_field"] = "prompt"
    loader = loader_of(section(**mixed(parts, batch_size=8)), block_size=G)
    batch = next(loader)
    for letter, labels, tokens in zip(
        letters_of(batch), batch["labels"], batch["tokens"], strict=True
    ):
        documents = np.count_nonzero(tokens == 256)
        labels_each = 5 if letter == "a" else {20: 19, 7: 6}[np.count_nonzero(tokens) // documents]
        assert np.count_nonzero(labels != -100) == documents * labels_each


FILE = """
[data]
source = "mixture"
seq_len = 512

[data.parts.books]
source = "text"
paths = ["books/*.txt"]
weight = 3

[data.parts.chat-1]
source = "jsonl"
paths = ["chats.jsonl"]
"""


def test_parts_in_files_and_on_the_command_line(tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text('base = "tiny"\n' + FILE)
    overrides = {"data.parts.books.weight": 2.5, "data.parts.more.source": "python_stdlib"}
    config = Config.load(path, overrides | {"data.parts.chat-1.paths": "other.jsonl"})
    parts = config.data.source_options.parts
    assert set(parts) == {"more", "books", "chat-1"}
    assert parts["books"] == {"source": "text", "paths": ["books/*.txt"], "weight": 2.5}
    assert parts["chat-1"]["paths"] == "other.jsonl"
    assert Config.from_dict(config.to_dict(), "a test") == config
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert Config.load(again).data == config.data
    path.write_text('base = "tiny"\n' + FILE + "\n[data.parts.books]\n")
    with pytest.raises(UserError, match="books"):
        Config.load(path)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"weight": 0}, "data.parts.b.weight = 0 must be a finite number (greater than 0)"),
        ({"weight": -1.5}, "data.parts.b.weight = -1.5 must be a finite number (greater than 0)"),
        ({"weight": "x"}, 'data.parts.b.weight = "x" must be a finite number (greater than 0)'),
        ({"upsample_factor": 0}, "data.parts.b.upsample_factor = 0 must be an integer (at least 1"),
        (
            {"source": "nothing"},
            'data.parts.b.source: unknown data source "nothing"; choose one of',
        ),
        ({"source": "mixture"}, 'data.parts.b.source = "mixture": a part must have another source'),
        ({"source": None}, "data.parts.b.source is missing: it must be one of "),
        (
            {"wait": 2},
            'data.parts.b.wait is not an option of a part with source = "jsonl", which ha',
        ),
        (
            {"paths": []},
            'data.parts.b.source = "jsonl" needs data.parts.b.paths, the files to read',
        ),
        ({"paths": ["/no"]}, 'data.parts.b.paths: "/no" does not exist'),
        (
            {"text_field": "x"},
            'line 1 has no field of data.parts.b.text_field = "x"; it has "text"',
        ),
        (
            {"source": "synthetic", "paths": None},
            'data.mode = "pack" is not possible with data.part',
        ),
    ],
)
def test_problems_of_a_part(tmp_path, part, message):
    parts = write(tmp_path, a=[20] * 4, b=[7] * 4)
    table = parts["b"] | part
    parts["b"] = {name: value for name, value in table.items() if value is not None}
    assert message in error_of(**mixed(parts), block_size=G)


def test_other_problems(tmp_path):
    parts = write(tmp_path, a=[20] * 4, b=[7] * 4)
    assert error_of(**mixed(parts, mode="concat", seq_len=60)) == (
        'data.seq_len = 60 is more than the 28 tokens of data.parts.b.source = "jsonl" (4 documents'
        ", 28 tokens); use a smaller data.seq_len or more data"
    )
    assert error_of(**mixed({"a b": parts["a"]}), block_size=G).startswith(
        "data.parts.a b: the name of a part must have letters, digits, _ or - only"
    )
    fields = mixed(parts, mode="concat")
    assert 'data.weighted_by = "documents" needs data.mode = "pack"' in error_of(
        **fields | {"weighted_by": "documents"}
    )
    fields_of_long = fields | {"parts": {"a": parts["a"] | {"upsample_tokens": 8}}}
    assert "data.parts.a.upsample_tokens = 8 needs data.mode" in error_of(**fields_of_long)
    random = {"a": {"source": "synthetic"}}
    assert error_of(**fields | {"parts": random}) == (
        'data.parts.a.source = "synthetic" generates its data and cannot be a part of a mixture'
    )
    overrides = {"run.epochs": "2", "data.source": "mixture"}
    overrides |= {"data.parts.a.source": "python_stdlib"}
    with pytest.raises(UserError, match='2 is not possible with data.source = "mixture", which'):
        with_steps(Config.load("tiny", overrides))


def test_token_files_of_another_tokenizer(tmp_path):
    parts = write(tmp_path, a=[20] * 4, b=[7] * 4)
    data = section(**parts["b"])
    tokenize_corpus(data, VOCAB, tmp_path / "out", 1)
    parts["b"] = {"source": "tokens", "paths": [str(tmp_path / "out")]}
    loader = loader_of(section(**mixed(parts)), block_size=G)
    assert {letter for _ in range(4) for letter in letters_of(next(loader))} == {"a", "b"}
    manifest = tmp_path / "out" / "token_parts.json"
    manifest.write_text(manifest.read_text().replace('"bytes"', '"other.json"'))
    assert error_of(**mixed(parts), block_size=G) == (
        'the parts have tokens of different tokenizers: data.parts.a has "bytes" and data.parts.b '
        'has "other.json"; tokenize all with the same data.tokenizer'
    )


def test_tokenizers_are_compared_by_content(tmp_path):
    """Two names of one tokenizer are the same, and one name of two tokenizers is not."""
    tokens, ids, words = {}, MaskedTokens(np.array([0, 3])), [(0, "?"), (3, "</s>")]
    first, other = (str(tmp_path / f"{name}.json") for name in ("first", "other"))
    for name, path, word in ("a", first, "x"), ("b", other, "x"), ("c", first, "y"):
        save_tokenizer(path, [*words, (1, word)])
        folder = tmp_path / f"tokens-{name}"
        identity = path, make_tokenizer(path).checksum
        open_folder(folder, dict(zip(TOKENIZER, identity, strict=True)))
        write_part(folder, 0, ids, np.array([2]), checksum=0, notes={})
        close_folder(folder, 1, {})
        tokens[name] = {"source": "tokens", "paths": [str(folder)]}
    same, different = ({name: tokens[name] for name in names} for names in ("ab", "ac"))
    fields = {"mode": "concat", "seq_len": 2}
    assert len(loader_of(section(**mixed(same, **fields))).corpus.stream) == 4
    assert error_of(**mixed(different, **fields)) == (
        f'the parts have tokens of different tokenizers: data.parts.a has "{first}" and '
        f'data.parts.c has "{first}"; tokenize all with the same data.tokenizer'
    )
    # One source, and the tokenizer of the run.
    one = tokens["a"] | {"seq_len": 2}
    save_tokenizer(first, [*words, (1, "x")])
    assert len(loader_of(section(**one, tokenizer=first)).corpus.stream) == 2
    save_tokenizer(other, [*words, (1, "y")])
    assert error_of(**one, tokenizer=other) == (
        f'data.paths: {tmp_path / "tokens-a"} was made with data.tokenizer = "{first}", which is '
        f'another tokenizer than "{other}"; set data.tokenizer to that one, or tokenize again'
    )
    assert error_of(**one, tokenizer="none.json") == (
        'data.tokenizer = "none.json" does not exist; it must be "bytes" or the path of a '
        "tokenizer.json"
    )
