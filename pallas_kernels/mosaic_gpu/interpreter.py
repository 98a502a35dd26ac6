"""Kernel operations that differ in the GPU interpreter (docs/design/testing.md)."""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import ROWS, WARPGROUPS, product, tiled

# Adds the product of weights [64 keys, queries] and a tile [queries, D] to "dk" or "dv".
AddProduct = Callable[[str, Array, Any], None]


def accumulate_keys(
    smem: dict[str, Any],
    warpgroup: Array,
    interpreted: bool,
    run: Callable[[AddProduct], Array],
    names: Sequence[str] = ("dk", "dv"),
) -> tuple[Array, ...]:
    """Runs a warpgroup's steps with accumulators; returns those [64, D] and `run`'s result."""
    shape = ROWS, smem["k"].shape[-1]
    if interpreted:
        for name in names:
            smem[name][warpgroup] = jnp.zeros(shape, jnp.float32)

        def add(name: str, weights: Array, tile: Any) -> None:
            smem["p"][warpgroup] = weights
            plgpu.commit_smem()
            smem[name][warpgroup] += product(smem["p"].at[warpgroup], tile, shape)

        end = run(add)
        return *(smem[name][warpgroup] for name in names), end

    def body(*refs: Any) -> tuple[Array, ...]:
        sums = dict(zip(names, refs, strict=True))
        end = run(lambda name, weights, tile: plgpu.wgmma(sums[name], weights, tile))
        return *(ref[...] for ref in refs), end

    return pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32)] * len(names))


def key_scratch(queries: int, head_dim: int, dtype: Any) -> dict[str, Any]:
    """Shared memory for values that are in registers on a GPU: weights, dk and dv."""
    smem = {"p": tiled((WARPGROUPS, ROWS, queries), dtype)}
    for name in ("dk", "dv"):
        smem[name] = plgpu.SMEM((WARPGROUPS, ROWS, head_dim), jnp.float32)
    return smem


class Accumulator:
    def __init__(self, ref: Any):
        self._ref = ref

    def start(self, value: Array) -> None:
        self._ref[...] = value

    def add(self, a: Any, b: Any) -> None:
        plgpu.wgmma(self._ref, a, b)

    def wait(self, younger: int) -> None:
        plgpu.wgmma_wait(younger)

    def value(self, younger: int) -> Array:
        """Returns the sum once all but the `younger` latest products of the warpgroup are done."""
        return plgpu.wgmma_accumulator_load(self._ref, wait_n=younger)


class _Value:
    """The accumulator of the interpreter, where products complete immediately."""

    def __init__(self, shape: tuple[int, int], staging: Any):
        self._sum, self._shape, self._staging = jnp.zeros(shape, jnp.float32), shape, staging

    def start(self, value: Array) -> None:
        self._sum = value

    def add(self, a: Any, b: Any) -> None:
        if isinstance(a, Array):
            self._staging[...] = a
            plgpu.commit_smem()
            a = self._staging
        self._sum = self._sum + product(a, b, self._shape)

    def wait(self, younger: int) -> None: ...

    def value(self, younger: int) -> Array:
        del younger
        return self._sum


def with_accumulators(
    body: Callable[..., Any], *shapes: tuple[int, int], interpreted: bool, staging: Any = None
) -> Any:
    """Calls `body` with accumulators; `staging` is shared memory for the interpreter."""
    if interpreted:
        return body(*(_Value(shape, staging) for shape in shapes))
    accumulators = (plgpu.ACC(shape, jnp.float32) for shape in shapes)
    return pl.run_scoped(lambda *refs: body(*map(Accumulator, refs)), *accumulators)


def product_plus(
    base: Callable[[], Array],
    a: Any,
    b: Any,
    shape: tuple[int, int],
    interpreted: bool,
    meanwhile: Callable[[], None] | None = None,
) -> Array:
    """Computes base + a b, with the base as initial value of the accumulator.

    `meanwhile` is called once earlier products of the warpgroup are done, but not this one.
    """

    def body(acc: Any) -> Array:
        acc.start(base())
        acc.add(a, b)
        if meanwhile is not None:
            acc.wait(younger=1)
            meanwhile()
        return acc.value(younger=0)

    return with_accumulators(body, shape, interpreted=interpreted)


def add_product(acc: Array, a: Array, b: Any, *, interpreted: bool, staging: Any) -> Array:
    if interpreted:
        total = _Value((acc.shape[0], acc.shape[1]), staging)
        total.add(a, b)
        return acc + total.value(younger=0)
    run: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
    return run(plgpu.ACC.init(acc))


def load_rows_of(flat: Any, first: Array | int, shape: tuple[int, int], interpreted: bool) -> Array:
    """Loads rows `first` to `first + shape[0]` of one-dimensional memory seen as [n, shape[1]]."""
    rows, width = shape
    if interpreted:
        return flat[pl.ds(first * width, rows * width)].reshape(shape)
    source = flat.reshape((flat.shape[0] // width, width)).at[pl.ds(first, rows)]
    return plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
