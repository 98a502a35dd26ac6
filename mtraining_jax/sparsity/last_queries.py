"""Selection of columns and diagonals with the last queries as probe queries, over all ranks.

The steps are the same for all such patterns. A pattern's `Rule` defines how columns and diagonals
are scored and how many are kept.
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

# (columns bool [R, NB, g], block diagonals bool [R, NB], int32 [R]: the second result of `choose`
# for each sequence)
Kept = tuple[Array, Array, Array]


class Rule(Protocol):
    """The pattern-specific part of a selection."""

    def scores(
        self, q_last: Array, k: Array, shards: Shards, scale: float
    ) -> tuple[Array, Array, Array]:
        """Scores local columns and diagonals, in the form of `estimate.softmax_scores`.

        Args:
            q_last: [B, Hq, last_q, D], replicated.
            k: [B, n, Hk, D], local keys.
            shards: the shards of the sequence.
            scale: scale of the logits.
        """

    def keys(self, by_distance: Array, heads: Array, spans: Spans) -> tuple[Array, select.Rule]:
        """Returns selection keys, and how many of the largest to keep.

        Args:
            by_distance: [2, R, NB, g], scores of columns, and of diagonals by distance, for each
                sequence. Entries after its tokens belong to no visible column or diagonal.
            heads: int32 [R], the query head of each row.
            spans: the sequences.

        Returns:
            Keys uint32 [2, R, NB, g], and a rule with fields that broadcast with [2, R], or with
            [2, R, E] if rows hold several sequences.
        """

    def nearest(self, slash_count: Array, spans: Spans) -> int | Array:
        """Returns how many of the nearest block diagonals are always kept, for each sequence.

        Args:
            slash_count: int32, diagonals kept of each sequence.
            spans: the sequences.
        """


def choose(
    q: Array,
    k: Array,
    shards: Shards,
    settings: Settings,
    rule: Rule,
    together: Callable[[Array, Spans], Kept] | None = None,
) -> tuple[VerticalSlashIndex, Array]:
    """Selects columns and block diagonals per batch entry and query head.

    All ranks get the same index, bit-identical for any number of ranks and assignment of blocks.
    Ties go to the smaller position (columns) or distance (diagonals). A diagonal at token distance
    s selects block diagonal floor(s/g) and, unless g divides s, floor(s/g)+1.

    If tokens after `shards.valid_len` are padding, the probe queries are the last ones before it,
    and columns or diagonals seen only by padding are never kept. With fewer than `last_q` valid
    tokens, all queries are used.

    Args:
        q: [B, n, Hq, D], local queries, after rotary embedding.
        k: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
        shards: the shards of the sequence. Backends may differ in a score's last bits, so a run
            should use a single one.
        settings: settings with `last_q`, `block_size`, `max_verticals` and `max_slashes`.
        rule: the pattern's rule.
        together: joint selection of columns and diagonals from scores as in `Rule.keys`. None
            selects the largest keys of each kind by `Rule.keys` and `Rule.nearest`.

    Returns:
        The index, replicated, with `index_capacities`; and int32 [B, Hq], 1 for heads that would be
        left without columns, since the first one crosses the mass target and is dropped, if the
        rule had no minimum.

    Raises:
        ValueError: if the inputs are invalid.
    """
    scale = check_choice(q, k, shards, settings.block_size)
    batch, num_heads = q.shape[0], q.shape[2]
    where = dict(block_ids=shards.block_ids, num_blocks=shards.num_blocks)
    seq_len = shards.num_blocks * settings.block_size
    valid_len = seq_len if shards.valid_len is None else shards.valid_len
    last = estimate.last_positions(settings.last_q, valid_len)
    q_last = exchange.gather_rows(q, last, **where, axis_names=shards.axis_names)
    scores = rule.scores(q_last.transpose(0, 2, 1, 3), k, shards, scale)
    # From here on a rank has whole sequences of some heads. A search over all ranks would need a
    # collective for every digit of a score.
    (vertical, own, tails), heads = exchange.to_heads(scores, **where, axis_names=shards.axis_names)
    slash = estimate.join_diagonals(own, tails)
    # Reverses diagonals, so that both are in ascending order of distance.
    slash = jnp.flip(slash, axis=(-2, -1))
    if shards.valid_len is not None:
        # Token V-1-s stores diagonal s; entries that padding would store move to the end.
        slash = jnp.roll(slash.reshape(-1, seq_len), valid_len - seq_len, 1).reshape(slash.shape)
    by_distance, spans = jnp.stack([vertical, slash]), OneSpan(shards.num_blocks, valid_len)
    if together is None:
        kept = each_kind(rule, by_distance, heads, spans)
    else:
        kept = together(by_distance, spans)
    lists = _lists(kept, settings)
    lists = exchange.from_heads(lists, batch, num_heads, shards.axis_names)
    capacities = index_capacities(settings, shards.num_blocks)
    # List padding is larger than every entry.
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
    """Stacks a number for columns and one for diagonals: broadcasts with [2, R], or [2, R, E]."""
    return spans.per_row(jnp.array(values, jnp.int32)[:, None])


def each_kind(
    rule: Rule, by_distance: Array, heads: Array, spans: Spans, most_columns: Array | None = None
) -> Kept:
    """Selects the largest column keys, and the block diagonals of the largest diagonal keys.

    Args:
        rule: the pattern's rule.
        by_distance, heads, spans: as in `Rule.keys`.
        most_columns: int32 [R, E], additional column limits for each sequence.

    Returns:
        The selection; its third entry is int32 for each sequence.
    """
    keys, kept_by = rule.keys(by_distance, heads, spans)
    if most_columns is not None:
        maximum = kept_by.maximum.at[0].min(most_columns)
        kept_by = dataclasses.replace(kept_by, maximum=maximum)
    kept, count = select.kept_entries(keys, kept_by, spans)
    # Distance s = d*g + offset selects block diagonal d, and d+1 unless the offset is 0.
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
    """Lists block diagonals (padded with NB), columns (padded with S) and the third entry."""
    columns, diagonals, saved = kept
    num_blocks, size = columns.shape[-2:]
    max_verticals, max_slash_blocks = index_capacities(settings, num_blocks)
    vertical_tokens = select.ascending_entries(columns, max_verticals, num_blocks * size)
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    slash_blocks = jnp.sort(jnp.where(diagonals, blocks, num_blocks), axis=-1)
    parts = slash_blocks[:, :max_slash_blocks], vertical_tokens, saved[:, None]
    return jnp.concatenate(parts, axis=-1)
