"""Data: text or token files in, batches of token ids in layout order out."""

from mtraining_jax.data.loader import IGNORE_LABEL, Loader, build_loader, local_rows_and_columns
from mtraining_jax.data.options import MODES, SOURCES, TOKEN_DTYPES, DataOptions
from mtraining_jax.data.tokenizer import Tokenizer, make_tokenizer

__all__ = [
    "IGNORE_LABEL",
    "MODES",
    "SOURCES",
    "TOKEN_DTYPES",
    "DataOptions",
    "Loader",
    "Tokenizer",
    "build_loader",
    "local_rows_and_columns",
    "make_tokenizer",
]
