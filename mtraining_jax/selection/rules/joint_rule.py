"""Joint selection of columns and block diagonals, by mass gained per computed pair.

Columns and diagonals are scored with the same queries, so a naive sum counts mass twice: a column
of mass x adds x / u at each of u distances, and a diagonal adds the same in each of u columns. Mass
that the other kind explains is therefore subtracted:

- A column counts with its *excess*: its mass minus what its diagonals would give it.
- A block diagonal counts with the mass at its distances minus what kept columns give these.

A block diagonal costs one block in each row of blocks, a column 1/g of a block. A single *price*
therefore decides about both: the mass that a row of blocks must gain for each computed block. The
fraction of rows in which kept diagonals already cover a column reduces its gain and cost alike.

All arithmetic uses integers; 2^30 is the total mass of a head.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.spans import Spans

_MASS_BITS = 30
_SHARE_BITS = 15
_FORCED = 1 << 31
# Candidate prices descend from the total mass: 2 % steps if the lowest price is a single unit of
# mass, smaller steps otherwise.
_PRICES = 1024


@dataclasses.dataclass(frozen=True)
class JointRule:
    """Lowers the price until the mass suffices, or the next price would exceed the density limit.

    The fields are those of `VerticalSlashOptions`; fractions are multiples of 2^-15. Forced are the
    sinks, the nearest block diagonals, and the widest local window with the sinks that
    `local_fraction` of `max_density` has room for. They may exceed `max_density`.
    """

    top_p: float
    min_block_mass: float  # the lowest price
    max_density: float  # counted in half blocks, including the row's own block
    max_verticals: int | Array  # a number, or int32 [R, E]
    sink_tokens: int
    local_blocks: int  # at least 1
    num_probe_queries: int
    local_fraction: float = 0.0

    def prices(self) -> np.ndarray:
        """Returns the candidate prices: int32 [n], descending, unique."""
        one = 1 << _MASS_BITS
        least = max(round(self.min_block_mass * one), 1)
        prices = np.unique(np.round(np.geomspace(least, one, _PRICES)).astype(np.int32))
        return prices[::-1].copy()


def kept_together(
    columns: Array, diagonals: Array, spans: Spans, rule: JointRule
) -> tuple[Array, Array]:
    """Selects columns bool [R, NB, g] and block diagonals bool [R, NB] of each head and sequence.

    At equal cost the result never holds less of the probe queries' mass than a window of the
    nearest block diagonals with the sinks: otherwise the window is kept instead. Undefined for
    blocks of no sequence.

    Inputs are the masses of columns and at each token distance, int32 [R, NB, g]. The probe queries
    are the last valid tokens.
    """
    selection = _PricedSelection(columns, diagonals, spans, rule)
    prices = jnp.asarray(rule.prices())

    def narrow(_, state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state  # the search does not end before `low`; it ends at `high` or the last one
        middle = (low + high) // 2
        ends = selection.ends(selection.at(prices[middle]))
        return jnp.where(ends, low, middle + 1), jnp.where(ends, middle, high)

    low = jnp.zeros_like(selection.enough)
    high = jnp.full_like(selection.enough, prices.size - 1)
    rounds = (prices.size - 1).bit_length()
    _, best = lax.fori_loop(0, rounds, narrow, (low, high))
    kept = selection.at(prices[best])
    before = selection.at(prices[jnp.maximum(best - 1, 0)])
    # A selection that exceeds the density limit is rejected, even if a lower price has enough mass.
    return selection.or_window(selection.where(selection.cost(kept) > selection.most, before, kept))


class _PricedSelection:
    """Selection at a given price, with its cost (half blocks) and mass, for each sequence."""

    def __init__(self, columns: Array, diagonals: Array, spans: Spans, rule: JointRule) -> None:
        _, num_blocks, size = columns.shape
        self._rule, self._columns, self._size, self._spans = rule, columns, size, spans
        self._numbers = spans.blocks
        self._tokens = spans.spread(jnp.asarray(spans.tokens, jnp.int32))
        used = (jnp.asarray(spans.tokens, jnp.int32) + size - 1) // size
        self._used = spans.spread(used)  # blocks with valid tokens
        self._entries = spans.entries(size)
        seen = self._entries < self._tokens[..., None]
        self._sinks = seen & (self._entries < rule.sink_tokens)
        self.most = _share(used * used, rule.max_density)
        local = self._width_within(_share(self.most, rule.local_fraction))
        local = spans.spread(jnp.maximum(local, rule.local_blocks))
        self._nearest = self._numbers < jnp.minimum(local, self._used)
        shadow = self._mean_over_queries(diagonals)
        self._excess = jnp.where(seen, jnp.maximum(columns - shadow, 0), 0)
        keys = self._excess.astype(jnp.uint32)
        keys = jnp.where(self._sinks, jnp.uint32(_FORCED), keys)
        most = jnp.minimum(rule.max_verticals, num_blocks * size)
        kept_by = top_p.Rule(minimum=0, maximum=most)
        self._candidates, _ = top_p.kept_entries(keys, kept_by, spans)
        self._mass = self._on_blocks(diagonals)
        self.enough = _share(spans.total(self._block_mass()), rule.top_p)

    def at(self, price: Array) -> tuple[Array, Array]:
        """Selects at an int32 price per sequence: bool [R, NB, g] and bool [R, NB]."""
        price = self._spans.spread(price)
        of_column = -(-price // self._size)[..., None]
        columns = self._sinks | (self._candidates & (self._excess >= of_column))
        explained = self._mean_over_queries(jnp.where(columns, self._excess, 0))
        mass = self._mass - self._on_blocks(explained)
        exists = self._numbers < self._used
        return columns, self._nearest | ((mass >= price) & exists)

    def ends(self, kept: tuple[Array, Array]) -> Array:
        """Whether the search ends: enough mass, or too many pairs (bool)."""
        return (self.held(kept) >= self.enough) | (self.cost(kept) > self.most)

    def cost(self, kept: tuple[Array, Array]) -> Array:
        """Returns the cost in half blocks, rounded up, int32; overlaps count once.

        The main block diagonal, which is always kept, costs half a block per row of blocks.
        """
        columns, diagonals = kept
        lengths = jnp.maximum(self._used - self._numbers, 0)
        counted = jnp.where(self._numbers < self._used, 1, 0)
        halves = self._spans.total(jnp.where(diagonals, 2 * lengths, 0) - counted)
        # For a column in block b: number of rows of blocks from b on not covered by a diagonal.
        free = self._spans.up_to((~diagonals).astype(jnp.int32))
        free = self._spans.at(free, jnp.maximum(lengths - 1, 0))
        free = jnp.where(lengths > 0, free, 0)
        whole, rest = self._parts(columns.sum(-1, dtype=jnp.int32) * free)
        return halves + self._in_halves(self._spans.total(whole), self._spans.total(rest))

    def held(self, kept: tuple[Array, Array]) -> Array:
        """Returns the probe queries' mass in the selection, int32; overlaps count once."""
        columns, diagonals = kept
        by_column = jnp.where(columns, self._columns, 0).sum(-1, dtype=jnp.int32)
        distance = self._used - 1 - self._numbers  # from the last block with valid tokens
        last = self._spans.at(diagonals, jnp.maximum(distance, 0))
        held = (distance >= 0) & last
        return self._spans.total(jnp.where(held, self._block_mass(), by_column))

    def or_window(self, kept: tuple[Array, Array]) -> tuple[Array, Array]:
        """Replaces the selection by the widest window of at most equal cost, if it holds more."""
        shape, spans = self._mass.shape, self._spans
        width = self._width_within(self.cost(kept))
        window = (
            jnp.broadcast_to(self._sinks, self._columns.shape),
            jnp.broadcast_to(self._numbers < spans.spread(width), shape),
        )
        better = (width >= self._rule.local_blocks) & (self.held(window) > self.held(kept))
        return self.where(better, window, kept)

    def _width_within(self, most: Array) -> Array:
        """Returns the diagonals of the widest window that, with the sinks, fits into `most`."""
        spans, size = self._spans, self._size
        lengths = jnp.maximum(self._used - self._numbers, 0)
        # For a window of w + 1 diagonals, which leaves the last rows of a block's columns.
        sinks = jnp.arange(-(-self._rule.sink_tokens // size), dtype=jnp.int32)
        left = jnp.maximum(self._used[..., None] - sinks, 0)
        free = jnp.maximum(left - 1 - self._numbers[..., None], 0)
        count = jnp.minimum(self._rule.sink_tokens, self._tokens)[..., None] - sinks * size
        entries = self._parts(jnp.clip(count, 0, size) * free)
        in_sinks = self._in_halves(*(x.sum(-1, dtype=jnp.int32) for x in entries))
        shape = self._columns.shape[:-1]
        diagonals = spans.up_to(jnp.broadcast_to(2 * lengths, shape)) - self._used
        fits = (diagonals + in_sinks <= spans.spread(most)) & (self._numbers < self._used)
        return spans.total(fits.astype(jnp.int32))

    def where(
        self, first: Array, x: tuple[Array, Array], y: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Selects `x` for marked sequences (bool), else `y`."""
        first = self._spans.spread(first)
        return jnp.where(first[..., None], x[0], y[0]), jnp.where(first, x[1], y[1])

    def _parts(self, entries: Array) -> tuple[Array, Array]:
        """Splits pairs (column, row of blocks) into whole blocks and a rest, for summation."""
        return entries // self._size, entries % self._size

    def _in_halves(self, whole: Array, rest: Array) -> Array:
        """Converts sums of `_parts` to half blocks, rounded up."""
        return 2 * whole - (-2 * rest // self._size)

    def _block_mass(self) -> Array:
        return self._columns.sum(-1, dtype=jnp.int32)

    def _mean_over_queries(self, x: Array) -> Array:
        """Maps column mass to distances, or distance mass to columns: int32 [R, NB, g].

        Entry i is the mean over the probe queries' positions p of x at p - i, rounded down.
        """
        end = self._tokens[..., None] - self._entries
        start = jnp.maximum(end - self._rule.num_probe_queries, 0)
        end = jnp.maximum(end, 0)
        total = self._spans.of_first(x, end) - self._spans.of_first(x, start)
        return total // self._rule.num_probe_queries

    def _on_blocks(self, x: Array) -> Array:
        """Sums masses [R, NB, g] at token distances to block diagonals: int32 [R, NB].

        Distance d g + t is on block diagonal d for g - t of the g queries of a block, and on the
        next one for the others.
        """
        offset = jnp.arange(self._size, dtype=jnp.int32)
        far = x // self._size * offset + x % self._size * offset // self._size
        near = (x - far).sum(-1, dtype=jnp.int32)
        return near + self._spans.from_previous(far.sum(-1, dtype=jnp.int32))


def _share(total: int | Array, share: float) -> Array:
    """Returns floor(share * total) for totals below 2^31, without overflow."""
    total = jnp.asarray(total, jnp.int32)
    share = round(share * (1 << _SHARE_BITS))
    high, low = total >> _SHARE_BITS, total & ((1 << _SHARE_BITS) - 1)
    return high * share + (low * share >> _SHARE_BITS)
