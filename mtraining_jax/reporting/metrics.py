"""What a step is measured by, and the files and services it is written to."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from mtraining_jax.config import Config, config_to_dict
from mtraining_jax.errors import UserError
from mtraining_jax.reporting.flops import peak_flops, step_flops

# JSONL for tools, TensorBoard and Weights & Biases for eyes: one record serves all.
Record = dict[str, Any]

JSONL_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"


# What every line and record of such a run says: no index was chosen.
REPLAYED = "replayed density, not chosen"


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
        """Asks devices of this process; None if they do not tell, as CPUs do not."""
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
    """One step in numbers that JSON knows.

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
        density (computed over causal pairs, mean over layers) and density_per_layer;
        skipped_steps (so far). A number that is not finite is None.

        With sparsity.kind = "replay", in place of the two densities: sparsity (`REPLAYED`),
        replayed_density and replayed_density_per_layer, and where the estimate runs as well
        estimated_density and estimated_density_per_layer, of the index that it chose and that
        was not computed.
    """
    tokens, devices = config.tokens_per_step, config.devices
    layers = {name: [float(x) for x in values] for name, values in metrics["layers"].items()}
    flops = step_flops(config, density=_mean(layers["density"]), executed=_mean(layers["executed"]))
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
        **_densities(layers, config),
        "skipped_steps": int(metrics["skipped"]),
    }
    return {name: _finite(value) for name, value in record.items()}


def density_of(record: Record) -> float | None:
    """The share of causal pairs that was computed, chosen or replayed; None if not finite."""
    return record["replayed_density"] if is_replayed(record) else record["density"]


def is_replayed(record: Record) -> bool:
    """Whether the pairs of this step were given beforehand, and not chosen."""
    return "replayed_density" in record


def _densities(layers: dict[str, list[float]], config: Config) -> Record:
    density = layers["density"]
    if config.sparsity.kind != "replay":
        return {"density": _mean(density), "density_per_layer": density}
    record = {
        "sparsity": REPLAYED,
        "replayed_density": _mean(density),
        "replayed_density_per_layer": density,
    }
    if "estimated_density" in layers:
        estimated = layers["estimated_density"]
        record["estimated_density"] = _mean(estimated)
        record["estimated_density_per_layer"] = estimated
    return record


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Writer(Protocol):
    """Where records go."""

    where: str

    def write(self, record: Record) -> None:
        """Takes the record of one step."""

    def close(self) -> None:
        """Brings all records to where they go."""


def open_writers(config: Config, last_step: int) -> list[Writer]:
    """The writers that the `metrics` section asks for, to be opened by one process only.

    Args:
        config: of the run.
        last_step: the step that the run goes on from: what was written about later ones, by a
            run that was cut off, is taken back.

    Raises:
        UserError: if wandb is asked for and not installed, or a file cannot be written.
    """
    folder, metrics = config.run.folder, config.metrics
    makers: list[Callable[[], Writer]] = []
    if metrics.wandb:  # first: it may be missing, and nothing is written yet
        makers.append(lambda: WandbWriter(config))
    if metrics.jsonl:
        makers.append(lambda: JsonlWriter(folder / JSONL_NAME, last_step))
    if metrics.tensorboard:
        makers.append(lambda: TensorBoardWriter(folder / TENSORBOARD_NAME, last_step))
    writers: list[Writer] = []
    try:
        for make in makers:
            writers.append(make())
    except BaseException as error:
        for writer in writers:
            writer.close()
        if isinstance(error, OSError):
            raise UserError(f"{folder}: metrics cannot be written: {error.strerror}") from error
        raise
    return writers


class JsonlWriter:
    """One JSON object a line; every line is on disk when `write` returns."""

    def __init__(self, path: Path, last_step: int) -> None:
        self.where = str(path)
        kept = _records_until(path, last_step)
        # Renamed into place: a run that is cut off here loses no line.
        new = path.with_suffix(".new")
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Writes one line."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """The records of a JSONL file; a last line that was cut off is left out."""
    return [json.loads(line) for line in _records_until(path, None)]


def _records_until(path: Path, last_step: int | None) -> list[str]:
    kept = []
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    step = json.loads(line)["step"]
                except (ValueError, KeyError, TypeError):
                    continue  # cut off in the middle of a line
                if last_step is None or step <= last_step:
                    kept.append(line)
    return kept


class TensorBoardWriter:
    """TensorBoard event files: one curve for each number, and one for each layer."""

    def __init__(self, folder: Path, last_step: int) -> None:
        # Not at the top: the import takes a while, and the writer may be switched off.
        from tensorboardX import SummaryWriter

        self.where = str(folder)
        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, record: Record) -> None:
        """Adds a point to each curve."""
        for name, value in record.items():
            values = value if isinstance(value, list) else [value]
            for layer, number in enumerate(values):
                tag = f"{name}/{layer:02d}" if isinstance(value, list) else f"train/{name}"
                if number is not None and not isinstance(number, str) and name != "step":
                    self._writer.add_scalar(tag, number, record["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WandbWriter:
    """Weights & Biases, in the project `mtraining-jax`, under the name of the run."""

    def __init__(self, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "metrics.wandb = true needs the package wandb, which is not installed; install "
                "the extra wandb (mtraining-jax[wandb]) or set metrics.wandb=false"
            ) from error
        self._run = wandb.init(
            project="mtraining-jax",
            name=config.run.name,
            dir=str(config.run.folder),
            config=config_to_dict(config),
            resume="allow",
            id=config.run.name,
        )
        self.where = f"Weights & Biases ({self._run.url or 'offline'})"

    def write(self, record: Record) -> None:
        """Sends the record."""
        self._run.log(record, step=record["step"])

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()
