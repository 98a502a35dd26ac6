r"""Loss of selections that compute fewer products than sampled rows do.

    python -m experiments.fewer_scores --model runs/quality/sampled_rows/hf --texts heldout.npy \
        --seq-len 32768 --tries rows pages,page=16,share=0.1 leading,components=32 layers,every=2 \
        --out fewer_scores.jsonl

Every try selects by the exact masses of 16 rows per query block, of fewer blocks or with fewer
products: `pages` first scores pages of keys by their mean (with `variance`, by the mean of the
exponentials of normally distributed keys), and omits key blocks with less than `share` of the
mean mass of a block; `leading` does so with the leading principal components of keys, or selects
by them if `share` is 0; `far` scores key blocks beyond `near` blocks with fewer rows; `layers`
selects in every n-th layer, for the heads of the layers after it as well. Losses are those of the
whole text, against dense attention, in nats; far copies as in benchmarks/quality/far_copies.py.
`scored` is the share of the blocks that are scored exactly. The same command resumes.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_kernels
from benchmarks.options import make_parser
from benchmarks.pattern_words import parse_pattern, split_options
from benchmarks.quality.far_copies import far_copies
from benchmarks.quality.measure import Programs, Selector
from benchmarks.quality.stepped_model import SteppedModel, read_model
from benchmarks.result_file import append_lines, read_lines
from benchmarks.timing import log
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import probe_rows, row_scores
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt, UnitFraction
from pallas_kernels import DenseIndex
from pallas_kernels.index import Index


@options
class Rows(SampledRows):
    """Sampled rows as they are, in XLA or with the kernel for 8-bit keys."""

    min_sparse_tokens: NonNegativeInt = 0

    def keys(self, q, k, context):
        return k

    def bits(self, q, k, context):
        return super(SampledRows, self).bits(q, k, context)

    def rows_at_once(self, q, k, context):
        return super(SampledRows, self).rows_at_once(q, k, context)

    def candidates(self, q: Array, k: Array, context: SelectionContext) -> Array | None:
        """Which key blocks are scored exactly, bool [B, Hq, n/g, NB]; None for all."""
        return None

    def scores(self, q, k, context):
        masses = probe_rows.block_masses(q, k, context, self.probe_queries_per_block)
        some = self.candidates(q, k, context)
        return masses if some is None else jnp.where(some, masses, 0)

    def masses(
        self, q: Array, keys: Array, context: SelectionContext, page: int, lift: Any
    ) -> Array:
        """`block_masses` of keys [B, S / page, Hk, E], and rows made by `lift` [B, n, r, Hq, E]."""
        rows, positions = probe_rows.probe_rows(q, context, self.probe_queries_per_block)
        whole = jnp.where(positions < 0, -1, (positions + 1) // page - 1)
        keys = row_scores.by_blocks(keys, self.block_size // page)
        scale = context.scale_for(q.shape[-1])
        return row_scores.block_masses(
            probe_rows.by_heads(lift(rows)), keys, whole, scale=scale, like=q, backend="xla"
        )

    def heavy(self, masses: Array, context: SelectionContext, share: float) -> Array:
        own = context.block_ids[:, None] + 1
        return masses >= share / own


@options
class Pages(Rows):
    """Omits key blocks where pages of keys have little mass."""

    page: PositiveInt = 16
    share: UnitFraction = 0.1
    variance: NonNegativeInt = 0

    def candidates(self, q, k, context):
        pages = k.reshape(k.shape[0], -1, self.page, *k.shape[2:]).astype(jnp.float32)
        keys, lift = pages.mean(2), lambda rows: rows.astype(jnp.float32)
        if self.variance:
            spread = pages.var(2) * (context.scale_for(q.shape[-1]) / 2)
            keys = jnp.concatenate([keys, spread], -1)

            def lift(rows: Array) -> Array:
                return jnp.concatenate([rows, rows * rows], -1).astype(jnp.float32)

        masses = self.masses(q, keys, context, self.page, lift)
        return self.heavy(masses, context, self.share)


@options
class Leading(Rows):
    """Omits key blocks that have little mass by the leading components of keys."""

    components: PositiveInt = 32
    share: UnitFraction = 0.1
    by_queries: NonNegativeInt = 1
    """Components of keys as queries weigh them."""

    def _masses(self, q: Array, k: Array, context: SelectionContext) -> Array:
        batch, _, heads, dim = q.shape
        kv_heads = k.shape[2]
        wide = k.astype(jnp.float32)
        wide -= wide.mean(1, keepdims=True)
        every = jnp.einsum("bshd,bshe->hde", wide, wide, precision="highest") / wide.shape[1]
        grouped = q.reshape(batch, -1, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
        asked = jnp.einsum("bshgd,bshge->hde", grouped, grouped, precision="highest")
        if not self.by_queries:
            asked = jnp.broadcast_to(jnp.eye(dim), asked.shape)
        values, vectors = jnp.linalg.eigh(asked)
        root = jnp.einsum("hde,he,hfe->hdf", vectors, jnp.sqrt(jnp.maximum(values, 0)), vectors)
        inverse = 1 / jnp.sqrt(jnp.maximum(values, 1e-6 * values.max(-1, keepdims=True)))
        inverse = jnp.einsum("hde,he,hfe->hdf", vectors, inverse, vectors)
        _, leading = jnp.linalg.eigh(root @ every @ root)
        leading = leading[..., -self.components :]
        of_keys, of_rows = root @ leading, inverse @ leading
        keys = jnp.einsum("bshd,hdc->bshc", wide, of_keys)

        def lift(rows: Array) -> Array:
            shape = *rows.shape[:3], kv_heads, heads // kv_heads, dim
            found = rows.astype(jnp.float32).reshape(shape)
            found = jnp.einsum("bnrhgd,hdc->bnrhgc", found, of_rows)
            return found.reshape(*rows.shape[:3], heads, -1)

        return self.masses(q, keys, context, 1, lift)

    def candidates(self, q, k, context):
        if not self.share:
            return None
        return self.heavy(self._masses(q, k, context), context, self.share)

    def scores(self, q, k, context):
        return super().scores(q, k, context) if self.share else self._masses(q, k, context)


@options
class Far(Rows):
    """Scores far key blocks with fewer rows."""

    near: PositiveInt = 32
    rows: PositiveInt = 4

    def scores(self, q, k, context):
        masses = probe_rows.block_masses(q, k, context, self.probe_queries_per_block)
        few = probe_rows.block_masses(q, k, context, self.rows)
        far = context.block_ids[:, None] - jnp.arange(context.num_blocks) >= self.near
        return jnp.where(far, few, masses)


@options
class Layers(Rows):
    """Selects in every n-th layer only."""

    every: PositiveInt = 2


KINDS = {"rows": Rows, "pages": Pages, "leading": Leading, "far": Far, "layers": Layers}


class Try:
    """A selection for all layers of a model."""

    def __init__(self, pattern: Rows, q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct) -> None:
        self.pattern, self._select = pattern, Selector(pattern, q, k, None)
        self._every = pattern.every if isinstance(pattern, Layers) else 1
        self._held: Index | None = None
        num_blocks = q.shape[1] // pattern.block_size
        ids = jnp.arange(num_blocks, dtype=jnp.int32)
        context = SelectionContext(ids, num_blocks)

        def scored(q: Array, k: Array) -> Array:
            causal = ids <= ids[:, None]
            some = pattern.candidates(q, k, context)
            share = causal if some is None else some & causal
            return share.mean(dtype=jnp.float32) / causal.mean(dtype=jnp.float32)

        self._scored = jax.jit(scored)

    def index(self, layer: int, q: Array, k: Array) -> Index:
        if layer % self._every == 0 or self._held is None:
            self._held = self._select(layer, q, k)
        return self._held

    def scored(self, q: Array, k: Array) -> float:
        return float(self._scored(q, k)) / self._every


def main() -> None:
    """Measures the tries on each text."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="integers [N, S], .npy")
    parser.add_argument("--numbers", type=int, nargs="*", help="texts; all by default")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--tries", nargs="+", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    texts = np.load(args.texts)[:, : args.seq_len].astype(np.int32)
    model = SteppedModel(read_model(args.model, args.seq_len, args.dtype), args.seq_len)
    spec = model.spec
    q, k = (
        jax.ShapeDtypeStruct((1, args.seq_len, heads, spec.head_dim), jnp.dtype(args.dtype))
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    programs = Programs(None, args.seq_len, np.zeros(1, np.int32))
    dense = jax.jit(functools.partial(pallas_kernels.attention, index=DenseIndex(128)))
    done = {(row["text"], row["try"]) for row in read_lines(args.out)}

    def add(text: int, name: str, losses: np.ndarray, found: dict[str, Any]) -> None:
        copies = far_copies(texts[text])
        losses = np.asarray(losses, np.float64)
        row = {
            "model": args.model.parent.name, "text": text, "try": name, **found,
            "loss": float(losses.mean()), "copies": int(copies.sum()),
            "copies_loss": float(losses[copies[-len(losses) :]].sum()),
        }  # fmt: skip
        append_lines(args.out, [row])
        log(json.dumps(row))

    def run(name: str, tried: Try | None) -> None:
        for text in args.numbers or range(len(texts)):
            if (text, name) in done:
                continue
            densities, scored = [], []

            def attend(layer: int, *qkv: Array, densities=densities, scored=scored) -> Array:
                if tried is None:
                    return dense(*qkv)
                index = tried.index(layer, *qkv[:2])
                densities.append(programs.densities(index)[0].mean())
                if layer % 8 == spec.num_layers // 2 % 8:  # some of the layers
                    scored.append(tried.scored(*qkv[:2]))
                return programs.attention(*qkv, index)

            losses = jax.device_get(model.losses(texts[text], attend))
            found = {} if tried is None else {
                "density": float(np.mean(jax.device_get(densities))),
                "scored": float(np.mean(scored)),
            }  # fmt: skip
            add(text, name, losses, found)

    run("dense", None)
    for name in args.tries:
        kind, _ = split_options(name)
        pattern = parse_pattern(name, KINDS)
        assert kind in KINDS and isinstance(pattern, Rows)
        run(name, Try(pattern, q, k))


if __name__ == "__main__":
    main()
