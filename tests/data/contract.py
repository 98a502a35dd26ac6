"""Contract tests of data sources; each source has a subclass with a tiny corpus."""

import itertools
import json

import jax
import numpy as np
import pytest

from mtraining_jax.data.sources import SOURCES
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.utils.fields import fields_of
from tests.data.common import VOCAB, error_of, loader_of, section

MODES = ("concat", "exact", "pack")


class SourceContract:
    """Subclasses set `source` and `fields`.

    Attributes:
        source: name of the source.
        modes: supported values of `data.mode`.
        bad: pairs of invalid fields and part of the error message.
    """

    source: str
    modes = MODES
    bad: tuple[tuple[dict, str], ...] = ()

    def fields(self, folder, monkeypatch) -> dict:
        """Fields of a corpus with at least 3 sequences of 4 tokens in every supported mode.

        Its first document has at least 3 tokens.
        """
        return {}

    @pytest.fixture
    def corpus(self, tmp_path, monkeypatch):
        return {"source": self.source, "eos": 0} | self.fields(tmp_path, monkeypatch)

    @pytest.mark.parametrize("mode", MODES)
    def test_sequences_have_valid_length_and_ids(self, corpus, mode):
        if mode not in self.modes:
            assert f'data.mode = "{mode}" is not possible' in error_of(**corpus, mode=mode)
            return
        block_size = 2 if mode == "pack" else None
        loader = loader_of(section(**corpus, mode=mode, batch_size=3), block_size=block_size)
        assert loader.num_sequences >= 3
        batch = next(loader)
        documents = batch.pop("documents", None)
        assert set(batch) == {"tokens", "labels"} and (documents is None) == (block_size is None)
        for array in batch.values():
            assert array.shape == (3, 4) and array.dtype == np.int32
        for array in jax.tree.leaves(documents):
            assert array.shape == (3, 2) and array.dtype == np.int32
        assert batch["tokens"].min() >= 0
        assert batch["tokens"].max() < loader.corpus.vocab_size <= VOCAB
        labels, following = batch["labels"][:, :-1], batch["tokens"][:, 1:]
        if documents:
            following = np.where(labels == IGNORE_LABEL, IGNORE_LABEL, following)
            assert (labels != IGNORE_LABEL).any()
        np.testing.assert_array_equal(labels, following)
        assert loader.description.startswith(f"{self.source}: ")
        loader.close()

    def test_batches_are_deterministic_and_can_be_read_in_part(self, corpus):
        data = section(**corpus, shuffle=True, batch_size=2)
        permutation, columns = np.array([2, 0, 3, 1]), np.array([1, 2])
        first = loader_of(data, permutation=permutation)
        again = loader_of(data, permutation=permutation, rows=np.array([1]), columns=columns)
        for left, right in itertools.islice(zip(first, again, strict=False), 3):
            for name in left:
                np.testing.assert_array_equal(left[name][1:, columns], right[name])
        first.close(), again.close()

    def test_it_resumes(self, corpus):
        data = section(**corpus, shuffle=True)
        loader = loader_of(data)
        next(loader), next(loader)
        state = json.loads(json.dumps(loader.get_state()))
        expected = [next(loader) for _ in range(3)]
        resumed = loader_of(data)
        resumed.set_state(state)
        for left in expected:
            right = next(resumed)
            for name in left:
                np.testing.assert_array_equal(left[name], right[name])
        loader.close(), resumed.close()

    def test_errors_name_the_field(self, corpus):
        assert error_of(**corpus | {"eos": VOCAB}).startswith(
            f"data.eos = {VOCAB} is outside the vocabulary"
        )
        if "paths" in corpus:
            missing = "/no/such/file"
            assert error_of(**corpus | {"paths": ()}) == (
                f'data.source = "{self.source}" needs data.paths, the files to read'
            )
            assert error_of(**corpus | {"paths": (missing,)}) == (
                f'data.paths: "{missing}" does not exist'
            )
        else:
            error = error_of(**corpus | {"paths": ("a.txt",)})
            assert "data.paths is an option of data.source = " in error
        for fields, words in self.bad:
            assert words in error_of(**corpus | fields)

    def test_every_option_has_a_help_text(self):
        cls = SOURCES.get(self.source)
        for field in fields_of(cls).values():
            assert field.doc, f"{cls.__name__}.{field.name} has no help text"
