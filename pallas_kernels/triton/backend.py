"""The Triton implementation of `pallas_kernels.interface.Backend`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import Shaped, unsupported_operands
from pallas_kernels.gradients import Gradients, whole_keys
from pallas_kernels.interface import Backend, BackwardCall, ForwardCall, Pair
from pallas_kernels.masses import LOG2E
from pallas_kernels.plans import Plan
from pallas_kernels.tiles import COLUMN_TILE, Columns, Tiles
from pallas_kernels.triton import device
from pallas_kernels.triton.block_masses import TritonBlockScores
from pallas_kernels.triton.call import Call, run_on_gpu
from pallas_kernels.triton.configs import Config, Configs, configs_for
from pallas_kernels.triton.estimate import TritonEstimate
from pallas_kernels.work.key_work import PARTS, KeyWork, join_parts, key_work
from pallas_kernels.work.query_work import QueryWork, query_work

BLOCK = 128
_DELTA = Config(rows=64, keys=0, warps=4, stages=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TritonWork:
    """Work lists of the kernels of both passes; items of columns come first in `keys`."""

    queries: QueryWork
    keys: KeyWork


@dataclasses.dataclass(frozen=True)
class Triton(Backend):
    name: str = "triton"
    run: Callable[[Call], dict[str, Array]] | None = None  # None for jax-triton on a GPU
    capability: int | None = None  # to take configurations of; None for that of the GPU

    @property
    def estimate(self) -> TritonEstimate:
        return TritonEstimate(self.run)

    @property
    def block_scores(self) -> TritonBlockScores:
        return TritonBlockScores(self.run)

    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        if self.run is None and (reason := device.cannot_run()):
            return reason
        return unsupported_operands(q, block_size)

    def plan(
        self, q: Shaped, k: Shaped, tiles: Tiles | None, columns: Columns | None, *, whole: bool
    ) -> TritonWork:
        sizes = q.shape[0], q.shape[2], q.shape[1] // BLOCK, k.shape[1] // BLOCK, k.shape[2]
        return TritonWork(query_work(tiles, columns, *sizes), key_work(tiles, columns, *sizes))

    def forward(self, call: ForwardCall) -> Pair:
        """Ignores `beside_transfers`: every item has its own thread blocks."""
        from pallas_kernels.triton.kernels.forward import attention_forward

        q, init = call.q, call.init
        out0, lse0 = (None, None) if init is None else (x.astype(jnp.float32) for x in init)
        found = self._over_queries(
            attention_forward,
            self._forward_config(q, call.plan),
            call,
            q,
            arrays={"init_out": out0, "init_lse": lse0},
            outputs={
                "out": jax.ShapeDtypeStruct(q.shape, call.out_dtype),
                "lse": jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
            },
            numbers={"log2_scale": call.scale * LOG2E},
            constants={"HAS_INIT": init is not None},
        )
        return found["out"], found["lse"]

    def backward(self, call: BackwardCall) -> Gradients:
        from pallas_kernels.triton.kernels.dq import attention_dq

        q, lse = call.q, call.lse
        rows = {
            "dout": call.dout.astype(q.dtype),
            # Subtracted from base-2 logits: an empty row then has no weights.
            "shift": jnp.where(lse > -jnp.inf, lse * LOG2E, jnp.inf),
            "delta": call.delta,
        }
        scales = {"scale": float(call.scale), "log2_scale": call.scale * LOG2E}
        keys = Gradients(q, None, None, None, None)  # without dq, which comes last
        if call.plan.has_tiles:
            dk, dv = self._of_blocks(call, rows, scales)
            keys = keys._replace(dk=dk, dv=dv)
        if call.column_kv is not None:
            dk, dv = self._of_columns(call, rows, scales)
            keys = keys._replace(dk_columns=dk, dv_columns=dv)
        if call.key_dtype is not None:
            keys = whole_keys(keys, call.plan.columns, call.key_dtype)
            # These come first, then dq: their fp32 sums fit in dq's memory.
            q, keys = lax.optimization_barrier((q, keys._replace(dq=None)))
        found = self._over_queries(
            attention_dq,
            self._configs(q).dq,
            call,
            q,
            arrays=rows,
            outputs={"dq": jax.ShapeDtypeStruct(q.shape, call.dq_dtype)},
            numbers=scales,
            constants={},
        )
        return keys._replace(dq=found["dq"])

    def delta_of(self, out: Array, dout: Array) -> Array:
        from pallas_kernels.triton.kernels.delta import attention_delta

        batch, length, heads, dim = out.shape
        call = Call(
            attention_delta,
            {"out": out, "dout": dout},
            {"delta": jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)},
            {"length": length},
            {"HEADS": heads, "DIM": dim, "ROWS": _DELTA.rows},
            (-(-length // _DELTA.rows) * heads, batch),
            _DELTA,
        )
        return self._run(call)["delta"]

    def _over_queries(
        self,
        kernel: Any,
        config: Config,
        of: ForwardCall | BackwardCall,
        q: Array,
        *,
        arrays: dict[str, Any],
        outputs: dict[str, jax.ShapeDtypeStruct],
        numbers: dict[str, float],
        constants: dict[str, Any],
    ) -> dict[str, Array]:
        plan, work = of.plan, of.plan.work.queries
        arrays = arrays | dict(items=work.items, run_first=work.run_first, run_last=work.run_last)
        constants = constants | dict(
            RUNS=0 if work.run_first is None else work.run_first.shape[2],
            HAS_TILES=plan.has_tiles,
            HAS_COLUMNS=plan.columns is not None,
        )
        call = Call(
            kernel,
            {**_inputs(of, work), **_columns(of), **arrays, "q": q},
            outputs,
            {**numbers, **_lengths(of, work), "num_columns": _count(plan.columns)},
            {**constants, **_constants(of, work, config)},
            (work.items.shape[0] * (BLOCK // config.rows),),
            config,
        )
        return self._run(call)

    def _of_blocks(self, of: BackwardCall, rows: dict[str, Any], scales: dict[str, float]) -> Pair:
        from pallas_kernels.triton.kernels.dkdv import attention_dkdv

        k, work, config = of.k, of.plan.work.keys, self._configs(of.q).dkdv
        items = work.items[_column_items(of) :]
        like = jax.ShapeDtypeStruct(k.shape, jnp.float32)
        arrays = rows | dict(items=items, first_entries=work.first, last_entries=work.last)
        outputs, in_parts = {"dk": like, "dv": like}, 0
        if work.heavy is None:
            arrays |= {"dk_parts": None, "dv_parts": None}
        else:
            in_parts = work.heavy.shape[-1] * PARTS * BLOCK
            like = jax.ShapeDtypeStruct((k.shape[0], in_parts, *k.shape[2:]), jnp.float32)
            outputs |= {"dk_parts": like, "dv_parts": like}
        call = Call(
            attention_dkdv,
            {**_inputs(of, work), **arrays},
            outputs,
            {**scales, **_lengths(of, work), "parts_length": in_parts},
            {**_constants(of, work, config), "PARTS": 0 if work.heavy is None else PARTS},
            (items.shape[0] * (BLOCK // config.keys),),
            config,
        )
        found = self._run(call)
        if work.heavy is None:
            return found["dk"], found["dv"]
        dk = join_parts(work.heavy, found["dk"], found["dk_parts"])
        return dk, join_parts(work.heavy, found["dv"], found["dv_parts"])

    def _of_columns(self, of: BackwardCall, rows: dict[str, Any], scales: dict[str, float]) -> Pair:
        from pallas_kernels.triton.kernels.dkdv import attention_dkdv_columns

        q, config, count = of.q, self._configs(of.q).dkdv, _column_items(of)
        columns = _columns(of)
        like = jax.ShapeDtypeStruct(columns["k_columns"].shape, jnp.float32)
        call = Call(
            attention_dkdv_columns,
            {"q": q, **rows, "items": of.plan.work.keys.items[:count], **columns},
            {"dk": like, "dv": like},
            {**scales, "query_length": q.shape[1], "num_columns": _count(of.plan.columns)},
            {"HEADS": q.shape[2], "DIM": q.shape[3], "ROWS": config.rows, "KEYS": config.keys},
            (count * (BLOCK // config.keys),),
            config,
        )
        found = self._run(call)
        return found["dk"], found["dv"]

    def _forward_config(self, q: Array, plan: Plan) -> Config:
        configs = self._configs(q)
        documents = plan.work.queries.run_first is not None
        return (documents and configs.forward_documents) or configs.forward

    def _configs(self, q: Array) -> Configs:
        capability = self.capability or device.capability()
        assert capability is not None  # checked by `unsupported`
        return configs_for(capability, q.shape[-1])

    def _run(self, call: Call) -> dict[str, Array]:
        return (self.run or run_on_gpu)(call)


def _inputs(of: ForwardCall | BackwardCall, work: QueryWork | KeyWork) -> dict[str, Any]:
    return dict(q=of.q, k=of.k, v=of.v, lists=work.lists, diagonal=work.diagonal)


def _lengths(of: ForwardCall | BackwardCall, work: QueryWork | KeyWork) -> dict[str, int]:
    capacity = work.lists.shape[-1]
    return dict(query_length=of.q.shape[1], key_length=of.k.shape[1], capacity=capacity)


def _constants(
    of: ForwardCall | BackwardCall, work: QueryWork | KeyWork, config: Config
) -> dict[str, int]:
    sizes = dict(HEADS=of.q.shape[2], KV_HEADS=of.k.shape[2], DIM=of.q.shape[3])
    return sizes | dict(LISTED=work.listed, ROWS=config.rows, KEYS=config.keys)


def _columns(of: ForwardCall | BackwardCall) -> dict[str, Any]:
    names = "k_columns", "v_columns", "keep", "tokens", "query_blocks"
    columns, column_kv = of.plan.columns, of.column_kv
    if columns is None or column_kv is None:
        return dict.fromkeys(names)
    keep = lax.bitcast_convert_type(columns.keep, jnp.int32)
    arrays = *column_kv, keep, columns.tokens, columns.query_blocks
    return dict(zip(names, arrays, strict=True))


def _count(columns: Columns | None) -> int:
    return 0 if columns is None else columns.tokens.shape[-1]


def _column_items(of: BackwardCall) -> int:
    """Returns the number of column items; they are at the start of the list."""
    return of.q.shape[0] * of.q.shape[2] * _count(of.plan.columns) // COLUMN_TILE
