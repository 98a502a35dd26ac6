"""XAttention: key blocks by sums along antidiagonals."""

from typing import Any

from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveInt


@options
class XAttention(RowPattern):
    """Key blocks by the attention of strides of tokens, each scored by an antidiagonal sum.

    With s = `stride`, the logit of query stride a and key stride b is the mean over i < s of
    q[a s + s-1-i] . k[b s + i] / sqrt(D), for b <= a. A softmax runs over b; a block's score is the
    sum over its strides. Costs 1/(2 s) of a dense forward pass, and covers every query.

    Source: XAttention (arXiv 2503.16428). Its reference implementation rounds scores to bf16; here
    they stay fp32, and ties go to the smaller position.
    """

    stride: PositiveInt = 8
    """Antidiagonal stride in tokens (s); must divide block_size. Useful values are 4, 8 and 16:
    larger is cheaper and coarser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size % self.stride:
            raise ValueError(f"stride={self.stride} must divide block_size={self.block_size}")

    def scores(self, q, k: Any, context):
        from mtraining_jax.selection.scores.strides import stride_masses

        return stride_masses(q, k, context, self.block_size, self.stride)

    def describe(self) -> str:
        return f"XAttention, stride {self.stride}, {self.rule_in_words()}"
