"""Patterns and settings of the frontier benchmark, and their text form."""

import jax.numpy as jnp
from jax import Array

from benchmarks.pattern_words import parse_pattern
from mtraining_jax.patterns.base import ModelSizes, Pattern
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt
from pallas_kernels import VerticalSlashIndex


@options
class Window(Pattern):
    """Baseline: the nearest block diagonals and the first columns, the same in every head."""

    blocks: PositiveInt = 16
    """Nearest block diagonals, including the row's own block."""
    columns: NonNegativeInt = 32
    """First tokens of the sequence."""
    block_size: PositiveInt = 128
    """Tokens on a side of a block."""

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        heads, num_blocks = (q.shape[0], q.shape[2]), context.num_blocks

        def listed(count: int, capacity: int, padding: int) -> tuple[Array, Array]:
            numbers = jnp.arange(capacity, dtype=jnp.int32)
            numbers = jnp.where(numbers < count, numbers, padding)
            return jnp.broadcast_to(numbers, (*heads, capacity)), jnp.full(heads, count, jnp.int32)

        # With room for every diagonal, windows of any width share the programs of the kernels.
        diagonals = listed(min(self.blocks, num_blocks), num_blocks, num_blocks)
        columns = listed(self.columns, self.columns, num_blocks * self.block_size)
        return Selection(VerticalSlashIndex(*diagonals, *columns, self.block_size, num_blocks))

    def describe(self) -> str:
        return f"window of {self.blocks} blocks and {self.columns} columns"


BASELINES = (
    "vertical_slash,top_p=0.9",
    "vertical_slash,top_p=0.8",
    "vertical_slash,max_verticals=4096,max_slashes=256",
    "vertical_slash,max_verticals=2048,max_slashes=128",
    "vertical_slash,max_verticals=512,max_slashes=32",
    "vertical_slash,local_blocks=8,max_verticals=1024,max_slashes=256",
    "window,blocks=32",
    "window,blocks=24",
    "window,blocks=16",
)
ROWS = tuple(
    f"{name},tau={tau:g}"
    for name in (
        "sampled_rows,probe_queries_per_block=128",
        "xattention,stride=4",
        "xattention,stride=8",
        "xattention,stride=16",
        "sampled_rows,probe_queries_per_block=16",
        "sampled_rows,probe_queries_per_block=16,columns=128",
        "sampled_rows,probe_queries_per_block=32",
    )
    for tau in (0.8, 0.9, 0.95, 0.97)
)
# Other publications. MoBA has chunks of 128 tokens, where its rule selects best.
FIELD = (
    *(f"flex_prefill,gamma={gamma:g}" for gamma in (0.8, 0.9, 0.95)),
    "flex_prefill,js_threshold=0,gamma=0.9",
    *(f"block_topk,top_blocks={count}" for count in (16, 32, 64)),
    *(f"moba,chunk_size=128,top_k={count}" for count in (16, 32)),
    "moba,chunk_size=1024,top_k=4",
)
# Options that vary along a curve.
_VARYING = (
    "tau", "top_p", "blocks", "max_verticals", "max_slashes", "gamma", "top_k", "top_blocks",
)  # fmt: skip


def parse(text: str, model: ModelSizes) -> Pattern:
    """Returns the pattern with a text form such as "vertical_slash,top_p=0.8".

    Args:
        text: name of a pattern, "window", or package.module:Name; then its options, each as
            ",name=value".
        model: sizes of the model, for patterns that need them.

    Raises:
        UserError: if there is no such pattern or option, or a value is not allowed.
    """
    try:
        return parse_pattern(text, {"window": Window}).bind(model)
    except ValueError as error:
        raise UserError(f'"{text}": {error}') from None


def family(text: str) -> str:
    """The name of the curve of a setting: everything but the option that varies along it."""
    name, *options = text.split(",")
    kept = [x for x in options if not x.startswith(_VARYING)]
    if any(x.startswith("max_") for x in options):
        kept.append("capped")
    return " ".join([name, *kept])
