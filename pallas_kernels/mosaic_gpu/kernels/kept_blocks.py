"""Hopper kernel that keeps the heaviest key blocks, up to a share of a query block's mass."""

# pyright: reportPrivateImportUsage=false
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_scores import TAU_BITS, KeepRule
from pallas_kernels.masses import MASS_BITS
from pallas_kernels.mosaic_gpu.common import COLUMN_LAYOUT, ROW_LAYOUT, ROWS, columns_to_tile, iota
from pallas_kernels.mosaic_gpu.interpreter import load_rows_of

_CHUNK = 1024  # masses that a warpgroup reads at once
_MOST_HELD = 4 * _CHUNK  # masses that it holds in registers
_MOST_READ = 256  # key blocks that it reads weights of at once
_HALF = 16  # blocks of a half word
_SEARCHED_BITS = MASS_BITS + 1  # rounded masses may add up to more than 1
MOST_BLOCKS = 48 * _CHUNK  # shared memory holds 4 bytes of each
# Barriers are placed by hand.
_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=64,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def kept_blocks_kernel(weights: Array, totals: Array, rule: KeepRule, interpret: Any) -> Array:
    """Returns uint32 bits [B, Hq, n, ceil(NB / 32)]; arguments as in `Fp8Scores`.

    Weights are [B, Hq, NB', R] with NB' a multiple of 64. One warpgroup per query block and head:
    masses go to shared memory as integers, and the smallest kept one is found bit by bit.
    """
    batch, heads, padded, _ = weights.shape
    size = -(-padded // _CHUNK) * _CHUNK
    num_local = rule.own.shape[1]
    bounds = {name: getattr(rule, name) for name in ("own", "first", "forced_end", "tau")}
    inputs = {"weights": weights, "totals": totals} | bounds
    names = [*inputs, "halves", "mass"]

    def kept_blocks(*references: Any) -> None:
        refs = dict(zip(names, references, strict=True))
        block = lax.axis_index("block")
        pair, row = lax.div(block, num_local), lax.rem(block, num_local)
        place = lax.div(pair, heads), lax.rem(pair, heads), row
        _KeptRow(refs, rule, place, bool(interpret)).run()

    shape = jax.ShapeDtypeStruct((batch, heads, num_local, size // _HALF), jnp.int32)
    run = plgpu.kernel(
        kept_blocks,
        out_type=[shape],
        scratch_types=[plgpu.SMEM((size,), jnp.int32)],
        grid=(batch * heads * num_local,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        interpret=interpret,
    )
    [halves] = run(*inputs.values())
    low, high = (halves[..., n::2].astype(jnp.uint32) for n in range(2))
    return low | (high << _HALF)


class _KeptRow:
    """The key blocks of one query block and head."""

    def __init__(
        self, refs: dict[str, Any], rule: KeepRule, place: tuple[Array, ...], interpreted: bool
    ) -> None:
        self.refs, self.mass, self.rule, self.interpreted = refs, refs["mass"], rule, interpreted
        self.batch, self.head, self.row = batch, _, row = place
        self.own, self.first, self.forced_end, self.tau = (
            refs[name][0 if refs[name].shape[0] == 1 else batch, row]
            for name in ("own", "first", "forced_end", "tau")
        )
        self.chunks = lax.div(self.own, _CHUNK) + 1
        self.held: tuple[Array, Array] | None = None

    def run(self) -> None:
        self.add_rows()
        plgpu.commit_smem()
        if self.mass.shape[0] <= _MOST_HELD:
            self.held = self.load(0, self.mass.shape[0])
        total = self.sum(lambda mass, _: mass)
        high, low = total >> TAU_BITS, total & ((1 << TAU_BITS) - 1)
        target = high * self.tau + ((low * self.tau + ((1 << TAU_BITS) - 1)) >> TAU_BITS)
        before = total - self.clear_forced()
        # Compiled, integers from shared memory compare as unsigned ones, so none may be below 0.
        missing = jnp.where(target > before, target - before, 0)

        def enough(candidate: Array) -> Array:
            return self.sum(lambda mass, _: jnp.where(mass >= candidate, mass, 0)) >= missing

        least = self.search(_SEARCHED_BITS, enough)
        above = before + self.sum(lambda mass, _: jnp.where(mass > least, mass, 0))
        each = jnp.maximum(least, 1)
        equal_kept = lax.div(target - above + each - 1, each)

        def few(end: Array) -> Array:
            def one(mass: Array, number: Array) -> Array:
                return jnp.where((mass == least) & (number < end), 1, 0)

            return self.sum(one) <= equal_kept

        most = jnp.int32(self.mass.shape[0])
        bits = self.mass.shape[0].bit_length()
        end = lax.cond(few(most), lambda: most, lambda: self.search(bits, few))
        plgpu.commit_smem()
        self.write(least, end)

    def add_rows(self) -> None:
        """Sums the shares of the rows of the query block, as integers, in shared memory."""
        rows = pl.ds(self.row * self.rule.rows, self.rule.rows)
        own = self.refs["totals"].at[self.batch, self.head, rows]
        totals = plgpu.load(own, layout=COLUMN_LAYOUT, optimized=False)
        totals = jnp.where(totals > -jnp.inf, totals, 0.0)  # of rows without keys

        blocks = math.gcd(self.refs["weights"].shape[2], _MOST_READ)

        def add(i: Array, _: None) -> None:
            begin = i * blocks
            source = self.refs["weights"].at[self.batch, self.head, pl.ds(begin, blocks), rows]
            weight = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
            weight = weight.astype(jnp.float32)
            share = jnp.exp2(weight - columns_to_tile(totals, weight))
            share = (share * (float(1 << MASS_BITS) / self.rule.rows) + 0.5).astype(jnp.int32)
            number = iota(weight, 0) + begin
            share = jnp.where((number >= self.first) & (number <= self.own), share, 0)
            self.mass.at[pl.ds(begin, blocks)][...] = share.sum(axis=1)

        def clear(i: Array, _: None) -> None:
            zero = plgpu.layout_cast(jnp.zeros((blocks,), jnp.int32), ROW_LAYOUT)
            self.mass.at[pl.ds(i * blocks, blocks)][...] = zero

        count, size = lax.div(self.own, blocks) + 1, self.mass.shape[0]
        lax.fori_loop(0, count, add, None)
        end = size // blocks if size <= _MOST_HELD else self.chunks * (_CHUNK // blocks)
        lax.fori_loop(count, end, clear, None)

    def clear_forced(self) -> Array:
        """Sets the masses of forced blocks to 0; returns the sum of the others."""

        def free(mass: Array, number: Array) -> Array:
            return jnp.where(self.forces(number), 0, mass)

        if self.held is not None:
            mass, number = self.held
            self.held = free(mass, number), number
            self.mass[...] = self.held[0]
        else:

            def clear(i: Array, _: None) -> None:
                part = pl.ds(i * _CHUNK, _CHUNK)
                self.mass.at[part][...] = free(*self.load(i * _CHUNK, _CHUNK))

            lax.fori_loop(0, self.chunks, clear, None)
        return self.sum(lambda mass, _: mass)

    def forces(self, number: Array) -> Array:
        return (number < self.forced_end) | (number > self.own - self.rule.local_blocks)

    def sum(self, term: Callable[[Array, Array], Array]) -> Array:
        """Sums a term of the mass and the number of each block."""
        if self.held is not None:
            return term(*self.held).sum()

        def add(i: Array, total: Array) -> Array:
            return total + term(*self.load(i * _CHUNK, _CHUNK))

        zero = plgpu.layout_cast(jnp.zeros((_CHUNK,), jnp.int32), _layout(_CHUNK))
        return lax.fori_loop(0, self.chunks, add, zero).sum()

    def load(self, first: Array | int, count: int) -> tuple[Array, Array]:
        """Returns masses and numbers of some blocks."""
        mass = plgpu.load(self.mass.at[pl.ds(first, count)], layout=_layout(count))
        number = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=_layout(count))
        return mass, number + first

    @staticmethod
    def search(bits: int, holds: Callable[[Array], Array]) -> Array:
        """Returns the largest number of some bits for which a falling condition holds, or 0."""

        def step(i: Array, found: Array) -> Array:
            candidate = found | (jnp.int32(1) << (bits - 1 - i))
            return jnp.where(holds(candidate), candidate, found)

        return lax.fori_loop(0, bits, step, jnp.int32(0))

    def write(self, least: Array, end: Array) -> None:
        """Writes the bits of the kept blocks, 16 in each integer."""

        def write_chunk(i: Array, _: None) -> None:
            rows = pl.ds(i * ROWS, ROWS)
            mass = load_rows_of(self.mass, i * ROWS, (ROWS, _HALF), self.interpreted)
            number = iota(mass, 0) * _HALF + iota(mass, 1) + i * _CHUNK
            forced = self.forces(number)
            kept = (mass > least) | ((mass == least) & (number < end))
            kept = forced | (kept & (mass >= self.rule.least))
            kept = kept & (number >= self.first) & (number <= self.own)
            bit = jnp.where(kept, jnp.int32(1) << iota(mass, 1), 0)
            out = self.refs["halves"].at[self.batch, self.head, self.row, rows]
            out[...] = bit.sum(axis=1)

        lax.fori_loop(0, self.mass.shape[0] // _CHUNK, write_chunk, None)


def _layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((count,), vec_size=4)
