r"""How many chunks the 128 queries of a block choose together, by MoBA's rule, on a real model.

    python -m examples.smollm2 MODEL
    python -m benchmarks.texts --tokenizer MODEL/tokenizer.json --out TEXTS
    python -m benchmarks.moba_union --model MODEL --texts TEXTS --seq-len 8192 --out RESULT.md

A kernel that gives each block of queries one list of key blocks has to compute the union of what
its queries choose, and to mask the rest. The table tells what that would cost, and what sorting
the queries by chunk costs instead (`pallas_kernels/composed.py`): shares of the causal pairs.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.frontier_model import SteppedModel, read_model
from benchmarks.report import setting
from mtraining_jax.sparsity import MoBA, Shards
from mtraining_jax.sparsity.metrics import causal_pairs
from pallas_kernels import DenseIndex, attention
from pallas_kernels.index import TokenChunksIndex
from pallas_kernels.index import bits as sets

CASES = ((128, 8), (128, 16), (256, 8), (512, 3), (512, 4), (1024, 4))  # tokens of a chunk, top k
_COLUMNS = (
    "chunk", "top k", "chosen", "union of 128 queries", "worst layer", "gathered, in tiles",
    "chunks of a query", "of 128 queries",
)  # fmt: skip


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parser().parse_args(argv)
    texts = np.load(args.texts / "tokens.npy")[:: args.every, : args.seq_len]
    model = SteppedModel(read_model(args.model, args.seq_len, "float32"), args.seq_len)
    cases = {case: MoBA(*case) for case in CASES if case[0] < args.seq_len}
    measure = jax.jit(lambda q, k: jnp.stack([shares(x, q, k) for x in cases.values()]))
    dense = jax.jit(lambda q, k, v: attention(q, k, v, DenseIndex(128)))
    found = [[] for _ in texts]  # of each text, for each layer: [case, 5]

    for own, tokens in zip(found, texts, strict=True):

        def attend(_, q: Array, k: Array, v: Array, own: list = own) -> Array:
            own.append(np.asarray(measure(q, k)))
            return dense(q, k, v)

        model.losses(tokens, attend)
    means = np.array(found).mean(0)  # [L, case, 5]
    lines = [
        f"# What 128 neighbouring queries choose together on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.model.name}, {len(texts)} texts of {args.seq_len} tokens, means over "
        f"all {len(means)} layers, heads and blocks of queries. Shares of the causal pairs; last "
        "two columns: chunks before the own one.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
    ]
    for number, (chunk, top_k) in enumerate(cases):
        of_case = means[:, number]
        exact, union, tiles, each, together = of_case.mean(0)
        cells = [
            chunk, top_k, *(f"{x:.3f}" for x in (exact, union, of_case[:, 1].max(), tiles)),
            f"{each:.1f}", f"{together:.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return text


def shares(pattern: MoBA, q: Array, k: Array) -> Array:
    """Computed pairs of the choice, of unions and of gathered tiles, and counts of past chunks.

    Args:
        pattern: whose choice.
        q: [1, S, Hq, D].
        k: [1, S, Hk, D].

    Returns:
        fp32 [5]: three shares of the causal pairs, chunks before the own one that a query chooses,
        and those that its block chooses; means over heads.
    """
    num_blocks = q.shape[1] // pattern.block_size
    rows = jnp.arange(num_blocks, dtype=jnp.int32)
    index: TokenChunksIndex = pattern.choose(q, k, Shards(rows, num_blocks)).index
    past = index.past(rows)
    together = jnp.bitwise_or.reduce(past, axis=3)
    counts = sets.count(together)  # [1, Hq, NB]
    total = float(causal_pairs(q.shape[1]))
    exact = index.computed_pairs(q.shape[1])
    chunk = pattern.chunk_size
    own = exact - sets.count(past).sum((2, 3)).astype(jnp.float32) * chunk
    union = own + counts.sum(2).astype(jnp.float32) * (chunk * pattern.block_size)
    return jnp.stack([
        exact.mean() / total, union.mean() / total,
        index.executed_pairs(q.shape[1]).mean() / total,
        sets.count(past).mean(), counts.mean(),
    ])  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--texts", type=Path, required=True, help="from benchmarks.texts")
    parser.add_argument("--seq-len", type=int, default=8192, metavar="S")
    parser.add_argument("--every", type=int, default=4, help="take each n-th text")
    parser.add_argument("--out", type=Path, metavar="RESULT.md")
    return parser


if __name__ == "__main__":
    main()
