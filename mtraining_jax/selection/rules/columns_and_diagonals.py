"""Selection keys of columns and diagonals, and how many of the largest are kept.

Keys are uint32 [2, R, NB, g], of columns and of diagonals by distance; rules broadcast with
[2, R, E].
"""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.scores.estimate import MASS_ONE
from mtraining_jax.selection.scores.last_queries import ProbeScores, per_kind

KeysAndRule = tuple[Array, top_p.Rule]


def by_mass(
    probed: ProbeScores,
    target: int | Array,
    minimum: tuple[int, int],
    maximum: tuple[Array, int],
    sinks: int | None,
) -> KeysAndRule:
    """Keeps the heaviest entries until their mass reaches a target.

    Args:
        probed: masses in units of 2^-30.
        target: in the same unit; int32 [R, 1] if it differs between sequences.
        minimum, maximum: numbers of columns and of diagonals to keep; columns int32 [R, E].
        sinks: number of first columns to keep in any case; with it the entry that crosses the
            target is kept, with None it is dropped.
    """
    segments = probed.segments
    # One unit less than the total mass, which leaves bit 30 to forced entries.
    keys = jnp.minimum(probed.by_distance, MASS_ONE - 1).astype(jnp.uint32)
    if sinks is not None:
        first = segments.spread(jnp.minimum(sinks, segments.tokens))
        forced = segments.entries(keys.shape[-1]) < first[..., None]
        keys = keys.at[0].add(jnp.where(forced, jnp.uint32(MASS_ONE), 0))
    return keys, top_p.Rule(
        minimum=jnp.minimum(per_kind(*minimum), segments.tokens),
        maximum=jnp.minimum(per_kind(*maximum), segments.tokens),
        mass_target=target,
        mass_mask=MASS_ONE - 1,
        keep_crossing=sinks is not None,
    )


def by_budget(
    probed: ProbeScores, budgets: tuple[Array, Array], maximum: tuple[Array, int]
) -> top_p.Rule:
    """Keeps the budgets of the rows' heads, [Hq] columns and diagonals, up to a maximum."""
    segments, budget = probed.segments, jnp.stack([jnp.asarray(x) for x in budgets])
    if not jnp.issubdtype(budget.dtype, jnp.integer):
        raise ValueError(f"verticals or slashes are {budget.dtype}; they must be integers")
    most = jnp.minimum(per_kind(*maximum), segments.tokens)
    kept = jnp.clip(budget[:, probed.heads, None], 0, most)
    return top_p.Rule(minimum=0, maximum=kept.astype(jnp.int32))


def logit_keys(probed: ProbeScores, sinks: int, window: int) -> Array:
    """Returns keys in the order of the sums of logits; first and nearest entries rank first."""
    segments = probed.segments
    numbers = segments.entries(probed.by_distance.shape[-1])
    forced = jnp.stack([numbers < sinks, numbers < window])
    # Rows with a single sequence share these numbers; rows with several have one set each.
    forced = forced.reshape(2, -1, *numbers.shape[-2:])
    scores = jnp.where(forced, jnp.inf, probed.by_distance)
    tokens = segments.spread(jnp.asarray(segments.tokens))[..., None]
    return top_p.float_keys(jnp.where(numbers < tokens, scores, -jnp.inf))


def mass_keys(probed: ProbeScores, sinks: Array, windows: Array) -> Array:
    """Returns masses plus one, with the highest bit set if forced, and 0 for padding.

    The first `sinks` columns and the nearest `windows` diagonals are forced, [Hq] each.
    """
    segments = probed.segments
    numbers = segments.entries(probed.by_distance.shape[-1])
    forced = jnp.stack([jnp.asarray(sinks), jnp.asarray(windows)])
    forced = numbers < forced[:, probed.heads, None, None]
    keys = probed.by_distance.astype(jnp.uint32) + 1
    keys = jnp.where(forced, jnp.uint32(1 << 31), keys)
    tokens = segments.spread(jnp.asarray(segments.tokens))[..., None]
    return jnp.where(numbers < tokens, keys, 0)
