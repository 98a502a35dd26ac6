"""Shares of mass that a batch brings for its layers, in the place of the pattern's own."""

from collections.abc import Mapping
from typing import Any

from jax import Array

from mtraining_jax.models.transformer import Attention
from mtraining_jax.sparsity import Pattern


def with_shares(
    attention: Attention, attention_inputs: Any, batch: Mapping[str, Array]
) -> tuple[Attention, Any]:
    """The attention of a batch's layers, by its shares if it has any, and the layers' inputs.

    Args:
        attention: from `make_attention`.
        attention_inputs: what each layer's pattern is, with a leading axis of layers, or None.
        batch: with `shares` int32 [B, L] in the unit of the pattern's `KeptShare`, or without.
    """
    if "shares" not in batch:
        return attention, attention_inputs

    def by_share(
        q: Array, k: Array, v: Array, given: tuple[Pattern | None, Array]
    ) -> tuple[Array, dict[str, Array]]:
        pattern, shares = given
        return attention(q, k, v, pattern, shares=shares)

    return by_share, (attention_inputs, batch["shares"].T)
