"""The patterns and settings that the frontier benchmark measures, and how they are written."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.errors import UserError
from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity import PATTERNS, Choice, ModelSizes, Pattern, Shards
from mtraining_jax.sparsity.setting_text import parse_settings

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class Window(Pattern):
    """The nearest block diagonals and the first columns, of every head alike: what to beat.

    Attributes:
        blocks: nearest block diagonals, that of a row's own block among them.
        columns: first tokens of the sequence.
        block_size: tokens on a side of a block.
    """

    blocks: limited(int, ge=1) = 16
    columns: limited(int, ge=0) = 32
    block_size: limited(int, ge=1) = 128

    def __post_init__(self) -> None:
        check_limits(self)

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """The same pairs whatever q and k are."""
        import jax.numpy as jnp

        from pallas_kernels import VerticalSlashIndex

        def listed(count: int, capacity: int, padding: int) -> tuple["Array", "Array"]:
            heads = q.shape[0], q.shape[2]
            numbers = jnp.arange(capacity, dtype=jnp.int32)
            numbers = jnp.where(numbers < count, numbers, padding)
            return (
                jnp.broadcast_to(numbers, (*heads, capacity)), jnp.full(heads, count, jnp.int32)
            )

        # With room for every diagonal, windows of any width share one program of the kernels.
        num_blocks = shards.num_blocks
        diagonals = listed(min(self.blocks, num_blocks), num_blocks, num_blocks)
        seq_len = num_blocks * self.block_size
        columns = listed(self.columns, self.columns, seq_len)
        return Choice(VerticalSlashIndex(*diagonals, *columns, self.block_size))

    def describe(self) -> str:
        """Both numbers."""
        return f"window of {self.blocks} blocks and {self.columns} columns"


_OWN = {"window": Window}

# As far as the package has them: `known` leaves out what it has not.
BASELINES = (
    "vertical_slash,top_p=0.9",
    "vertical_slash,top_p=0.8",
    "vertical_slash,max_verticals=4096,max_slashes=256",
    "vertical_slash,max_verticals=2048,max_slashes=128",
    "vertical_slash,max_verticals=512,max_slashes=32",
    "vertical_slash,local_blocks=8,max_verticals=1024,max_slashes=256",
    "vertical_slash,preset=joint,top_p=1.0,least_share=0.004",
    "vertical_slash,preset=joint,top_p=1.0,least_share=0.002",
    "window,blocks=32",
    "window,blocks=24",
    "window,blocks=16",
)
TAUS = (0.8, 0.9, 0.95, 0.97)
ROWS = tuple(
    f"{name},tau={tau:g}"
    for name in (
        "exact_rows",
        "xattention,stride=4",
        "xattention,stride=8",
        "xattention,stride=16",
        "sampled_rows,sampled_rows=16",
        "sampled_rows,sampled_rows=16,columns=128",
        "sampled_rows,sampled_rows=32",
        "mixed_rows,stride=16,sampled_rows=16",
        "prism",
    )
    for tau in TAUS
)
# Of other publications. MoBA's chunks are of 128 tokens, where its rule chooses best.
FIELD = (
    *(f"flex_prefill,gamma={gamma:g}" for gamma in (0.8, 0.9, 0.95)),
    "flex_prefill,js_threshold=0,gamma=0.9",
    *(f"block_topk,top_blocks={count}" for count in (16, 32, 64)),
    *(f"moba,chunk_size=128,top_k={count}" for count in (16, 32)),
    "moba,chunk_size=1024,top_k=4",
)
QUICK = (
    "vertical_slash,top_p=0.9",
    "window,blocks=16",
    "exact_rows,tau=0.95",
    "xattention,stride=8,tau=0.9",
    "xattention,stride=8,tau=0.95",
    "mixed_rows,stride=16,sampled_rows=16,tau=0.9",
)


def parse(text: str, model: ModelSizes) -> Pattern:
    """The pattern that a text such as "vertical_slash,top_p=0.8" names.

    Args:
        text: the name of a pattern, "window", or package.module:Name; then its options, each as
            ",name=value".
        model: for patterns that need its sizes.

    Raises:
        UserError: if there is no such pattern or option, or a value is not allowed.
    """
    try:
        return parse_settings(text, _OWN).pattern(model)
    except ValueError as error:
        raise UserError(f'"{text}": {error}') from None


def known(texts: tuple[str, ...]) -> list[str]:
    """Those whose pattern this version of the package has."""
    return [x for x in texts if x.split(",")[0] in (*_OWN, *PATTERNS.names)]


def family(text: str) -> str:
    """What the settings of a curve have in common: all but the option that moves along it."""
    moving = (
        "tau", "top_p", "blocks", "max_verticals", "max_slashes", "gamma", "top_k", "top_blocks",
        "max_density",
    )
    name, *options = text.split(",")
    if "preset=joint" in options:
        moving += ("least_share",)
    kept = [x for x in options if not x.startswith(moving)]
    if any(x.startswith("max_") for x in options):
        kept.append("capped")
    return " ".join([name, *kept])
