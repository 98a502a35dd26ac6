"""Times the kernel that scores key blocks for short rows, with each of some settings.

    python benchmarks/score_kernel.py [--settings 0:none 0:issued 1:issued ...]
        [--seq-len 131072] [--heads 16] [--kv-heads 2] [--head-dim 128] [--rows 16]

A setting is how many quarters of the exponentials are polynomials, and when a warpgroup lets the
next one multiply (`pallas_kernels.mosaic_gpu.kernels.short_block_scores.ShortBlockScoresConfig`).
Errors are those of the masses of key blocks against the first setting's. Queries and keys are
random; the time does not follow them. It needs a Hopper GPU.
"""

import argparse
import functools
import sys
from pathlib import Path

if __name__ == "__main__":  # run from a checkout, only the script's own folder is importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.report import setting
from benchmarks.timing import median_ms
from mtraining_jax.errors import UserError
from mtraining_jax.sparsity import Shards
from mtraining_jax.sparsity.sampled_rows import by_blocks, samples
from pallas_kernels.mosaic_gpu import device
from pallas_kernels.mosaic_gpu.block_masses import HopperBlockScores
from pallas_kernels.mosaic_gpu.kernels.short_block_scores import (
    MOST_LENGTH,
    TILE_ROWS,
    TURNS,
    ShortBlockScoresConfig,
    short_block_scores_kernel,
)

SETTINGS = (
    "0:none", "1:none", "2:none", "0:issued", "1:issued", "2:issued", "0:done", "1:done",
)  # fmt: skip
_COLUMNS = "quarters by polynomials", "turns", "kernel ms", "masses ms", "largest error of a mass"
_BLOCK = 128


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    _check(args)
    lines = [
        f"# Scores of key blocks on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.seq_len} tokens, {args.rows} rows of each block of {_BLOCK}, "
        f"{args.heads} query and {args.kv_heads} key/value heads of {args.head_dim}, bf16, batch "
        f"1, random inputs, medians of {args.repeats}.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
    ]
    print("\n".join(lines), flush=True)
    inputs, first = _inputs(args), None
    for text in args.settings:
        line, first = _line(args, text, inputs, first)
        lines.append(line)
        print(line, flush=True)
    return "\n".join(lines)


def _line(
    args: argparse.Namespace, text: str, inputs: tuple[Array, Array, Array], first: Array | None
) -> tuple[str, Array]:
    """Times a setting; also returns the masses of the first one."""
    config = _setting(text)
    rows, keys, places = inputs
    scale = args.head_dim**-0.5
    kernels = HopperBlockScores(short=config)
    masses = jax.jit(functools.partial(kernels.block_masses, scale=scale))
    alone = jax.jit(
        functools.partial(
            short_block_scores_kernel, scale=scale, block_columns=_BLOCK, config=config,
            num_blocks=device.multiprocessors(),
        )
    )
    flat = [x.reshape(1, x.shape[1], -1, args.head_dim) for x in (rows, keys)]
    found = masses(rows, keys, places)
    first = found if first is None else first
    cells = (
        str(config.polynomial_quarters), config.turns,
        f"{median_ms(lambda: alone(*flat, places.reshape(1, -1)), args.repeats):.2f}",
        f"{median_ms(lambda: masses(rows, keys, places), args.repeats):.2f}",
        f"{float(jnp.abs(found - first).max()):.1e}",
    )
    return "| " + " | ".join(cells) + " |", first


def _inputs(args: argparse.Namespace) -> tuple[Array, Array, Array]:
    """Rows [1, Hq, n, r, D] and keys [1, Hk, n, g, D] of random queries and keys, and places."""
    rng = np.random.default_rng(0)
    q, k = (
        jnp.asarray(
            rng.standard_normal((1, args.seq_len, n, args.head_dim), np.float32), jnp.bfloat16
        )
        for n in (args.heads, args.kv_heads)
    )
    num_blocks = args.seq_len // _BLOCK
    shards = Shards(jnp.arange(num_blocks, dtype=jnp.int32), num_blocks)
    rows, places = jax.jit(lambda q: samples(q, shards, _BLOCK, args.rows))(q)
    return rows, by_blocks(k, _BLOCK), places


def _setting(text: str) -> ShortBlockScoresConfig:
    quarters, _, turns = text.partition(":")
    if quarters not in ("0", "1", "2", "3", "4") or turns not in TURNS:
        raise UserError(f'"{text}" is not a setting: 0 to 4, a colon, then {", ".join(TURNS)}')
    return ShortBlockScoresConfig(polynomial_quarters=int(quarters), turns=turns)


def _check(args: argparse.Namespace) -> None:
    for text in args.settings:
        _setting(text)
    if args.head_dim % 64 or args.head_dim > MOST_LENGTH:
        raise UserError(f"--head-dim={args.head_dim} is not 64 or 128")
    if args.seq_len % _BLOCK or args.seq_len // _BLOCK * args.rows % TILE_ROWS:
        raise UserError(
            f"--seq-len={args.seq_len} with --rows={args.rows} does not make whole blocks of "
            f"{_BLOCK} tokens and whole tiles of {TILE_ROWS} rows"
        )
    if reason := device.no_hopper_gpu():
        raise UserError(reason)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
