"""Packing of documents into sequences, and the resulting batches."""

import itertools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax.data.packing import rules
from mtraining_jax.data.packing.rules import best_fit, chunked, consecutive, packed_order
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.utils.errors import UserError
from tests.data.common import VOCAB, error_of, loader_of, section, tables_of

EOS, G, S = 9, 4, 32


# ---- packing algorithms ------------------------------------------------------------------------


def rooms_of_naive_best_fit(blocks, capacity):
    """Reference implementation: the sorted free blocks of all packs."""
    rooms = []
    long = sorted((size for size in blocks if size * 10 > capacity), reverse=True)
    for size in [*long, *(size for size in blocks if size * 10 <= capacity)]:
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


def fewest_packs(blocks, capacity):
    """The optimum, by exhaustive search."""

    def fits(left, rooms):
        if not left:
            return True
        tried = set()
        for i, room in enumerate(rooms):
            if room >= left[0] and room not in tried:
                tried.add(room)
                if fits(left[1:], [*rooms[:i], room - left[0], *rooms[i + 1 :]]):
                    return True
        return False

    descending = sorted(blocks, reverse=True)
    return next(n for n in itertools.count(1) if fits(descending, [capacity] * n))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), capacity=st.integers(1, 60))
def test_best_fit_matches_the_reference(data, capacity):
    blocks = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    packs = best_fit(np.array(blocks), capacity)
    filled = np.bincount(packs, blocks)
    assert filled.min() > 0
    assert sorted(capacity - filled) == rooms_of_naive_best_fit(blocks, capacity)


def test_best_fit_is_near_the_optimum():
    rng, ratios = np.random.default_rng(0), []
    for _ in range(40):
        blocks = rng.integers(1, 11, 12)
        ratios.append((best_fit(blocks, 16).max() + 1) / fewest_packs(blocks.tolist(), 16))
    assert np.mean(ratios) <= 1.05 and np.max(ratios) <= 1.25


def test_long_and_short_documents_have_little_padding():
    # Half of the tokens in documents of 64K on average, half in documents of 1.2K; 512K sequences.
    rng, tokens = np.random.default_rng(0), 2**29
    short, long = (
        np.ceil(rng.lognormal(np.log(mean) - 1.1**2 / 2, 1.1, tokens // mean // 2))
        for mean in (1200, 65536)
    )
    lengths = np.concatenate([short, long]).astype(np.int64)
    _, lengths = chunked(np.zeros_like(lengths), lengths, 2**19)
    lengths = rng.permutation(lengths)
    packs = best_fit(-(-lengths // 128), 2**12)
    assert lengths.sum() > 2**28
    assert 1 - lengths.sum() / ((packs.max() + 1) * 2**19) < 0.03
    # With decreasing order the last pack would have 4096 of the shortest documents.
    assert np.bincount(packs).max() < 1024


def test_short_documents_waste_at_most_a_tenth():
    rng = np.random.default_rng(0)
    for _ in range(20):
        blocks = rng.integers(1, 21, 500)
        packs = best_fit(blocks, 200)
        assert packs.max() + 1 <= np.ceil(blocks.sum() / 200 * 10 / 9)


def test_windows_are_packed_separately_in_random_order(monkeypatch):
    monkeypatch.setattr(rules, "WINDOW", 50)
    blocks = np.random.default_rng(0).integers(1, 9, 120)
    order, ends = packed_order(blocks, 16, seed=3)
    assert sorted(order) == list(range(120)) and ends[-1] == 120
    packs = np.split(order, ends[:-1])
    assert all(0 < blocks[pack].sum() <= 16 for pack in packs)
    assert all(len(set(pack // 50)) == 1 for pack in packs)
    first = [pack[0] // 50 for pack in packs]
    assert first != sorted(first)  # packs of different windows are mixed
    sizes = [blocks[pack].tolist() for pack in packs]
    assert any(size != sorted(size, reverse=True) for size in sizes)
    for seed, same in ((3, True), (4, False)):
        again, _ = packed_order(blocks, 16, seed)
        assert np.array_equal(again, order) == same


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), longest=st.integers(1, 12))
def test_long_documents_are_split(lengths, longest):
    lengths = np.array(lengths)
    starts = 100 * np.arange(lengths.size)
    found = list(zip(*chunked(starts, lengths, longest), strict=True))
    assert found == [
        (start + cut, min(longest, length - cut))
        for start, length in zip(starts, lengths, strict=True)
        for cut in range(0, length, longest)
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), capacity=st.integers(1, 6))
def test_consecutive_documents_are_split_at_the_ends_of_packs(lengths, capacity):
    places, packs = {}, []  # block to (document, offset, tokens)
    block = 0
    for number, length in enumerate(lengths):
        for at in range(0, length, G):
            places[block] = number, at, min(G, length - at)
            block += 1
    for begin in range(0, block - block % capacity, capacity):
        pack = []
        for number, at, size in (places[i] for i in range(begin, begin + capacity)):
            if pack and pack[-1][0] == number:
                pack[-1][2] += size
            else:
                pack.append([number, at, size])
        packs.append(pack)
    starts = 100 * np.arange(len(lengths))
    starts, sizes, ends = consecutive(starts, np.array(lengths), G, capacity)
    expected = [(100 * number + at, size) for pack in packs for number, at, size in pack]
    assert list(zip(starts, sizes, strict=True)) == expected
    assert ends.tolist() == np.cumsum([len(pack) for pack in packs]).tolist()


# ---- batches -----------------------------------------------------------------------------------


def write(folder, lengths):
    """Writes a file of documents that end with `EOS`; all other tokens are different."""
    ids = 10 + np.arange(sum(lengths))
    ids[np.cumsum(lengths) - 1] = EOS
    # Replaces the old file atomically, since a prefetching loader may have it memory-mapped.
    np.save(folder / "new", ids.astype(np.uint16))
    (folder / "new.npy").replace(folder / "a.npy")
    return np.split(ids, np.cumsum(lengths)[:-1])


def packed(folder, vocab_size=10_000, **fields):
    fields = {"mode": "pack", "eos": EOS, "seq_len": S, "batch_size": 2} | fields
    return section(vocab_size, source="tokens", paths=(str(folder),), **fields)


def loader(data, **local):
    return loader_of(data, 10_000, block_size=G, **local)


def read_back(batch, num_blocks=S // G):
    """Checks a batch and returns its documents in sequence order."""
    found = []
    rows = batch["tokens"], batch["labels"], tables_of(batch["documents"])
    for tokens, labels, table in zip(*rows, strict=True):
        assert table.shape == (num_blocks, 3) and table.dtype == np.int32
        at = 0
        while at < num_blocks and table[at, 2]:
            first, end, length = table[at]
            assert first == at < end and (end - at - 1) * G < length <= (end - at) * G
            assert (table[at:end] == table[at]).all()
            own = slice(at * G, at * G + length)
            np.testing.assert_array_equal(labels[own][:-1], tokens[own][1:])
            padding = slice(at * G + length - 1, end * G)
            assert (labels[padding] == IGNORE_LABEL).all() and not tokens[padding][1:].any()
            found.append(tokens[own])
            at = end
        assert (table[at:] == [num_blocks, 0, 0]).all()
        assert not tokens[at * G :].any() and (labels[at * G :] == IGNORE_LABEL).all()
    return found


@pytest.mark.parametrize("shuffle", [False, True])
def test_packs_have_every_document_once(tmp_path, shuffle):
    lengths = [2, 3, 4, 5, 8, 31, 32, 33, 75, 2, 6, 7, 12, 20]
    documents = write(tmp_path, lengths)
    expected = [part for ids in documents for part in np.split(ids, range(S, len(ids), S))]
    data = packed(tmp_path, shuffle=shuffle, batch_size=1)
    found = loader(data)
    batches = [next(found) for _ in range(found.num_sequences)]
    pieces = [ids for batch in batches for ids in read_back(batch)]
    assert sorted(map(tuple, pieces)) == sorted(map(tuple, expected))
    waste = 1 - sum(lengths) / (found.num_sequences * S)
    assert f"{waste:.1%} padding, 2 longer than a sequence split" in found.description
    assert "14 documents, 240 tokens" in found.description


def test_consecutive_documents_keep_their_order(tmp_path):
    documents = write(tmp_path, [5, 9, 40, 3, 20, 2, 30])
    data = packed(tmp_path, mode="concat", mask_documents=True)
    found = loader(data)
    pieces = read_back(next(found))
    # Blocks of 4: 2 + 3 + 10 + 1, so the third document is split after 3 of its 10 blocks.
    expected = [documents[0], documents[1], documents[2][:12], documents[2][12:], documents[3]]
    for left, right in zip(pieces, expected, strict=True):
        np.testing.assert_array_equal(left, right)
    # The third sequence has 8 tokens of the last document, in its last two blocks.
    assert ", 22 tokens dropped that fill no sequence" in found.description


def test_exact_mode_has_one_document_per_sequence(tmp_path):
    write(tmp_path, [33, 5, 33])
    batch = next(loader(packed(tmp_path, mode="exact", mask_documents=True)))
    assert [len(ids) for ids in read_back(batch)] == [S, S]
    assert (tables_of(batch["documents"]) == [0, S // G, S]).all()


def test_parts_of_a_batch_have_the_documents_of_entire_rows(tmp_path):
    write(tmp_path, [5, 9, 40, 3, 20, 2, 30, 11, 11, 11])
    data = packed(tmp_path, shuffle=True)
    permutation = np.random.default_rng(0).permutation(S)
    columns = np.array([0, 3, 4, 30])
    whole, part, in_order = (
        loader(data, permutation=permutation),
        loader(data, permutation=permutation, rows=np.array([1]), columns=columns),
        loader(data),
    )
    for _ in range(3):
        left, right, plain = next(whole), next(part), next(in_order)
        tables = [tables_of(batch["documents"]) for batch in (left, right, plain)]
        np.testing.assert_array_equal(tables[0][1:], tables[1])
        np.testing.assert_array_equal(tables[0], tables[2])
        for name in ("tokens", "labels"):
            np.testing.assert_array_equal(left[name][1:, columns], right[name])
            np.testing.assert_array_equal(left[name], plain[name][:, permutation])
    first = right["documents"].first
    np.testing.assert_array_equal(part.shard(first, (slice(1, 2),)), first)
    with pytest.raises(ValueError, match="does not read all rows from 0 to 1"):
        part.shard(first, (slice(None),))


def test_weights_sum_to_1_per_document(tmp_path):
    write(tmp_path, [5, 9, 40, 3, 20, 2, 30])
    batch = next(loader(packed(tmp_path), weighted=True))
    weights, table = batch["weights"], tables_of(batch["documents"])
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights > 0, batch["labels"] != IGNORE_LABEL)
    for row, blocks in zip(weights, table, strict=True):
        for first, end, length in {tuple(block) for block in blocks.tolist() if block[2]}:
            own = row[first * G : end * G]
            assert own.sum() == pytest.approx(1) and (own[: length - 1] == own[0]).all()


def test_resuming_requires_the_same_packs(tmp_path):
    write(tmp_path, [5, 9, 40, 3, 20, 2, 30, 11, 11, 11])
    data = packed(tmp_path, shuffle=True, batch_size=1)
    first = loader(data)
    next(first)
    state = json.loads(json.dumps(first.get_state()))
    expected, resumed = next(first), loader(data)
    resumed.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, next(resumed), expected)
    saved = state["identity"]
    saved["data.mode"] = "concat"
    with pytest.raises(UserError, match="had data.mask_documents = true, but this run has false"):
        loader_of(replace(data, mode="concat"), 10_000).set_state(state)
    saved["data.mode"] = "pack"
    with pytest.raises(UserError, match="checkpoint's data loader had sparsity.block_size = 4"):
        loader_of(data, 10_000, block_size=8).set_state(state)
    write(tmp_path, [9, 5, 40, 3, 20, 2, 30, 11, 11, 11])
    with pytest.raises(UserError, match="had digest of the packed documents = "):
        loader(data).set_state(state)


# ---- document boundaries -----------------------------------------------------------------------


def test_documents_from_a_file_of_lengths(tmp_path):
    write(tmp_path, [5, 9, 3])
    with open(tmp_path / "a.npy.lengths", "wb") as file:
        np.save(file, np.array([7, 0, 10], np.uint32))
    found = loader(packed(tmp_path, eos=None, batch_size=1))
    assert sorted(map(len, read_back(next(found)))) == [7, 10]
    assert "1 with fewer than 2 tokens skipped" in found.description


def test_rows_of_a_2d_file_are_documents(tmp_path):
    np.save(tmp_path / "a.npy", 10 + np.arange(12).reshape(2, 6))
    assert [len(ids) for ids in read_back(next(loader(packed(tmp_path, batch_size=1))))] == [6, 6]


def test_documents_of_text_end_with_eos(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": ""}\n{"text": "c"}\n')
    data = section(source="jsonl", paths=(str(tmp_path),), mode="pack", seq_len=16)
    found = loader_of(data, block_size=G)
    pieces = sorted(ids.tolist() for ids in read_back(next(found), num_blocks=4))
    assert pieces == [[97, 98, 256], [99, 256]]
    assert "1 with fewer than 2 tokens skipped" in found.description


def test_synthetic_documents_are_aligned_to_blocks(tmp_path):
    fields = {"source": "synthetic", "seq_len": 2**16, "mask_documents": True, "eos": 7}
    data = section(5000, **fields)
    found = loader_of(data, 5000, block_size=128)
    batch = next(found)
    tokens, table = batch["tokens"][0], tables_of(batch["documents"])[0]
    firsts = np.flatnonzero(table[:, 0] == np.arange(2**9))
    assert firsts.size > 3 and table[-1, 1] == 2**9
    for first, end, length in table[firsts][:-1]:
        own = tokens[first * 128 : end * 128]
        assert np.flatnonzero(own == 7).tolist() == [length - 1] and not own[length:].any()


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        (b"no file", "cannot be read as document lengths"),
        (np.array([5, 9]), "the lengths of 2 documents sum to 14, but the token file has"),
        (np.array([20, -3]), "document 1 has negative length -3"),
        (np.array([17.0]), "has float64 (1,), not a list of lengths"),
        (np.array([{}]), "has object (1,), not a list of lengths"),
    ],
)
def test_invalid_lengths(tmp_path, lengths, reason):
    write(tmp_path, [5, 9, 3])
    path = tmp_path / "a.npy.lengths"
    if isinstance(lengths, bytes):
        path.write_bytes(lengths)
    else:
        with path.open("wb") as file:
            np.save(file, lengths)
    with pytest.raises(UserError) as caught:
        loader(packed(tmp_path))
    assert str(path) in str(caught.value) and reason in str(caught.value)


def test_packing_errors(tmp_path):
    fields = {"source": "tokens", "paths": (str(tmp_path),), "mode": "pack"}
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n")
    assert error_of(source="jsonl", paths=(str(blank),), mode="pack", block_size=G) == (
        'data.source = "jsonl" has no documents'
    )
    write(tmp_path, [1, 1, 1])
    assert error_of(**fields, eos=EOS, block_size=G) == (
        'the 3 documents of data.source = "tokens" have fewer than 2 tokens each: there is '
        "nothing to predict"
    )
    write(tmp_path, [5, 1])
    consecutive_ones = fields | {"seq_len": S, "eos": EOS, "mode": "concat", "mask_documents": True}
    assert error_of(**consecutive_ones, block_size=G) == (
        'data.seq_len = 32 is more than the 8 tokens of the 2 documents of data.source = "tokens", '
        'padded to blocks of 4, and data.mode = "concat" drops incomplete sequences; set data.mode '
        '= "pack" or a smaller data.seq_len'
    )
    assert 'data.eos is not set; data.mode = "pack" needs it' in error_of(**fields, block_size=G)
    assert "is not supported by this command" in error_of(**fields, eos=EOS)
    with pytest.raises(ValueError, match="data.seq_len = 4 is not a multiple of 3"):
        loader_of(section(**fields, eos=EOS), VOCAB, block_size=3)


def test_only_documents_that_are_trained_in_whole_are_split(tmp_path):
    long = np.arange(10, 20)
    masks = {1: np.ones(10, int), 2: np.arange(8) > 0, 3: np.arange(10) < 9}
    rows = [{"ids": [1, 2], "m": [0, 1]}]
    rows += [
        {"ids": (long[: mask.size] * k).tolist(), "m": mask.astype(int).tolist()}
        for k, mask in masks.items()
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"token_field": "ids", "mask_field": "m", "mode": "pack", "seq_len": 4}
    loader = loader_of(section(source="jsonl", paths=(str(path),), **fields), block_size=1)
    assert loader.description.endswith(
        ", 2 longer than a sequence skipped (up to 10 tokens), 1 longer than a sequence split"
    )
    found = [next(loader)["tokens"] for _ in range(loader.num_sequences)]
    assert sorted(np.concatenate(found, axis=None).tolist()) == [1, 2, *long.tolist()]
    loader.close()
