"""Times attention and the choice of lists on packed documents, and prints a markdown table.

    python benchmarks/packs.py [--seq-len 131072] [--heads 16] [--kv-heads 2] [--head-dim 128]
        [--share 0.15] [--columns 3000] [--attend KIND ...] [--choose PATTERN ...]
        [--packs COUNT ...] [--backend auto] [--out FILE.md]

A pair of a query and a key should take as long in a pack as in a sequence that is one document. The
first line of each kind is that sequence without documents; rates of the others are compared with
it. Lists are random, as scores of random queries and keys are flat: each row keeps its document's
first block, its two nearest, and of the others a share. Columns are random too, and seen within
their document. Programs are compiled once for each kind, whatever the documents; the three options
of lists name what to time where all of it takes too long.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # run from a checkout, only the script's own folder is importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.masks import BLOCK, Work
from benchmarks.programs import Ours, random_inputs
from benchmarks.report import setting
from benchmarks.timing import median_ms
from mtraining_jax.sparsity import FlexPrefill, MoBA, Pattern, SampledRows, Shards, VerticalSlash
from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.documents import Documents
from pallas_kernels import BlockMaskIndex, DenseDocumentsIndex, DenseIndex, Index

_COLUMNS = (
    "pack", "documents", "pairs", "density", "forward ms", "TFLOP/s", "of one", "backward ms",
    "TFLOP/s", "of one",
)  # fmt: skip
_CHOSEN: dict[str, Callable[[int], Pattern]] = {
    "sampled_rows": lambda below: SampledRows(dense_below=below),
    "sampled_rows_and_128_columns": lambda below: SampledRows(columns=128, dense_below=below),
    "vertical_slash": lambda below: VerticalSlash(dense_below=below),
    "flex_prefill": lambda below: FlexPrefill(dense_below=below),
    "moba": lambda below: MoBA(),  # which knows no such limit
}
_CHOICE = "pack", "choose ms", "of one", "with short ones dense ms"
_KINDS = "dense", "lists", "lists_and_columns"


def packs(seq_len: int) -> dict[str, list[int]]:
    """Lengths of documents that fill a sequence, by a name; those of `mixed` are no whole blocks.

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
    lines = [
        f"# Packed documents on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.seq_len} tokens, {args.heads} query and {args.kv_heads} key/value "
        f"heads of {args.head_dim}, bf16, batch 1, random inputs, seed {args.seed}, medians of "
        f"{args.repeats}, backend {args.backend}.",
        "",
        "TFLOP/s: executed tiles, 4 D FLOP a pair forward and 10 D backward. *Of one*: this rate "
        "over that of the first line of its kind.",
        "",
        *_header(_COLUMNS),
    ]

    def tell(cells: tuple) -> None:
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        print(lines[-1], flush=True)
        if args.out is not None:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    chosen = {"no documents": None} | {
        name: lengths for name, lengths in packs(args.seq_len).items()
        if args.packs is None or name.split()[0] in args.packs
    }
    programs = _Programs.of(args)
    for kind in args.attend:
        first = None
        for name, lengths in chosen.items():
            index = _index(args, kind, lengths)
            rates, cells = _attention(args, programs, inputs, index)
            first = first or rates
            ratios = [f"{rate / one:.2f}" for rate, one in zip(rates, first, strict=True)]
            count = 1 if lengths is None else len(lengths)
            cells = count, *cells[:4], ratios[0], *cells[4:], ratios[1]
            tell((f"{kind.replace('_', ' ')}, {name}", *cells))
    lines += ["", "Choosing, from queries and keys to bits:", "", *_header(_CHOICE)]
    for kind in args.choose:
        every, long = (_choice(args, _CHOSEN[kind](x)) for x in (BLOCK, 8192))
        first = _choice(args, _CHOSEN[kind](BLOCK))(inputs, None)
        for name, lengths in chosen.items():
            times = first, first
            if lengths is not None:
                documents = _documents(args.seq_len, lengths)
                times = every(inputs, documents), long(inputs, documents)
            cells = f"{times[0]:.2f}", f"{times[0] / first:.2f}", f"{times[1]:.2f}"
            tell((f"{kind}, {name}", *cells))
    return "\n".join(lines)


def _header(columns: tuple[str, ...]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]


def _documents(seq_len: int, lengths: list[int]) -> DocumentBlocks:
    return Documents.from_lengths([lengths], seq_len, BLOCK).blocks()


def _index(args, kind: str, lengths: list[int] | None) -> Index:
    """Dense within documents, or random lists, or these and columns; None for no documents."""
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


class _Programs(NamedTuple):
    """What is timed and what it is compared with, compiled once for arguments of equal shapes."""

    build: Callable
    forward: Callable
    backward: Callable
    pairs: Callable

    @classmethod
    def of(cls, args) -> "_Programs":
        ours = Ours(None if args.backend == "auto" else args.backend)

        def pairs(index: Index) -> tuple[Array, Array]:
            return index.executed_pairs(args.seq_len), index.computed_pairs(args.seq_len)

        return cls(*map(jax.jit, (ours.build, ours.forward, ours.backward, pairs)))


def _attention(
    args, programs: _Programs, inputs: list[Array], index: Index
) -> tuple[list[float], list[str]]:
    """Rates of both passes in TFLOP/s, and cells: pairs, density, times and rates."""
    _, forward, backward, _ = programs
    q, k, v, dout = inputs
    built = programs.build(q, k, v, index)
    out, lse = forward(q, k, v, built)
    times = [
        median_ms(functools.partial(forward, q, k, v, built), args.repeats),
        median_ms(functools.partial(backward, q, k, v, dout, out, lse, built), args.repeats),
    ]
    executed, computed = (float(np.mean(x)) for x in programs.pairs(index))
    pairs = executed * args.heads
    flops = Work(round(pairs / BLOCK**2)).flops(args.head_dim)
    rates = [flops / times[0] / 1e9, 2.5 * flops / times[1] / 1e9]
    share = computed / (args.seq_len * (args.seq_len + 1) / 2)
    return rates, [
        f"{pairs:.2e}", f"{share:.4f}", f"{times[0]:.3f}", f"{rates[0]:.0f}", f"{times[1]:.3f}",
        f"{rates[1]:.0f}",
    ]  # fmt: skip


def _choice(args, pattern: Pattern) -> Callable[[list[Array], DocumentBlocks | None], float]:
    """A function of inputs and documents that times the choice, in milliseconds."""
    num_blocks = args.seq_len // BLOCK
    backend = None if args.backend == "auto" else args.backend

    @jax.jit
    def choose(q: Array, k: Array, documents: DocumentBlocks | None) -> Index:
        blocks = jnp.arange(num_blocks, dtype=jnp.int32)
        shards = Shards(blocks, num_blocks, backend=backend, documents=documents)
        return pattern.choose(q, k, shards).index

    def timed(inputs: list[Array], documents: DocumentBlocks | None) -> float:
        return median_ms(functools.partial(choose, *inputs[:2], documents), args.repeats)

    return timed


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--columns", type=int, default=3000)
    parser.add_argument("--attend", nargs="*", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--choose", nargs="*", choices=_CHOSEN, default=list(_CHOSEN))
    parser.add_argument(
        "--packs", nargs="*", metavar="COUNT", help="of how many documents: 1, 8, 64 or mixed"
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.seq_len % (8 * BLOCK):
        parser.error(f"--seq-len={args.seq_len} must be a multiple of {8 * BLOCK}")
    known = [name.split()[0] for name in packs(args.seq_len)]
    if unknown := [x for x in args.packs or () if x not in known]:
        parser.error(f"--packs={unknown[0]} is none of {', '.join(known)}")
    return args


if __name__ == "__main__":
    main()
