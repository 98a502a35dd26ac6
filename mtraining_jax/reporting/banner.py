"""The lines that a run prints at its start."""

from typing import Any

import jax
from jax.sharding import Mesh

from mtraining_jax.config import Config
from mtraining_jax.models.families.family import family_of
from mtraining_jax.models.spec import layer_windows, windows_text
from mtraining_jax.reporting import PAGE
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted, with_unit
from pallas_kernels import backends

_ANCHORS = {"mean": "mean time", "min": "fastest replica", "max": "slowest replica"}


def banner(
    config: Config,
    parameters: tuple[int, int],
    mesh: Mesh,
    data: str,
    validation: str | None = None,
) -> list[str]:
    """Summarizes a run in a few lines; `data` and `validation` describe data."""
    model, parallel, sparsity = config.model, config.parallel, config.sparsity
    total, trained = parameters
    trainable = "" if trained == total else f" ({trained / total:.1%} trainable)"
    start = f", from {model.init_from}" if model.init_from else ""
    device = mesh.devices.flat[0]
    shape = " x ".join(map(str, config.mesh_shape))
    parts = config.optimizer.accumulation_steps
    pattern, windows = sparsity.pattern.describe(), windows_text(model)
    if windows is not None:
        mixed = None in layer_windows(model)
        pattern = f"{pattern}, {windows}" if mixed else windows
    rows = {
        "model": f"{family_of(model.family).title} with {with_unit(total)} parameters{trainable}"
        f"{start}: {model.num_layers} layers, width {model.hidden_size},"
        f" {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim},"
        f" vocabulary {model.vocab_size:,}, {model.dtype}",
        "data": data,
        "validation": validation,
        "batch": f"{config.data.batch_size} x {config.data.seq_len:,} tokens per step"
        + (f" in {parts} micro-batches" if parts > 1 else ""),
        "mesh": f"{shape} (data x node x device) of"
        f" {counted(mesh.size, device.device_kind + ' device')}"
        f" in {counted(jax.process_count(), 'process')}"
        + (", parameters sharded" if parallel.fsdp else "")
        + _unused(config, jax.device_count()),
        "attention": f"{pattern}, blocks of {sparsity.block_size} tokens,"
        f" {parallel.layout}, {parallel.ring} ring",
        "tuned": None if sparsity.tune == "none" else _tuning(config),
        "dense": config.dense_steps.describe() if config.dense_steps.count() else None,
        "output": (config.run.bucket or str(config.run.folder))
        + (f", {PAGE} at the end" if config.metrics.report and config.metrics.jsonl else ""),
    }
    return [
        f"mtraining-jax: {config.run.name}, {counted(config.run.steps, 'step')}",
        *(f"  {name:<10} {text}" for name, text in rows.items() if text is not None),
        f"attention backend: {_backend(config)}",
    ]


def _unused(config: Config, available: int) -> str:
    if not (idle := available - config.devices):
        return ""
    parallel = config.parallel
    one_row = parallel.replicas == parallel.nodes == jax.process_count() == 1
    how = f"; parallel.devices_per_node = {available} uses all" if one_row else ""
    return f"; {idle} more {'is' if idle == 1 else 'are'} not used{how}"


def _tuning(config: Config) -> str:
    sparsity = config.sparsity
    text = (
        f"{', '.join(sparsity.pattern.overridable())} from {sparsity.tune_min:g} to "
        f"{sparsity.tune_max:g} per data-parallel replica, to match the {_ANCHORS[sparsity.tune]}"
    )
    if config.parallel.replicas == 1 or not config.data.has_documents:
        text += "; no effect, as all replicas have the same work"
    return text


def _backend(config: Config) -> str:
    model, block_size = config.model, config.sparsity.block_size
    q: Any = jax.ShapeDtypeStruct((1, block_size, model.num_heads, model.head_dim), model.dtype)
    asked = config.parallel.backend
    try:
        width = backends.kernel_width(asked, q, block_size)
        q = jax.ShapeDtypeStruct((*q.shape[:-1], width), q.dtype)
        name, reason = backends.describe(asked, q, block_size)
    except ValueError as error:
        raise UserError(f"parallel.backend = {asked} is not possible: {error}") from error
    if reason is None:
        reason = jax.devices()[0].device_kind if asked in (None, "auto") else "parallel.backend"
    elif jax.default_backend() == "cpu":
        reason = "no Hopper GPU"
    padded = f", heads padded from {model.head_dim} to {width}" if width != model.head_dim else ""
    return f"{name} ({reason}){padded}"
