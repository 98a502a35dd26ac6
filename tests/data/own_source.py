"""A custom data source: `--data.source=tests.data.own_source:Counting`."""

from collections.abc import Iterator

import numpy as np

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveInt


@options(kw_only=True)
class Counting(DocumentSource):
    """Documents of consecutive numbers."""

    count_to: PositiveInt = 4
    """Last number of each document."""
    holds_ids = True

    def documents(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields eight equal documents."""
        for number in range(8):
            yield f"document {number}", np.arange(1, self.count_to + 1)
