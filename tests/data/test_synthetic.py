"""Synthetic token ids: their statistics, and random access."""

import hashlib
import json

import numpy as np
import pytest

from mtraining_jax.data.loader import Loader
from mtraining_jax.data.sources.synthetic import SyntheticStream
from tests.data.common import error_of, section

SEQ_LEN, VOCAB = 2**17, 5000


def loader_of(vocab_size=VOCAB, columns=None, permutation=None, **fields):
    fields = {"source": "synthetic", "seq_len": SEQ_LEN, "shuffle": True} | fields
    data = section(vocab_size, **fields)
    if permutation is None:
        permutation = np.arange(data.seq_len)
    return Loader(data, permutation=permutation, vocab_size=vocab_size, columns=columns)


def first_tokens(**fields):
    loader = loader_of(**fields)
    tokens = next(loader)["tokens"]
    loader.close()
    return tokens


def test_ids_follow_zipfs_law_and_stay_in_the_vocabulary():
    tokens = first_tokens(batch_size=4)
    counts = np.bincount(tokens.reshape(-1), minlength=VOCAB)
    assert tokens.dtype == np.int32 and counts.size == VOCAB
    eos = counts[-1]
    # The frequency of id r is proportional to 1 / (r + 2.7).
    shares = 1 / (np.arange(VOCAB - 1) + 2.7)
    expected = shares / shares.sum() * (tokens.size - eos)
    for low, high in ((0, 10), (10, 100), (100, 1000), (1000, VOCAB - 1)):
        assert counts[low:high].sum() == pytest.approx(expected[low:high].sum(), rel=0.05)


def test_documents_have_heavy_tailed_lengths():
    tokens = first_tokens(batch_size=32, eos=7)
    assert tokens.max() == VOCAB - 1  # an ordinary token, since eos is 7
    lengths = np.concatenate([np.diff(np.flatnonzero(row == 7)) for row in tokens])
    assert 300 < lengths.size < 1000
    # Lognormal: median 2048, mean 3.1 times that; sequences truncate the longest.
    assert 1500 < np.median(lengths) < 2500
    assert lengths.mean() > 2 * np.median(lengths)
    assert lengths.max() > 16 * np.median(lengths) and lengths.min() < 200


def test_document_lengths_match_the_tokens():
    stream = SyntheticStream(SEQ_LEN, VOCAB, 7, seed=3)
    for sequence in (0, 5):
        tokens = stream.take(sequence * SEQ_LEN + np.arange(SEQ_LEN))
        ends = np.flatnonzero(tokens == 7) + 1
        lengths = stream.document_lengths(sequence)
        assert lengths.tolist() == np.diff(ends, prepend=0, append=SEQ_LEN).tolist()


def test_passages_are_repeated_at_long_distances():
    tokens = first_tokens()[0].astype(np.int64)
    # Repeated 16-token sequences, which practically never occur by chance.
    runs = np.lib.stride_tricks.sliding_window_view(tokens, 16)
    _, first, inverse = np.unique(runs, axis=0, return_index=True, return_inverse=True)
    distance = np.arange(runs.shape[0]) - first[inverse.reshape(-1)]
    repeated = distance > 0
    assert 0.1 < repeated.mean() < 0.35
    assert np.median(distance[repeated]) > SEQ_LEN / 10
    assert distance.max() > SEQ_LEN / 2


def test_tokens_depend_on_seed_and_sequence_only():
    tokens = first_tokens(batch_size=2, shuffle=False)
    np.testing.assert_array_equal(tokens, first_tokens(batch_size=2, shuffle=False))
    other = first_tokens(batch_size=2, shuffle=False, seed=1)
    for left, right in ((tokens[0], tokens[1]), (tokens[0], other[0])):
        # As often equal as two independent draws.
        assert 0 < (left == right).mean() < 0.05


def test_tokens_are_those_of_earlier_versions():
    """Values as they are, because a run may resume with a later version."""
    stream = SyntheticStream(2**14, VOCAB, 7, seed=3)
    tokens = stream.take(5 * 2**14 + np.arange(2**14)).astype("<i4")
    assert stream.document_lengths(5).tolist()[:4] == [2500, 1894, 2904, 414]
    assert hashlib.sha256(tokens.tobytes()).hexdigest()[:16] == "c495863b27d295c1"


def test_processes_read_their_part_and_resume():
    rng = np.random.default_rng(0)
    permutation = rng.permutation(SEQ_LEN)
    columns = np.sort(rng.choice(SEQ_LEN, SEQ_LEN // 8, replace=False))
    whole = loader_of(permutation=permutation, batch_size=2, seed=5)
    part = loader_of(permutation=permutation, batch_size=2, seed=5, columns=columns)
    next(whole), next(part)
    state = json.loads(json.dumps(part.get_state()))
    expected = next(whole)
    for found in (next(part), None):
        if found is None:
            part.set_state(state)
            found = next(part)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values[:, columns])
    whole.close()
    part.close()


def test_errors():
    def error(**fields):
        return error_of(**{"source": "synthetic"} | fields)

    assert error(mode="exact") == (
        'data.mode = "exact" is not possible with data.source = "synthetic": it must be "concat"'
    )
    assert error(eos=VOCAB, vocab_size=VOCAB) == (
        "data.eos = 5000 is outside the vocabulary: model.vocab_size = 5000"
    )
    assert error(eos="<eos>").startswith('data.eos = "<eos>" must be an id')
    assert error(vocab_size=1).startswith("model.vocab_size = 1 must be at least 2")
    assert set(np.unique(first_tokens(vocab_size=2))) == {0, 1}
