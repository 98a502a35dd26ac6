"""Times attention within sliding windows on one device and prints a markdown table.

python -m benchmarks.kernels.windows --seq-len 131072 --windows 512 1024 4096
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.options import make_parser
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.timing import median_ms
from mtraining_jax.tools.plan.pattern_costs import density_of_window
from pallas_kernels import DenseIndex, WindowIndex, attention

_BLOCK = 128
_COLUMNS = "S", "window", "forward ms", "both passes ms", "rate, forward", "rate, both"
_ABOUT = "rate: computed pairs per second, relative to dense causal attention."


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    page = Page(args.out)
    page.add(
        f"# Sliding windows on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.heads} query and {args.kv_heads} key/value heads of {args.head_dim}, "
        f"bf16, batch 1, random inputs, seed {args.seed}, medians of {args.repeats}, backend "
        f"{args.backend or 'auto'}. {_ABOUT}",
        "",
        *table_head(_COLUMNS),
    )
    for seq_len in args.seq_len:
        attend = functools.partial(attention, backend=args.backend)
        dense = times(args, seq_len, attend, DenseIndex(_BLOCK))
        page.add(_line(seq_len, "dense", dense, [1.0, 1.0]))
        for window in args.windows:
            index = WindowIndex.of_sequence(1, args.heads, seq_len // _BLOCK, _BLOCK, window)
            found, density = times(args, seq_len, attend, index), density_of_window(window, seq_len)
            rates = [density * full / own for full, own in zip(dense, found, strict=True)]
            page.add(_line(seq_len, str(window), found, rates))
    return page.text


def _line(seq_len: int, window: str, times: list[float], rates: list[float]) -> str:
    return table_line([str(seq_len), window, *(f"{x:.2f}" for x in (*times, *rates))])


def times(
    args: argparse.Namespace, seq_len: int, attend: Callable[..., Array | tuple], *more: Any
) -> list[float]:
    """Milliseconds of the forward pass of attend(q, k, v, *more), and of both passes."""
    rng = np.random.default_rng(args.seed)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((1, seq_len, n, args.head_dim), np.float32), jnp.bfloat16)
        for n in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    )

    def both(q: Array, k: Array, v: Array, dout: Array, *more: Any) -> tuple[Any, ...]:
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, *more), q, k, v)
        return out, *vjp(dout)

    runs = (
        functools.partial(jax.jit(attend), q, k, v, *more),
        functools.partial(jax.jit(both), q, k, v, dout, *more),
    )
    return [median_ms(run, args.repeats) for run in runs]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    shared = "heads", "kv-heads", "head-dim", "backend", "repeats", "seed", "out"
    parser = make_parser(__doc__, *shared)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[131072], metavar="S")
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 1024, 4096], metavar="W")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
