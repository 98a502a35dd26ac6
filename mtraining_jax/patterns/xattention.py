"""XAttention: key blocks by sums along antidiagonals."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.utils.limits import PositiveInt

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class XAttention(RowPattern):
    """Key blocks by the attention of strides of tokens, each scored by an antidiagonal sum.

    With s = `stride`, the logit of query stride a and key stride b is the mean over i < s of
    q[a s + s-1-i] . k[b s + i] / sqrt(D), for b <= a. A softmax runs over b; a block's score is the
    sum over its strides. Costs 1/(2 s) of a dense forward pass, and covers every query.

    Source: XAttention (arXiv 2503.16428). Its reference implementation rounds scores to bf16; here
    they stay fp32, and ties go to the smaller position.

    Attributes:
        stride: Antidiagonal stride in tokens (s); must divide block_size. Useful values are 4, 8
            and 16: larger is cheaper and coarser.
    """

    stride: PositiveInt = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size % self.stride:
            raise ValueError(f"stride={self.stride} must divide block_size={self.block_size}")

    def scores(self, q: "Array", k: "Array", context: SelectionContext) -> "Array":
        import jax.numpy as jnp

        from mtraining_jax.selection.scores import row_scores

        size, per_block = self.stride, self.block_size // self.stride

        places = context.block_ids[:, None] * per_block + jnp.arange(per_block, dtype=jnp.int32)
        ends = context.ends(context.block_ids, self.block_size)
        if ends is not None:  # padding adds nothing to the stride it completes
            every = jnp.arange(context.num_blocks, dtype=jnp.int32)
            q = row_scores.without_padding(q, context.block_ids, ends)
            ends_of_keys = context.ends(every, self.block_size)
            assert ends_of_keys is not None
            k = row_scores.without_padding(k, every, ends_of_keys)
            places = jnp.where(places * size < ends[..., None], places, -1)

        def strides(x: "Array") -> "Array":  # [B, n, H, D] -> [B, H, blocks, strides, s * D]
            x = x.reshape(x.shape[0], -1, per_block, size, *x.shape[2:])
            x = x.transpose(0, 4, 1, 2, 3, 5)
            return x.reshape(*x.shape[:4], -1)

        # Reversed within a stride: query s-1-i meets key i.
        backwards = q.reshape(q.shape[0], -1, size, *q.shape[2:])[:, :, ::-1].reshape(q.shape)
        scale = context.scale_for(q.shape[-1])
        return row_scores.block_masses(
            strides(backwards),
            strides(k),
            places,
            context.first_blocks(context.block_ids),
            scale=scale / size,
            like=q,
            backend=context.backend,
        )

    def scoring_share(self) -> float:
        return 1 / (2 * self.stride)

    def describe(self) -> str:
        return f"XAttention, stride {self.stride}, {self.rule_in_words()}"
