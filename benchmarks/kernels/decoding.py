r"""Times attention of one new token to a cache, dense and to lists of blocks, on one GPU.

    python -m benchmarks.kernels.decoding --out decoding.md

Each call runs as many layers as have 4 GB of keys and values (1 to 12), each with a cache of its
own, so that the GPU's L2 cache holds no list; a layer's queries depend on the output of the one
before. Times are per layer. GB/s count the keys and values of the listed blocks. Errors are those
of one layer against XLA, norm over norm. Bits: of two runs.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.options import make_parser
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.timing import median_ms
from pallas_kernels.decode import DecodeCall, decode

BLOCK, DIM = 128, 128
CASES = (  # tokens, batch, query heads, key/value heads
    (32768, 1, 12, 2), (131072, 1, 12, 2), (524288, 1, 12, 2), (1048576, 1, 12, 2),
    (131072, 1, 32, 8), (32768, 8, 12, 2), (131072, 8, 12, 2),
)  # fmt: skip
SHARES = 1.0, 0.12, 0.06, 0.03
KERNELS = "mosaic_gpu"
_BYTES, _MOST_LAYERS = 4e9, 12
_COLUMNS = (
    "tokens", "batch", "heads", "blocks read", "backend", "µs a layer", "GB/s", "error",
    "bits repeat",
)  # fmt: skip


class Layers:
    """Caches of layers, and the queries of the first one."""

    def __init__(self, tokens: int, batch: int, heads: int, kv_heads: int) -> None:
        self.size = 4 * batch * kv_heads * tokens * DIM  # bytes of a layer
        count = max(min(int(_BYTES / self.size), _MOST_LAYERS), 1)
        keys = jax.random.split(jax.random.key(0), 2 * count + 1)
        shape = batch, kv_heads, tokens, DIM
        draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
        self.caches = [(draw(a), draw(b)) for a, b in zip(keys[:-1:2], keys[1::2], strict=True)]
        self.q = jax.random.normal(keys[-1], (batch, heads, DIM), jnp.bfloat16)
        self.seen = jnp.tile(jnp.array([0, BLOCK], jnp.int32), (1, tokens // BLOCK, 1))
        every = np.tile(np.arange(tokens // BLOCK), (batch, kv_heads, 1))
        self.order = np.random.default_rng(0).permuted(every, axis=-1)

    def program(self, count: int, layers: int, backend: str) -> functools.partial:
        """Attention to `count` blocks in some layers: a compiled program with its arguments."""
        lists = np.sort(self.order[..., :count], axis=-1).astype(np.int32)
        counts = jnp.full(lists.shape[:2], count, jnp.int32)
        run = jax.jit(functools.partial(_run, backend=backend))
        operands = jnp.asarray(lists), counts, self.seen
        return functools.partial(run, self.caches[:layers], self.q, *operands)


def _run(
    caches: list[tuple[Array, Array]],
    q: Array,
    blocks: Array,
    counts: Array,
    seen: Array,
    *,
    backend: str,
) -> Array:
    for k, v in caches:
        out, _ = decode(DecodeCall(q, k, v, blocks, counts, seen, DIM**-0.5), backend)
        q = (q.astype(jnp.float32) + out).astype(q.dtype)
    return q


def row(layers: Layers, count: int, backend: str, repeats: int) -> list[str]:
    """The last cells of a row."""
    run = layers.program(count, len(layers.caches), backend)
    us = 1e3 * median_ms(run, repeats) / len(layers.caches)
    error = "–"
    if backend != "xla":
        start, found, right = (
            np.asarray(x, np.float32)
            for x in (
                layers.q, layers.program(count, 1, backend)(), layers.program(count, 1, "xla")()
            )
        )  # fmt: skip
        error = f"{np.linalg.norm(found - right) / np.linalg.norm(right - start):.1e}"
    same = len({np.asarray(run()).tobytes() for _ in range(2)}) == 1
    blocks = layers.seen.shape[1]
    rate = layers.size * count / blocks / us / 1e3
    share = f"{100 * count / blocks:.0f} %"
    return [share, backend, f"{us:.1f}", f"{rate:.0f}", error, "yes" if same else "no"]


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
        for share in SHARES:
            count = math.ceil(share * layers.seen.shape[1])
            for backend in ("xla", KERNELS) if share == 1 else (KERNELS,):
                page.add(table_line([*case, *row(layers, count, backend, args.repeats)]))
        del layers


if __name__ == "__main__":
    main()
