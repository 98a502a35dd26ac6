"""Tiles of rows and their visible columns, as traversed by the block score kernels."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import ROW_LAYOUT, fold, iota, rows_to_tile


class RowTiles:
    """Column tiles to process for each row tile, and where masks are needed.

    `places` and `starts` are those of `block_scores_kernel`; `rows` and `width` are the sizes of
    tiles. `inputs` are arrays that the kernel needs; `items` is the number of row tiles.
    """

    def __init__(
        self, places: Array, starts: Array | None, num_heads: int, batch: int, rows: int, width: int
    ):
        self._pairs, self._heads = batch * num_heads, num_heads
        self._row_tiles, self._width = places.shape[1] // rows, width
        self._one_for_all, self._from_zero = places.shape[0] == 1, starts is None
        self.items = self._pairs * self._row_tiles
        of_tiles = places.reshape(-1, self._row_tiles, rows)
        # Column tiles seen by any row of a tile end at `tiles`; those before `whole` end where
        # every row sees them.
        self.inputs = {
            "places": places,
            "tiles": of_tiles.max(axis=2) // width + 1,
            "whole": (of_tiles.min(axis=2) + 1) // width,
        }
        if starts is not None:
            begin = _from_starts(
                starts.reshape(of_tiles.shape), of_tiles, self.inputs["tiles"], width
            )
            self.inputs |= begin | {"starts": starts}

    def item(self, refs: dict[str, Any], number: Array) -> tuple[Array, Array, Array]:
        """Returns batch entry, head and row tile; tiles that see most columns come first."""
        pair = lax.rem(number, self._pairs)
        row_tile = self._row_tiles - 1 - lax.div(number, self._pairs)
        b = lax.div(pair, self._heads)
        if not self._from_zero:
            row_tile = refs["order"][b, row_tile]
        return b, lax.rem(pair, self._heads), row_tile

    def columns(self, refs: dict[str, Any], b: Array, row_tile: Array) -> tuple[Array, Array]:
        """Returns the first column tile that a row tile sees, and one past the last."""
        tiles = self._at(refs, "tiles", b, row_tile)
        return jnp.int32(0) if self._from_zero else self._at(refs, "first", b, row_tile), tiles

    def seen(self, refs: dict[str, Any], b: Array, rows: Any) -> list[Array]:
        """Returns the last visible column of some rows, and the first one if it may not be 0."""
        own = 0 if self._one_for_all else b
        names = ["places"] if self._from_zero else ["places", "starts"]
        return [
            plgpu.load(refs[name].at[own, rows], layout=ROW_LAYOUT, optimized=False)
            for name in names
        ]

    def score(
        self,
        refs: dict[str, Any],
        b: Array,
        head: Array,
        row_tile: Array,
        j: Array,
        logits: Array,
        rows: Any,
        seen: list[Array],
        peak: Array,
        *,
        block_columns: int,
        log2_scale: float,
    ) -> Array:
        """Writes the scores of 64 rows and the blocks of column tile j.

        `seen` are those of the rows; `peak`, fp32 [64], is the largest scaled logit so far, which
        is returned including this tile.
        """
        blocks = self._width // block_columns
        of_blocks = [logits[:, n * block_columns : (n + 1) * block_columns] for n in range(blocks)]
        of_blocks = self._masked(refs, b, row_tile, j, of_blocks, seen)
        for n, x in enumerate(of_blocks):
            own = fold(jnp.maximum, x).max(axis=1) * log2_scale
            base = jnp.where(own > -jnp.inf, own, 0.0)
            terms = jnp.exp2(x * log2_scale - rows_to_tile(base, x))
            total = fold(jnp.add, terms).sum(axis=1)
            refs["scores"].at[b, head, j * blocks + n, rows][...] = base + jnp.log2(total)
            peak = jnp.maximum(peak, own)
        return peak

    def _masked(
        self,
        refs: dict[str, Any],
        b: Array,
        row_tile: Array,
        j: Array,
        of_blocks: list[Array],
        seen: list[Array],
    ) -> list[Array]:
        cut = j >= self._at(refs, "whole", b, row_tile)
        if not self._from_zero:
            cut |= j < self._at(refs, "whole_from", b, row_tile)

        def mask(of_blocks: list[Array]) -> list[Array]:
            found = []
            for n, tile in enumerate(of_blocks):
                column = iota(tile, 1) + (j * self._width + n * tile.shape[1])
                tile = jnp.where(column <= rows_to_tile(seen[0], tile), tile, -jnp.inf)
                if not self._from_zero:
                    tile = jnp.where(column >= rows_to_tile(seen[1], tile), tile, -jnp.inf)
                found.append(tile)
            return found

        return lax.cond(cut, mask, lambda tiles: tiles, of_blocks)

    def _at(self, refs: dict[str, Any], name: str, b: Array, row_tile: Array) -> Array:
        return refs[name][0 if self._one_for_all else b, row_tile]


def _from_starts(starts: Array, places: Array, tiles: Array, width: int) -> dict[str, Array]:
    """Computes the first visible column tile of each row tile, and an order of row tiles.

    int32 [B, T] each: the first tile that any row sees; the first one with a beginning seen by
    every row; row tiles with the most column tiles last.
    """
    lowest = jnp.where(places >= 0, starts, jnp.iinfo(jnp.int32).max).min(axis=2)
    first = jnp.minimum(lowest // width, tiles)
    whole_from = (starts.max(axis=2) + width - 1) // width
    order = jnp.argsort(tiles - first, axis=1, stable=True).astype(jnp.int32)
    return {"first": first, "whole_from": whole_from, "order": order}
