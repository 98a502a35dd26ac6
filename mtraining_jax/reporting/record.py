"""The record of a step: the metrics that are written, printed and summarized."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtraining_jax.callbacks import Record
from mtraining_jax.config import Config
from mtraining_jax.reporting.flops import PEAK_BF16_FLOPS, step_flops
from mtraining_jax.utils.errors import UserError

# Tokens per second: of all positions, of real tokens without padding, and of trained ones.
SPEEDS = "tokens_per_second", "real_tokens_per_second", "labels_per_second"
# Key of the density of a pattern that does not select pairs.
_REPLAYED = "replayed_density"


def step_record(
    metrics: dict[str, Any], seconds: float, config: Config, devices: Sequence[Any]
) -> Record:
    """JSON-serializable metrics of one step, as in docs/metrics.md; non-finite values become None.

    `metrics` come from the train step, on the host; `seconds` is the wall-clock time of the step;
    memory is the maximum over local `devices`. Patterns that do not select pairs have, instead of
    density, sparsity (the pattern's name for it), replayed_density and replayed_density_per_layer.
    Each other statistic NAME of the pattern is the mean over layers, next to NAME_per_layer.
    """
    layers = {name: [float(x) for x in values] for name, values in metrics["layers"].items()}
    if "document_pairs" in layers:
        # A ratio of sums, since sequences with different documents have different weights.
        for name, pairs in (("density", "computed_pairs"), ("executed", "executed_pairs")):
            both = zip(layers.pop(pairs), layers["document_pairs"], strict=True)
            layers[name] = [computed / causal for computed, causal in both]
    density = layers.pop("density")
    flops = step_flops(
        config,
        density=_mean(density),
        executed=_mean(layers.pop("executed")),
        causal=_mean(layers.get("document_pairs", [1.0])),
    )
    step, tokens = int(metrics["step"]), config.tokens_per_step
    labels, real_tokens = int(metrics["labels"]), int(metrics["real_tokens"])
    device_seconds = seconds * config.devices
    peak = PEAK_BF16_FLOPS.get(devices[0].device_kind)
    memory = [device.memory_stats() for device in devices]  # None on CPUs
    settings = config.sparsity.pattern
    record = {
        "step": step,
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "lr": float(metrics["lr"]),
        "labels": labels,
        "real_tokens": real_tokens,
        "tokens": step * tokens,
        "tokens_per_second": tokens / seconds,
        "real_tokens_per_second": real_tokens / seconds,
        "labels_per_second": labels / seconds,
        "step_seconds": seconds,
        "attention_flops_executed": flops.attention_executed,
        "attention_flops_dense_equivalent": flops.attention_dense,
        "flops_executed": flops.executed,
        "flops_dense_equivalent": flops.dense_equivalent,
        "flops_model": flops.model,
        "tflops_per_device_executed": flops.executed / device_seconds / 1e12,
        "tflops_per_device_dense_equivalent": flops.dense_equivalent / device_seconds / 1e12,
        "mfu": None if peak is None else flops.model / device_seconds / peak,
        "memory_bytes_in_use": max(x["bytes_in_use"] for x in memory) if all(memory) else None,
        "memory_bytes_peak": max(x["peak_bytes_in_use"] for x in memory) if all(memory) else None,
        **({} if settings.selects else {"sparsity": settings.density_name}),
        **_by_layer("density" if settings.selects else _REPLAYED, density),
        "skipped_steps": int(metrics["skipped"]),
    }
    if "auxiliary_loss" in metrics:
        record["auxiliary_loss"] = float(metrics["auxiliary_loss"])
    terms = {name: float(x) for name, x in metrics.get("loss_terms", {}).items()}
    if taken := sorted(terms.keys() & record.keys()):
        raise UserError(
            f"a callback adds a term {taken[0]!r} to the loss, but the record of a step already "
            "has that: give it another name"
        )
    record |= terms
    if step in config.dense_steps:
        record["dense_step"] = True
    for name, values in layers.items():
        statistic = _by_layer(name, values)
        if taken := sorted(statistic.keys() & record.keys()):
            raise UserError(
                f"the pattern's statistic {name!r} must be renamed: the record of a step "
                f"already has {', '.join(taken)}"
            )
        record |= statistic
    return {name: _finite(value) for name, value in record.items()}


def validation_record(sums: Mapping[str, tuple[np.ndarray, np.ndarray]], seconds: float) -> Record:
    """JSON-serializable metrics of an evaluation, merged into the step's record.

    `sums` are sums of losses in nats and numbers of labels by bucket of positions, by NAME:
    eval_loss, eval_loss_dense, and these with /PART for each part of a mixture. Entry k of
    NAME_by_position is the mean over positions 2^k to 2^(k+1) - 1. Non-finite values become None.
    """
    record: Record = {}
    for name, (losses, labels) in sums.items():
        total, *means = _means(np.append(losses.sum(), losses), np.append(labels.sum(), labels))
        record |= {name: total, f"{name}_by_position": means}
    return {key: _finite(value) for key, value in record.items()} | {"eval_seconds": seconds}


def _means(losses: np.ndarray, labels: np.ndarray) -> list[float]:
    return np.divide(losses, labels, out=np.full(len(labels), np.nan), where=labels > 0).tolist()


def validation_text(record: Record) -> str | None:
    """Validation losses of a record, e.g. `2.61, dense 2.58`, if any."""
    texts = []
    for name, text in {"eval_loss": "", "eval_loss_dense": "dense "}.items():
        if name in record:
            texts.append(text + number(record[name], ".4f"))
        for part in sorted(x for x in record if x.startswith(f"{name}/")):
            if not part.endswith("_by_position"):
                texts.append(f"{text}{part.partition('/')[2]} {number(record[part], '.4f')}")
    return ", ".join(texts) or None


def density_of(record: Record) -> float | None:
    """Computed pairs over causal pairs, selected or replayed; None if not finite."""
    return record[_REPLAYED] if _REPLAYED in record else record["density"]


def speed_text(all_tokens: float, real: float, trained: float) -> str:
    """Tokens per second: of all positions, and if they differ by 1 % real and trained tokens."""
    text = f"{all_tokens:,.0f} tokens/s"
    return (
        text
        if trained > 0.99 * all_tokens
        else f"{text} ({real:,.0f} real, {trained:,.0f} trained)"
    )


def note_on_density(record: Record) -> str | None:
    """Note on the density of a pattern that does not select pairs; otherwise None."""
    return record.get("sparsity")


def number(value: float | None, form: str) -> str:
    """A number of a record as text."""
    return "not finite" if value is None else format(value, form)


def rate(tflops: float) -> str:
    """Three significant digits: 412, 41.2, 4.12, 0.412."""
    return format(tflops, ".0f" if tflops >= 100 else ".3g")


def _by_layer(name: str, values: list[float]) -> Record:
    measured = [x for x in values if not math.isnan(x)]  # not in layers with a window
    return {name: _mean(measured or values), f"{name}_per_layer": values}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
