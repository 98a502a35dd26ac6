r"""Loss of answers with tokens that attend to selected key blocks, as in decoding.

    python -m benchmarks.quality.decoding --model FOLDER --texts tokens.npy --seq-len 8192 \
        --rules dense mean:16:0.95 union:16:0.9 codes:1:0.5 --out decoding.jsonl

The last --answer tokens of each text are the answer. The prompt before it is read once, with
--prompt attention; then each rule reads the answer in one pass that computes what decoding token by
token would: keys and values of an answer's token come from hidden states of the same rule.

A rule is kind:n:budget. Every n tokens a selection is renewed by one row, the first token's exact
attention; until then tokens attend to the selected blocks, the first one, and all from the block
before that token on. The budget of `head`, `union` and `mean` is the attention mass to keep: per
query head, the union of these over the heads of a key/value head (which loads a block once), or by
the mean mass of these heads. `bounds` (Quest, arXiv 2406.10774) keeps that fraction of the
blocks, by the largest product of a query with the minimum and maximum of each page of keys, and
`pooled` by that with a page's mean key; kind:n:budget:keys gives the size of pages. `means`
selects like `mean`, with the keys of a page replaced by their mean. `share` keeps the blocks with
at least that fraction of the mean mass of a block, on average over the heads of a key/value head,
and `codes` does so with the codes of keys that decoding uses (`KeyCodes`).
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import pallas_kernels
from benchmarks.options import make_parser
from benchmarks.quality.far_copies import far_copies
from benchmarks.quality.stepped_model import SteppedModel, read_model
from benchmarks.timing import log
from mtraining_jax.attention.sharded import select_index
from mtraining_jax.models.products import dot32
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.utils.errors import UserError
from pallas_kernels.key_codes import KeyCodes, unpack

KINDS = "dense", "head", "union", "mean", "bounds", "pooled", "means", "share", "codes"
BLOCK = 128
_SINKS, _LOCAL = 1, 2  # blocks that are always kept, as in SampledRows


@dataclasses.dataclass(frozen=True)
class Rule:
    """How an answer's tokens select; see the module."""

    kind: str
    every: int = 1
    budget: float = 1.0
    page: int = BLOCK  # keys that share a minimum and a maximum

    @classmethod
    def parse(cls, text: str) -> Self:
        kind, *numbers = text.split(":")
        if kind not in KINDS or len(numbers) not in ((0,) if kind == "dense" else (2, 3)):
            raise UserError(f"{text} is not a rule; it is dense or kind:n:budget of {KINDS[1:]}")
        if not numbers:
            return cls(kind)
        return cls(kind, int(numbers[0]), float(numbers[1]), *map(int, numbers[2:]))

    def __str__(self) -> str:
        if self.kind == "dense":
            return self.kind
        return f"{self.kind}:{self.every}:{self.budget:g}:{self.page}"


def visible(rule: Rule, q_LHD: Array, k_SHkD: Array, first: int) -> tuple[Array, Array]:
    """Returns which keys an answer's tokens see, bool [L, Hq, S], and the density of loads.

    The density is that of the blocks of a key/value head that any of its query heads sees, of
    those before the token; fp32 scalar. `first` is the position of the first token.
    """
    length, heads, dim = q_LHD.shape
    keys, kv_heads = k_SHkD.shape[:2]
    position, number = first + jnp.arange(length), jnp.arange(keys)
    causal = number <= position[:, None]
    if rule.kind == "dense":
        return jnp.broadcast_to(causal[:, None], (length, heads, keys)), jnp.float32(1)
    starts = jnp.arange(0, length, rule.every)
    at = position[starts]
    rows = q_LHD[starts].reshape(len(starts), kv_heads, -1, dim)
    blocks = jnp.arange(-(-keys // BLOCK))
    own = at // BLOCK
    forced = (blocks < _SINKS) | (blocks > (own - _LOCAL)[:, None])
    if rule.kind in ("bounds", "pooled"):
        kept = _by_bounds(rule, rows, k_SHkD, at)
    else:
        scored = _coarse(rule, k_SHkD, first)
        logits = dot32("whgd,shd->whgs", rows, scored) / math.sqrt(dim)
        seen = number <= at[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
        pad = -keys % BLOCK
        mass = jnp.pad(weights, ((0, 0),) * 3 + ((0, pad),)).reshape(*weights.shape[:3], -1, BLOCK)
        mass = mass.sum(-1)
        if rule.kind not in ("head", "union"):
            mass = mass.mean(2, keepdims=True)
        if rule.kind in ("share", "codes"):
            kept = mass >= (rule.budget / (own + 1))[:, None, None, None]
        else:
            kept = _heaviest(mass, forced[:, None, None], rule.budget)
    kept |= forced[:, None, None]
    shape = (len(starts), kv_heads, heads // kv_heads, len(blocks))
    kept = jnp.broadcast_to(kept.any(2, keepdims=True) if rule.kind == "union" else kept, shape)
    kept = kept[jnp.arange(length) // rule.every]  # [L, Hk, G, NB]
    before = blocks <= (position // BLOCK)[:, None]
    loads = (kept.any(2) & before[:, None]).sum(-1) / before.sum(-1)[:, None]
    by_key = jnp.repeat(kept.reshape(length, heads, -1), BLOCK, axis=-1)[..., :keys]
    return by_key & causal[:, None], loads.mean()


def _heaviest(mass: Array, forced: Array, tau: float) -> Array:
    """The heaviest blocks until their mass, with that of forced ones, is tau; the last is kept."""
    free = jnp.where(forced, 0, mass)
    order = jnp.argsort(-free, axis=-1)
    ordered = jnp.take_along_axis(free, order, -1)
    before = jnp.cumsum(ordered, -1) - ordered + jnp.where(forced, mass, 0).sum(-1, keepdims=True)
    taken = (before < tau) & (ordered > 0)
    return jnp.put_along_axis(jnp.zeros(mass.shape, bool), order, taken, -1, inplace=False)


def _coarse(rule: Rule, k_SHkD: Array, first: int) -> Array:
    """The keys that a rule scores."""
    keys, heads, dim = k_SHkD.shape
    if rule.kind == "means":
        padded = jnp.pad(k_SHkD, ((0, -keys % BLOCK), (0, 0), (0, 0)), mode="edge")
        pages = padded.astype(jnp.float32).reshape(-1, rule.page, heads, dim)
        coarse = jnp.broadcast_to(pages.mean(1, keepdims=True), pages.shape)
        return coarse.reshape(padded.shape)[:keys].astype(k_SHkD.dtype)
    if rule.kind == "codes":
        k = k_SHkD.astype(jnp.float32).swapaxes(0, 1)[None]
        prompt = k[:, :, :first]
        found = KeyCodes.of(k, prompt.mean(2, keepdims=True), prompt.std(2, keepdims=True))
        # The same shift for all keys changes no softmax.
        return (unpack(found.codes)[..., :dim] * found.unit)[0].swapaxes(0, 1)
    return k_SHkD


def _by_bounds(rule: Rule, rows: Array, k_SHkD: Array, at: Array) -> Array:
    """The share of blocks with the largest bounds, of the largest head of a group."""
    keys, heads, dim = k_SHkD.shape
    pages = jnp.pad(k_SHkD, ((0, -keys % BLOCK), (0, 0), (0, 0)), mode="edge")
    pages = pages.reshape(-1, rule.page, heads, dim).astype(jnp.float32)
    q = rows.astype(jnp.float32)
    if rule.kind == "pooled":
        bound = dot32("whgd,nhd->whgn", q, pages.mean(1))
    else:
        bound = dot32("whgd,nhd->whgn", jnp.maximum(q, 0), pages.max(1))
        bound += dot32("whgd,nhd->whgn", jnp.minimum(q, 0), pages.min(1))
    bound = bound.reshape(*bound.shape[:3], -1, BLOCK // rule.page).max(-1)
    before = jnp.arange(bound.shape[-1]) <= (at // BLOCK)[:, None, None, None]
    bound = jnp.where(before, bound, -jnp.inf).max(2, keepdims=True)
    count = jnp.ceil(rule.budget * before.sum(-1, keepdims=True)).astype(int)
    rank = jnp.argsort(jnp.argsort(-bound, axis=-1), axis=-1)
    return (rank < count) & before


def attend(
    rule: Rule, cache: tuple[Array, Array], first: int, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """Attention of an answer [1, L, H, D] to the prompt's keys and values, and the density."""
    keys, values = (jnp.concatenate([x, new[0]]) for x, new in zip(cache, (k, v), strict=True))
    heads, dim = q.shape[2:]
    seen, density = visible(rule, q[0], keys, first)
    q = q[0].reshape(len(q[0]), keys.shape[1], -1, dim)
    logits = dot32("lhgd,shd->hgls", q, keys) / math.sqrt(dim)
    seen = seen.transpose(1, 0, 2).reshape(logits.shape)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)).astype(values.dtype)
    out = dot32("hgls,shd->lhgd", weights, values)
    return out.reshape(1, -1, heads, dim).astype(values.dtype), density


class Answers:
    """A model and a prompt, with an answer that rules read."""

    def __init__(self, model: SteppedModel, prompt: Callable[..., Array]) -> None:
        self._model, self._prompt = model, prompt
        self._read = jax.jit(self._losses, static_argnums=(0, 1))

    def read(self, tokens: np.ndarray, length: int) -> None:
        """Reads all but the last `length` tokens; compiled once for each number of them."""
        kept: list[tuple[Array, Array]] = []

        def attention(number: int, q: Array, k: Array, v: Array) -> Array:
            kept.append((k[0, : len(tokens) - length], v[0, : len(tokens) - length]))
            return self._prompt(q, k, v)

        self._model.losses(tokens, attention)
        self._cache = tuple(jnp.stack(x) for x in zip(*kept, strict=True))
        self._tokens = jnp.asarray(tokens[len(tokens) - length :], jnp.int32)
        self._first = len(tokens) - length

    def losses(self, rule: Rule) -> tuple[np.ndarray, float]:
        """The losses of an answer's tokens but the first, fp32 [L - 1], and the mean density."""
        losses, density = self._read(rule, self._first, self._cache, self._tokens)
        return np.asarray(losses), float(density.mean())

    def _losses(
        self, rule: Rule, first: int, cache: tuple[Array, Array], tokens: Array
    ) -> tuple[Array, Array]:
        def attention(number: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            layer = [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in cache]
            return attend(rule, tuple(layer), first, q, k, v)

        return self._model.part_losses(tokens[:-1], tokens[1:], first, attention)


def main() -> None:
    """Measures the rules on each text."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="integers [N, S], .npy")
    parser.add_argument("--seq-len", type=int, required=True, help="tokens of a text")
    parser.add_argument("--numbers", type=int, nargs="*", help="texts; all by default")
    parser.add_argument("--answer", type=int, default=512, help="tokens of the answer")
    parser.add_argument("--prompt", choices=("dense", "sparse"), default="sparse")
    parser.add_argument("--rules", nargs="+", type=Rule.parse, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    texts = np.load(args.texts)[:, : args.seq_len]
    pattern = Dense() if args.prompt == "dense" else SampledRows(min_sparse_tokens=0)
    ids = jnp.arange(args.seq_len // BLOCK, dtype=jnp.int32)

    @jax.jit
    def prompt(q: Array, k: Array, v: Array) -> Array:
        index = select_index(q, k, pattern, block_ids=ids, num_blocks=len(ids))
        return pallas_kernels.attention(q, k, v, index)

    answers = Answers(
        SteppedModel(read_model(args.model, args.seq_len, args.dtype), args.seq_len), prompt
    )
    for number in args.numbers or range(len(texts)):
        tokens = texts[number]
        answers.read(tokens, args.answer)
        copies = far_copies(tokens)[-args.answer + 1 :]
        for rule in args.rules:
            losses, density = answers.losses(rule)
            row = {
                "text": number, "rule": str(rule), "prompt": args.prompt, "density": density,
                "loss": float(losses.mean()), "copies": int(copies.sum()),
                "copies_loss": float(losses[copies].sum()),
            }  # fmt: skip
            log(json.dumps(row))
            with args.out.open("a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
