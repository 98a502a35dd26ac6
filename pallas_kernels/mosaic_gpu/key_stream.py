"""The copy side of the row kernels: keys and values of an item through shared memory."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import TILE, WARPGROUPS, WORD, Config, await_last, tiled
from pallas_kernels.mosaic_gpu.masks import keep_bias, keep_words, key_numbers
from pallas_kernels.mosaic_gpu.query_walk import QueryWalk
from pallas_kernels.work.items import QueryItem


def _slots(config: Config) -> dict[str, int]:
    return {"k": config.stages, "v": config.value_stages or config.stages}


def stream_barriers(config: Config, has_columns: bool) -> dict[str, Any]:
    """Barriers of two rings of slots, for keys (with their bias) and for values."""
    bars = {}
    for name, slots in _slots(config).items():
        bars[f"{name}_full"] = plgpu.Barrier(num_barriers=slots)
        bars[f"{name}_free"] = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots)
    if has_columns:
        bars["bias_full"] = plgpu.Barrier(num_barriers=config.stages)
    return bars


def stream_memory(config: Config, head_dim: int, dtype: Any, has_columns: bool) -> dict[str, Any]:
    slots = _slots(config).items()
    smem = {name: tiled((stages, config.keys, head_dim), dtype) for name, stages in slots}
    if has_columns:
        smem["bias"] = plgpu.SMEM((config.stages, config.keys), jnp.float32)
    return smem


class Producer:
    """Streams keys and values of items; with `lag`, values come one step after keys."""

    def __init__(self, walk: QueryWalk, smem: dict[str, Any], bars: dict[str, Any], lag: bool):
        self.walk, self.smem, self.bars = walk, smem, bars
        self.lag, self.keys = lag, smem["k"].shape[1]
        self.parts = TILE // self.keys  # of a block, each a step

    def _load(self, name: str, step: Array, source: Any) -> None:
        stages = self.smem[name].shape[0]
        slot = lax.rem(step, stages)

        @pl.when(step >= stages)
        def _() -> None:
            plgpu.barrier_wait(self.bars[f"{name}_free"].at[slot])

        plgpu.copy_gmem_to_smem(
            source, self.smem[name].at[slot], self.bars[f"{name}_full"].at[slot]
        )

    def load_item(self, it: QueryItem, step: Array) -> Array:
        refs, walk, keys, parts = self.walk.refs, self.walk, self.keys, self.parts
        tiles = it.tiles * parts
        kv_head = lax.div(it.head, walk.group)

        def tile(name: str, number: Array, head: Array) -> Any:
            return refs[name].at[it.batch, pl.ds(number * keys, keys), head]

        def load_values(s: Array, number: Array) -> None:
            self._load("v", step + s, tile("v", number, kv_head))

        def load_run(number: Array | int, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            begin, previous = carry
            first, count = walk.run(it, number)

            def load_block(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                previous, number = carry
                for part in range(parts):
                    at, own = (begin + s) * parts + part, number * parts + part
                    self._load("k", step + at, tile("k", own, kv_head))
                    if not self.lag:
                        load_values(at, own)
                    elif part:
                        load_values(at - 1, own - 1)
                    else:
                        pl.when(at > 0)(functools.partial(load_values, at - 1, previous))
                # The next list entry is prefetched: the waits hide its latency.
                following = walk.listed_block(it, first + lax.min(s + 1, count - 1))
                return number * parts + parts - 1, following

            start = lax.cond(count > 0, lambda: walk.listed_block(it, first), lambda: previous)
            last, _ = lax.fori_loop(0, count, load_block, (previous, start))
            return begin + count, last

        if walk.runs is None:
            _, last = load_run(0, (0, jnp.int32(0)))
        else:
            _, last = lax.fori_loop(0, walk.runs, load_run, (jnp.int32(0), jnp.int32(0)))
        if self.lag:
            pl.when(it.tiles > 0)(lambda: load_values(tiles - 1, last))
        if walk.has_columns:
            walked = it.from_first(it.column_tiles) * parts

            def column_tile(s: Array) -> Array:
                return it.column_tile(jnp.int32(0)) * parts + s

            def load_column_values(s: Array) -> None:
                self._load("v", step + tiles + s, tile("vc", column_tile(s), it.head))

            def read_words(s: Array) -> list[Array]:
                words = keys // WORD
                return keep_words(refs["keep"], it, it.block, column_tile(s) * words, words)

            def load_columns(s: Array, words: list[Array]) -> list[Array]:
                # The next tile's words are prefetched, to hide the latency.
                following = read_words(lax.min(s + 1, walked - 1))
                self._load("k", step + tiles + s, tile("kc", column_tile(s), it.head))
                # The keys' slot is free, and with it the slot of their bias.
                slot = lax.rem(step + tiles + s, self.smem["bias"].shape[0])
                index = lax.iota(jnp.int32, TILE) if parts == 1 else key_numbers()
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
        return step + it.steps * parts

    def drain(self, steps: Array) -> None:
        free = {name: self.bars[f"{name}_free"] for name in ("k", "v")}
        slots = {name: self.smem[name].shape[0] for name in free}
        if slots["k"] == slots["v"]:
            return await_last([*free.values()], steps, slots["k"])
        for name, barrier in free.items():
            await_last([barrier], steps, slots[name])
