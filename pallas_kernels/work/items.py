"""Work items, stored as rows of an array that kernels read.

Each class lists the fields of an item, in the order of the array's columns. Lists are built by
`pack` and read in a kernel by `read`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

ITEM_FIELDS = 8  # columns of every list, not all of them used

KEY_BLOCKS, KEY_COLUMNS, KEY_PARTS = range(3)  # values of `KeyItem.kind`


class QueryItem(NamedTuple):
    """A block of 128 queries of one head, for the forward kernel and the one for dq.

    Attributes:
        batch, head, block: batch entry, query head and query block.
        first: its first entry in the list of key blocks.
        tiles: number of key blocks.
        column_tiles: one past the last tile of gathered columns that it processes.
        past_tiles: one past the last of these that needs no test by position.
        first_column_tile: the first one of these; None if it is 0 in all items.
    """

    batch: Array
    head: Array
    block: Array
    first: Array
    tiles: Array
    column_tiles: Array
    past_tiles: Array
    first_column_tile: Array | None = None

    def from_first(self, column_tile: Array) -> Array:
        """Returns the number of column tiles that it processes before the given one."""
        if self.first_column_tile is None:
            return column_tile
        return column_tile - self.first_column_tile

    def column_tile(self, number: Array) -> Array:
        """Returns the number-th column tile that it processes."""
        return number if self.first_column_tile is None else number + self.first_column_tile

    @property
    def steps(self) -> Array:
        """Number of tiles of both kinds."""
        return self.tiles + self.from_first(self.column_tiles)


Values = Any  # scalars in a kernel; arrays, views of them or numbers where lists are built


class KeyItem(NamedTuple):
    """128 keys, for the kernel for dk and dv and for the fused backward kernel.

    Attributes:
        kind: a key block, a tile of gathered columns, or a key block with a part of the query
            blocks that see it.
        batch: batch entry.
        head: query head of columns; key/value head of a block, or in the list of the fused kernel
            the first of the query heads that the item processes.
        block: number of the key block or column tile.
        first_row: for columns, the first query block that may see a token of the tile; for a part,
            its number.
        full_row: for columns, the first query block after all of them; for a part, the slot of its
            sums among the parts.
        sign: for blocks in the fused kernel, 1 if query blocks rise and -1 if they fall; for
            columns in the list for dk and dv, with `KeyWork.ends`, one past the last query block
            that it processes.
        key_turn: in the fused kernel, the turn at which the item adds to its dk and dv.
    """

    kind: Values
    batch: Values
    head: Values
    block: Values
    first_row: Values
    full_row: Values
    sign: Values
    key_turn: Values

    @property
    def columns(self) -> Array:
        """Whether it is a tile of gathered columns."""
        return self.kind == KEY_COLUMNS

    @property
    def part(self) -> Array:
        """Whether it is a key block with a part of its query blocks."""
        return self.kind == KEY_PARTS

    @property
    def blocks(self) -> Array:
        """Whether it is a complete key block."""
        return self.kind == KEY_BLOCKS


def pack(item: QueryItem | KeyItem) -> Array:
    """Packs an item with array or scalar fields into int32 [..., 8]."""
    given = [0 if x is None else x for x in item]
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in given))
    fields = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in given]
    fields += [jnp.zeros(shape, jnp.int32)] * (ITEM_FIELDS - len(fields))
    return jnp.stack(fields, axis=-1)


def read[Item: (QueryItem, KeyItem)](
    kind: type[Item], items: Any, n: Array, fields: int | None = None
) -> Item:
    """Reads the n-th item of a list in global memory; its first `fields` fields, or all."""
    return kind(*(items[n, column] for column in range(fields or len(kind._fields))))


def column_of(kind: type[QueryItem | KeyItem], field: str) -> int:
    """Returns the column of a list that stores a field."""
    return kind._fields.index(field)
