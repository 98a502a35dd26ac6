"""Measures and balances the work of data-parallel replicas (mesh axis 'data')."""

import functools
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.cost_model.flops import step_flops
from mtraining_jax.cost_model.kernel_times import KERNEL_RATES, AttentionSize, matmul_rate, pack_ms
from mtraining_jax.data.balance import Balance, Weigh, imbalance, weight
from mtraining_jax.data.densities import Densities, length_classes, num_classes
from mtraining_jax.data.loader import Loader
from mtraining_jax.reporting.record import Record
from mtraining_jax.selection.by_length import take_pairs_by_length
from mtraining_jax.selection.metrics import causal_pairs


def attention_size(config: Config) -> AttentionSize:
    """Returns what the attention time of a replica depends on, except document lengths."""
    model = config.model
    return AttentionSize(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        ranks=config.ranks,
        block_size=config.sparsity.block_size,
        passes=2 if model.remat == "full" else 1,
    )


def assumed_densities(config: Config) -> np.ndarray:
    """Returns the expected density by length class, before any measurement: float64 [K].

    Documents shorter than `min_sparse_tokens` use dense attention and have density 1.
    """
    settings, block = config.sparsity.settings, config.sparsity.block_size
    blocks = 2 ** np.arange(num_classes(config.data.seq_len // block))  # of the shortest
    middle = np.minimum(3 * blocks * block // 2, config.data.seq_len)
    found = np.array([settings.expected_density(tokens)[0] for tokens in middle.tolist()])
    longest = (2 * blocks - 1) * block
    return np.where(longest < getattr(settings, "min_sparse_tokens", 0), 1.0, found)


def balance_of(config: Config) -> Balance | None:
    """Returns how the loader distributes sequences over replicas; None without balancing."""
    data = config.data
    if data.balance == "none":
        return None
    return Balance(
        name=data.balance,
        groups=config.parallel.replicas,
        parts=config.optimizer.accumulation_steps,
        block_size=config.sparsity.block_size,
        weigh=_weigh(config),
        densities=Densities(assumed_densities(config)) if _by_density(config) else None,
    )


def measures_by_length(config: Config) -> bool:
    """Whether each step counts computed pairs by document length."""
    return config.data.balance != "none" and _groups_differ(config)


def _groups_differ(config: Config) -> bool:
    return config.data.has_documents and config.parallel.replicas > 1


def _by_density(config: Config) -> bool:
    return config.data.balance == "density" and _groups_differ(config)


def _weigh(config: Config) -> Weigh:
    return functools.partial(pack_ms, size=attention_size(config))


class GroupWork:
    """Reports for each step how balanced the replicas were.

    Times are predictions of `cost_model.kernel_times` for H200s, on any hardware: replicas
    synchronize at the end of a step, so the time of a single one cannot be measured.
    """

    def __init__(self, config: Config, loader: Loader) -> None:
        self._config, self._loader = config, loader
        self._weigh, self._assumed = _weigh(config), assumed_densities(config)
        self._under_way: dict[int, list[np.ndarray]] = {}
        products = step_flops(config, density=0.0, executed=0.0).matrices
        rate = matmul_rate(config.model.hidden_size, config.ranks)
        self._rest_ms = 1e3 * products / (config.devices * rate)

    @staticmethod
    def of(config: Config, loader: Loader) -> "GroupWork | None":
        """Builds it for a run; None if all replicas have equal work."""
        return GroupWork(config, loader) if _groups_differ(config) else None

    def begin(self) -> None:
        """Records the batch that the loader returned last."""
        packs, sequences = self._loader.packs, self._loader.sequences
        assert packs is not None and sequences is not None  # there are documents and a batch
        lengths = [packs.pieces(sequence)[1] for sequence in sequences.tolist()]
        self._under_way[self._loader.handed_out] = lengths

    def finish(self, metrics: MutableMapping[str, Any]) -> Record:
        """Passes the measurements of a step to the loader, and returns its imbalances.

        Removes pairs by length from `metrics`. Returns attention_imbalance_predicted and
        step_imbalance_predicted, the slowest replica over the mean, from the densities known before
        the step. If pairs are counted by length, also attention_imbalance and step_imbalance from
        the densities of the step itself, and density_by_length (None without documents).
        Includes attention_ms_by_group if rates for the model's head width are known.
        """
        step = int(metrics["step"])
        lengths = self._under_way.pop(step)
        known = self._loader.densities_before(step)
        if step in self._config.dense_steps:
            known = np.ones_like(self._assumed)
        times = self._times(lengths, self._assumed if known is None else known)
        record = self.imbalances(times, "_predicted")
        pairs = take_pairs_by_length(metrics["layers"])
        if pairs is not None:
            measured = self._densities(pairs, lengths)
            self._loader.measured(step, measured)
            found = np.isfinite(measured)
            times = self._times(lengths, np.where(found, measured, 0.0))
            record |= self.imbalances(times, "")
            record["density_by_length"] = [
                float(x) if seen else None for x, seen in zip(measured, found, strict=True)
            ]
        if self._config.model.head_dim in KERNEL_RATES:
            record["attention_ms_by_group"] = times.tolist()
        return record

    def _densities(self, pairs: np.ndarray, lengths: list[np.ndarray]) -> np.ndarray:
        """Measured density by class; NaN without documents."""
        data, block = self._config.data, self._config.sparsity.block_size
        every = np.concatenate(lengths)
        padded = -(-every // block) * block
        of_class = length_classes(every, block)
        causal = np.bincount(of_class, padded * (padded + 1.0) / 2, minlength=pairs.size)
        computed = pairs * data.batch_size * causal_pairs(data.seq_len)
        found = np.divide(computed, causal, out=np.full(pairs.size, np.nan), where=causal > 0)
        return np.minimum(found, 1.0)  # pair counts are rounded

    def _times(self, lengths: list[np.ndarray], densities: np.ndarray) -> np.ndarray:
        """Attention milliseconds of each replica in a step, float64 [M]."""
        block = self._config.sparsity.block_size
        each = np.array([weight(own, densities, self._weigh, block) for own in lengths])
        return each.reshape(self._config.parallel.replicas, -1).sum(1)

    def imbalances(self, times: np.ndarray, suffix: str) -> Record:
        """Returns the imbalance (slowest over mean) of attention and of full steps."""
        groups = times.size
        whole = times + self._rest_ms
        return {
            f"attention_imbalance{suffix}": imbalance(times, groups),
            f"step_imbalance{suffix}": imbalance(whole, groups),
        }
