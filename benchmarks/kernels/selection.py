"""Times the selection of an index, part by part, and prints a markdown table.

    python -m benchmarks.kernels.selection --seq-len 131072 --patterns xattention,stride=8

Patterns are those that list blocks for each row of blocks, and vertical_slash. `--backend
triton_sm80` runs A100 code on a later GPU. Inputs are random, so all scores are flat: densities say
nothing about a model. They do not matter here, because the time of a selection does not depend on
them.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels import triton_sm80
from benchmarks.options import BACKENDS, make_parser
from benchmarks.quality.patterns import parse
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.timing import median_ms
from mtraining_jax.attention.sharded import select_index
from mtraining_jax.patterns.base import ModelSizes
from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules.row_rule import kept_blocks
from mtraining_jax.selection.scores import estimate
from mtraining_jax.utils.errors import UserError
from pallas_kernels import Plan, plan
from pallas_kernels.index import Index
from pallas_kernels.tiles import Tiles

PATTERNS = (
    "xattention,stride=16", "xattention,stride=8", "xattention,stride=4",
    "sampled_rows,probe_queries_per_block=16", "sampled_rows,probe_queries_per_block=32",
)  # fmt: skip
_COLUMNS = (
    "S", "pattern", "selection ms", "probe queries ms", "rule ms", "lists ms", "work lists ms",
    "temporary GiB", "density",
)  # fmt: skip
_ABOUT = """\
selection: scores and rule, from queries and keys to an index; probe queries: scores of columns \
and diagonals with the last queries; rule: from given scores to bits; lists: from bits to the \
lists of both passes; work lists: what the kernels walk, from these lists. One program of all \
parts can be faster than their sum. Temporary: memory of the selection, without its arguments and \
result, by XLA's account."""


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    if args.backend == triton_sm80.NAME:
        triton_sm80.register()
    page = Page(args.out)
    page.add(
        f"# Selection on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.heads} query and {args.kv_heads} key/value heads of {args.head_dim}, "
        f"bf16, batch 1, random inputs, seed {args.seed}, medians of {args.repeats}, backend "
        f"{args.backend or 'auto'}.",
        "",
        _ABOUT,
        "",
        *table_head(_COLUMNS),
    )
    for seq_len in args.seq_len:
        for text in args.patterns:
            page.add(table_line(_cells(args, seq_len, text)))
    return page.text


def _cells(args: argparse.Namespace, seq_len: int, text: str) -> list[str]:
    """Times one pattern at one length."""
    pattern = parse(text, ModelSizes(1, args.heads, seq_len))
    if not isinstance(pattern, RowPattern | VerticalSlash):
        raise UserError(
            f'"{text}" does not select lists of blocks for each row of blocks, and is not '
            "vertical_slash"
        )
    num_blocks = seq_len // pattern.block_size
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    rng = np.random.default_rng(args.seed)
    q, k = (
        jnp.asarray(rng.standard_normal((1, seq_len, n, args.head_dim), np.float32), jnp.bfloat16)
        for n in (args.heads, args.kv_heads)
    )

    def time(function: Callable[..., Any], *arguments: Any) -> str:
        run = functools.partial(jax.jit(function), *arguments)
        return f"{median_ms(run, args.repeats):.2f}"

    def select(q: Array, k: Array) -> Index:
        return select_index(
            q, k, pattern, block_ids=blocks, num_blocks=num_blocks, backend=args.backend
        )

    def rule(scores: Array) -> Array:
        context = SelectionContext(blocks, num_blocks)
        return kept_blocks(scores, blocks, pattern.rule(context), context.documents)

    def lists(index: Index) -> Tiles | None:
        return index.on_one_device(1, seq_len, args.heads, seq_len)[0]

    def work(tiles: Tiles | None) -> Plan:
        return plan(q, k, tiles, single_call=True, backend=args.backend)

    def probe_queries(q: Array, k: Array) -> tuple[Array, ...]:
        """The scores alone, by kernels of the backend or by XLA."""
        context = SelectionContext(blocks, num_blocks, backend=args.backend)
        return estimate.softmax_scores(
            q[:, None, -pattern.num_probe_queries :].swapaxes(2, 3), k, context
        )

    compiled = jax.jit(select).lower(q, k).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**30
    index = compiled(q, k)
    if isinstance(pattern, RowPattern):
        scores = jnp.asarray(rng.random((1, args.heads, num_blocks, num_blocks), np.float32))
        tiles = jax.jit(lists)(index)
        parts = ["–", time(rule, scores), time(lists, index), time(work, tiles)]
    else:
        parts = [time(probe_queries, q, k), "–", "–", "–"]
    density = float(np.mean(index.computed_pairs(seq_len))) / (seq_len * (seq_len + 1) / 2)
    whole = time(select, q, k)
    shown = f"{temporary:.2f}", f"{density:.3f}"
    return [str(seq_len), pattern.describe(), whole, *parts, *shown]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "heads", "kv-heads", "head-dim", "repeats", "seed", "out")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[32768, 131072], metavar="S")
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), metavar="NAME,OPTION=...")
    parser.add_argument(
        "--backend", choices=[*BACKENDS, triton_sm80.NAME], help="default: the best one here"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
