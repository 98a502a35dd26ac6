"""The record of a step: the metrics that are written, printed and summarized."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.cost_model.flops import peak_flops, step_flops

Record = dict[str, Any]

# Key of the density of a pattern that does not select pairs.
_NOT_CHOSEN = "replayed_density"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes in JAX's allocator, maximum over local devices: `in_use` now, `peak` since startup."""

    in_use: int
    peak: int

    @classmethod
    def now(
        cls,
        devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    ) -> "Memory | None":
        """Queries local devices; None if they do not report it (CPUs)."""
        stats = [device.memory_stats() for device in devices]
        if not stats or not all(stats):
            return None
        return cls(
            in_use=max(x["bytes_in_use"] for x in stats),
            peak=max(x["peak_bytes_in_use"] for x in stats),
        )


def step_record(
    metrics: dict[str, Any],
    seconds: float,
    config: Config,
    *,
    device_kind: str = "",
    memory: Memory | None = None,
) -> Record:
    """JSON-serializable metrics of one step; non-finite values become None.

    Args:
        metrics: from the train step, on the host.
        seconds: wall-clock time of the step.
        device_kind: JAX device kind, for the peak rate.
        memory: memory of local devices, if known.

    Returns:
        - step, loss, grad_norm, lr, skipped_steps (so far), tokens (so far), tokens_per_second,
          step_seconds; dense_step = True in dense steps of a sparse run.
        - attention_flops_executed, attention_flops_dense_equivalent, flops_executed,
          flops_dense_equivalent, flops_model: FLOP of the step on all devices, see `flops`.
        - tflops_per_device_executed, tflops_per_device_dense_equivalent: 10^12 FLOP/s per device.
        - mfu: model FLOP/s over the bf16 peak; None for devices not listed in `flops`.
        - memory_bytes_in_use, memory_bytes_peak: None if unknown.
        - density, density_per_layer: computed pairs over causal pairs of all sequences. Patterns
          that do not select pairs have instead sparsity (the pattern's name for its density),
          replayed_density and replayed_density_per_layer.
        - document_pairs, with documents: causal pairs within documents over all causal pairs.
        - Each statistic NAME of the pattern, mean over layers, and NAME_per_layer.
    """
    tokens, devices = config.tokens_per_step, config.devices
    layers = {name: [float(x) for x in values] for name, values in metrics["layers"].items()}
    if "document_pairs" in layers:
        # A ratio of sums, since sequences with different documents have different weights.
        for name, pairs in (("density", "computed_pairs"), ("executed", "executed_pairs")):
            both = zip(layers.pop(pairs), layers["document_pairs"], strict=True)
            layers[name] = [computed / there for computed, there in both]
    flops = step_flops(
        config,
        density=_mean(layers["density"]),
        executed=_mean(layers["executed"]),
        causal=_mean(layers.get("document_pairs", [1.0])),
    )
    peak = peak_flops(device_kind)
    record = {
        "step": int(metrics["step"]),
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "lr": float(metrics["lr"]),
        "tokens": int(metrics["step"]) * tokens,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "attention_flops_executed": flops.attention_executed,
        "attention_flops_dense_equivalent": flops.attention_dense,
        "flops_executed": flops.executed,
        "flops_dense_equivalent": flops.dense_equivalent,
        "flops_model": flops.model,
        "tflops_per_device_executed": flops.executed / seconds / devices / 1e12,
        "tflops_per_device_dense_equivalent": flops.dense_equivalent / seconds / devices / 1e12,
        "mfu": None if peak is None else flops.model / seconds / devices / peak,
        "memory_bytes_in_use": None if memory is None else memory.in_use,
        "memory_bytes_peak": None if memory is None else memory.peak,
        **_densities(layers["density"], config),
        "skipped_steps": int(metrics["skipped"]),
    }
    if record["step"] in config.dense_steps:
        record["dense_step"] = True
    for name, values in layers.items():
        if name not in ("density", "executed"):
            statistic = _by_layer(name, values)
            if taken := sorted(statistic.keys() & record.keys()):
                raise ValueError(
                    f"the pattern's statistic {name!r} must be renamed: the record of a step "
                    f"already has {', '.join(taken)}"
                )
            record |= statistic
    return {name: _finite(value) for name, value in record.items()}


def held_out_record(sums: Mapping[str, tuple[np.ndarray, np.ndarray]], seconds: float) -> Record:
    """JSON-serializable metrics of an evaluation, merged into the step's record.

    Args:
        sums: by name, `eval_loss` (sparse attention) and `eval_loss_dense`: sums of losses in nats
            and numbers of labels, [buckets] each (`position_buckets`).
        seconds: wall-clock time of the evaluation, not included in step_seconds.

    Returns:
        For each NAME the mean over all labels, and NAME_by_position: entry k is the mean over
        positions 2^k to 2^(k+1) - 1; eval_seconds. None replaces non-finite values.
    """
    record: Record = {}
    for name, (losses, labels) in sums.items():
        record[name] = float(losses.sum() / labels.sum())
        means = np.divide(losses, labels, out=np.full(len(labels), np.nan), where=labels > 0)
        record[f"{name}_by_position"] = means.tolist()
    return {key: _finite(value) for key, value in record.items()} | {"eval_seconds": seconds}


def held_out_text(record: Record) -> str | None:
    """Validation losses of a record, e.g. `2.61, dense 2.58`, if any."""
    names = {"eval_loss": "", "eval_loss_dense": "dense "}
    found = [f"{text}{_text(record[name])}" for name, text in names.items() if name in record]
    return ", ".join(found) or None


def imbalance_text(record: Record) -> str | None:
    """Attention work of the slowest replica over the mean, e.g. `1.31`, if replicas differ."""
    if (measured := record.get("attention_imbalance")) is not None:
        return f"{measured:.2f}"
    predicted = record.get("attention_imbalance_predicted")
    return None if predicted is None else f"{predicted:.2f} (predicted)"


def tuned_text(record: Record) -> str | None:
    """Range of tuned mass fractions, e.g. `tau 0.861 to 0.934`, if tuned."""
    if "tuned" not in record:
        return None
    shares = record["tuned_by_group"]
    text = f"{record['tuned']} {min(shares):.3f} to {max(shares):.3f}"
    if record["infeasible"]:
        text += f" (infeasible for {record['infeasible']:.0%} of replicas)"
    return text


def density_of(record: Record) -> float | None:
    """Computed pairs over causal pairs, selected or replayed; None if not finite."""
    return record[_NOT_CHOSEN] if _NOT_CHOSEN in record else record["density"]


def note_on_density(record: Record) -> str | None:
    """Note on the density of a pattern that does not select pairs; otherwise None."""
    return record.get("sparsity")


def _densities(density: list[float], config: Config) -> Record:
    settings = config.sparsity.settings
    if settings.selects:
        return _by_layer("density", density)
    return {"sparsity": settings.density_name, **_by_layer(_NOT_CHOSEN, density)}


def _by_layer(name: str, values: list[float]) -> Record:
    return {name: _mean(values), f"{name}_per_layer": values}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
