"""Plans of kernel calls, made once for a forward and its backward pass."""

import dataclasses
from typing import Any

import jax
from jax import Array

from pallas_kernels.tiles import Columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of one kernel call, from `pallas_kernels.plan`; a pytree."""

    work: Any  # work lists of the backend's kernels, a pytree
    columns: Columns | None  # the gathered columns to compute as well
    backend: str = jax.tree.static()  # name of the backend that made it and will run it
    block_size: int = jax.tree.static()  # g
    has_tiles: bool = jax.tree.static()  # whether there are tiles, or only columns
    query_shape: tuple[int, ...] = jax.tree.static()  # [B, nq, Hq, D]
    key_shape: tuple[int, ...] = jax.tree.static()  # [B, nk, Hk, D]

    def check(self, q: Array, k: Array, v: Array, column_kv: tuple[Array, Array] | None) -> None:
        """Raises ValueError if the arrays do not match the plan; the message names the argument."""
        for name, x, shape in (
            ("q", q, self.query_shape),
            ("k", k, self.key_shape),
            ("v", v, self.key_shape),
        ):
            if x.shape != shape:
                raise ValueError(f"{name} has shape {x.shape}, but the plan is for {shape}")
        if (column_kv is None) != (self.columns is None):
            given, planned = ("no", "with") if column_kv is None else ("a", "without")
            raise ValueError(f"{given} column_kv was passed to a plan {planned} columns")
        if column_kv is not None and self.columns is not None:
            batch, _, heads, dim = self.query_shape
            shape = (batch, self.columns.tokens.shape[-1], heads, dim)
            for name, x in zip(("keys", "values"), column_kv, strict=True):
                if x.shape != shape:
                    raise ValueError(f"column_kv: {name} have shape {x.shape}; expected {shape}")
