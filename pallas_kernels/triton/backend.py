"""The Triton implementation of `pallas_kernels.backends.Backend`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import Shaped, unsupported_operands
from pallas_kernels.gradients import Gradients, whole_keys
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
class Triton:
    """Kernels for Ampere and newer GPUs, written in Triton."""

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
        del whole
        sizes = q.shape[0], q.shape[2], q.shape[1] // BLOCK, k.shape[1] // BLOCK, k.shape[2]
        return TritonWork(query_work(tiles, columns, *sizes), key_work(tiles, columns, *sizes))

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        plan: Plan,
        column_kv: tuple[Array, Array] | None,
        *,
        scale: float,
        init: tuple[Array, Array] | None,
        out_dtype: jnp.dtype,
        beside_transfers: bool,
    ) -> tuple[Array, Array]:
        """Ignores `beside_transfers`: every item has its own thread blocks."""
        del beside_transfers
        from pallas_kernels.triton.kernels.forward import attention_forward

        out0, lse0 = (None, None) if init is None else (x.astype(jnp.float32) for x in init)
        found = self._over_queries(
            attention_forward,
            self._forward_config(q, plan),
            q,
            k,
            v,
            plan,
            column_kv,
            arrays={"init_out": out0, "init_lse": lse0},
            outputs={
                "out": jax.ShapeDtypeStruct(q.shape, out_dtype),
                "lse": jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
            },
            numbers={"log2_scale": scale * LOG2E},
            constants={"HAS_INIT": init is not None},
        )
        return found["out"], found["lse"]

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        plan: Plan,
        column_kv: tuple[Array, Array] | None,
        *,
        scale: float,
        dq_dtype: jnp.dtype,
        key_dtype: jnp.dtype | None,
        beside_transfers: bool,
    ) -> Gradients:
        del beside_transfers
        from pallas_kernels.triton.kernels.dq import attention_dq

        rows = {
            "dout": dout.astype(q.dtype),
            # Subtracted from base-2 logits: an empty row then has no weights.
            "shift": jnp.where(lse > -jnp.inf, lse * LOG2E, jnp.inf),
            "delta": delta,
        }
        scales = {"scale": float(scale), "log2_scale": scale * LOG2E}
        keys: tuple[Array | None, Array | None] = None, None
        of_columns: tuple[Array | None, Array | None] = None, None
        if plan.has_tiles:
            keys = self._of_blocks(q, k, v, plan, rows, scales)
        if column_kv is not None:
            of_columns = self._of_columns(q, plan, column_kv, rows, scales)
        if key_dtype is not None:
            keys = whole_keys(*keys, *of_columns, plan.columns, key_dtype)
            of_columns = None, None
            # These come first, then dq: their fp32 sums fit in dq's memory.
            q, keys = lax.optimization_barrier((q, keys))
        found = self._over_queries(
            attention_dq,
            self._configs(q).dq,
            q,
            k,
            v,
            plan,
            column_kv,
            arrays=rows,
            outputs={"dq": jax.ShapeDtypeStruct(q.shape, dq_dtype)},
            numbers=scales,
            constants={},
        )
        return Gradients(found["dq"], *keys, *of_columns)

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
        q: Array,
        k: Array,
        v: Array,
        plan: Plan,
        column_kv: tuple[Array, Array] | None,
        *,
        arrays: Mapping[str, Array | None],
        outputs: dict[str, jax.ShapeDtypeStruct],
        numbers: dict[str, float],
        constants: dict[str, bool],
    ) -> dict[str, Array]:
        work = plan.work.queries
        call = Call(
            kernel,
            {
                "q": q,
                "k": k,
                "v": v,
                "items": work.items,
                "lists": work.lists,
                "diagonal": work.diagonal,
                "run_first": work.run_first,
                "run_last": work.run_last,
                **_columns(plan.columns, column_kv),
                **arrays,
            },
            outputs,
            {
                **numbers,
                "query_length": q.shape[1],
                "key_length": k.shape[1],
                "capacity": work.lists.shape[-1],
                "num_columns": _count(plan.columns),
            },
            {
                **constants,
                "HEADS": q.shape[2],
                "KV_HEADS": k.shape[2],
                "DIM": q.shape[3],
                "LISTED": work.listed,
                "RUNS": 0 if work.run_first is None else work.run_first.shape[2],
                "HAS_TILES": plan.has_tiles,
                "HAS_COLUMNS": plan.columns is not None,
                "ROWS": config.rows,
                "KEYS": config.keys,
            },
            (work.items.shape[0] * (BLOCK // config.rows),),
            config,
        )
        return self._run(call)

    def _of_blocks(
        self,
        q: Array,
        k: Array,
        v: Array,
        plan: Plan,
        rows: dict[str, Array],
        scales: dict[str, float],
    ) -> tuple[Array, Array]:
        from pallas_kernels.triton.kernels.dkdv import attention_dkdv

        work, config = plan.work.keys, self._configs(q).dkdv
        items = work.items[_column_items(plan.columns, q) :]
        like = jax.ShapeDtypeStruct(k.shape, jnp.float32)
        outputs, absent, in_parts = {"dk": like, "dv": like}, {}, 0
        if work.heavy is None:
            absent = {"dk_parts": None, "dv_parts": None}
        else:
            in_parts = work.heavy.shape[-1] * PARTS * BLOCK
            like = jax.ShapeDtypeStruct((k.shape[0], in_parts, *k.shape[2:]), jnp.float32)
            outputs |= {"dk_parts": like, "dv_parts": like}
        call = Call(
            attention_dkdv,
            {
                "q": q,
                "k": k,
                "v": v,
                **rows,
                "items": items,
                "lists": work.lists,
                "diagonal": work.diagonal,
                "first_entries": work.first,
                "last_entries": work.last,
                **absent,
            },
            outputs,
            {
                **scales,
                "query_length": q.shape[1],
                "key_length": k.shape[1],
                "capacity": work.lists.shape[-1],
                "parts_length": in_parts,
            },
            {
                "HEADS": q.shape[2],
                "KV_HEADS": k.shape[2],
                "DIM": q.shape[3],
                "LISTED": work.listed,
                "PARTS": 0 if work.heavy is None else PARTS,
                "ROWS": config.rows,
                "KEYS": config.keys,
            },
            (items.shape[0] * (BLOCK // config.keys),),
            config,
        )
        found = self._run(call)
        if work.heavy is None:
            return found["dk"], found["dv"]
        dk = join_parts(work.heavy, found["dk"], found["dk_parts"])
        return dk, join_parts(work.heavy, found["dv"], found["dv_parts"])

    def _of_columns(
        self,
        q: Array,
        plan: Plan,
        column_kv: tuple[Array, Array],
        rows: dict[str, Array],
        scales: dict[str, float],
    ) -> tuple[Array, Array]:
        from pallas_kernels.triton.kernels.dkdv import attention_dkdv_columns

        config, count = self._configs(q).dkdv, _column_items(plan.columns, q)
        like = jax.ShapeDtypeStruct(column_kv[0].shape, jnp.float32)
        call = Call(
            attention_dkdv_columns,
            {
                "q": q,
                **rows,
                "items": plan.work.keys.items[:count],
                **_columns(plan.columns, column_kv),
            },
            {"dk": like, "dv": like},
            {**scales, "query_length": q.shape[1], "num_columns": _count(plan.columns)},
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


def _columns(
    columns: Columns | None, column_kv: tuple[Array, Array] | None
) -> dict[str, Array | None]:
    names = "k_columns", "v_columns", "keep", "tokens", "query_blocks"
    if columns is None or column_kv is None:
        return dict.fromkeys(names)
    keep = lax.bitcast_convert_type(columns.keep, jnp.int32)
    arrays = *column_kv, keep, columns.tokens, columns.query_blocks
    return dict(zip(names, arrays, strict=True))


def _count(columns: Columns | None) -> int:
    return 0 if columns is None else columns.tokens.shape[-1]


def _column_items(columns: Columns | None, q: Array) -> int:
    """Returns the number of column items; they are at the start of the list."""
    return q.shape[0] * q.shape[2] * _count(columns) // COLUMN_TILE
