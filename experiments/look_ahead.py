"""Measures whether a pattern's selection uses later tokens, by losses of single blocks.

    python -m experiments.look_ahead --tier c --arm sampled_rows --inferred sampled_rows --out FILE

A pattern that selects per row of blocks may select for a query by later queries of its block. So
for random positions p of held-out text the loss on token p + 1 is computed three times: with p's
block complete, with the tokens after p replaced by those of another block of the text, and in a
sequence that ends at p. If the first is lower than the second, later tokens help to predict token
p + 1; the third also differs in which queries select. Keys and values of earlier blocks, which are
the same for all, come from one pass over the text; the block is computed by XLA every time. Half
of the tokens are far copies (`benchmarks/quality/far_copies.py`), where the text has as many.
Appends a JSON line per text to FILE and skips texts that are there.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.options import make_parser
from benchmarks.quality.far_copies import far_copies
from benchmarks.quality.measure import Selector
from benchmarks.quality.stepped_model import SteppedModel
from experiments import measure, variants
from experiments.data import FOLDER
from experiments.result_lines import append_lines, read_lines
from mtraining_jax.documents import Documents
from mtraining_jax.models.transformer import graph_definition
from mtraining_jax.patterns.base import ModelSizes, Pattern
from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.utils.errors import UserError
from pallas_kernels import attention
from pallas_kernels.index import bits as sets

_SHARES = 1 / 4, 1 / 2, 1  # prefixes are padded to these parts of the sequence
_AT_ONCE = 11  # variants of a block


class CutBlocks:
    """Computes single blocks of a text, cut off at any position."""

    def __init__(self, model: SteppedModel, pattern: Pattern, seq_len: int) -> None:
        if not isinstance(pattern, RowPattern):
            raise UserError("only patterns that select per row of blocks can be measured")
        spec, self.size = model.spec, pattern.block_size
        self.model, self.pattern, self.seq_len = model, pattern, seq_len
        shapes = (
            jax.ShapeDtypeStruct((1, seq_len, heads, spec.head_dim), jnp.dtype(spec.dtype))
            for heads in (spec.num_heads, spec.num_kv_heads)
        )
        self._select = Selector(pattern, *shapes, None)
        self._attend = jax.jit(attention)
        self._block = jax.jit(self._losses)

    def read(self, tokens: np.ndarray) -> tuple[np.ndarray, list[Array]]:
        """Runs the whole text: losses fp32 [S - 1], and keys and values [L, 1, S, Hk, D]."""
        kept = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            kept.append((k, v))
            return self._attend(q, k, v, self._select(layer, q, k))

        losses = np.asarray(self.model.losses(tokens, attend))
        return losses, [jnp.stack(x) for x in zip(*kept, strict=True)]

    def losses(
        self,
        tokens: np.ndarray,
        kept: list[Array],
        block: int,
        inputs: np.ndarray,
        ends: np.ndarray,
    ) -> np.ndarray:
        """Losses on the tokens after the block's, with its first `ends` tokens: [n, g].

        Inputs, int32 [n, g], stand in for the block's tokens; ends are int32 [n].
        """
        blocks, first = self.seq_len // self.size, block * self.size
        padded = next(int(x * blocks) for x in _SHARES if block < int(x * blocks)) * self.size
        labels = jnp.asarray(tokens[first + 1 : first + self.size + 1], jnp.int32)
        parts = [x[:, :, :padded] for x in kept]
        variants = jnp.asarray(inputs, jnp.int32), jnp.asarray(ends, jnp.int32)
        return np.asarray(self._block(*parts, labels, jnp.int32(block), variants))

    def _losses(
        self, k_all: Array, v_all: Array, labels: Array, block: Array, each: tuple[Array, Array]
    ) -> Array:
        def variant(each: tuple[Array, Array]) -> Array:
            inputs, end = each

            def attend(layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
                out = self._attend_block(q, k, v, k_all[layer], v_all[layer], block, end)
                return out, jnp.float32(0)

            return self.model.part_losses(inputs, labels, block * self.size, attend)[0]

        return jax.lax.map(variant, each, batch_size=_AT_ONCE)

    def _attend_block(
        self, q: Array, k: Array, v: Array, k_all: Array, v_all: Array, block: Array, end: Array
    ) -> Array:
        """Attention of one block of queries [1, g, Hq, D] that ends after `end` tokens."""
        size, num_blocks = self.size, k_all.shape[1] // self.size
        at = (0, block * size, 0, 0)
        k, v = (jax.lax.dynamic_update_slice(x, y, at) for x, y in ((k_all, k), (v_all, v)))
        valid = block * size + end
        documents = Documents.padded(valid, num_blocks * size, size)
        context = SelectionContext(block[None], num_blocks, backend="xla", documents=documents)
        index = self.pattern.index(q, k, context)
        listed = sets.unpack(index.bits[0, :, 0], num_blocks)  # [Hq, NB]
        group = q.shape[2] // k.shape[2]
        keys = jnp.arange(k.shape[1], dtype=jnp.int32)
        rows = block * size + jnp.arange(size, dtype=jnp.int32)

        def head(args: tuple[Array, Array, Array, Array]) -> Array:
            q, k, v, listed = args
            logits = jnp.matmul(q, k.T, preferred_element_type=jnp.float32)
            seen = jnp.repeat(listed, size) & (keys <= rows[:, None])
            logits = jnp.where(seen, logits * q.shape[-1] ** -0.5, -jnp.inf)
            weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
            return jnp.matmul(weights, v, preferred_element_type=jnp.float32).astype(v.dtype)

        def heads(x: Array, times: int) -> Array:
            return jnp.repeat(x[0].swapaxes(0, 1), times, axis=0)

        out = jax.lax.map(head, (heads(q, 1), heads(k, group), heads(v, group), listed))
        return out.swapaxes(0, 1)[None]


def measured(
    cut: CutBlocks, tokens: np.ndarray, blocks: np.ndarray, each: int, rng: np.random.Generator
) -> Iterator[list]:
    """Yields [position, far copy, loss with the block complete, cut off, in one pass, replaced]."""
    far, size = far_copies(tokens), cut.size
    whole, kept = cut.read(tokens)
    for block in blocks:
        first = int(block) * size
        copies = np.flatnonzero(far[first + 1 : first + size + 1])
        others = np.flatnonzero(~far[first + 1 : first + size + 1])
        half = min(each // 2, len(copies))
        places = np.concatenate([
            rng.choice(copies, half, replace=False),
            rng.choice(others, min(each - half, len(others)), replace=False),
        ]).astype(int)  # fmt: skip
        true, other = (
            tokens[x : x + size] for x in (first, int(rng.choice(blocks[blocks != block])) * size)
        )
        replaced = np.where(np.arange(size) <= places[:, None], true, other)
        inputs = np.concatenate([replaced, np.broadcast_to(true, (len(places) + 1, size))])
        ends = np.array([*(size for _ in places), *(places + 1), size])
        losses = cut.losses(tokens, kept, int(block), inputs, ends)
        for n, place in enumerate(places.tolist()):
            p, of_cut = first + place, losses[len(places) + n, place]
            values = losses[-1, place], of_cut, whole[p], losses[n, place]
            yield [p, int(far[p + 1]), *(round(float(x), 5) for x in values)]


def main(argv: list[str] | None = None) -> int:
    """Measures one model with one pattern; returns 0, or 75 if the time was up."""
    parser = make_parser(__doc__)
    parser.add_argument("--tier", choices=variants.TIERS, required=True)
    parser.add_argument("--arm", required=True, help="the trained model")
    parser.add_argument("--inferred", required=True, help="arm; its pattern is used")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of runs and data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=64, help="of each text")
    parser.add_argument("--positions", type=int, default=8, help="in each block")
    parser.add_argument("--minutes", type=float, default=9, help="time limit (default 9)")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes
    loaded = measure.load(args.tier, args.arm, args.seed, args.folder, []).loaded
    spec, config = loaded.network.spec, variants.arm_config(args.tier, args.inferred)
    held = np.load(args.folder / "data" / args.tier / "heldout.npy", mmap_mode="r")
    seq_len = held.shape[1]
    sizes = ModelSizes(spec.num_layers, spec.num_heads, seq_len)
    pattern = config.sparsity.pattern.bind(sizes)
    model = SteppedModel(nnx.merge(graph_definition(spec), loaded.state), seq_len)
    cut = CutBlocks(model, pattern, seq_len)
    about = {"what": "look_ahead", "tier": args.tier, "seed": args.seed}
    about |= {"trained": args.arm, "inferred": args.inferred}
    done = {x["number"] for x in read_lines(args.out) if about.items() <= x.items()}
    last = seq_len // cut.size - 1  # the last block has no token after it
    for number in np.linspace(0, len(held), args.texts, endpoint=False).astype(int).tolist():
        if number in done:
            continue
        rng = np.random.default_rng([args.seed, number])
        blocks = np.sort(
            rng.choice(np.arange(16, last), min(args.blocks, last - 16), replace=False)
        )
        rows = list(measured(cut, np.asarray(held[number], np.int32), blocks, args.positions, rng))
        append_lines(args.out, [about | {"number": number, "rows": rows}])
        print(number, summary(rows), flush=True)
        if time.monotonic() > deadline:
            return measure.LATER
    rows = [
        x for line in read_lines(args.out) if about.items() <= line.items() for x in line["rows"]
    ]
    print(json.dumps(about | summary(rows)))
    return 0


def summary(rows: list[list]) -> dict[str, str]:
    """Mean loss with the block complete minus replaced and minus cut off, by kind and place."""
    table, found = np.array(rows, np.float64), {}
    place = table[:, 0] % 128
    for name, column in (("replaced", 5), ("cut", 3)):
        difference = table[:, 2] - table[:, column]
        for far in (0, 1):
            for begin, end in ((0, 128), (0, 32), (32, 96), (96, 127)):
                part = difference[(table[:, 1] == far) & (place >= begin) & (place < end)]
                if len(part) > 1:
                    error = part.std(ddof=1) / len(part) ** 0.5
                    key = f"{name} {'far' if far else 'other'} {begin}-{end}"
                    found[key] = f"{part.mean():+.4f} +- {error:.4f} ({len(part)})"
    return found


if __name__ == "__main__":
    sys.exit(main())
