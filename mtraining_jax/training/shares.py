"""Mass fractions that come with a batch and replace those of the pattern."""

from collections.abc import Mapping
from typing import Any

from jax import Array

from mtraining_jax.models.transformer import Attention
from mtraining_jax.patterns.base import Pattern


def with_shares(
    attention: Attention, attention_inputs: Any, batch: Mapping[str, Array]
) -> tuple[Attention, Any]:
    """Applies the mass fractions of a batch (`shares`, int32 [B, L]), if any, to its attention.

    Returns the attention and its layer inputs.
    """
    if "shares" not in batch:
        return attention, attention_inputs

    def by_share(
        q: Array, k: Array, v: Array, given: tuple[Pattern | None, Array]
    ) -> tuple[Array, dict[str, Array]]:
        pattern, shares = given
        return attention(q, k, v, pattern, shares=shares)

    return by_share, (attention_inputs, batch["shares"].T)
