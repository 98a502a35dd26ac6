"""Causal and computed pairs of a planned run, from document lengths if they are known."""

import dataclasses

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.data.corpus import packs_of
from mtraining_jax.data.pack_report import PackReport, report_on
from mtraining_jax.data.sources import selected_source
from mtraining_jax.patterns.base import Settings
from mtraining_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Causal pairs of a sequence and the fraction of them that a step computes.

    Attributes:
        causal: causal pairs within documents over all causal pairs; 1 without documents.
        density: computed pairs over causal pairs within documents.
        why: explanation of `density`.
        source: explanation of `causal`; empty without documents.
        counted: whether the data source was opened to count.
    """

    causal: float
    density: float
    why: str
    source: str = ""
    counted: bool = False


def planned_pairs(config: Config) -> Pairs:
    """The pairs of a run, from document lengths if its source knows them without reading the data.

    Otherwise assumes one document per sequence, which is the upper bound.
    """
    settings = config.sparsity.settings
    density, why = settings.expected_density(config.data.seq_len)
    if not config.data.has_documents:
        return Pairs(1.0, density, why)
    if config.data.mode == "exact":
        return Pairs(1.0, density, why, 'one document per sequence: data.mode = "exact"')
    source = selected_source(config.data)
    if not source.has_lengths(config.data):
        unknown = f'data.source = "{config.data.source}" knows no lengths before it is read'
        return Pairs(1.0, density, why, _assumed(unknown))
    try:
        corpus = source.open(config.data, config.model.vocab_size)
        packs = packs_of(corpus, config.data, config.sparsity.block_size)
    except UserError as error:
        return Pairs(1.0, density, why, _assumed(str(error)))
    report = report_on(packs, config.data.seq_len, config.sparsity.block_size)
    # Patterns that select pairs keep short documents dense; replayed indices are cut instead.
    below = getattr(settings, "min_sparse_tokens", 0) if settings.selects and settings.sparse else 0
    causal, density, short = _shares(report, settings, below)
    if below:
        why = f"{why}; {short:.1%} of the pairs are in documents shorter than {below:,} tokens"
    seen = report.ends.size
    of = f"{seen:,} sequences" if seen == report.sequences else f"the first {seen:,} sequences"
    found = f"lengths of {report.lengths.size:,} documents in {of}"
    return Pairs(causal, density, why, found, counted=True)


def _shares(report: PackReport, settings: Settings, below: int) -> tuple[float, float, float]:
    """Pairs within documents over causal pairs; and of these, computed and in short documents."""
    padded, which = np.unique(report.padded, return_inverse=True)
    size = padded.astype(np.float64)
    pairs = np.bincount(which) * (size * (size + 1) / 2)
    expected = [settings.expected_density(tokens)[0] for tokens in padded.tolist()]
    density = (pairs * np.where(padded < below, 1.0, expected)).sum() / pairs.sum()
    total = report.ends.size * (report.seq_len * (report.seq_len + 1) / 2)
    return pairs.sum() / total, density, pairs[padded < below].sum() / pairs.sum()


def _assumed(reason: str) -> str:
    return (
        f"ASSUMED one document per sequence: {reason}; python -m mtraining_jax.cli.inspect_data "
        "counts them"
    )
