"""The Hopper implementation of `pallas_kernels.interface.Backend`."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import Shaped, unsupported_operands
from pallas_kernels.interface import (
    Backend,
    BackwardCall,
    Decoding,
    ForwardCall,
    Gradients,
    Pair,
    whole_keys,
)
from pallas_kernels.mosaic_gpu import device
from pallas_kernels.mosaic_gpu.common import (
    ROWS,
    BackwardOperands,
    GatheredColumns,
    gathered_columns,
)
from pallas_kernels.mosaic_gpu.configs import CONFIGS, Configs
from pallas_kernels.mosaic_gpu.fused_backward.kernel import fused_kernel
from pallas_kernels.mosaic_gpu.fused_backward.steps import FusedConfig
from pallas_kernels.mosaic_gpu.kernels.block_scores import HopperBlockScores
from pallas_kernels.mosaic_gpu.kernels.code_weights import code_weights_kernel
from pallas_kernels.mosaic_gpu.kernels.decode import decode_kernel
from pallas_kernels.mosaic_gpu.kernels.delta import delta_kernel
from pallas_kernels.mosaic_gpu.kernels.dkdv import dkdv_kernel
from pallas_kernels.mosaic_gpu.kernels.dq import dq_kernel
from pallas_kernels.mosaic_gpu.kernels.estimate import HopperEstimate
from pallas_kernels.mosaic_gpu.kernels.forward import forward_kernel
from pallas_kernels.mosaic_gpu.kernels.fp8_scores import HopperFp8Scores
from pallas_kernels.mosaic_gpu.kernels.selected_blocks import selected_blocks_kernel
from pallas_kernels.tiles import Columns, DiagonalTiles, SegmentedDiagonals, Tiles, scatter_columns
from pallas_kernels.work.fused_work import FusedWork, fused_work
from pallas_kernels.work.key_work import KeyWork, key_work
from pallas_kernels.work.lists import Sizes
from pallas_kernels.work.query_work import QueryWork, query_work

_PARTS_BESIDE_TRANSFERS = 8  # thread blocks per multiprocessor


class HopperWork(NamedTuple):
    queries: QueryWork  # of the forward kernel and of the one for dq
    keys: KeyWork | FusedWork  # of the kernel for dk and dv, or of the fused backward kernel


@dataclasses.dataclass(frozen=True)
class MosaicGpu(Backend):
    name: str = "mosaic_gpu"
    interpret: Any = False  # or parameters of Pallas' GPU interpreter
    configs: Configs | None = None  # kernel configurations; None for those of `configs.py`
    one_backward_kernel: bool | None = None  # fused wherever possible; None: where fastest

    estimate = HopperEstimate()
    block_scores = HopperBlockScores()
    fp8_scores = HopperFp8Scores()

    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        reason = None if self.interpret else device.no_hopper_gpu()
        return reason or unsupported_operands(q, block_size)

    def plan(
        self,
        q: Shaped,
        k: Shaped,
        tiles: Tiles | None,
        columns: Columns | None,
        *,
        single_call: bool,
    ) -> HopperWork:
        sizes = Sizes.of(q, k)
        queries = query_work(tiles, columns, sizes)
        if isinstance(tiles, DiagonalTiles | SegmentedDiagonals):
            config = self._fused_config(q, tiles, single_call)
            if config is not None:
                wave = device.multiprocessors(self.interpret) if config.waves else 0
                # Items of a window are short: those of one head would often add to dk and dv.
                heads = config.item_heads if tiles.window is None else None
                keys = fused_work(tiles, columns, sizes, item_heads=heads, wave=wave)
                return HopperWork(queries, keys)
        return HopperWork(queries, key_work(tiles, columns, sizes))

    def forward(self, call: ForwardCall) -> Pair:
        num_blocks = self._thread_blocks(call.overlaps_collectives)
        return forward_kernel(call, self._configs(call.q).forward, num_blocks, self.interpret)

    def backward(self, call: BackwardCall) -> Gradients:
        """`overlaps_collectives` changes nothing in the fused kernel: one thread block per item."""
        lse, scale = call.lse, call.scale
        base = jnp.where(lse > -jnp.inf, lse / -scale, -jnp.inf)  # initial value of the logits
        dout = call.dout.astype(call.q.dtype)
        operands = BackwardOperands(call.q, call.k, call.v, dout, base, call.delta)
        if isinstance(call.plan.work.keys, FusedWork):
            return self._one_kernel(call, operands)
        return self._two_kernels(call, operands)

    @property
    def decoding(self) -> Decoding:
        return Decoding(
            functools.partial(decode_kernel, interpret=self.interpret),
            functools.partial(code_weights_kernel, interpret=self.interpret),
            functools.partial(selected_blocks_kernel, interpret=self.interpret),
        )

    def delta_of(self, out: Array, dout: Array) -> Array:
        rows = out.shape[1]
        padding = ((0, 0), (0, -rows % ROWS), (0, 0), (0, 0))  # zero for blocks of 128
        out, dout = jnp.pad(out, padding), jnp.pad(dout, padding)
        return delta_kernel(out, dout, interpret=self.interpret)[..., :rows]

    def _two_kernels(self, call: BackwardCall, operands: BackwardOperands) -> Gradients:
        configs = self._configs(call.q)
        keys, column_gradients = dkdv_kernel(call, operands, configs.dkdv, self.interpret)
        columns = call.plan.columns
        if call.key_dtype is not None:
            if column_gradients is not None and columns is not None:
                keys = _whole_keys(keys, column_gradients, columns.tokens, call.key_dtype)
                column_gradients = None
            # These come first: their fp32 sums (with columns, one array) then fit in dq's memory.
            q, *keys = lax.optimization_barrier((operands.q, *keys))
            operands = operands._replace(q=q)
        dk, dv = keys
        num_blocks = self._thread_blocks(call.overlaps_collectives)
        dq = dq_kernel(call, operands, configs.dq, num_blocks, self.interpret)
        if not call.plan.has_tiles:
            dk = dv = None
        return Gradients(dq, dk, dv, *(column_gradients or (None, None)))

    def _one_kernel(self, call: BackwardCall, operands: BackwardOperands) -> Gradients:
        config = self._configs(call.q).fused
        assert config is not None  # the plan has its work

        # `jax.vmap` runs entries one by one: arrays that a kernel updates in place (`jax.new_ref`)
        # cannot be mapped over.
        @jax.custom_batching.sequential_vmap
        def fused(
            operands: BackwardOperands, work: FusedWork, columns: GatheredColumns | None
        ) -> Gradients:
            return fused_kernel(
                operands, work, columns, call.scale, config, call.key_dtype, self.interpret
            )

        plan = call.plan
        grads = fused(operands, plan.work.keys, gathered_columns(call))
        grads = grads._replace(dq=grads.dq.astype(call.dq_dtype))
        if call.key_dtype is not None:
            return whole_keys(grads, plan.columns, call.key_dtype)
        return grads

    def _fused_config(
        self, q: Shaped, tiles: DiagonalTiles | SegmentedDiagonals, single_call: bool
    ) -> FusedConfig | None:
        """Returns the configuration of the fused backward kernel, or None if it is not used."""
        if self.one_backward_kernel is False:
            return None
        # Documents in the keys of several ranks: additions to dq have no order to follow.
        if isinstance(tiles, SegmentedDiagonals) and tiles.first_keys is not None:
            return None
        # On part of a ring's keys, lists of sparse diagonals are too short for its fixed cost.
        configs = self._configs(q)
        small = math.prod(q.shape) * 4 <= configs.fused_sparse_bytes
        sparse = single_call and tiles.num_segments == 1 and small
        chosen = tiles.dense or tiles.window is not None or sparse or self.one_backward_kernel
        return configs.fused if chosen else None

    def _configs(self, q: Shaped) -> Configs:
        return self.configs or CONFIGS[q.shape[-1]]

    def _thread_blocks(self, overlaps_collectives: bool) -> int:
        """Returns the thread blocks of persistent kernels: more than fit next to a collective."""
        parts = _PARTS_BESIDE_TRANSFERS if overlaps_collectives else 1
        return device.multiprocessors(self.interpret) * parts


def _whole_keys(
    keys: Array, column_gradients: Array, tokens: Array, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Applies `whole_keys` to dk and dv in one array [2, B, ...]."""
    pair, column_gradients = (x.reshape(-1, *x.shape[2:]) for x in (keys, column_gradients))
    dk, dv = scatter_columns(pair, column_gradients, jnp.concatenate([tokens] * 2)).reshape(
        keys.shape
    )
    return dk.astype(dtype), dv.astype(dtype)
