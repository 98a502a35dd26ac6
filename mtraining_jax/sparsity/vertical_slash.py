"""Choosing a vertical-slash index from the last queries of a sequence that is spread over ranks."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.sparsity import estimate, exchange, select
from mtraining_jax.sparsity.patterns import FixedBudget, VerticalSlash
from pallas_kernels.index import VerticalSlashIndex

# A rematerialisation policy that saves this name makes the recomputation reuse the index.
INDEX_NAME = "sparse_index"

_CAPACITY_MULTIPLE = 128


def choose_index(
    q_BnHD: Array,
    k_BnHkD: Array,
    pattern: VerticalSlash | FixedBudget,
    *,
    block_ids: Array,
    num_blocks: int,
    axis_names: Sequence[str] = (),
    scale: float | None = None,
    backend: str | None = None,
) -> VerticalSlashIndex:
    """Chooses, per batch entry and query head, the columns and block diagonals to compute.

    To be called inside `shard_map` on the local shards of a sequence, or on one device with
    `axis_names=()`. All ranks get the same index; its bits do not depend on how many ranks there
    are, nor on how blocks are dealt to them. No gradient flows through it.

    The estimate is the attention of the last `pattern.last_q` queries to all keys (arXiv
    2510.18830, vertical-slash). A column's score is its mean mass over those queries, a diagonal's
    score the mean mass at its distance. With `VerticalSlash` the largest are kept until their
    mass reaches top_p; with `FixedBudget` a given number is kept, and scores are sums of raw
    logits. Equal scores are kept in order of position (columns) or distance (diagonals). A
    diagonal at token distance s turns on block diagonals floor(s/g) and, unless g divides s,
    floor(s/g)+1.

    Args:
        q_BnHD: [B, n, Hq, D], local queries, rotary embedding applied.
        k_BnHkD: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
        pattern: what to keep. For `FixedBudget`, the budgets of this layer, int32 [Hq].
        block_ids: int32 [n/g], global number of each local block. Every block of the sequence
            is on one rank.
        num_blocks: NB, blocks of the whole sequence.
        axis_names: mesh axes the sequence is sharded over.
        scale: of the logits; 1/sqrt(D) when None.
        backend: of the estimate with `VerticalSlash`: "xla", "mosaic_gpu" or None for the best
            that runs here. Two backends may differ in a score's last bits, so one run should
            use one. The kernels take `last_q` = 64; any other number runs in XLA.

    Returns:
        The index, replicated, with `index_capacities`.

    Raises:
        ValueError: naming what does not fit.
    """
    scale = _check(q_BnHD, k_BnHkD, pattern, block_ids, num_blocks, scale)
    q, k = lax.stop_gradient((q_BnHD, k_BnHkD))
    block_ids = block_ids.astype(jnp.int32)
    seq_len = num_blocks * pattern.block_size
    last = estimate.last_positions(pattern.last_q, seq_len)
    q_last = exchange.gather_rows(q, last, block_ids, num_blocks, axis_names)
    q_last = q_last.transpose(0, 2, 1, 3)
    where = dict(block_ids=block_ids, num_blocks=num_blocks)
    if isinstance(pattern, FixedBudget):
        scores = estimate.logit_scores(q_last, k, **where)
    else:
        scores = estimate.softmax_scores(
            q_last, k, scale=scale, backend=backend, axis_names=axis_names, **where
        )
    # From here on a rank has whole sequences of some heads. A search over all ranks instead
    # would take an exchange for every digit of a score.
    (vertical, own, tails), heads = exchange.to_heads(scores, **where, axis_names=axis_names)
    slash = estimate.join_diagonals(own, tails)
    if isinstance(pattern, FixedBudget):
        keys, rule = _fixed_keys(vertical, slash, pattern, heads)
    else:
        keys, rule = _top_p_keys(vertical, slash, pattern)
    lists = exchange.from_heads(_build(keys, rule, pattern), q.shape[0], q.shape[2], axis_names)
    capacities = index_capacities(pattern, num_blocks)
    # What is beyond the end of a list is above every entry.
    slashes, verticals = lists[..., : capacities[1]], lists[..., capacities[1] :]
    leaves = (
        slashes, (slashes < num_blocks).sum(-1, dtype=jnp.int32),
        verticals, (verticals < seq_len).sum(-1, dtype=jnp.int32),
    )
    leaves = (checkpoint_name(leaf, INDEX_NAME) for leaf in leaves)
    return VerticalSlashIndex(*leaves, block_size=pattern.block_size)


def index_capacities(pattern: VerticalSlash | FixedBudget, num_blocks: int) -> tuple[int, int]:
    """Columns and block diagonals that an index chosen by `pattern` has room for.

    Args:
        pattern: what is kept.
        num_blocks: NB, blocks of the whole sequence.

    Returns:
        (max_verticals rounded up to 128, at most S; 2 * max_slashes + local_blocks, at most NB).
    """
    rounded = -(-pattern.max_verticals // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE
    slash_blocks = 2 * pattern.max_slashes + getattr(pattern, "local_blocks", 1)
    return min(rounded, num_blocks * pattern.block_size), min(slash_blocks, num_blocks)


def _top_p_keys(vertical, slash, pattern: VerticalSlash):
    """Keys whose low 30 bits are the mass, with bit 30 set for what is forced."""
    safe = pattern.preset == "safe"
    keys = _by_distance(vertical, slash)
    seq_len = keys.shape[-2] * keys.shape[-1]
    # One unit less than all the mass, to leave bit 30 for the forced entries.
    keys = jnp.minimum(keys, estimate.MASS_ONE - 1).astype(jnp.uint32)
    if safe:
        forced = _entries(keys) < pattern.sink_tokens
        keys = keys.at[0].add(jnp.where(forced, jnp.uint32(estimate.MASS_ONE), 0))
    minimum = (
        (max(pattern.min_verticals, pattern.sink_tokens), pattern.min_slashes) if safe else (0, 0)
    )
    return keys, select.Rule(
        minimum=_per_kind([min(x, seq_len) for x in minimum]),
        maximum=_per_kind([min(x, seq_len) for x in (pattern.max_verticals, pattern.max_slashes)]),
        mass_target=round(pattern.top_p * estimate.MASS_ONE),
        mass_mask=estimate.MASS_ONE - 1,
        keep_crossing=safe,
    )


def _fixed_keys(vertical, slash, pattern: FixedBudget, heads: Array):
    """Keys in the order of the logit sums, with what is forced at the very top."""
    scores = _by_distance(vertical, slash)
    entries = _entries(scores)
    forced = jnp.stack([entries < pattern.sink_tokens, entries < pattern.sliding_window])
    keys = select.float_keys(jnp.where(forced[:, None], jnp.inf, scores))
    budgets = jnp.stack([jnp.asarray(pattern.verticals), jnp.asarray(pattern.slashes)])
    caps = _per_kind([pattern.max_verticals, pattern.max_slashes])
    budgets = jnp.clip(budgets, 0, jnp.minimum(caps, entries.size)).astype(jnp.int32)
    return keys, select.Rule(minimum=0, maximum=budgets[:, heads])


def _build(keys, rule, pattern) -> Array:
    """Turns keys [2, R, NB, g] of columns and diagonals into the lists of an index.

    Returns:
        [R, max_slash_blocks + max_verticals], block diagonals and then columns, padded with NB
        and S.
    """
    num_blocks, size = keys.shape[-2:]
    seq_len = num_blocks * size
    kept, count = select.kept_entries(keys, rule)
    max_verticals, max_slash_blocks = index_capacities(pattern, num_blocks)
    vertical_tokens = select.ascending_entries(kept[0], max_verticals, seq_len)

    # Distance s = d*g + place turns on block diagonal d, and d+1 unless place is 0.
    beyond = kept[1, ..., 1:].any(-1)
    active = kept[1].any(-1) | jnp.pad(beyond, ((0, 0), (1, 0)))[:, :-1]
    nearest = 1
    if isinstance(pattern, VerticalSlash):
        nearest = pattern.local_blocks
        if pattern.preset == "paper":
            # The reference pads short lists with -1, which acts on the main block diagonal.
            nearest = (count[1] < min(pattern.max_slashes, seq_len))[:, None]
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    slash_blocks = jnp.sort(jnp.where(active | (blocks < nearest), blocks, num_blocks), axis=-1)
    return jnp.concatenate([slash_blocks[:, :max_slash_blocks], vertical_tokens], axis=-1)


def _by_distance(vertical: Array, slash: Array) -> Array:
    """Stacks both [R, NB, g], the diagonals reversed so that entries ascend in distance."""
    return jnp.stack([vertical, jnp.flip(slash, axis=(-2, -1))])


def _entries(keys: Array) -> Array:
    """int32 [NB, g], the numbers of the entries of [..., NB, g]."""
    num_blocks, size = keys.shape[-2:]
    return jnp.arange(num_blocks * size, dtype=jnp.int32).reshape(num_blocks, size)


def _per_kind(values: Sequence[int]) -> Array:
    return jnp.array(values, jnp.int32)[:, None]


def _check(q, k, pattern, block_ids, num_blocks, scale) -> float:
    """Raises ValueError for what does not fit; returns the scale of the logits."""
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} must be [B, n, H, D] with equal B, n and D")
    if q.dtype != k.dtype:
        raise ValueError(f"q is {q.dtype} but k is {k.dtype}; they must have the same dtype")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot be shared evenly by {k.shape[2]} key/value heads"
        )
    if block_ids.shape != (q.shape[1] // pattern.block_size,) or q.shape[1] % pattern.block_size:
        raise ValueError(
            f"{q.shape[1]} local tokens do not make {block_ids.shape} blocks of "
            f"block_size={pattern.block_size}"
        )
    if num_blocks > estimate.MAX_BLOCKS or num_blocks * pattern.block_size > estimate.MAX_TOKENS:
        raise ValueError(
            f"num_blocks={num_blocks} of block_size={pattern.block_size} are too many: at most "
            f"{estimate.MAX_BLOCKS} blocks and {estimate.MAX_TOKENS} tokens"
        )
    if isinstance(pattern, FixedBudget):
        for name in ("verticals", "slashes"):
            shape = jnp.shape(getattr(pattern, name))
            if shape != (q.shape[2],):
                raise ValueError(f"{name} has shape {shape}, but there are {q.shape[2]} heads")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale={scale} must be positive")
    return scale
