"""YaRN: divides low frequencies, keeps high ones, with a ramp over the dimensions in between."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from mtraining_jax.models.rope.kind import RopeScaling, Scaled
from mtraining_jax.utils.fields import options


@options
class YarnScaling(RopeScaling):
    """YaRN (arXiv:2309.00071)."""

    type: ClassVar[str] = "yarn"

    original_max_position_embeddings: int | None = None
    """Original context length in tokens; none uses max_position_embeddings instead, as transformers
    4.48 always did."""
    beta_fast: float = 32.0
    """Dimensions with more rotations than this over the original context are kept."""
    beta_slow: float = 1.0
    """Dimensions with fewer rotations than this over the original context are divided by factor."""
    attention_factor: float | None = None
    """Scale of cosines and sines; none is 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Round the limits of the transition to whole dimensions."""

    def problems(self, head_dim: int | None = None) -> Iterator[str]:
        yield from super().problems(head_dim)
        if self.beta_slow <= 0:
            yield f"beta_slow = {self.beta_slow} must be positive"
        if self.beta_fast < self.beta_slow:
            yield f"beta_fast = {self.beta_fast} must not be less than beta_slow = {self.beta_slow}"

    def stretch(self, plain: np.ndarray, theta: float, context: int, length: int) -> Scaled:
        """The ramp follows section 3.2."""
        dim = 2 * len(plain)
        original = self.original_max_position_embeddings or context

        def dimension_turning(rotations: float) -> float:
            turns_of_first = original / (2 * math.pi)
            return dim * math.log(turns_of_first / rotations) / (2 * math.log(theta))

        low, high = dimension_turning(self.beta_fast), dimension_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # As in transformers, an empty range becomes a step, and limits may be in reverse order.
        ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 1e-3), 0.0, 1.0)
        frequencies = plain * (1 - ramp) + plain / self.factor * ramp
        scale = self.attention_factor
        return frequencies, 0.1 * math.log(self.factor) + 1.0 if scale is None else scale

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], context: int) -> Self:
        mscale, all_dim, factor = (rope.get(x) for x in ("mscale", "mscale_all_dim", "factor"))
        if rope.get("attention_factor") is None and mscale and all_dim and factor:
            # The ratio of two attention factors, as transformers computes it.
            scale = math.log(max(factor, 1.0))
            ratio = (0.1 * mscale * scale + 1.0) / (0.1 * all_dim * scale + 1.0)
            rope = {**rope, "attention_factor": ratio}
        return super().from_hf(rope, context)

    def to_hf(self, context: int) -> dict[str, Any]:
        """Always includes the original context."""
        fields = super().to_hf(context)
        fields.setdefault("original_max_position_embeddings", context)
        if self.truncate:  # older versions of transformers do not know the field
            del fields["truncate"]
        return fields
