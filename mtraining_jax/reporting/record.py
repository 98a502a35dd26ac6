"""One step in numbers: the record that every writer, line and summary is made from."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.reporting.flops import peak_flops, step_flops

# JSONL for tools, TensorBoard and Weights & Biases for eyes: one record serves all.
Record = dict[str, Any]

# The key of a density that was given beforehand, apart from that of one that was chosen.
_NOT_CHOSEN = "replayed_density"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of the device of this process that has most of them in use; by JAX's allocator.

    Attributes:
        in_use: now.
        peak: most at any time since the process started.
    """

    in_use: int
    peak: int

    @classmethod
    def now(cls, devices: Sequence[jax.Device]) -> "Memory | None":
        """Asks the devices of this process; None if they do not report it, as CPUs do not."""
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
    """One step in numbers that JSON can hold.

    Args:
        metrics: of the train step, read from the devices.
        seconds: wall-clock time of the step.
        config: of the run.
        device_kind: JAX's name of the devices, for the hardware's rate.
        memory: of this process's devices, if they tell.

    Returns:
        step, loss, grad_norm, lr; tokens (read so far), tokens_per_second, step_seconds;
        attention_flops_executed, attention_flops_dense_equivalent, flops_executed,
        flops_dense_equivalent, flops_model (of the step, all devices together, see `flops`);
        tflops_per_device_executed, tflops_per_device_dense_equivalent (10^12 FLOP/s of one
        device); mfu (model FLOP/s over the bf16 peak of the data sheet, None for devices that
        `flops` does not list); memory_bytes_in_use and memory_bytes_peak (None where unknown);
        density (computed over causal pairs, of all sequences together, mean over layers) and
        density_per_layer; with documents document_pairs, their causal pairs over those of whole
        sequences; each
        statistic of the pattern under its own name, mean over layers, and NAME_per_layer;
        skipped_steps (so far); of a sparse run's dense step dense_step, True. A number that is not
        finite is None.

        A pattern that does not choose has, in place of the two densities: sparsity (what it calls
        its density), replayed_density and replayed_density_per_layer.

    Raises:
        ValueError: if a statistic has the name of something else.
    """
    tokens, devices = config.tokens_per_step, config.devices
    layers = {name: [float(x) for x in values] for name, values in metrics["layers"].items()}
    if "document_pairs" in layers:
        # Of all pairs together: the mean of sequences whose documents differ is another number.
        for name, pairs in (("density", "computed_pairs"), ("executed", "executed_pairs")):
            both = zip(layers.pop(pairs), layers["document_pairs"], strict=True)
            layers[name] = [computed / there for computed, there in both]
    flops = step_flops(
        config, density=_mean(layers["density"]), executed=_mean(layers["executed"]),
        causal=_mean(layers.get("document_pairs", [1.0])),
    )  # fmt: skip
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
                    f"the pattern's statistic {name!r} must have another name: a record of a step "
                    f"has {', '.join(taken)} already"
                )
            record |= statistic
    return {name: _finite(value) for name, value in record.items()}


def held_out_record(sums: Mapping[str, tuple[np.ndarray, np.ndarray]], seconds: float) -> Record:
    """An evaluation on held-out text in numbers that JSON can hold; it joins the step's record.

    Args:
        sums: by name, `eval_loss` (with the run's own pattern) and `eval_loss_dense`: sums of
            losses in nats, and numbers of labels, [buckets] each (`position_buckets`).
        seconds: wall-clock time of the evaluation, which is no part of the step's.

    Returns:
        For each name the mean over all labels, and NAME_by_position, whose number k is the mean
        over labels at positions 2^k to 2^(k+1) - 1; eval_seconds. A number that is not finite is
        None.
    """
    record: Record = {}
    for name, (losses, labels) in sums.items():
        record[name] = float(losses.sum() / labels.sum())
        means = np.divide(losses, labels, out=np.full(len(labels), np.nan), where=labels > 0)
        record[f"{name}_by_position"] = means.tolist()
    return {key: _finite(value) for key, value in record.items()} | {"eval_seconds": seconds}


def held_out_text(record: Record) -> str | None:
    """The held-out losses of a record, `2.61, dense 2.58`; None if it has none."""
    names = {"eval_loss": "", "eval_loss_dense": "dense "}
    found = [f"{text}{_text(record[name])}" for name, text in names.items() if name in record]
    return ", ".join(found) or None


def imbalance_text(record: Record) -> str | None:
    """The busiest group's attention over the mean, `1.31`; None where groups do not differ."""
    if (measured := record.get("attention_imbalance")) is not None:
        return f"{measured:.2f}"
    predicted = record.get("attention_imbalance_predicted")
    return None if predicted is None else f"{predicted:.2f} (predicted)"


def tuned_text(record: Record) -> str | None:
    """The least and greatest share that a group kept, `tau 0.861 to 0.934`; None if not tuned."""
    if "tuned" not in record:
        return None
    shares = record["tuned_by_group"]
    text = f"{record['tuned']} {min(shares):.3f} to {max(shares):.3f}"
    if record["infeasible"]:
        text += f" (infeasible for {record['infeasible']:.0%} of groups)"
    return text


def density_of(record: Record) -> float | None:
    """The share of causal pairs that was computed, chosen or not; None if it is not finite."""
    return record[_NOT_CHOSEN] if _NOT_CHOSEN in record else record["density"]


def note_on_density(record: Record) -> str | None:
    """The pattern's remark on a density that was not chosen; None if it was chosen."""
    return record.get("sparsity")


def _densities(density: list[float], config: Config) -> Record:
    settings = config.sparsity.settings
    if settings.chooses:
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
