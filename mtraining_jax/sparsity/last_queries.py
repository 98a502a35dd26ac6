"""Choosing columns and diagonals by what the last queries of a sequence see, over all ranks.

The steps are the same for every such pattern. The pattern's `Rule` says how columns and diagonals
are scored and how many of them are kept.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from mtraining_jax.sparsity import estimate, exchange, select
from mtraining_jax.sparsity.checks import check_choice
from mtraining_jax.sparsity.pattern import Settings, Shards
from mtraining_jax.sparsity.spans import OneSpan, Spans
from mtraining_jax.sparsity.vertical_slash import index_capacities
from pallas_kernels.index import VerticalSlashIndex

# (columns bool [R, NB, g], block diagonals bool [R, NB], int32 [R]: the second result of `choose`,
# for each sequence)
Kept = tuple[Array, Array, Array]


class Rule(Protocol):
    """What a pattern decides."""

    def scores(
        self, q_last: Array, k: Array, shards: Shards, scale: float
    ) -> tuple[Array, Array, Array]:
        """Scores of local columns and diagonals, as `estimate.softmax_scores` gives them.

        Args:
            q_last: [B, Hq, last_q, D], the same on all ranks.
            k: [B, n, Hk, D], local keys.
            shards: where the keys lie.
            scale: of the logits.
        """

    def keys(
        self, by_distance: Array, heads: Array, spans: Spans
    ) -> tuple[Array, select.Rule]:
        """Keys to select by, and how many of the largest are kept.

        Args:
            by_distance: scores [2, R, NB, g] of columns, and of diagonals in order of distance, of
                each sequence. Entries behind its tokens are of no column or diagonal that a query
                sees.
            heads: int32 [R], the query head of each row.
            spans: the sequences.

        Returns:
            Keys uint32 [2, R, NB, g], and a rule whose fields broadcast with [2, R], or with
            [2, R, E] where rows hold several sequences.
        """

    def nearest(self, slash_count: Array, spans: Spans) -> int | Array:
        """How many block diagonals, from the main one on, are always kept of each sequence.

        Args:
            slash_count: int32, diagonals kept of each sequence.
            spans: the sequences.
        """


def choose(
    q: Array, k: Array, shards: Shards, settings: Settings, rule: Rule,
    together: Callable[[Array, Spans], Kept] | None = None,
) -> tuple[VerticalSlashIndex, Array]:
    """Chooses, per batch entry and query head, the columns and block diagonals to compute.

    All ranks get the same index; its bits do not depend on how many ranks there are, nor on how
    blocks are dealt to them. Equal scores are kept in order of
    position (columns) or distance (diagonals). A diagonal at token distance s turns on block
    diagonals floor(s/g) and, unless g divides s, floor(s/g)+1.

    Where tokens behind `shards.valid_len` are padding, the last queries are those before it, and
    no column or diagonal is kept that only padding has. If fewer tokens count than `last_q`, the
    estimate is of all queries there are.

    Args:
        q: [B, n, Hq, D], local queries, rotary embedding applied.
        k: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
        shards: where they lie. Two backends may differ in a score's last bits, so one run should
            use one.
        settings: with `last_q`, `block_size`, `max_verticals` and `max_slashes`.
        rule: what the pattern decides.
        together: what is kept of scores as in `Rule.keys`, columns and diagonals at once; None
            keeps the largest keys of each kind by `Rule.keys` and `Rule.nearest`.

    Returns:
        The index, replicated, with `index_capacities`; and int32 [B, Hq], 1 for heads whose columns
        reach the rule's mass although it drops the column that does: heads that keep it only
        because the rule's minimum does not leave them without.

    Raises:
        ValueError: naming what does not fit.
    """
    scale = check_choice(q, k, shards, settings.block_size)
    batch, num_heads = q.shape[0], q.shape[2]
    where = dict(block_ids=shards.block_ids, num_blocks=shards.num_blocks)
    seq_len = shards.num_blocks * settings.block_size
    valid_len = seq_len if shards.valid_len is None else shards.valid_len
    last = estimate.last_positions(settings.last_q, valid_len)
    q_last = exchange.gather_rows(q, last, **where, axis_names=shards.axis_names)
    scores = rule.scores(q_last.transpose(0, 2, 1, 3), k, shards, scale)
    # From here on a rank has whole sequences of some heads. A search over all ranks instead
    # would take an exchange for every digit of a score.
    (vertical, own, tails), heads = exchange.to_heads(
        scores, **where, axis_names=shards.axis_names
    )
    slash = estimate.join_diagonals(own, tails)
    # Diagonals are reversed so that both ascend in distance.
    slash = jnp.flip(slash, axis=(-2, -1))
    if shards.valid_len is not None:
        # Token V-1-s holds diagonal s; those that padding would hold go to the end.
        slash = jnp.roll(slash.reshape(-1, seq_len), valid_len - seq_len, 1).reshape(slash.shape)
    by_distance, spans = jnp.stack([vertical, slash]), OneSpan(shards.num_blocks, valid_len)
    if together is None:
        kept = each_kind(rule, by_distance, heads, spans)
    else:
        kept = together(by_distance, spans)
    lists = _lists(kept, settings)
    lists = exchange.from_heads(lists, batch, num_heads, shards.axis_names)
    capacities = index_capacities(settings, shards.num_blocks)
    # Padding at the end of a list is larger than every entry.
    slashes, verticals = lists[..., : capacities[1]], lists[..., capacities[1] : -1]
    index = VerticalSlashIndex(
        slash_blocks=slashes,
        slash_count=(slashes < shards.num_blocks).sum(-1, dtype=jnp.int32),
        vertical_tokens=verticals,
        vertical_count=(verticals < seq_len).sum(-1, dtype=jnp.int32),
        block_size=settings.block_size,
    )
    return index, lists[..., -1]


def per_kind(values: Sequence[int], spans: Spans) -> Array:
    """A number for columns and one for diagonals: broadcasts with [2, R], or [2, R, E]."""
    return spans.per_row(jnp.array(values, jnp.int32)[:, None])


def each_kind(
    rule: Rule, by_distance: Array, heads: Array, spans: Spans,
    most_columns: Array | None = None,
) -> Kept:
    """The largest keys of columns, and the block diagonals of the largest keys of diagonals.

    Args:
        rule: what is scored and kept.
        by_distance: as in `Rule.keys`, like the next two.
        heads: see there.
        spans: see there.
        most_columns: int32 [R, E], limits for each sequence besides the rule's own.

    Returns:
        What is kept; the third is int32 for each sequence.
    """
    keys, kept_by = rule.keys(by_distance, heads, spans)
    if most_columns is not None:
        maximum = kept_by.maximum.at[0].min(most_columns)
        kept_by = dataclasses.replace(kept_by, maximum=maximum)
    kept, count = select.kept_entries(keys, kept_by, spans)
    # Distance s = d*g + place turns on block diagonal d, and d+1 unless place is 0.
    beyond = kept[1, ..., 1:].any(-1)
    active = kept[1].any(-1) | spans.from_previous(beyond)
    nearest = rule.nearest(count[1], spans)
    forced = spans.blocks < (nearest if isinstance(nearest, int) else spans.spread(nearest))
    saved = jnp.zeros_like(count[0])
    if kept_by.mass_target is not None and not kept_by.keep_crossing:
        masses = (keys[0] & jnp.uint32(kept_by.mass_mask)).astype(jnp.int32)
        mass = spans.sums((jnp.where(kept[0], masses, 0),))[0]
        saved = (mass >= kept_by.mass_target).astype(jnp.int32)
    return kept[0], active | forced, saved


def _lists(kept: Kept, settings: Settings) -> Array:
    """Turns what is kept into the lists of an index.

    Returns:
        [R, max_slash_blocks + max_verticals + 1], block diagonals and then columns, padded with NB
        and S, and the second result of `choose`.
    """
    columns, diagonals, saved = kept
    num_blocks, size = columns.shape[-2:]
    max_verticals, max_slash_blocks = index_capacities(settings, num_blocks)
    vertical_tokens = select.ascending_entries(columns, max_verticals, num_blocks * size)
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    slash_blocks = jnp.sort(jnp.where(diagonals, blocks, num_blocks), axis=-1)
    parts = slash_blocks[:, :max_slash_blocks], vertical_tokens, saved[:, None]
    return jnp.concatenate(parts, axis=-1)
