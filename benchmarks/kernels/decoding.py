r"""Times attention of one new token to a cache: dense, to lists of blocks, and selecting them.

    python -m benchmarks.kernels.decoding --out decoding.md

Each call runs as many layers as have 4 GB of keys and values (1 to 12), several times, so that the
host's time is hidden; each layer has a cache of its own, so that the GPU's L2 cache holds no list,
and its queries depend on the output of the one before. Times are per layer. GB/s count the keys and
values of the listed blocks. A token that selects (share "selected") scores codes of 4 bits, and
keeps blocks with at least the mean mass; 5 % of the keys' blocks are heavy. Errors are those of one
layer against XLA, norm over norm. Bits: of two runs.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.options import make_parser
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.timing import median_ms
from pallas_kernels.decode import DecodeCall, decode
from pallas_kernels.key_codes import KeyCodes, block_weights, selected_blocks

BLOCK, DIM = 128, 128
CASES = (  # tokens, batch, query heads, key/value heads
    (32768, 1, 12, 2), (131072, 1, 12, 2), (524288, 1, 12, 2), (1048576, 1, 12, 2),
    (131072, 1, 32, 8), (32768, 8, 12, 2), (131072, 8, 12, 2),
)  # fmt: skip
SHARES = 1.0, 0.12, 0.06
KERNELS = "mosaic_gpu"
_BYTES, _MOST_LAYERS = 4e9, 12
_CALL_BYTES, _MOST_PASSES = 3e10, 20  # of keys and values in one call
_HEAVY = 0.05  # of the blocks
_STEP = 1e-3  # of the queries, so that they select alike in all layers
_COLUMNS = (
    "tokens", "batch", "heads", "blocks read", "backend", "µs a layer", "GB/s", "error",
    "bits repeat",
)  # fmt: skip


class Layers:
    """Caches of layers with codes of the keys, and the queries of the first layer."""

    def __init__(self, tokens: int, batch: int, heads: int, kv_heads: int) -> None:
        self.size = 4 * batch * kv_heads * tokens * DIM  # bytes of a layer
        count = max(min(int(_BYTES / self.size), _MOST_LAYERS), 1)
        keys = jax.random.split(jax.random.key(0), count + 1)
        self.q = jax.random.normal(keys[-1], (batch, heads, DIM), jnp.bfloat16)
        self.caches = [_draw(key, self.q, kv_heads, tokens) for key in keys[:-1]]
        self.blocks = tokens // BLOCK
        self.seen = jnp.tile(jnp.array([0, BLOCK], jnp.int32), (1, self.blocks, 1))
        every = np.tile(np.arange(self.blocks), (batch, kv_heads, 1))
        self.order = np.random.default_rng(0).permuted(every, axis=-1)

    def program(self, count: int | None, layers: int, passes: int, backend: str) -> Any:
        """Attention to `count` blocks, or to selected ones: a program with its arguments."""
        lists = np.sort(self.order[..., : count or self.blocks], axis=-1).astype(np.int32)
        counts = jnp.full(lists.shape[:2], lists.shape[-1], jnp.int32)
        run = jax.jit(functools.partial(_run, count is None, passes, backend))
        return functools.partial(
            run, self.caches[:layers], self.q, jnp.asarray(lists), counts, self.seen
        )

    def selected(self) -> float:
        """The share of the blocks that the first layer selects."""
        return float(_select(self.caches[0][2], self.q, self.seen, KERNELS)[1].mean()) / self.blocks


@functools.partial(jax.jit, static_argnums=(2, 3))
def _draw(key: Array, q: Array, kv_heads: int, tokens: int) -> tuple[Array, Array, KeyCodes]:
    """Draws keys, values and codes. Keys of some blocks point to the queries."""
    batch, heads, dim = q.shape
    keys = jax.random.split(key, 3)
    k, v = (jax.random.normal(x, (batch, kv_heads, tokens, dim), jnp.bfloat16) for x in keys[:2])
    towards = q.reshape(batch, kv_heads, -1, dim).astype(jnp.float32).mean(2) * (heads // kv_heads)
    heavy = jax.random.uniform(keys[2], (batch, kv_heads, tokens // BLOCK)) < _HEAVY
    heavy = jnp.repeat(heavy, BLOCK, axis=2)[..., None]
    k += (heavy * towards[:, :, None]).astype(k.dtype)
    wide = k.astype(jnp.float32)
    return k, v, KeyCodes.of(k, wide.mean(2, keepdims=True), wide.std(2, keepdims=True))


def _select(codes: KeyCodes, q: Array, seen: Array, backend: str) -> tuple[Array, Array]:
    weights, totals = block_weights(q, codes, seen, DIM**-0.5, backend)
    blocks = seen.shape[1]
    forced, least = jnp.arange(blocks)[None] == blocks - 1, jnp.full(1, 1 / blocks, jnp.float32)
    return selected_blocks(weights, totals, q, forced, least, backend)


def _run(
    selects: bool,
    passes: int,
    backend: str,
    caches: list[tuple[Array, Array, KeyCodes]],
    q: Array,
    blocks: Array,
    counts: Array,
    seen: Array,
) -> Array:
    out = jnp.zeros(q.shape, jnp.float32)
    for k, v, codes in caches * passes:
        q = (q.astype(jnp.float32) + _STEP * out).astype(q.dtype)
        if selects:
            blocks, counts = _select(codes, q, seen, backend)
        out, _ = decode(DecodeCall(q, k, v, blocks, counts, seen, DIM**-0.5), backend)
    return out


def row(layers: Layers, count: int | None, backend: str, repeats: int) -> list[str]:
    """The last cells of a row."""
    passes = max(1, min(_MOST_PASSES, int(_CALL_BYTES / layers.size / len(layers.caches))))
    run = layers.program(count, len(layers.caches), passes, backend)
    us = 1e3 * median_ms(run, repeats) / len(layers.caches) / passes
    error = "–"
    if backend != "xla":
        found, right = (np.asarray(layers.program(count, 1, 1, x)()) for x in (backend, "xla"))
        error = f"{np.linalg.norm(found - right) / np.linalg.norm(right):.1e}"
    same = len({np.asarray(run()).tobytes() for _ in range(2)}) == 1
    share = layers.selected() if count is None else count / layers.blocks
    rate = layers.size * share / us / 1e3
    shown = f"{100 * share:.0f} %" if count is not None else f"{100 * share:.1f} %, selected"
    return [shown, backend, f"{us:.1f}", f"{rate:.0f}", error, "yes" if same else "no"]


def main() -> None:
    """Prints a table of all cases."""
    parser = make_parser(__doc__ or "", "repeats", "out")
    parser.add_argument("--cases", type=int, nargs="*", help="their numbers; all by default")
    args = parser.parse_args()
    page = Page(args.out)
    page.add("# Attention of a new token", "", setting(), "", *table_head(_COLUMNS))
    for tokens, batch, heads, kv_heads in (CASES[x] for x in args.cases or range(len(CASES))):
        layers = Layers(tokens, batch, heads, kv_heads)
        case = f"{tokens}", f"{batch}", f"{heads}/{kv_heads}"
        counts = [math.ceil(share * layers.blocks) for share in SHARES]
        for count in (*counts, None):
            for backend in ("xla", KERNELS) if count == layers.blocks else (KERNELS,):
                page.add(table_line([*case, *row(layers, count, backend, args.repeats)]))
        del layers


if __name__ == "__main__":
    main()
