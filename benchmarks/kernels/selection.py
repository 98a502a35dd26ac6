"""Times choices of an index, part by part, and prints a markdown table.

    python -m benchmarks.kernels.selection --seq-len 131072 --patterns xattention,stride=8 prism

Patterns are those that list blocks for each row of blocks, and vertical_slash, of which the scores
by the last queries are timed. `--backend triton_sm80` runs the code of an A100 on a later GPU.

Queries and keys are random, of which every score is flat: so no density of a model can be read off
here, and none is needed, as the time of a choice does not follow it.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels import triton_sm80 as ampere_code
from benchmarks.quality.patterns import parse
from benchmarks.report import setting
from benchmarks.timing import median_ms
from mtraining_jax.errors import UserError
from mtraining_jax.sparsity import ModelSizes, Shards, VerticalSlash, choose_index, estimate
from mtraining_jax.sparsity.row_pattern import RowPattern
from mtraining_jax.sparsity.row_rule import kept_blocks
from pallas_kernels import plan
from pallas_kernels.index import BlockMaskIndex, Index

PATTERNS = (
    "xattention,stride=16", "xattention,stride=8", "xattention,stride=4",
    "sampled_rows,sampled_rows=16", "sampled_rows,sampled_rows=32", "prism",
)  # fmt: skip
_COLUMNS = (
    "S", "pattern", "choose ms", "of it the last queries", "of it the rule", "lists ms",
    "work lists ms", "density",
)  # fmt: skip


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    if args.backend == ampere_code.NAME:
        ampere_code.register()
    lines = [
        f"# Choosing on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.heads} query and {args.kv_heads} key/value heads of {args.head_dim}, "
        f"bf16, batch 1, random inputs, seed {args.seed}, medians of {args.repeats}, backend "
        f"{args.backend}.",
        "",
        "choose: scores and rule, from queries and keys to an index; the last queries: their "
        "scores of columns and diagonals; the rule: from given scores to bits; lists: from bits "
        "to the lists of both passes; work lists: what the kernels walk, from these lists. They "
        "add up but for what a program of all of them fuses.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
    ]
    for seq_len in args.seq_len:
        for text in args.patterns:
            lines.append(_line(args, seq_len, text))
            print(lines[-1], flush=True)
            if args.out is not None:
                args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "\n".join(lines)


def _line(args, seq_len: int, text: str) -> str:
    """Times one pattern at one length."""
    pattern = parse(text, ModelSizes(1, args.heads, seq_len))
    if not isinstance(pattern, RowPattern | VerticalSlash):
        raise UserError(
            f'"{text}" does not choose lists of blocks for each row of blocks, and is not '
            "vertical_slash"
        )
    num_blocks = seq_len // pattern.block_size
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    rng = np.random.default_rng(args.seed)
    q, k = (
        jnp.asarray(rng.standard_normal((1, seq_len, n, args.head_dim), np.float32), jnp.bfloat16)
        for n in (args.heads, args.kv_heads)
    )

    @jax.jit
    def choose(q: Array, k: Array) -> Index:
        return choose_index(
            q, k, pattern, block_ids=blocks, num_blocks=num_blocks, backend=args.backend
        )

    def time(function, *arguments) -> str:
        return f"{median_ms(functools.partial(function, *arguments), args.repeats):.2f}"

    index = choose(q, k)
    if isinstance(pattern, RowPattern):
        parts = _parts_of_lists(args, pattern, q, k, index, time)
    else:
        parts = _parts_of_last_queries(args, pattern, q, k, time)
    share = float(np.mean(index.computed_pairs(seq_len))) / (seq_len * (seq_len + 1) / 2)
    cells = str(seq_len), pattern.describe(), time(choose, q, k), *parts, f"{share:.3f}"
    return "| " + " | ".join(cells) + " |"


def _parts_of_lists(args, pattern: RowPattern, q, k, index, time) -> tuple[str, ...]:
    """Cells behind the whole choice, of a pattern that lists blocks for each row of blocks."""
    seq_len, num_blocks = q.shape[1], q.shape[1] // pattern.block_size
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)

    @jax.jit
    def rule(scores: Array) -> Array:
        return kept_blocks(scores, blocks, pattern.rule(Shards(blocks, num_blocks)))

    @jax.jit
    def lists(index: BlockMaskIndex):
        return index.on_one_device(1, seq_len, args.heads, seq_len)[0]

    @jax.jit
    def work(tiles):
        return plan(q, k, tiles, whole=True, backend=args.backend)

    tiles = lists(index)
    shape = 1, args.heads, num_blocks, num_blocks
    scores = jnp.asarray(np.random.default_rng(args.seed).random(shape, np.float32))
    return "–", time(rule, scores), time(lists, index), time(work, tiles)


def _parts_of_last_queries(args, pattern: VerticalSlash, q, k, time) -> tuple[str, ...]:
    """The same of vertical-slash: the scores alone, by kernels of the backend or by XLA."""
    blocks = jnp.arange(q.shape[1] // pattern.block_size, dtype=jnp.int32)

    @jax.jit
    def scores(q: Array, k: Array) -> tuple[Array, ...]:
        return estimate.softmax_scores(
            q[:, -pattern.last_q :].swapaxes(1, 2), k, scale=args.head_dim**-0.5,
            block_ids=blocks, num_blocks=blocks.shape[0], axis_names=(), backend=args.backend,
        )

    return time(scores, q, k), "–", "–", "–"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seq-len", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
