"""A custom data source: `--data.source=tests.data.own_source:Counting`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.utils.limits import PositiveInt


@dataclass(frozen=True, kw_only=True)
class Counting(DocumentSource):
    """Documents of consecutive numbers.

    Attributes:
        count_to: Last number of each document.
    """

    count_to: PositiveInt = 4
    holds_ids = True

    def documents(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields eight equal documents."""
        for number in range(8):
            yield f"document {number}", np.arange(1, self.count_to + 1)
