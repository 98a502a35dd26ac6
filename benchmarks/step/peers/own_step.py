"""Steps of this library."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.report import versions
from benchmarks.step.compiled_step import CompiledStep
from benchmarks.step.peers.arms import (
    CHUNK,
    CLIP_NORM,
    INIT_STDDEV,
    LEARNING_RATE,
    RMS_NORM_EPS,
    ROPE_THETA,
    Sizes,
    density_at,
    on_cpu,
)
from mtraining_jax.config import Config
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.state import StateBuilder


def make_config(sizes: Sizes, tokens: int, variant: str) -> Config:
    """The configuration of a run on one device."""
    sparsity: dict[str, Any] = {"kind": "dense"}
    if variant == "sparse":
        sparsity = {"kind": "benchmarks.replay:Replay", "replay_of": "sampled_rows"}
        sparsity |= {"replay_density": density_at(tokens), "block_size": min(128, tokens // 16)}
    model = dataclasses.asdict(sizes) | {
        "max_position_embeddings": tokens, "rope_theta": ROPE_THETA, "rms_norm_eps": RMS_NORM_EPS,
        "initializer_range": INIT_STDDEV, "tie_word_embeddings": True,
    }  # fmt: skip
    cpu = {"cpu_devices": jax.device_count()} if on_cpu() else {}
    return Config.from_dict({
        "run": {"steps": 100},
        "model": model,
        "sparsity": sparsity,
        "parallel": {"devices_per_node": 1} | cpu,
        "data": {"source": "synthetic", "seq_len": tokens, "batch_size": 1},
        "loss": {"chunk_size": CHUNK},
        "optimizer": {"lr": LEARNING_RATE, "clip_norm": CLIP_NORM},
    })  # fmt: skip


class Step:
    """The trainer's compiled step, `dense` or `sparse`."""

    def __init__(self, sizes: Sizes, tokens: int, variant: str) -> None:
        if jax.default_backend() != "gpu" and not on_cpu():
            raise ImportError("JAX sees no GPU")
        config = make_config(sizes, tokens, variant)
        mesh = build_mesh(config)
        ids = sizes.tokens(tokens)
        labels = np.roll(ids, -1, axis=1)
        labels[:, -1] = IGNORE_LABEL
        place = NamedSharding(mesh, TOKENS)
        self.batch = jax.device_put({"tokens": ids, "labels": labels}, place)
        self.builder = StateBuilder(config, mesh)
        self.step = CompiledStep(config, mesh, self.batch)

    def load(self) -> dict[str, Any]:
        self.state = jax.block_until_ready(self.builder.fresh())
        device = jax.devices()[0].device_kind
        return {"device": device, "versions": versions("jax", "jaxlib", "flax", "optax")}

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Takes steps; returns their losses and seconds. Donates the state: call it once."""
        found = self.step.run(self.state, [self.batch] * steps)
        self.found = found
        return found.losses, found.step_seconds

    def peak(self) -> int | None:
        """Bytes of a step, as the compiler reserves them."""
        return self.step.peak_bytes

    def density(self) -> float | None:
        return self.found.density
