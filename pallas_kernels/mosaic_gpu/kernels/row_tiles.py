"""Tiles of rows and their visible columns, as traversed by the block score kernels."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import ROW_LAYOUT, fold, iota, rows_to_tile


class Item(NamedTuple):
    batch: Array
    head: Array
    row_tile: Array


class RowTiles:
    """Column tiles to process for each row tile, and where masks are needed; see `row_inputs`."""

    def __init__(self, refs: dict[str, Any], width: int, block_columns: int, log2_scale: float):
        self.refs, self.width, self.log2_scale = refs, width, log2_scale
        self.block_columns = block_columns
        batch, self.heads = refs["q"].shape[:2]
        self.pairs, self.row_tiles = batch * self.heads, refs["tiles"].shape[1]
        self.one_for_all, self.from_zero = refs["places"].shape[0] == 1, "starts" not in refs

    def item(self, number: Array) -> Item:
        pair = lax.rem(number, self.pairs)
        row_tile = self.row_tiles - 1 - lax.div(number, self.pairs)
        batch = lax.div(pair, self.heads)
        if not self.from_zero:
            row_tile = self.refs["order"][batch, row_tile]
        return Item(batch, lax.rem(pair, self.heads), row_tile)

    def columns(self, it: Item) -> tuple[Array, Array]:
        """Returns the first column tile that a row tile sees, and one past the last."""
        tiles = self._at("tiles", it)
        return jnp.int32(0) if self.from_zero else self._at("first", it), tiles

    def seen(self, it: Item, rows: Any) -> list[Array]:
        """Returns the last visible column of some rows, and the first one if it may not be 0."""
        own = 0 if self.one_for_all else it.batch
        names = ["places"] if self.from_zero else ["places", "starts"]
        return [
            plgpu.load(self.refs[name].at[own, rows], layout=ROW_LAYOUT, optimized=False)
            for name in names
        ]

    def score(
        self, it: Item, j: Array, logits: Array, rows: Any, seen: list[Array], peak: Array
    ) -> Array:
        """Writes the scores of 64 rows and of the blocks of column tile j; returns the new peak."""
        size, scores = self.block_columns, self.refs["scores"]
        blocks = self.width // size
        of_blocks = [logits[:, n * size : (n + 1) * size] for n in range(blocks)]
        of_blocks = self._masked(it, j, of_blocks, seen)
        for n, x in enumerate(of_blocks):
            own = fold(jnp.maximum, x).max(axis=1) * self.log2_scale
            base = jnp.where(own > -jnp.inf, own, 0.0)
            terms = jnp.exp2(x * self.log2_scale - rows_to_tile(base, x))
            total = fold(jnp.add, terms).sum(axis=1)
            scores.at[it.batch, it.head, j * blocks + n, rows][...] = base + jnp.log2(total)
            peak = jnp.maximum(peak, own)
        return peak

    def _masked(self, it: Item, j: Array, of_blocks: list[Array], seen: list[Array]) -> list[Array]:
        cut = j >= self._at("whole", it)
        if not self.from_zero:
            cut |= j < self._at("whole_from", it)

        def mask(of_blocks: list[Array]) -> list[Array]:
            found = []
            for n, tile in enumerate(of_blocks):
                column = iota(tile, 1) + (j * self.width + n * tile.shape[1])
                tile = jnp.where(column <= rows_to_tile(seen[0], tile), tile, -jnp.inf)
                if not self.from_zero:
                    tile = jnp.where(column >= rows_to_tile(seen[1], tile), tile, -jnp.inf)
                found.append(tile)
            return found

        return lax.cond(cut, mask, lambda tiles: tiles, of_blocks)

    def _at(self, name: str, it: Item) -> Array:
        return self.refs[name][0 if self.one_for_all else it.batch, it.row_tile]


def row_inputs(places: Array, starts: Array | None, rows: int, width: int) -> dict[str, Array]:
    """Returns the operands of `RowTiles`, from those of `BlockScores.scores`."""
    of_tiles = places.reshape(places.shape[0], -1, rows)
    # Column tiles seen by any row of a tile end at `tiles`; those before `whole` end where every
    # row sees them.
    tiles = of_tiles.max(axis=2) // width + 1
    whole = (of_tiles.min(axis=2) + 1) // width
    inputs = {"places": places, "tiles": tiles, "whole": whole}
    if starts is None:
        return inputs
    starts_of_tiles = starts.reshape(of_tiles.shape)
    past = jnp.iinfo(jnp.int32).max
    first = jnp.where(of_tiles >= 0, starts_of_tiles, past).min(axis=2)
    first = jnp.minimum(first // width, tiles)
    # The first tile with a beginning seen by every row, and row tiles by number of column tiles.
    whole_from = (starts_of_tiles.max(axis=2) + width - 1) // width
    order = jnp.argsort(tiles - first, axis=1, stable=True).astype(jnp.int32)
    return inputs | {"first": first, "whole_from": whole_from, "order": order, "starts": starts}
