"""Batches that a caller of `mtraining_jax.fit` makes."""

from collections.abc import Iterator
from typing import ClassVar

from mtraining_jax.data.corpus import Corpus
from mtraining_jax.data.source import Source
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options


@options(kw_only=True)
class Given(Source):
    """Batches from Python: the argument `data` of `mtraining_jax.fit`, which selects this."""

    modes: ClassVar[tuple[str, ...]] = ("concat",)

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        if data.balance != "none":
            yield (
                f'data.balance = "{data.balance}" reorders sequences, which is not possible with '
                'batches from Python: set data.balance = "none"'
            )

    def open(self, data: DataSpec, vocab_size: int) -> Corpus:
        del data, vocab_size
        raise UserError(
            'data.source = "given" has its batches from Python: call mtraining_jax.fit(config, '
            "data=...)"
        )
