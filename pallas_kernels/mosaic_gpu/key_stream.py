"""The copy side of the row kernels: keys and values of an item through shared memory."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import TILE, WARPGROUPS, WORD, await_last, tiled
from pallas_kernels.mosaic_gpu.masks import keep_bias, keep_words
from pallas_kernels.mosaic_gpu.query_walk import QueryWalk
from pallas_kernels.work.items import QueryItem


def stream_barriers(stages: int, has_columns: bool) -> dict[str, Any]:
    """Barriers of two rings with `stages` slots, for keys (with their bias) and for values."""
    full = plgpu.Barrier(num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    bars = {"k_full": full, "v_full": full, "k_free": free, "v_free": free}
    if has_columns:
        bars["bias_full"] = full
    return bars


def stream_memory(stages: int, head_dim: int, dtype: Any, has_columns: bool) -> dict[str, Any]:
    smem = {name: tiled((stages, TILE, head_dim), dtype) for name in ("k", "v")}
    if has_columns:
        smem["bias"] = plgpu.SMEM((stages, TILE), jnp.float32)
    return smem


class Producer:
    """Streams keys and values of items; with `lag`, values come one step after keys."""

    def __init__(self, walk: QueryWalk, smem: dict[str, Any], bars: dict[str, Any], lag: bool):
        self.walk, self.smem, self.bars = walk, smem, bars
        self.stages, self.lag = smem["k"].shape[0], lag

    def _load(self, name: str, step: Array, source: Any) -> None:
        slot = lax.rem(step, self.stages)

        @pl.when(step >= self.stages)
        def _() -> None:
            plgpu.barrier_wait(self.bars[f"{name}_free"].at[slot])

        plgpu.copy_gmem_to_smem(
            source, self.smem[name].at[slot], self.bars[f"{name}_full"].at[slot]
        )

    def load_item(self, it: QueryItem, step: Array) -> Array:
        refs, walk = self.walk.refs, self.walk
        kv_head = lax.div(it.head, walk.group)

        def tile(name: str, number: Array, head: Array) -> Any:
            return refs[name].at[it.batch, pl.ds(number * TILE, TILE), head]

        def load_values(s: Array, number: Array) -> None:
            self._load("v", step + s, tile("v", number, kv_head))

        def load_run(number: Array | int, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            begin, previous = carry
            first, count = walk.run(it, number)

            def load_block(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                previous, number = carry
                self._load("k", step + begin + s, tile("k", number, kv_head))
                if self.lag:
                    pl.when(begin + s > 0)(lambda: load_values(begin + s - 1, previous))
                else:
                    load_values(begin + s, number)
                # The next list entry is prefetched: the waits hide its latency.
                following = walk.listed_block(it, first + lax.min(s + 1, count - 1))
                return number, following

            start = lax.cond(count > 0, lambda: walk.listed_block(it, first), lambda: previous)
            last, _ = lax.fori_loop(0, count, load_block, (previous, start))
            return begin + count, last

        if walk.runs is None:
            _, last = load_run(0, (0, jnp.int32(0)))
        else:
            _, last = lax.fori_loop(0, walk.runs, load_run, (jnp.int32(0), jnp.int32(0)))
        if self.lag:
            pl.when(it.tiles > 0)(lambda: load_values(it.tiles - 1, last))
        if walk.has_columns:
            walked = it.from_first(it.column_tiles)

            def load_column_values(s: Array) -> None:
                self._load("v", step + it.tiles + s, tile("vc", it.column_tile(s), it.head))

            def read_words(s: Array) -> list[Array]:
                words = TILE // WORD
                return keep_words(refs["keep"], it, it.block, it.column_tile(s) * words, words)

            def load_columns(s: Array, words: list[Array]) -> list[Array]:
                # The next tile's words are prefetched, to hide the latency.
                following = read_words(lax.min(s + 1, walked - 1))
                self._load("k", step + it.tiles + s, tile("kc", it.column_tile(s), it.head))
                # The keys' slot is free, and with it the slot of their bias.
                slot = lax.rem(step + it.tiles + s, self.stages)
                index = lax.iota(jnp.int32, TILE)
                self.smem["bias"][slot] = keep_bias(words, index)
                plgpu.barrier_arrive(self.bars["bias_full"].at[slot])
                if self.lag:
                    pl.when(s > 0)(lambda: load_column_values(s - 1))
                else:
                    load_column_values(s)
                return following

            @pl.when(walked > 0)
            def _() -> None:
                lax.fori_loop(0, walked, load_columns, read_words(jnp.int32(0)))

            if self.lag:
                pl.when(walked > 0)(lambda: load_column_values(walked - 1))
        return step + it.steps

    def drain(self, steps: Array) -> None:
        await_last((self.bars["k_free"], self.bars["v_free"]), steps, self.stages)
