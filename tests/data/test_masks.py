"""Label masks: from the columns of every source to the labels and weights of batches."""

import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import models

from mtraining_jax.cli.inspect_data import main
from mtraining_jax.data.corpus import starts_of
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.data.stream import Part, TokenStream, Vocab
from mtraining_jax.tools.corpus.tokenizing import tokenize_corpus
from mtraining_jax.utils.errors import UserError
from tests.data.common import VOCAB, error_of, loader_of, section
from tests.data.mds_writer import array_bytes, write_mds

# Documents of ids from 1, since 0 is eos; the fourth has no trained token.
LENGTHS = [5, 9, 40, 3, 20, 2, 30, 11, 18, 11]
G = 4  # tokens per block
IDS = [10 * i + 1 + np.arange(n) % 10 for i, n in enumerate(LENGTHS)]
MASKS = [np.random.default_rng(i).random(n) < 0.4 for i, n in enumerate(LENGTHS)]
MASKS[3][:] = False


def write_jsonl(folder, **values):
    """Documents of token ids; by default with their masks as 0 and 1."""
    values = {"loss_mask": [mask.astype(int).tolist() for mask in MASKS]} | values
    rows = [
        {"ids": ids.tolist()} | {name: column[i] for name, column in values.items()}
        for i, ids in enumerate(IDS)
    ]
    path = folder / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = {"token_field": "ids", "mask_field": "loss_mask", "eos": 0}
    return {"source": "jsonl", "paths": (str(path),)} | fields


# Of the stream: an appended eos is trained if the token before it is.
TRAINED = np.concatenate([np.append(mask, mask[-1]) for mask in MASKS])


@pytest.mark.parametrize("mode", ["concat", "mask", "pack", "exact"])
def test_labels_are_those_of_trained_tokens(tmp_path, mode):
    """The same data without a mask has the same tokens."""
    fields = write_jsonl(tmp_path) | {"seq_len": 16, "batch_size": 4, "mode": mode}
    if mode == "mask":
        fields |= {"mode": "concat", "mask_documents": True}
    if mode == "exact":
        fields |= {"seq_len": 11, "batch_size": 2}
    block_size = G if mode in ("mask", "pack") else None
    data = section(VOCAB, **fields)
    loader = loader_of(data, block_size=block_size, weighted=True)
    plain = loader_of(section(VOCAB, **fields | {"mask_field": None}), block_size=block_size)
    stream = loader.corpus.stream
    trained = np.concatenate([MASKS[7], MASKS[9]]) if mode == "exact" else TRAINED
    np.testing.assert_array_equal(stream.trained(np.arange(len(stream))), trained)
    assert f"({trained.mean():.1%} trained)" in loader.description
    batch = next(loader)
    for row, sequence in enumerate(loader.sequences):
        if loader.packs is None:
            starts, lengths = (
                starts_of(loader.corpus, data)[sequence : sequence + 1],
                [data.seq_len],
            )
        else:
            starts, lengths = loader.packs.pieces(sequence)
        at = 0
        for start, length in zip(starts, lengths, strict=True):
            part, of_labels = slice(at, at + length), slice(at, at + length - 1)
            positions = start + np.arange(length)
            np.testing.assert_array_equal(batch["tokens"][row, part], stream.take(positions))
            wanted = np.where(trained[positions[1:]], stream.take(positions[1:]), -100)
            labels = batch["labels"][row]
            np.testing.assert_array_equal(labels[of_labels], wanted)
            assert labels[at + length - 1] == -100
            if block_size:
                weights = batch["weights"][row, part]
                np.testing.assert_array_equal(weights > 0, labels[part] != -100)
                assert np.unique(weights[weights > 0]).size <= 1
                assert weights.sum() == pytest.approx(float((wanted != -100).any()))
            at += -(-length // (block_size or 1)) * (block_size or 1)
    if mode != "pack":
        np.testing.assert_array_equal(next(plain)["tokens"], batch["tokens"])
    else:  # the rest of split documents may be without labels as well
        skipped = int(loader.description.split(" without a trained label")[0].split()[-1])
        assert skipped >= 1 and loader.num_sequences <= plain.num_sequences
        assert all((row != -100).any() for row in batch["labels"])


def test_processes_read_their_part_and_runs_resume(tmp_path):
    fields = write_jsonl(tmp_path) | {"seq_len": 16, "mode": "pack", "batch_size": 2}
    data = section(VOCAB, **fields, shuffle=True)
    permutation = np.random.default_rng(0).permutation(16)
    columns = np.array([0, 3, 4, 10])
    whole = loader_of(data, block_size=G, weighted=True)
    part = loader_of(
        data, VOCAB, permutation, rows=np.array([1]), columns=columns, block_size=G, weighted=True
    )
    for _ in range(3):
        left, right = next(whole), next(part)
        for name in ("tokens", "labels", "weights"):
            np.testing.assert_array_equal(left[name][1:, permutation[columns]], right[name])
    state = json.loads(json.dumps(whole.get_state()))
    resumed = loader_of(data, block_size=G, weighted=True)
    resumed.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, next(whole), next(resumed))
    other = section(VOCAB, **fields | {"mode": "concat", "mask_field": None})
    masked = loader_of(section(VOCAB, **fields | {"mode": "concat"})).get_state()
    with pytest.raises(UserError, match="had checksum of a sample of its label mask = "):
        loader_of(other).set_state(masked)


def write_labels(folder):
    labels = [np.where(mask, ids, -100).tolist() for ids, mask in zip(IDS, MASKS, strict=True)]
    return write_jsonl(folder, loss_mask=labels)


def write_booleans(folder):
    return write_jsonl(folder, loss_mask=[mask.tolist() for mask in MASKS])


def table():
    ids = [ids.tolist() for ids in IDS]
    return pa.table({"ids": ids, "other": ["x"] * len(ids), "loss_mask": [list(m) for m in MASKS]})


def write_parquet(folder):
    pq.write_table(table(), folder / "a.parquet")
    return write_jsonl(folder) | {"source": "parquet", "paths": (str(folder / "a.parquet"),)}


def write_hf_disk(folder):
    with pa.ipc.new_stream(str(folder / "data.arrow"), table().schema) as writer:
        writer.write_table(table())
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return write_jsonl(folder) | {"source": "hf_disk", "paths": (str(folder),)}


def write_spans(folder):
    """One MDS sample with all documents, as in ProLong's data."""
    ends = np.cumsum(LENGTHS)
    spans = np.stack([ends - LENGTHS, ends], axis=1).astype(np.uint32)
    arrays = {"ids": np.concatenate(IDS).astype(np.uint32), "indices": spans}
    arrays["loss_mask"] = np.concatenate(MASKS).astype(np.int32)
    columns = [(name, "ndarray", None) for name in sorted(arrays)]
    write_mds(folder, columns, [[{name: array_bytes(x) for name, x in arrays.items()}]])
    return write_jsonl(folder) | {"source": "mds", "paths": (str(folder / "index.json"),)}


def write_token_files(folder):
    """Pre-tokenized by two processes, in several parts."""
    data = section(VOCAB, **write_jsonl(folder))
    totals = tokenize_corpus(data, VOCAB, folder / "out", 2, part_bytes=300)
    assert totals.parts > 2 and f" ({TRAINED.sum()} trained) in " in str(totals)
    assert tokenize_corpus(data, VOCAB, folder / "out", 1, part_bytes=300).found == totals.parts
    return {"source": "tokens", "paths": (str(folder / "out"),)}


@pytest.mark.parametrize(
    "write",
    [write_labels, write_booleans, write_parquet, write_hf_disk, write_spans, write_token_files],
)
def test_sources_agree(tmp_path, write):
    (tmp_path / "other").mkdir()
    batches = []
    for fields in (write_jsonl(tmp_path), write(tmp_path / "other")):
        data = section(VOCAB, **fields | {"seq_len": 16, "mode": "pack", "batch_size": 8})
        batches.append(next(loader_of(data, block_size=G, weighted=True)))
    jax.tree.map(np.testing.assert_array_equal, *batches)


def test_a_changed_mask_rewrites_its_part(tmp_path):
    fields, out = write_jsonl(tmp_path), tmp_path / "out"
    args = section(VOCAB, **fields), VOCAB, out, 1
    tokenize_corpus(*args, part_bytes=300)
    before = {path.name: path.read_bytes() for path in out.glob("part-*")}
    write_jsonl(
        tmp_path, loss_mask=[[1] * n for n in LENGTHS[:2]] + [m.tolist() for m in MASKS[2:]]
    )
    assert tokenize_corpus(*args, part_bytes=300).found > 0
    changed = {path.name for path in out.glob("part-*") if path.read_bytes() != before[path.name]}
    assert changed == {"part-00000.npy.mask", "part-00000.json"}
    with pytest.raises(UserError, match='was started with data.mask_field = "loss_mask", but now'):
        tokenize_corpus(section(VOCAB, **fields | {"mask_field": None}), VOCAB, out, 1)


# ---- prompts -------------------------------------------------------------------------------------

PAIRS = [("ab", "cd"), ("", "x"), ("abc", "")]


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_prompts_are_not_trained(tmp_path, source):
    rows = [{"prompt": prompt, "completion": text} for prompt, text in PAIRS]
    path = tmp_path / f"a.{source}"
    if source == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    fields = {"paths": (str(path),), "prompt_field": "prompt", "text_field": "completion"}
    data = section(source=source, **fields, seq_len=5, batch_size=1)
    stream = data.source_options.open(data, VOCAB).stream
    positions = np.arange(len(stream))
    assert stream.take(positions).tolist() == [*b"abcd", 256, *b"x", 256, *b"abc", 256]
    trained = [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0]  # eos as the token before it
    assert stream.trained(positions).tolist() == trained


def test_a_token_that_a_prompt_shares_with_its_text_is_trained_and_reported(tmp_path):
    words = {"<eos>": 0, "ab": 1, "a": 2, "b": 3, "c": 4}
    merges = tokenizers.Tokenizer(models.BPE(words, [("a", "b")], unk_token="<eos>"))
    merges.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "ca", "text": "bc"}, {"prompt": "c", "text": "ab"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = {"source": "jsonl", "paths": (str(path),), "prompt_field": "prompt"}
    data = section(**fields, tokenizer=str(tmp_path / "tokenizer.json"))
    corpus = data.source_options.open(data, VOCAB)
    positions = np.arange(len(corpus.stream))
    assert corpus.stream.take(positions).tolist() == [4, 1, 4, 0, 4, 1, 0]
    assert corpus.stream.trained(positions).tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert "trained), 1 with a prompt that ends inside a token, documents" in corpus.summary
    totals = tokenize_corpus(data, VOCAB, tmp_path / "out", 1)
    assert str(totals).endswith("in 1 part, 1 with a prompt that ends inside a token")


def test_inspect_data_marks_what_is_trained(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": prompt, "text": text} for prompt, text in PAIRS]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = ["--data.source=jsonl", f'--data.paths=["{path}"]', "--data.prompt_field=prompt"]
    options += ["--data.mode=pack", "--data.seq_len=512"]
    assert main(["--config=tiny", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("jsonl: 3 documents, 11 tokens (45.5% trained); ")
    assert "1 without a trained label skipped" in lines[0]
    i = lines.index("  5 tokens from 0, 3 trained:")
    assert lines[i + 1 : i + 3] == ['    - 2 tokens: "ab"', '    + 3 tokens: "cd" <end>']


# ---- bad input -----------------------------------------------------------------------------------

GOOD = [1] * LENGTHS[0]


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (GOOD[1:], " has 4 values for 5 token ids"),
        ([1, 0, 2, 1, 1], " has 2 at position 2; it must have 0 or 1 for each token, or labels: "),
        ([-100, 2, 3, 4, 1], " has 1 at position 4; it must have 0 or 1 for each token, or labels"),
        ([0.5, 1, 1, 1, 1], " is not a list of integers"),
        ([float("nan"), 1, 1, 1, 1], " is not a list of integers"),
        ([None, 1, 1, 1, 1], " is not a list of integers"),
        ([[1], [1, 1], 1, 1, 1], " is not a list of integers"),
        ("11111", " is not a list of integers"),
        (3, " is not a list of integers"),
    ],
)
def test_invalid_masks(tmp_path, mask, reason):
    fields = write_jsonl(tmp_path, loss_mask=[mask, *([1] * n for n in LENGTHS[1:])])
    message = error_of(**fields)
    path = fields["paths"][0]
    assert message.startswith(f'{path}, line 1: the list of data.mask_field = "loss_mask"{reason}')


def test_other_problems_of_masks(tmp_path):
    fields = write_jsonl(tmp_path)
    zeros = write_jsonl(tmp_path, loss_mask=[[0] * n for n in LENGTHS])
    (path,) = zeros["paths"]
    assert error_of(**zeros) == (
        f'no token is trained: the label mask of data.source = "jsonl" (data.paths = ["{path}"]) '
        "is 0 everywhere"
    )
    with pytest.raises(UserError, match='no token of data.source = "jsonl" is trained: its label'):
        tokenize_corpus(section(**zeros), VOCAB, tmp_path / "out", 1)
    first = write_jsonl(tmp_path, loss_mask=[[1] + [0] * (n - 1) for n in LENGTHS])
    assert error_of(**first, mode="pack", block_size=G) == (
        'no document of data.source = "jsonl" has a trained label'
    )
    assert error_of(**fields | {"mask_field": "x"}).endswith(
        'line 1 has no field of data.mask_field = "x"; it has "ids", "loss_mask"'
    )
    assert error_of(**fields | {"token_field": "loss_mask", "mask_field": "ids"}).endswith(
        "has 2 at position 1; it must have 0 or 1 for each token, or labels: -100 or the token "
        "id, here 0"
    )
    assert error_of(**fields | {"token_field": None}) == (
        'data.mask_field = "loss_mask" is for token ids: set data.token_field, or '
        "data.prompt_field for text"
    )
    assert error_of(**fields | {"mask_field": None, "prompt_field": "x"}) == (
        'data.prompt_field = "x" is for text; for token ids set data.mask_field instead'
    )
    with pytest.raises(UserError, match=r"token ids of shape \[3\] have a label mask of shape \[2"):
        MaskedTokens(np.arange(3), np.ones(2, bool))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"ids": [[1, 2]], "loss_mask": [[0.5, 1.0]]}), path)
    message = error_of(**fields | {"source": "parquet", "paths": (str(path),)})
    assert "loss_mask" in message and message.endswith("not a list of integers")


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (np.ones(16, bool), "has 16 values, but the token file has 17 tokens"),
        (np.full(17, 2), "has 2 at position 0, not 0 or 1"),
        (np.ones(17), "has float64, not a label mask of bool or 0 and 1"),
        (np.zeros(17, bool), "no token is trained: the label mask of "),
        (b"no file", "is truncated or not a .npy file"),
    ],
)
def test_invalid_mask_files(tmp_path, mask, reason):
    np.save(tmp_path / "a.npy", np.arange(1, 18))
    path = tmp_path / "a.npy.mask"
    with path.open("wb") as file:
        file.write(mask) if isinstance(mask, bytes) else np.save(file, mask)
    message = error_of(source="tokens", paths=(str(tmp_path),))
    assert reason in message and str(tmp_path / "a.npy") in message


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("kind", [bool, np.int64])
def test_trained_tokens_are_counted_across_chunks_and_files(monkeypatch, chunk, kind):
    monkeypatch.setattr("mtraining_jax.data.stream._CHUNK", chunk)
    random = np.random.default_rng(chunk)
    masks = [random.random(23) < 0.4, None, random.random(5) < 0.4]
    sizes = [23, 11, 5]
    parts = [
        Part("a", np.zeros(size, np.uint16), trained=None if mask is None else mask.astype(kind))
        for size, mask in zip(sizes, masks, strict=True)
    ]
    stream = TokenStream(parts, Vocab(1, "a test"))
    mask = np.concatenate([np.ones(11, bool) if mask is None else mask for mask in masks])
    expected = np.concatenate([[0], np.cumsum(mask)])
    positions = np.sort(np.concatenate([np.arange(40), [0, 0, 7, 14, 23, 23, 34, 39, 39]]))
    for some in (positions, positions[::5], positions[:0], np.array([39])):
        assert stream.trained_before(some).tolist() == expected[some].tolist()
