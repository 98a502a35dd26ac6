"""Tiles of rows and the columns that they see, as the kernels that score key blocks take them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import ROW_LAYOUT, iota, rows_to_tile


class Item(NamedTuple):
    batch: Array
    head: Array
    row_tile: Array


class RowTiles:
    """Row tiles of each thread block, the column tiles that they see, and where masks are needed.

    Args:
        refs: the inputs of the kernel, those of `row_inputs` among them.
        shape: batch entries, heads, and row tiles of each head.
        width: columns of a tile.
        programs: thread blocks.
        alternate: whether every other round of items is assigned in reverse order, so that all
            thread blocks have about as much to do.
    """

    def __init__(
        self,
        refs: dict[str, Any],
        shape: tuple[int, int, int],
        width: int,
        programs: int,
        alternate: bool = False,
    ) -> None:
        self.refs, self.width = refs, width
        self.programs, self.alternate = programs, alternate
        batch, self.heads, self.row_tiles = shape
        self.pairs = batch * self.heads
        self.one_for_all, self.from_zero = refs["places"].shape[0] == 1, "starts" not in refs

    def count(self) -> Array:
        """Returns the number of items of this thread block."""
        whole, rest = divmod(self.pairs * self.row_tiles, self.programs)
        return whole + (self._place(jnp.int32(whole)) < rest).astype(jnp.int32)

    def item(self, n: Array) -> Item:
        """Returns the n-th item of this thread block; the longest items come first."""
        number = n * self.programs + self._place(n)
        pair = lax.rem(number, self.pairs)
        row_tile = self.row_tiles - 1 - lax.div(number, self.pairs)
        batch = lax.div(pair, self.heads)
        if not self.from_zero:
            row_tile = self.refs["order"][batch, row_tile]
        return Item(batch, lax.rem(pair, self.heads), row_tile)

    def _place(self, n: Array) -> Array:
        block = lax.axis_index("block")
        if not self.alternate:
            return block
        return jnp.where(lax.rem(n, 2) == 0, block, self.programs - 1 - block)

    def columns(self, it: Item) -> tuple[Array, Array]:
        """Returns the first column tile that a row tile sees, and one past the last."""
        end = self._at("tiles", it)
        return jnp.int32(0) if self.from_zero else self._at("first", it), end

    def seen(self, it: Item, rows: Any) -> list[Array]:
        """Returns the last visible column of some rows, and the first one if it may not be 0."""
        own = 0 if self.one_for_all else it.batch
        names = ["places"] if self.from_zero else ["places", "starts"]
        return [
            plgpu.load(self.refs[name].at[own, rows], layout=ROW_LAYOUT, optimized=False)
            for name in names
        ]

    def uncut(self, it: Item) -> tuple[Array, Array]:
        """Returns the range of column tiles that each row of a row tile sees all of."""
        end = self._at("whole", it)
        return jnp.int32(0) if self.from_zero else self._at("whole_from", it), end

    def is_cut(self, uncut: tuple[Array, Array], tile: Array) -> Array:
        """Whether a column tile is outside the range of `uncut`."""
        first, end = uncut
        return tile >= end if self.from_zero else (tile >= end) | (tile < first)

    def mask(self, first: Array, x: Array, seen: list[Array]) -> Array:
        """Sets what rows do not see of columns from `first` on to -inf."""
        column = iota(x, 1) + first
        x = jnp.where(column <= rows_to_tile(seen[0], x), x, -jnp.inf)
        if not self.from_zero:
            x = jnp.where(column >= rows_to_tile(seen[1], x), x, -jnp.inf)
        return x

    def sees_all(self, first: Array, count: int, seen: list[Array]) -> Array:
        """Whether rows see all of `count` columns from `first` on."""
        whole = seen[0] >= first + (count - 1)
        return whole if self.from_zero else whole & (seen[1] <= first)

    def _at(self, name: str, it: Item) -> Array:
        return self.refs[name][0 if self.one_for_all else it.batch, it.row_tile]


def row_inputs(places: Array, starts: Array | None, rows: int, width: int) -> dict[str, Array]:
    """Returns the operands of `RowTiles`, from those of `BlockScores.scores`."""
    places_of_tiles = places.reshape(places.shape[0], -1, rows)
    # Column tiles seen by any row of a tile end at `tiles`; those before `whole` end where every
    # row sees them.
    tiles = places_of_tiles.max(axis=2) // width + 1
    whole = (places_of_tiles.min(axis=2) + 1) // width
    inputs = {"places": places, "tiles": tiles, "whole": whole}
    if starts is None:
        return inputs
    starts_of_tiles = starts.reshape(places_of_tiles.shape)
    past = jnp.iinfo(jnp.int32).max
    first = jnp.where(places_of_tiles >= 0, starts_of_tiles, past).min(axis=2)
    first = jnp.minimum(first // width, tiles)
    # The first tile with a beginning seen by every row, and row tiles by number of column tiles.
    whole_from = (starts_of_tiles.max(axis=2) + width - 1) // width
    order = jnp.argsort(tiles - first, axis=1, stable=True).astype(jnp.int32)
    return inputs | {"first": first, "whole_from": whole_from, "order": order, "starts": starts}
