"""Tunes the mass fraction of each data-parallel replica during a run (`sparsity.tune`)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from mtraining_jax.config import Config
from mtraining_jax.cost_model.kernel_times import KERNEL_RATES, pack_ms
from mtraining_jax.data.loader import Loader
from mtraining_jax.parallel.mesh import SHARES
from mtraining_jax.reporting.record import Record
from mtraining_jax.training.tuning.group_work import GroupWork, assumed_densities, attention_size
from mtraining_jax.training.tuning.share_response import GroupDocuments, ShareResponse
from mtraining_jax.training.tuning.tuned_shares import Bounds, TunedShares, tuned_shares
from mtraining_jax.utils.errors import UserError

# The fractions of a step are computed while the previous step runs, so measurements are available
# up to the step before that. A fixed delay makes the fractions identical on every process and run.
DELAY = 2


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """A step with pending measurements."""

    documents: list[GroupDocuments]
    tuned: TunedShares


class Tuner:
    """Adds mass fractions to each batch, and learns from the measurements of finished steps.

    It needs no communication: every process knows the documents of the global batch, and the
    densities of all replicas are among the metrics of a step. `work` is None if replicas have
    equal work.
    """

    def __init__(self, config: Config, loader: Loader, mesh: Mesh, work: GroupWork | None) -> None:
        sparsity = config.sparsity
        self._config, self._loader, self._work = config, loader, work
        self._sharding = NamedSharding(mesh, SHARES)
        kept = sparsity.settings.kept_share()
        assert kept is not None  # `validate` requires it for sparsity.tune
        self._kept = kept
        base = getattr(sparsity, self._kept.name)
        self._bounds = Bounds(base, sparsity.tune_min, sparsity.tune_max)
        self._size, self._assumed = attention_size(config), assumed_densities(config)
        start = ShareResponse.start(self._assumed.size, config.model.num_layers)
        # Estimates after each of the last steps.
        self._after, self._newest = {0: start}, 0
        self._under_way: dict[int, _UnderWay] = {}

    @staticmethod
    def of(config: Config, loader: Loader, mesh: Mesh, work: GroupWork | None) -> "Tuner | None":
        """Builds the tuner of a run; None without tuning."""
        return None if config.sparsity.tune == "none" else Tuner(config, loader, mesh, work)

    def add_to(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Adds `shares`, int32 [B, L], to the batch that the loader returned last."""
        step, groups = self._loader.handed_out, self._config.parallel.replicas
        documents = self._documents()
        tuned = tuned_shares(
            documents,
            self._known_before(step),
            self._assumed,
            self._bounds,
            self._config.sparsity.tune,
            self._size,
        )
        self._under_way[step] = _UnderWay(documents, tuned)
        rows = self._config.data.batch_size // groups
        units = np.rint(tuned.shares * (1 << self._kept.bits)).astype(np.int32)
        shares = np.repeat(units, rows, axis=0)
        return {
            **batch,
            "shares": jax.make_array_from_callback(
                shares.shape, self._sharding, lambda index: shares[index]
            ),
        }

    def finish(self, metrics: Mapping[str, Any]) -> Record:
        """Learns from a finished step, and returns what was tuned in it.

        Returns tuned (name of the fraction); tuned_by_group [M] and tuned_per_layer [L], mean
        fractions; infeasible, the fraction of replicas slower than the anchor even at the lower
        bound. If replicas differ, these replace values of `GroupWork`: both imbalances with the
        suffix _untuned (predicted at the configured fraction), _predicted (at the tuned fractions)
        and without suffix (from the measured densities), and attention_ms_by_group.
        """
        step = int(metrics["step"])
        own = self._under_way.pop(step)
        tuned, measured = own.tuned, np.asarray(metrics["density_by_group"], np.float64)
        before = self._after[self._newest]
        record = {
            "tuned": self._kept.name,
            "tuned_by_group": tuned.shares.mean(1).tolist(),
            "tuned_per_layer": tuned.shares.mean(0).tolist(),
            "infeasible": float(tuned.infeasible.mean()),
        }
        if self._work is not None:
            times = self._measured_ms(own.documents, before, measured)
            record |= self._work.imbalances(tuned.untuned_ms, "_untuned")
            record |= self._work.imbalances(tuned.tuned_ms, "_predicted")
            record |= self._work.imbalances(times, "")
            if self._config.model.head_dim in KERNEL_RATES:
                record["attention_ms_by_group"] = times.tolist()
        after = before.after(
            own.documents, self._assumed, tuned.shares, self._bounds.base, measured
        )
        self._after = {
            **{past: x for past, x in self._after.items() if past > step - DELAY - 1},
            step: after,
        }
        self._newest = step
        return record

    def state(self) -> dict[str, Any]:
        """Returns the estimates after the last steps, as a small JSON-serializable dict."""
        return {str(step): response.state() for step, response in self._after.items()}

    def go_to(self, step: int, state: dict[str, Any] | None) -> None:
        """Restores the result of `state` after `step`; None starts from scratch."""
        start = next(iter(self._after.values()))
        try:
            after = {int(at): x for at, x in (state or {}).items()}
        except (AttributeError, ValueError) as error:
            raise UserError("the checkpoint has no valid state of sparsity.tune") from error
        self._after = {at: start.of_state(x) for at, x in sorted(after.items())} or {step: start}
        self._newest = max(self._after)

    def _known_before(self, step: int) -> ShareResponse:
        return self._after[max(step - DELAY, min(self._after))]

    def _documents(self) -> list[GroupDocuments]:
        """Returns the documents of each replica in the batch that was returned last."""
        config, loader = self._config, self._loader
        packs, sequences = loader.packs, loader.sequences
        if packs is None or sequences is None:
            # Every sequence is one document with sparse attention.
            rows = [np.array([config.data.seq_len])] * config.data.batch_size
            min_sparse_tokens = 0
        else:
            rows = [packs.pieces(sequence)[1] for sequence in sequences.tolist()]
            min_sparse_tokens = getattr(config.sparsity.settings, "min_sparse_tokens", 0)
        groups = config.parallel.replicas
        each = len(rows) // groups
        return [
            GroupDocuments(
                rows[m * each : (m + 1) * each], config.sparsity.block_size, min_sparse_tokens
            )
            for m in range(groups)
        ]

    def _measured_ms(
        self, documents: list[GroupDocuments], response: ShareResponse, measured: np.ndarray
    ) -> np.ndarray:
        """Attention times [M] from densities [M, L] of replicas, with expected document ratios."""
        known = response.densities(self._assumed)
        chosen = response.chosen(documents, measured).mean(1)
        times = []
        for own, density in zip(documents, chosen, strict=True):
            factor = 1.0
            if np.isfinite(density):
                factor = density * own.chosen_weight / own.chosen_density(known)
            times.append(pack_ms(own.lengths, own.densities(known, factor), self._size))
        return np.array(times)
