"""Times Lighthouse attention (arXiv 2605.06554) next to patterns, and prints a markdown table.

    python -m benchmarks.kernels.lighthouse --seq-len 98304 524288

Lighthouse selects no pairs: it attends between means of queries and keys, as fine as selected, and
adds the outputs of all levels. So it is a layer of its own and not a pattern. What is here was
written from its published code (github.com/ighoshsubho/lighthouse-attention, cfea089: the scorer
"norm", without context parallelism), and computes dense attention by this library's kernels. The
patterns select in each pass; a replay also selects, and then computes random lists of its density.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.kernels.windows import times
from benchmarks.options import make_parser
from benchmarks.quality.patterns import parse
from benchmarks.report import Page, setting, table_head, table_line
from mtraining_jax import Dense, sparse_attention
from mtraining_jax.patterns.base import ModelSizes

_COLUMNS = "S", "attention", "forward ms", "both passes ms", "speedup, forward", "speedup, both"
_LISTS = "benchmarks.replay:Replay,replay_of=sampled_rows"
_PATTERNS = ["dense", *(f"{_LISTS},replay_density={x}" for x in (0.063, 0.02))]


def lighthouse(
    q: Array, k: Array, v: Array, top_k: int, pooling: int = 4, levels: int = 3, tile: int = 128,
    backend: str | None = None,
) -> Array:  # fmt: skip
    """Computes Lighthouse attention.

    Level l has an entry for each pooling^l tokens: means of q, k and v. All entries of the last
    level attend, and for each of `top_k` selected entries of a level the finer ones in it.
    Attention is dense and causal over all these entries. An entry's output is added to as many
    tokens as it has, beginning with its last one.

    Args:
        q: [B, S, Hq, D]; k, v: [B, S, Hk, D].
        top_k: entries selected per level and head. Each of top_k / tile parts of the sequence
            selects tile / 2 entries by the largest norm of a query, then by that of a key.
        pooling: entries joined by one of the next level (p).
        levels: number of levels, that of tokens included (L).
        tile: entries selected per part.
        backend: of `sparse_attention`.

    Returns:
        [B, S, Hq, D] in the dtype of q.
    """
    (batch, tokens, heads, dim), parts = q.shape, top_k // tile
    if tokens % (parts * pooling ** (levels - 1)) or top_k % tile:
        raise ValueError(f"{tokens} tokens do not divide into {parts} parts of whole entries")
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    widths = [pooling**level for level in range(levels)]

    def pyramid(x: Array) -> Array:  # [B, H, entries of all levels, D]
        split = [x.reshape(batch, -1, width, heads, dim).mean(2) for width in widths]
        return jnp.concatenate(split, axis=1).swapaxes(1, 2)

    def scores(x: Array) -> list[Array]:  # [B, H, entries of the level]
        norms = jnp.linalg.norm(x.astype(jnp.float32), axis=-1).swapaxes(1, 2)
        return [norms.reshape(batch, heads, -1, width).max(-1) for width in widths]

    entries = _entries(*lax.stop_gradient((scores(q), scores(k))), pooling, parts, tile)
    count, total = entries.shape[-1], sum(tokens // width for width in widths)
    slots = jnp.full((batch, heads, total), count)
    slots = jnp.put_along_axis(slots, entries, jnp.arange(count), axis=-1, inplace=False)
    selected = (_take(pyramid(x), entries).swapaxes(1, 2) for x in (q, k, v))
    dense = Dense(block_size=math.gcd(count, 128))
    out = cast(Array, sparse_attention(*selected, pattern=dense, backend=backend)).swapaxes(1, 2)
    added, rows, start = jnp.zeros_like(q), _take(out, slots), 0
    for width in widths:  # of entries; the first tokens have no entry that ends before them
        level = jnp.repeat(rows[:, :, start : start + tokens // width], width, axis=2)
        added = added.at[:, width - 1 :].add(level.swapaxes(1, 2)[:, : tokens + 1 - width])
        start += tokens // width
    return added


@jax.vmap
@jax.vmap
def _take(x: Array, where: Array) -> Array:
    """Rows of x [B, H, N, D] at `where` [B, H, M], or 0 where it is N; no row twice."""
    return x.at[where].get(mode="fill", fill_value=0, unique_indices=True)


def _entries(of_q: list[Array], of_k: list[Array], pooling: int, parts: int, tile: int) -> Array:
    """Numbers of the attending entries, counted through all levels, in causal order: [B, H, E]."""
    batch, heads, coarse = of_q[-1].shape
    shape = batch, heads, parts, coarse // parts
    numbers = jnp.broadcast_to(jnp.arange(coarse).reshape(shape[2:]), shape)
    ids, keys, last = [], [], len(of_q) - 1
    for level in range(last, -1, -1):
        rejected, best = jnp.ones(numbers.shape, bool), []
        for scores in (of_q[level], of_k[level]) if level else ():
            found = jnp.take_along_axis(scores[:, :, None], numbers, axis=-1)
            best += [lax.top_k(jnp.where(rejected, found, -jnp.inf), tile // 2)[1]]
            rejected = jnp.put_along_axis(rejected, best[-1], False, axis=-1, inplace=False)
        # An entry with finer ones comes after them, a coarser one later; another at its start.
        start = numbers * pooling**level
        after = ((start + pooling**level) << last) - (1 << (last - level))
        keys.append(jnp.where(rejected, start << last, after).reshape(batch, heads, -1))
        ids.append((numbers + sum(x.shape[-1] for x in of_q[:level])).reshape(batch, heads, -1))
        if level:
            parents = jnp.take_along_axis(numbers, jnp.concatenate(best, -1), axis=-1)
            numbers = (pooling * parents[..., None] + jnp.arange(pooling)).reshape(*shape[:3], -1)
    order = jnp.argsort(jnp.concatenate(keys, -1), axis=-1)
    return jnp.take_along_axis(jnp.concatenate(ids, -1), order, axis=-1)


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    shared = "heads", "kv-heads", "head-dim", "backend", "repeats", "seed", "out"
    parser = make_parser(__doc__, *shared)
    parser.set_defaults(heads=8, kv_heads=8)  # as in its configurations
    parser.add_argument("--seq-len", type=int, nargs="+", default=[98304, 524288], metavar="S")
    parser.add_argument("--top-k", type=int, default=2048, metavar="K")
    parser.add_argument("--patterns", nargs="+", default=_PATTERNS, metavar="NAME,OPTION=...")
    args = parser.parse_args(argv)
    page = Page(args.out)
    page.add(
        f"# Lighthouse attention on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.heads} query and {args.kv_heads} key/value heads of {args.head_dim}, "
        f"bf16, batch 1, random inputs, seed {args.seed}, medians of {args.repeats}. Times include "
        "selection. speedup: over the first row of a length.",
        "",
        *table_head(_COLUMNS),
    )
    for seq_len in args.seq_len:
        rows, model = dict[str, Callable[..., Any]](), ModelSizes(1, args.heads, seq_len)
        for text in args.patterns:  # the first layer of those that differ by layer
            pattern = jax.tree.map(lambda x: x[0], parse(text, model))
            rows[text] = functools.partial(sparse_attention, pattern=pattern)
        rows[f"Lighthouse, top_k={args.top_k}"] = functools.partial(lighthouse, top_k=args.top_k)
        first: list[float] = []
        for name, attend in rows.items():
            found = times(args, seq_len, functools.partial(attend, backend=args.backend))
            first = first or list(found)
            found += [one / own for one, own in zip(first, found, strict=True)]
            page.add(table_line([str(seq_len), name, *(f"{x:.2f}" for x in found)]))
    return page.text


if __name__ == "__main__":
    main()
