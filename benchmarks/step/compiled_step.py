"""The compiled training step of a configuration, for timing."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.config import Config
from mtraining_jax.models.transformer import Attention
from mtraining_jax.tools.plan.compiled import peak_bytes
from mtraining_jax.training.build import build_attention, build_layout, build_pattern
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Steps:
    """Results of several steps.

    Attributes:
        losses, norms: loss and gradient norm of each step.
        density, executed: means over layers, in the last step; None without attention.
        step_seconds: time of each step.
        seconds: median of the steps after the first.
        compile_seconds: time to trace and compile.
        peak_bytes: memory of one device, as the compiler reserves it; None if it does not say.
    """

    losses: list[float]
    norms: list[float]
    density: float | None
    executed: float | None
    step_seconds: list[float]
    seconds: float
    compile_seconds: float
    peak_bytes: int | None


class CompiledStep:
    """Compiles the training step of a configuration.

    Args:
        config: of the run.
        mesh: of its devices.
        batch: arrays by name; all batches have their shapes.
        attention: replaces the attention of the configuration, if given.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        batch: dict[str, Array],
        attention: Attention | None = None,
    ) -> None:
        layout, pattern = build_layout(config), build_pattern(config)
        if attention is None:
            attention = build_attention(config, mesh, layout, pattern)
        builder = StateBuilder(config, mesh)
        begin = time.perf_counter()
        step = make_train_step(config, builder, attention, mesh, AttentionInputs(pattern))
        self._compiled = step.lower(builder.abstract(), batch).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.peak_bytes = peak_bytes(self._compiled)

    def run(self, state: Any, batches: Sequence[dict[str, Array]]) -> Steps:
        """Takes a step per batch; donates `state`."""
        jax.block_until_ready(state)
        times, found = [], []
        for batch in batches:
            begin = time.perf_counter()
            state, metrics = self._compiled(state, batch)
            found.append(jax.device_get(metrics))  # waits
            times.append(time.perf_counter() - begin)
        layers = {name: float(np.mean(x)) for name, x in found[-1]["layers"].items()}
        return Steps(
            losses=[float(metrics["loss"]) for metrics in found],
            norms=[float(metrics["grad_norm"]) for metrics in found],
            density=layers.get("density"),
            executed=layers.get("executed"),
            step_seconds=times,
            seconds=statistics.median(times[1:] or times),
            compile_seconds=self.compile_seconds,
            peak_bytes=self.peak_bytes,
        )
