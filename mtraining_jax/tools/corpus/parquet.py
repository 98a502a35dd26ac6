"""Parquet files with a column of text or token ids, one document per row."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.tools.corpus.arrow import ArrowSource
from mtraining_jax.utils.fields import options

# 16 rows of half a million tokens are 64 MB as int64.
_ROWS_AT_ONCE = 16


@options(kw_only=True)
class Parquet(ArrowSource):
    """Parquet files (needs the extra parquet)."""

    name: ClassVar[str] = "parquet"
    file_format: ClassVar[str] = "Parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def open_table(self, path: Path) -> tuple[Any, Callable[[list[str]], Iterable[Any]]]:
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        read = functools.partial(file.iter_batches, _ROWS_AT_ONCE)
        return file.schema_arrow, lambda columns: read(columns=columns)
