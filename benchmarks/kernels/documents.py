"""Times attention and selection on packed documents, and prints a markdown table.

    python -m benchmarks.kernels.documents --seq-len 131072

A query-key pair should take as long in a pack as in a sequence of one document. The first line of
each kind is such a sequence; the others are compared with it. Lists are random, because scores of
random queries and keys are flat: each row keeps the first block of its document, the two nearest
blocks, and a fraction of the others (--share). Columns are random too, and seen within their
document. Programs are compiled once per kind, for any documents.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels.masks import BLOCK, Work
from benchmarks.kernels.programs import Attention, random_inputs
from benchmarks.options import make_parser
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.timing import median_ms
from mtraining_jax.sparsity import FlexPrefill, MoBA, Pattern, SampledRows, Shards, VerticalSlash
from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.documents import Documents
from pallas_kernels import BlockMaskIndex, DenseDocumentsIndex, DenseIndex, Index

_COLUMNS = (
    "pack", "documents", "pairs", "density", "forward ms", "TFLOP/s", "ratio", "backward ms",
    "TFLOP/s", "ratio",
)  # fmt: skip
_SELECTION_COLUMNS = "pack", "selection ms", "ratio", "with short documents dense ms"
_KINDS = "dense", "lists", "lists_and_columns"
# By name: the pattern, with documents of fewer tokens dense.
_PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "sampled_rows": lambda below: SampledRows(dense_below=below),
    "sampled_rows_and_128_columns": lambda below: SampledRows(columns=128, dense_below=below),
    "vertical_slash": lambda below: VerticalSlash(dense_below=below),
    "flex_prefill": lambda below: FlexPrefill(dense_below=below),
    "moba": lambda below: MoBA(),  # has no such limit
}


def packs(seq_len: int) -> dict[str, list[int]]:
    """Lengths of documents that fill a sequence, by a name; "mixed" ones are not whole blocks.

    Args:
        seq_len: S, a multiple of 8 blocks.
    """
    counts = (n for n in (1, 8, 64) if seq_len % (n * BLOCK) == 0)
    found = {f"{n} x {seq_len // n}": [seq_len // n] * n for n in counts}
    left, mixed = seq_len, []
    while left >= 2 * BLOCK:
        mixed.append(left // 2 - 37)
        left -= left // 2
    return found | {"mixed": mixed}


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    key = jax.random.key(args.seed)
    inputs = random_inputs(key, args.seq_len, args.heads, args.kv_heads, args.head_dim)
    cases = {"no documents": None} | {
        name: lengths
        for name, lengths in packs(args.seq_len).items()
        if args.packs is None or name.split()[0] in args.packs
    }
    page = Page(args.out)
    page.add(
        f"# Packed documents on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.seq_len} tokens, {args.heads} query and {args.kv_heads} key/value "
        f"heads of {args.head_dim}, bf16, batch 1, random inputs, seed {args.seed}, medians of "
        f"{args.repeats}, backend {args.backend or 'auto'}.",
        "",
        "TFLOP/s: executed tiles, 4 D FLOP a pair forward and 10 D backward. Ratio: of this rate, "
        "or time of selection, to that of the first line of its kind.",
        "",
        *table_head(_COLUMNS),
    )
    measure = _attention(args, inputs)
    for kind in args.attend:
        first = None
        for name, lengths in cases.items():
            rates, cells = measure(_index(args, kind, lengths))
            first = first or rates
            ratios = [f"{rate / one:.2f}" for rate, one in zip(rates, first, strict=True)]
            count = 1 if lengths is None else len(lengths)
            cells = str(count), *cells[:4], ratios[0], *cells[4:], ratios[1]
            page.add(table_line([f"{kind.replace('_', ' ')}, {name}", *cells]))
    page.add("", "Selection, from queries and keys to bits:", "", *table_head(_SELECTION_COLUMNS))
    for kind in args.choose:
        all_sparse, short_dense = (
            _selection(args, _PATTERNS[kind](below)) for below in (BLOCK, 8192)
        )
        first = _selection(args, _PATTERNS[kind](BLOCK))(inputs, None)
        for name, lengths in cases.items():
            times = first, first
            if lengths is not None:
                documents = _documents(args.seq_len, lengths)
                times = all_sparse(inputs, documents), short_dense(inputs, documents)
            cells = f"{times[0]:.2f}", f"{times[0] / first:.2f}", f"{times[1]:.2f}"
            page.add(table_line([f"{kind}, {name}", *cells]))
    return page.text


def _documents(seq_len: int, lengths: list[int]) -> DocumentBlocks:
    return Documents.from_lengths([lengths], seq_len, BLOCK).blocks()


def _index(args, kind: str, lengths: list[int] | None) -> Index:
    """Dense within documents, random lists, or lists and columns; lengths None: no documents."""
    if kind == "dense":
        if lengths is None:
            return DenseIndex(BLOCK)
        spans = _documents(args.seq_len, lengths).spans()
        shape = 1, args.heads, spans[0].shape[1]
        return DenseDocumentsIndex(*(jnp.broadcast_to(x, shape) for x in spans), BLOCK)
    num_blocks = args.seq_len // BLOCK
    blocks, shape = np.arange(num_blocks), (1, args.heads, num_blocks, num_blocks)
    first = np.zeros(num_blocks, np.int32)
    if lengths is not None:
        first = np.asarray(_documents(args.seq_len, lengths).first[0])
    mask = np.random.default_rng(args.seed).random(shape, np.float32) < args.share
    mask |= (blocks[:, None] - blocks < 2) | (blocks == first[:, None])
    mask &= (blocks >= first[:, None]) & (blocks <= blocks[:, None])
    index = BlockMaskIndex.from_block_mask(jnp.asarray(mask), BLOCK)
    if kind == "lists":
        return index
    tokens = np.random.default_rng(args.seed).random((1, args.heads, args.seq_len), np.float32)
    tokens = np.argsort(tokens, axis=-1)[..., : args.columns].astype(np.int32)
    index = index.with_columns(jnp.asarray(tokens))
    return index if lengths is None else index.columns_from(jnp.asarray(first))


def _attention(args, inputs: list[Array]) -> Callable[[Index], tuple[list[float], list[str]]]:
    """Returns a function that times an index: rates of both passes, and cells of the table."""
    kernels = Attention(args.backend)
    build, forward, backward = map(jax.jit, (kernels.build, kernels.forward, kernels.backward))
    count = jax.jit(
        lambda index: (index.executed_pairs(args.seq_len), index.computed_pairs(args.seq_len))
    )
    q, k, v, dout = inputs

    def measure(index: Index) -> tuple[list[float], list[str]]:
        built = build(q, k, v, index)
        out, lse = forward(q, k, v, built)
        times = [
            median_ms(functools.partial(forward, q, k, v, built), args.repeats),
            median_ms(functools.partial(backward, q, k, v, dout, out, lse, built), args.repeats),
        ]
        executed, computed = (float(np.mean(x)) for x in count(index))
        pairs = executed * args.heads
        flops = Work(round(pairs / BLOCK**2)).flops(args.head_dim)
        rates = [flops / times[0] / 1e9, 2.5 * flops / times[1] / 1e9]
        density = computed / (args.seq_len * (args.seq_len + 1) / 2)
        return rates, [
            f"{pairs:.2e}",
            f"{density:.4f}",
            f"{times[0]:.3f}",
            f"{rates[0]:.0f}",
            f"{times[1]:.3f}",
            f"{rates[1]:.0f}",
        ]

    return measure


def _selection(args, pattern: Pattern) -> Callable[[list[Array], DocumentBlocks | None], float]:
    """Returns a function of inputs and documents that times selection, in ms."""
    num_blocks = args.seq_len // BLOCK

    @jax.jit
    def select(q: Array, k: Array, documents: DocumentBlocks | None) -> Index:
        blocks = jnp.arange(num_blocks, dtype=jnp.int32)
        shards = Shards(blocks, num_blocks, backend=args.backend, documents=documents)
        return pattern.choose(q, k, shards).index

    return lambda inputs, documents: median_ms(
        functools.partial(select, *inputs[:2], documents), args.repeats
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        __doc__, "heads", "kv-heads", "head-dim", "backend", "repeats", "seed", "out"
    )
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--share", type=float, default=0.15, help="fraction of distant blocks")
    parser.add_argument("--columns", type=int, default=3000, help="columns of each head")
    parser.add_argument(
        "--attend", nargs="*", choices=_KINDS, default=list(_KINDS), help="attention to time"
    )
    parser.add_argument(
        "--choose", nargs="*", choices=_PATTERNS, default=list(_PATTERNS), help="patterns to time"
    )
    parser.add_argument(
        "--packs", nargs="*", metavar="COUNT", help="of 1, 8, 64 or mixed documents"
    )
    args = parser.parse_args(argv)
    if args.seq_len % (8 * BLOCK):
        parser.error(f"--seq-len={args.seq_len} must be a multiple of {8 * BLOCK}")
    known = [name.split()[0] for name in packs(args.seq_len)]
    if unknown := [x for x in args.packs or () if x not in known]:
        parser.error(f"--packs={unknown[0]} is not one of {', '.join(known)}")
    return args


if __name__ == "__main__":
    main()
