"""XAttention: key blocks by sums along antidiagonals."""

from jax import Array

from mtraining_jax.patterns.options.rows import XAttentionOptions
from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores.strides import stride_masses
from mtraining_jax.utils.fields import options


@options
class XAttention(RowPattern, XAttentionOptions):
    """Key blocks by the attention of strides of tokens, each scored by an antidiagonal sum.

    With s = `stride`, the logit of query stride a and key stride b is the mean over i < s of
    q[a s + s-1-i] . k[b s + i] / sqrt(D), for b <= a. A softmax runs over b; a block's score is the
    sum over its strides. Costs 1/(2 s) of a dense forward pass, and covers every query.

    Source: XAttention (arXiv 2503.16428). Its reference implementation rounds scores to bf16; here
    they stay fp32, and ties go to the smaller position.
    """

    def scores(self, q: Array, k: Array, context: SelectionContext) -> Array:
        return stride_masses(q, k, context, self.block_size, self.stride)
