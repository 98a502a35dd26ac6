"""Items of work: their fields, as rows of an array that kernels read.

A class below lists the fields of an item; their order is that of the columns of the array. Lists
are built by `pack` and read, in a kernel, by `read`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

ITEM_FIELDS = 8  # columns of every list, some of them unused

KEY_BLOCKS, KEY_COLUMNS, KEY_PARTS = range(3)  # values of `KeyItem.kind`


class QueryItem(NamedTuple):
    """A block of 128 queries of one head, for the forward kernel and the one for dq.

    Attributes:
        batch, head, block: whose queries.
        first: entry of the list of key blocks that it begins with.
        tiles: number of key blocks.
        column_tiles: one past the last tile of gathered columns that it walks.
        past_tiles: one past the last of these that needs no test by position.
        first_column_tile: the first one of these; None where that is 0 in all items.
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
        """How many tiles of columns it walks before the given one."""
        if self.first_column_tile is None:
            return column_tile
        return column_tile - self.first_column_tile

    def column_tile(self, number: Array) -> Array:
        """The tile of columns that it walks after as many others."""
        return number if self.first_column_tile is None else number + self.first_column_tile

    @property
    def steps(self) -> Array:
        """Tiles of both kinds."""
        return self.tiles + self.from_first(self.column_tiles)


class KeyItem(NamedTuple):
    """128 keys, for the kernel for dk and dv and the one for all gradients.

    Attributes:
        kind: a block of keys, a tile of gathered columns, or a block of keys with a part of the
            query blocks that see it.
        batch: entry of the batch.
        head: of columns their query head; of a block its key/value head, or in the list of the
            fused kernel the first query head of those that the item walks.
        block: number of the key block or of the tile of columns.
        first_row: of columns, the first query block that may see a token of the tile; of a part,
            its number.
        full_row: of columns, the first query block that lies after all of them; of a part, the
            place among the parts where its sums go.
        sign: of blocks in the fused kernel, 1 where query blocks rise and -1 where they fall; of
            columns in the list for dk and dv, with `KeyWork.ends`, one past the last query block
            that it walks.
        key_turn: in the fused kernel, the turn at which the item adds to its dk and dv.
    """

    kind: Array
    batch: Array
    head: Array
    block: Array
    first_row: Array
    full_row: Array
    sign: Array
    key_turn: Array

    @property
    def columns(self) -> Array:
        """Whether it is a tile of gathered columns."""
        return self.kind == KEY_COLUMNS

    @property
    def part(self) -> Array:
        """Whether it is a block of keys with a part of its query blocks."""
        return self.kind == KEY_PARTS

    @property
    def blocks(self) -> Array:
        """Whether it is a block of keys."""
        return self.kind == KEY_BLOCKS


def pack(item: QueryItem | KeyItem) -> Array:
    """Items int32 [..., 8] from one whose fields are arrays of a shape, or numbers."""
    given = [0 if x is None else x for x in item]
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in given))
    fields = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in given]
    fields += [jnp.zeros(shape, jnp.int32)] * (ITEM_FIELDS - len(fields))
    return jnp.stack(fields, axis=-1)


def read[Item: (QueryItem, KeyItem)](
    kind: type[Item], items: Any, n: Array, fields: int | None = None
) -> Item:
    """The n-th item of a list in global memory; its first `fields` fields, or all of them."""
    return kind(*(items[n, column] for column in range(fields or len(kind._fields))))


def column_of(kind: type[QueryItem | KeyItem], field: str) -> int:
    """The column of a list that holds a field."""
    return kind._fields.index(field)
