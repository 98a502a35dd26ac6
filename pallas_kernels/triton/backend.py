"""The Triton implementation of `pallas_kernels.interface.Backend`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import NARROW_HEAD_DIMS, Shaped, unsupported_operands
from pallas_kernels.interface import Backend, BackwardCall, ForwardCall, Gradients, Pair, whole_keys
from pallas_kernels.masses import LOG2E
from pallas_kernels.tiles import COLUMN_TILE, Columns, Tiles
from pallas_kernels.triton import device
from pallas_kernels.triton.call import Call, Run, run_on_gpu
from pallas_kernels.triton.configs import Config, Configs, table_for
from pallas_kernels.triton.selection import TritonBlockScores, TritonEstimate
from pallas_kernels.work.key_work import PARTS, KeyWork, join_parts, key_work
from pallas_kernels.work.lists import Sizes
from pallas_kernels.work.query_work import QueryWork, query_work

BLOCK = 128
_DELTA = Config(rows=64, keys=0, warps=4, stages=1)


class TritonWork(NamedTuple):
    """Work lists of the kernels of both passes; items of columns come first in `keys`."""

    queries: QueryWork
    keys: KeyWork


@dataclasses.dataclass(frozen=True)
class Triton(Backend):
    name: str = "triton"
    run: Run = run_on_gpu
    capability: int | None = None  # to take configurations of; None for that of the GPU

    @property
    def estimate(self) -> TritonEstimate:
        return TritonEstimate(self.run)

    @property
    def block_scores(self) -> TritonBlockScores:
        return TritonBlockScores(self.run)

    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        if self.run is run_on_gpu and (reason := device.cannot_run()):
            return reason
        return unsupported_operands(q, block_size, NARROW_HEAD_DIMS)

    def plan(
        self,
        q: Shaped,
        k: Shaped,
        tiles: Tiles | None,
        columns: Columns | None,
        *,
        single_call: bool,
    ) -> TritonWork:
        sizes = Sizes.of(q, k)
        return TritonWork(query_work(tiles, columns, sizes), key_work(tiles, columns, sizes))

    def forward(self, call: ForwardCall) -> Pair:
        """Ignores `overlaps_collectives`: every item has its own thread blocks."""
        from pallas_kernels.triton.kernels.forward import attention_forward

        q, init, configs = call.q, call.init, self._configs(call.q)
        documents = call.plan.work.queries.run_first is not None
        config = (documents and configs.forward_documents) or configs.forward
        out0, lse0 = (None, None) if init is None else (x.astype(jnp.float32) for x in init)
        values = dict(init_out=out0, init_lse=lse0, HAS_INIT=init is not None)
        outputs = {
            "out": jax.ShapeDtypeStruct(q.shape, call.out_dtype),
            "lse": jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
        }
        found = self._over_queries(attention_forward, config, call, values, outputs)
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
        keys = Gradients(q, None, None, None, None)  # without dq, which comes last
        if call.plan.has_tiles:
            dk, dv = self._block_gradients(call, rows)
            keys = keys._replace(dk=dk, dv=dv)
        if call.column_kv is not None:
            dk, dv = self._column_gradients(call, rows)
            keys = keys._replace(dk_columns=dk, dv_columns=dv)
        if call.key_dtype is not None:
            keys = whole_keys(keys, call.plan.columns, call.key_dtype)
            # These come first, then dq: their fp32 sums fit in dq's memory.
            q, keys = lax.optimization_barrier((q, keys._replace(dq=None)))
        outputs = {"dq": jax.ShapeDtypeStruct(q.shape, call.dq_dtype)}
        config, values = self._configs(q).dq, rows | {"q": q}
        return keys._replace(**self._over_queries(attention_dq, config, call, values, outputs))

    def delta_of(self, out: Array, dout: Array) -> Array:
        from pallas_kernels.triton.kernels.dq import attention_delta

        batch, length, heads, dim = out.shape
        values = dict(out=out, dout=dout, length=length, HEADS=heads, DIM=dim)
        outputs = {"delta": jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)}
        grid = -(-length // _DELTA.rows) * heads, batch
        return self.run(Call.of(attention_delta, values, outputs, grid, _DELTA))["delta"]

    def _over_queries(
        self,
        kernel: Any,
        config: Config,
        of: ForwardCall | BackwardCall,
        more: dict[str, Any],
        outputs: dict[str, jax.ShapeDtypeStruct],
    ) -> dict[str, Array]:
        work = of.plan.work.queries
        values = _values(of, work) | dict(run_first=work.run_first, run_last=work.run_last)
        values["RUNS"] = 0 if work.run_first is None else work.run_first.shape[2]
        grid = (work.items.shape[0] * (BLOCK // config.rows),)
        return self.run(Call.of(kernel, values | more, outputs, grid, config))

    def _block_gradients(self, of: BackwardCall, rows: dict[str, Any]) -> Pair:
        from pallas_kernels.triton.kernels.dkdv import attention_dkdv

        k, work, config = of.k, of.plan.work.keys, self._configs(of.q).dkdv
        items = work.items[_column_items(of) :]
        like = jax.ShapeDtypeStruct(k.shape, jnp.float32)
        values = _values(of, work) | rows
        values |= dict(items=items, first_entries=work.first, last_entries=work.last)
        outputs = {"dk": like, "dv": like}
        if work.heavy is None:
            values |= dict(dk_parts=None, dv_parts=None, parts_length=0, PARTS=0)
        else:
            in_parts = work.heavy.shape[-1] * PARTS * BLOCK
            like = jax.ShapeDtypeStruct((k.shape[0], in_parts, *k.shape[2:]), jnp.float32)
            outputs |= {"dk_parts": like, "dv_parts": like}
            values |= dict(parts_length=in_parts, PARTS=PARTS)
        grid = (items.shape[0] * (BLOCK // config.keys),)
        found = self.run(Call.of(attention_dkdv, values, outputs, grid, config))
        if work.heavy is None:
            return found["dk"], found["dv"]
        dk = join_parts(work.heavy, found["dk"], found["dk_parts"])
        return dk, join_parts(work.heavy, found["dv"], found["dv_parts"])

    def _column_gradients(self, of: BackwardCall, rows: dict[str, Any]) -> Pair:
        from pallas_kernels.triton.kernels.dkdv import attention_dkdv_columns

        config, count, work = self._configs(of.q).dkdv, _column_items(of), of.plan.work.keys
        values = _values(of, work) | rows | {"items": work.items[:count]}
        like = jax.ShapeDtypeStruct(values["k_columns"].shape, jnp.float32)
        grid = (count * (BLOCK // config.keys),)
        outputs = {"dk": like, "dv": like}
        found = self.run(Call.of(attention_dkdv_columns, values, outputs, grid, config))
        return found["dk"], found["dv"]

    def _configs(self, q: Array) -> Configs:
        capability = self.capability or device.capability()
        assert capability is not None  # checked by `unsupported`
        return table_for(capability)[q.shape[-1]]


def _values(of: ForwardCall | BackwardCall, work: QueryWork | KeyWork) -> dict[str, Any]:
    """Returns the kernels' arguments by name; each takes some."""
    columns = of.plan.columns
    k_columns, v_columns = of.column_kv or (None, None)
    values = dict(q=of.q, k=of.k, v=of.v, items=work.items, lists=work.lists)
    values |= dict(diagonal=work.diagonal, k_columns=k_columns, v_columns=v_columns)
    values |= dict(keep=None, tokens=None, query_blocks=None)
    if columns is not None:
        keep = lax.bitcast_convert_type(columns.keep, jnp.int32)
        values |= dict(keep=keep, tokens=columns.tokens, query_blocks=columns.query_blocks)
    scale, num_columns = float(of.scale), _count(columns)
    values |= dict(scale=scale, log2_scale=scale * LOG2E, num_columns=num_columns)
    values |= dict(query_length=of.q.shape[1], key_length=of.k.shape[1])
    values |= dict(capacity=work.lists.shape[-1], LISTED=work.listed, WINDOW=work.window or 0)
    values |= dict(HEADS=of.q.shape[2], KV_HEADS=of.k.shape[2], DIM=of.q.shape[3])
    return values | dict(HAS_TILES=of.plan.has_tiles, HAS_COLUMNS=columns is not None)


def _count(columns: Columns | None) -> int:
    return 0 if columns is None else columns.tokens.shape[-1]


def _column_items(of: BackwardCall) -> int:
    """Returns the number of column items; they are at the start of the list."""
    return of.q.shape[0] * of.q.shape[2] * _count(of.plan.columns) // COLUMN_TILE
