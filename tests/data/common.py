"""Helpers: `[data]` sections, loaders and error messages from a few fields."""

import numpy as np
import pytest

from mtraining_jax.config import Config
from mtraining_jax.config.sections import DataConfig
from mtraining_jax.data.corpus import starts_of
from mtraining_jax.data.loader import Loader
from mtraining_jax.documents import Documents
from mtraining_jax.utils.errors import UserError

VOCAB = 257


def section(vocab_size: int = VOCAB, **fields) -> DataConfig:
    """A `[data]` section; the rest of the configuration allows any sequence length."""
    model = {
        "vocab_size": vocab_size,
        "hidden_size": 2,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "intermediate_size": 2,
        "max_position_embeddings": 2**31 - 1,
    }
    table = {
        "model": model,
        "sparsity": {"kind": "dense", "block_size": 1},
        "data": {"shuffle": False, "seq_len": 4} | fields,
    }
    return Config.from_dict(table, "a test").data


def tables_of(documents: Documents) -> np.ndarray:
    """First block, end and tokens of each block's document: int32 [B, NB, 3]."""
    return np.stack([documents.first, documents.end, documents.tokens], axis=-1)


def loader_of(data: DataConfig, vocab_size: int = VOCAB, permutation=None, **local) -> Loader:
    """A loader for the section, by default in sequence order."""
    if permutation is None:
        permutation = np.arange(data.seq_len)
    return Loader(data, permutation=permutation, vocab_size=vocab_size, **local)


def sequences(vocab_size: int = VOCAB, **fields):
    """All sequences in order, and the corpus."""
    data = section(vocab_size, **fields)
    corpus = data.source_options.open(data, vocab_size)
    within = np.arange(data.seq_len)
    starts = starts_of(corpus, data)
    return [corpus.stream.take(start + within).tolist() for start in starts], corpus


def error_of(vocab_size: int = VOCAB, block_size: int | None = None, **fields) -> str:
    """The error message of validating and opening a section and reading one batch."""
    with pytest.raises(UserError) as caught:
        next(loader_of(section(vocab_size, **fields), vocab_size, block_size=block_size))
    message = str(caught.value)
    assert "\n" not in message and not message.endswith(".")
    return message
