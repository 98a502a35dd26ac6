"""Computed pairs by document length, from a layer's index to numbers of a batch."""

from collections.abc import MutableMapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.documents import Documents
from mtraining_jax.selection.metrics import causal_pairs
from mtraining_jax.utils.errors import UserError
from pallas_kernels.index import Index, Rows

_NAME = "pairs_of_length_class_"
# Pair counts of rows are summed as two integer parts, so that sums are exact and below 2^31, in a
# single collective for all classes.
_PART = 14


def pairs_by_length(
    index: Index, rows: Rows, documents: Documents, seq_len: int
) -> dict[str, Array]:
    """Counts the computed pairs in documents of each length class, relative to the sequence.

    Class k has the documents of 2^k to 2^(k+1) - 1 blocks (`data.densities.length_classes`).
    Returns fp32 [B, Hq] per class, by name: computed pairs in all `rows` over S (S + 1) / 2.

    Raises:
        UserError: if the index cannot count the pairs of its rows.
    """
    pairs = index.pairs_of_rows(rows)
    if pairs is None:
        raise UserError(
            f"density by the length of documents cannot be measured with a {type(index).__name__}: "
            'data.balance = "length" would do'
        )
    classes = jnp.arange(documents.length.shape[1].bit_length(), dtype=jnp.int32)
    blocks = documents.of(rows.blocks).length[:, None]
    inside = (blocks >> classes[:, None, None, None]) == 1  # [K, B, 1, rows]
    parts = jnp.stack([pairs >> _PART, pairs & (2**_PART - 1)])
    sums = jnp.where(inside, parts[:, None], 0).sum(-1, dtype=jnp.int32)
    high, low = rows.total(sums).astype(jnp.float32)
    # As a float: of 65536 tokens and more there are too many pairs for an int32.
    fractions = (high * 2**_PART + low) / float(causal_pairs(seq_len))
    return {f"{_NAME}{number}": fraction for number, fraction in enumerate(fractions)}


def take_pairs_by_length(statistics: MutableMapping[str, Any]) -> np.ndarray | None:
    """Takes these numbers out of the statistics of a step, floats [L] by name.

    Returns the mean over layers, float64 [K] by class; None if they were not measured.
    """
    names = sorted((name for name in statistics if name.startswith(_NAME)), key=_class)
    if not names:
        return None
    return np.array([np.mean(statistics.pop(name), dtype=np.float64) for name in names])


def _class(name: str) -> int:
    return int(name.removeprefix(_NAME))
