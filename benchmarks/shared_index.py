r"""What layers would lose if they used the index of an earlier layer, on a real model.

    python -m examples.smollm2 MODEL
    python -m benchmarks.texts --tokenizer MODEL/tokenizer.json --out TEXTS
    python -m benchmarks.shared_index --model MODEL --texts TEXTS --seq-len 4096 --out RESULT.md

Heads of two layers have no common order. So each head of a layer is given, on a first text, the
head of the earlier layer whose pairs keep most of its mass, among those that compute no more than
1.1 times as much as its own choice does; the other texts tell what that loses. Without that limit
every head would be given the one that computes most.
Attention is dense throughout: the table is of recall, not of loss. A query head can be given the
pairs of any head, so key/value heads do not matter.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.frontier_model import SteppedModel, read_model
from benchmarks.frontier_patterns import parse
from benchmarks.report import setting
from mtraining_jax.sparsity import ModelSizes, Shards
from mtraining_jax.sparsity.pattern import Pattern
from pallas_kernels import DenseIndex, attention

DISTANCES = (1, 2, 3)  # layers back
# What may be lost for layers to share: of the mean, and of the worst head.
MEAN_DROP, WORST_DROP = 0.01, 0.05
MOST_DENSITY = 1.1  # of the head that is given, over that of a head's own choice
_COLUMNS = (
    "layers back", "own recall", "mean drop", "the same without a map", "worst head's drop",
    "own density", "density with the map", "layers that may share",
)  # fmt: skip


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parser().parse_args(argv)
    texts = np.load(args.texts / "tokens.npy")[:: args.every, : args.seq_len]
    model = SteppedModel(read_model(args.model, args.seq_len, "float32"), args.seq_len)
    spec = model.spec
    pattern = parse(args.pattern, ModelSizes(spec.num_layers, spec.num_heads, args.seq_len))
    rows = np.random.default_rng(0).choice(args.seq_len, args.rows, replace=False)
    look = jax.jit(lambda q, k: pairs_and_masses(pattern, q, k, jnp.asarray(np.sort(rows))))
    dense = jax.jit(lambda q, k, v: attention(q, k, v, DenseIndex(128)))
    found = []  # of each text: [distance, L, Hq, Hq], own recalls and densities [L, Hq]
    for tokens in texts:
        pairs, shared, own, density = [], [], [], []

        def attend(
            _, q: Array, k: Array, v: Array, pairs: list = pairs, shared: list = shared,
            own: list = own, density: list = density,
        ) -> Array:  # fmt: skip
            computed, masses = look(q, k)
            pairs.append(computed)
            table = kept(masses, computed)
            own.append(np.diagonal(table))
            density.append(np.asarray(computed.sum((1, 2)) / (masses > 0)[0].sum()))
            shared.append([
                kept(masses, pairs[-1 - back]) if len(pairs) > back else np.full_like(table, np.nan)
                for back in DISTANCES
            ])  # fmt: skip
            pairs[: -1 - max(DISTANCES)] = [None] * len(pairs[: -1 - max(DISTANCES)])
            return dense(q, k, v)

        model.losses(tokens, attend)
        found.append((np.moveaxis(np.array(shared), 1, 0), np.array(own), np.array(density)))
    lines = [
        f"# Recall of layers that use an earlier layer's index, on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. {args.model.name}, {args.pattern}, heads mapped on one text and measured on "
        f"{len(texts) - 1} others of {args.seq_len} tokens, {args.rows} queries of each. A layer "
        f"may share if its mean recall drops by at most {MEAN_DROP} and no head's by more than "
        f"{WORST_DROP}, in any text.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
    ]
    for number, back in enumerate(DISTANCES):
        if back >= spec.num_layers:
            break
        lines.append(line(back, [(shared[number], *rest) for shared, *rest in found]))
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return text


def pairs_and_masses(pattern: Pattern, q: Array, k: Array, rows: Array) -> tuple[Array, Array]:
    """What a pattern computes of some rows, bool [Hq, R, S], and their softmax, fp32 like it."""
    seq_len, size = q.shape[1], pattern.block_size
    blocks = jnp.arange(seq_len // size, dtype=jnp.int32)
    index = pattern.choose(q, k, Shards(blocks, blocks.size)).index
    seen = jnp.arange(seq_len) <= rows[:, None]
    listed = index.computes(rows, blocks)
    shape = (*listed.shape[:3], blocks.size, size)
    computed = jnp.broadcast_to(listed, shape).reshape(*listed.shape[:3], seq_len)[0] & seen
    keys = jnp.repeat(k[0], q.shape[2] // k.shape[2], axis=1)
    logits = jnp.einsum("rhd,shd->hrs", q[0, rows], keys) * q.shape[-1] ** -0.5
    return computed, jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)


def kept(masses: Array, computed: Array) -> np.ndarray:
    """Recall of each head (first axis) under the pairs of each head (second axis)."""
    return np.asarray(_kept(masses, computed))


@jax.jit
def _kept(masses: Array, computed: Array) -> Array:
    return jnp.einsum("hrs,grs->hg", masses, computed.astype(masses.dtype)) / masses.shape[1]


def line(back: int, found: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> str:
    """A row of the table.

    Args:
        back: how many layers.
        found: of each text, recalls [L, Hq, Hq] under an earlier layer's heads, own ones [L, Hq]
            and densities [L, Hq]; the first text decides which head is taken.
    """
    shared, _, density = found[0]
    allowed = density[:-back, None] <= MOST_DENSITY * density[back:, :, None]  # [L - back, Hq, Hq]
    # Where every head computes more, the one that computes least.
    least = density[:-back, None] == density[:-back, None].min(-1, keepdims=True)
    allowed |= least & ~allowed.any(-1, keepdims=True)
    best = np.where(allowed, shared[back:], -1).argmax(-1)  # [L - back, Hq]
    drops, plain, taken = [], [], []
    for shared, own, density in found[1:]:
        mapped = np.take_along_axis(shared[back:], best[..., None], axis=-1)[..., 0]
        drops.append(own[back:] - mapped)
        plain.append(own[back:] - np.diagonal(shared[back:], axis1=1, axis2=2))
        taken.append(np.take_along_axis(density[:-back], best, axis=-1))
    drops = np.array(drops)  # [texts, L - back, Hq]
    may = (drops.mean(-1) <= MEAN_DROP) & (drops.max(-1) <= WORST_DROP)
    recalls, densities = (
        np.mean([x[back:].mean() for x in of_texts])
        for of_texts in zip(*(rest for _, *rest in found[1:]), strict=True)
    )
    cells = (
        back, f"{recalls:.3f}", f"{drops.mean():.3f}", f"{np.mean(plain):.3f}",
        f"{drops.max():.3f}", f"{densities:.3f}", f"{np.mean(taken):.3f}",
        f"{may.all(0).sum()} of {may.shape[1]}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--texts", type=Path, required=True, help="from benchmarks.texts")
    parser.add_argument("--seq-len", type=int, default=4096, metavar="S")
    parser.add_argument("--every", type=int, default=6, help="take each n-th text")
    parser.add_argument("--rows", type=int, default=128, help="queries of each text")
    parser.add_argument("--pattern", default="sampled_rows,tau=0.9", metavar="NAME,OPTION=VALUE")
    parser.add_argument("--out", type=Path, metavar="RESULT.md")
    return parser


if __name__ == "__main__":
    main()
