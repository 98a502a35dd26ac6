"""The lines that a run prints at its start."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from mtraining_jax.config import Config
from mtraining_jax.models.families import family_of
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted
from pallas_kernels import backends


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Number of all (`total`) and of trainable (`trained`) parameters."""

    total: int
    trained: int


def banner(
    config: Config, parameters: ParameterCount, mesh: Mesh, data: str, held_out: str | None = None
) -> list[str]:
    """Summarizes a run in a few lines; `data` and `held_out` describe its data."""
    model, parallel, sparsity = config.model, config.parallel, config.sparsity
    total, trained = parameters.total, parameters.trained
    share = "" if trained == total else f" ({trained / total:.1%} trainable)"
    start = f", from {model.init_from}" if model.init_from else ""
    device = mesh.devices.flat[0]
    processes = jax.process_count()
    shape = " x ".join(map(str, config.mesh_shape))
    ring = f"{parallel.ring} ring"
    batch = f"{config.data.batch_size} x {config.data.seq_len:,} tokens per step"
    parts = config.optimizer.accumulation_steps
    rows = [
        (
            "model",
            f"{family_of(model.family).title} with {_count(total)} parameters{share}{start}:"
            f" {model.num_layers} layers, width {model.hidden_size},"
            f" {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim},"
            f" vocabulary {model.vocab_size:,}, {model.dtype}",
        ),
        ("data", data),
        *([] if held_out is None else [("validation", held_out)]),
        ("batch", batch + (f" in {parts} micro-batches" if parts > 1 else "")),
        (
            "mesh",
            f"{shape} (data x node x device) of"
            f" {counted(mesh.size, device.device_kind + ' device')}"
            f" in {counted(processes, 'process')}"
            + (", parameters sharded" if parallel.fsdp else ""),
        ),
        (
            "attention",
            f"{sparsity.settings.describe()}, blocks of {sparsity.block_size} tokens,"
            f" {parallel.layout}, {ring}",
        ),
        *([] if sparsity.tune == "none" else [("tuned", _tuning(config))]),
        *([("dense", config.dense_steps.describe())] if config.dense_steps.count() else []),
        ("output", str(config.run.folder)),
    ]
    return [
        f"mtraining-jax: {config.run.name}, {counted(config.run.steps, 'step')}",
        *(f"  {name:<10} {text}" for name, text in rows),
        f"attention backend: {backend_line(config)}",
    ]


def _tuning(config: Config) -> str:
    sparsity = config.sparsity
    kept = sparsity.settings.kept_share()
    name = "" if kept is None else kept.name
    targets = {"mean": "mean time", "min": "fastest replica", "max": "slowest replica"}
    text = (
        f"{name} from {sparsity.tune_min:g} to {sparsity.tune_max:g} per data-parallel replica, to"
        f" match the {targets[sparsity.tune]}"
    )
    if config.parallel.replicas == 1 or not config.data.has_documents:
        text += "; no effect, as all replicas have the same work"
    return text


def backend_line(config: Config) -> str:
    """The attention backend in use, and why."""
    model, block_size = config.model, config.sparsity.block_size
    q: Any = jax.ShapeDtypeStruct((1, block_size, model.num_heads, model.head_dim), model.dtype)
    asked = config.parallel.backend
    try:
        name, reason = backends.describe(asked, q, block_size)
    except ValueError as error:
        raise UserError(f"parallel.backend = {asked} is not possible: {error}") from error
    if reason is None:
        because = jax.devices()[0].device_kind if asked in (None, "auto") else "parallel.backend"
        return f"{name} ({because})"
    return f"{name} ({'no Hopper GPU' if jax.default_backend() == 'cpu' else reason})"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
