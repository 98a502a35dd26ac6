"""Tunes the mass fraction of each data-parallel replica during a run (`sparsity.tune`)."""

import itertools
from collections.abc import Mapping, MutableMapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mtraining_jax.callbacks import Record
from mtraining_jax.config import Config
from mtraining_jax.data.loader import Loader
from mtraining_jax.parallel.mesh import OVERRIDES
from mtraining_jax.tools.balance.density_response import (
    DensityResponse,
    ReplicaDocuments,
    sparse_densities,
)
from mtraining_jax.tools.balance.mass_fractions import FractionTuning, TunedFractions
from mtraining_jax.tools.balance.replica_load import ReplicaLoad, attention_size
from mtraining_jax.utils.errors import UserError

# The fractions of a step are computed while the previous step runs, so measurements are available
# up to the step before that. A fixed delay makes the fractions identical on every process and run.
DELAY = 2


class Tuner(ReplicaLoad):
    """Adds mass fractions to each batch, and learns from the measurements of finished steps.

    It needs no communication: every process knows the documents of the global batch, and the
    densities of all replicas are among the metrics of a step.
    """

    key = "sparsity.tune"

    def __init__(self, config: Config, loader: Loader, mesh: Mesh) -> None:
        super().__init__(config, loader)
        sparsity = config.sparsity
        # `validate` requires one for sparsity.tune.
        ((self._option, self._bits),) = sparsity.pattern.overridable().items()
        self._sharding = NamedSharding(mesh, OVERRIDES)
        self._tuning = FractionTuning(
            sparsity.tune_min, sparsity.tune_max, sparsity.tune, attention_size(config)
        )
        base = getattr(sparsity.pattern, self._option)
        start = DensityResponse.start(self._assumed, base, config.model.num_layers)
        self._after = {0: start}  # estimates after each of the last steps
        self._unfinished: dict[int, tuple[list[ReplicaDocuments], TunedFractions]] = {}

    def batch(self, step: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds `overrides` of the tuned option, int32 [B, L], to the loader's last batch."""
        super().batch(step, batch)
        config = self._config
        shortest = getattr(config.sparsity.pattern, "min_sparse_tokens", 0)
        each = config.data.batch_size // config.parallel.replicas
        documents = [
            ReplicaDocuments(lengths, config.sparsity.block_size, shortest)
            for lengths in itertools.batched(self._lengths[step], each)
        ]
        tuned = self._tuning.tune(documents, self._after[max(step - DELAY, min(self._after))])
        self._unfinished[step] = documents, tuned
        units = np.rint(tuned.fractions * (1 << self._bits)).astype(np.int32)
        units = np.repeat(units, each, axis=0)
        array = jax.make_array_from_callback(units.shape, self._sharding, units.__getitem__)
        return {**batch, "overrides": {self._option: array}}

    def measured(self, metrics: MutableMapping[str, Any]) -> Record:
        """Learns from a finished step, and returns what was tuned in it.

        Imbalances are _untuned (predicted at the configured fraction), _predicted (at the tuned
        ones) and without suffix (from measured densities).
        """
        step = int(metrics["step"])
        documents, tuned = self._unfinished.pop(step)
        measured = np.asarray(metrics["density_by_group"], np.float64)
        before = self._after[max(self._after)]
        recent = {past: x for past, x in self._after.items() if past >= step - DELAY}
        self._after = {**recent, step: before.after(documents, tuned.fractions, measured)}
        return {
            **super().measured(metrics),
            "tuned": self._option,
            "tuned_by_group": tuned.fractions.mean(1).tolist(),
            "tuned_per_layer": tuned.fractions.mean(0).tolist(),
            "infeasible": float(tuned.infeasible.mean()),
            **self._imbalances(tuned.untuned_ms, "_untuned"),
            **self._imbalances(tuned.tuned_ms, "_predicted"),
            **self._imbalances(self._measured_ms(documents, before, measured), ""),
        }

    def save(self) -> dict[str, Any]:
        return {str(step): response.state() for step, response in self._after.items()}

    def restore(self, step: int, saved: dict[str, Any] | None) -> None:
        start = next(iter(self._after.values()))
        try:
            after = {int(at): x for at, x in (saved or {}).items()}
        except (AttributeError, ValueError) as error:
            raise UserError("the checkpoint has no valid state of sparsity.tune") from error
        self._after = {at: start.with_state(x) for at, x in after.items()} or {step: start}

    def _measured_ms(
        self, documents: list[ReplicaDocuments], response: DensityResponse, measured: np.ndarray
    ) -> np.ndarray:
        """Attention times [M] from densities [M, L] of replicas, with expected document ratios."""
        computed = sparse_densities(documents, measured).mean(1)
        times = []
        for own, density in zip(documents, computed, strict=True):
            factor = 1.0
            if np.isfinite(density):
                expected = own.class_weights(response.densities).sum()
                factor = density * own.sparse_weight / expected
            times.append(self._tuning.ms(own, response, factor))
        return np.array(times)
