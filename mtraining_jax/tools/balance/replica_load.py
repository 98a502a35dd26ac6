"""Predicts, balances and reports the attention work of data-parallel replicas."""

import functools
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from mtraining_jax.callbacks import Callback, Record
from mtraining_jax.config import Config
from mtraining_jax.data.balance import (
    Balance,
    Densities,
    length_classes,
    num_classes,
    sequence_cost,
)
from mtraining_jax.data.loader import Loader
from mtraining_jax.reporting.flops import step_flops
from mtraining_jax.selection.by_length import take_pairs_by_length
from mtraining_jax.selection.metrics import causal_pairs
from mtraining_jax.tools.plan.kernel_times import KERNEL_RATES, AttentionSize, matmul_rate, pack_ms
from mtraining_jax.tools.plan.pattern_costs import expected_density


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
    """Returns the expected density by length class before any measurement, float64 [K]."""
    settings, block = config.sparsity.pattern, config.sparsity.block_size
    shortest = 2 ** np.arange(num_classes(config.data.seq_len // block)) * block
    middle = np.minimum(3 * shortest // 2, config.data.seq_len)
    expected = np.array([expected_density(settings, tokens)[0] for tokens in middle.tolist()])
    longest = 2 * shortest - block
    # Shorter documents use dense attention.
    return np.where(longest < getattr(settings, "min_sparse_tokens", 0), 1.0, expected)


def replicas_differ(config: Config) -> bool:
    """Whether replicas have different work."""
    return config.data.has_documents and config.parallel.replicas > 1


def measures_by_length(config: Config) -> bool:
    """Whether each step counts computed pairs by document length."""
    return config.data.balance != "none" and replicas_differ(config)


def balance_of(config: Config) -> Balance | None:
    """Returns how the loader distributes sequences over replicas; None without balancing."""
    data = config.data
    if data.balance == "none":
        return None
    by_density = data.balance == "density" and replicas_differ(config)
    return Balance(
        name=data.balance,
        replicas=config.parallel.replicas,
        parts=config.optimizer.accumulation_steps,
        block_size=config.sparsity.block_size,
        cost=functools.partial(pack_ms, size=attention_size(config)),
        densities=Densities(assumed_densities(config)) if by_density else None,
    )


class ReplicaLoad(Callback):
    """Reports for each step how balanced the replicas were.

    Times are predictions of `cost_model.kernel_times` for H200s, on any hardware: replicas
    synchronize at the end of a step, so the time of a single one cannot be measured.
    """

    def __init__(self, config: Config, loader: Loader) -> None:
        self._config, self._loader = config, loader
        self._weigh = functools.partial(pack_ms, size=attention_size(config))
        self._assumed = assumed_densities(config)
        self._lengths: dict[int, list[np.ndarray]] = {}  # of unfinished steps, by sequence
        products = step_flops(config, density=0.0, executed=0.0).matrices
        rate = matmul_rate(config.model.hidden_size, config.ranks)
        self._rest_ms = 1e3 * products / (config.devices * rate)

    def batch(self, step: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes the loader's last batch; returns that of the step."""
        packs, sequences = self._loader.packs, self._loader.sequences
        assert packs is not None and sequences is not None  # there are documents and a batch
        lengths = [packs.pieces(sequence)[1] for sequence in sequences.tolist()]
        self._lengths[step] = lengths
        return batch

    def measured(self, metrics: MutableMapping[str, Any]) -> Record:
        """Passes the measurements of a step to the loader, and returns its imbalances.

        Removes pairs by length from `metrics`. Imbalances are _predicted from the densities known
        before the step; if pairs are counted by length, there are also those of the step's own
        densities, and density_by_length (None without documents).
        """
        step = int(metrics["step"])
        lengths = self._lengths.pop(step)
        known = self._loader.densities_before(step)
        if step in self._config.dense_steps:
            known = np.ones_like(self._assumed)
        times = self._times(lengths, self._assumed if known is None else known)
        record = self._imbalances(times, "_predicted")
        pairs = take_pairs_by_length(metrics["layers"])
        if pairs is not None:
            measured = self._densities(pairs, lengths)
            self._loader.measured(step, measured)
            record |= self._imbalances(self._times(lengths, np.nan_to_num(measured)), "")
            record["density_by_length"] = [x if np.isfinite(x) else None for x in measured.tolist()]
        return record

    def _densities(self, pairs: np.ndarray, lengths: list[np.ndarray]) -> np.ndarray:
        """Returns the measured density by class; NaN without documents."""
        data, block = self._config.data, self._config.sparsity.block_size
        every = np.concatenate(lengths)
        padded = -(-every // block) * block
        class_ids = length_classes(every, block)
        causal = np.bincount(class_ids, padded * (padded + 1.0) / 2, minlength=pairs.size)
        computed = pairs * data.batch_size * causal_pairs(data.seq_len)
        densities = np.divide(computed, causal, out=np.full(pairs.size, np.nan), where=causal > 0)
        return np.minimum(densities, 1.0)  # pair counts are rounded

    def _times(self, lengths: list[np.ndarray], densities: np.ndarray) -> np.ndarray:
        """Returns the attention milliseconds of each replica in a step, float64 [M]."""
        block = self._config.sparsity.block_size
        costs = [sequence_cost(row, densities, self._weigh, block) for row in lengths]
        return np.array(costs).reshape(self._config.parallel.replicas, -1).sum(1)

    def _imbalances(self, attention_ms: np.ndarray, suffix: str) -> Record:
        """Returns the times, and the imbalance (slowest over mean) of attention and full steps."""
        step_ms = attention_ms + self._rest_ms
        record: Record = {
            f"attention_imbalance{suffix}": float(attention_ms.max() / attention_ms.mean()),
            f"step_imbalance{suffix}": float(step_ms.max() / step_ms.mean()),
        }
        if self._config.model.head_dim in KERNEL_RATES:
            record["attention_ms_by_group"] = attention_ms.tolist()
        return record
