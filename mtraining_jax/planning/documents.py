"""What documents leave of the causal pairs, as far as a plan can know."""

import dataclasses

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.data.corpus import packs_of
from mtraining_jax.data.pack_report import PackReport, report_on
from mtraining_jax.data.sources import selected_source
from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.pattern import Settings


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The causal pairs of a sequence, and how many of them a step is taken to compute.

    Attributes:
        causal: pairs within documents over all causal ones of a sequence; 1 without documents.
        density: computed over the pairs within documents.
        why: of this density.
        source: where `causal` is from, in a few words; empty without documents.
        counted: whether the source was opened for it.
    """

    causal: float
    density: float
    why: str
    source: str = ""
    counted: bool = False


def planned_pairs(config: Config) -> Pairs:
    """The pairs of a run: by the lengths of its documents, where its source has them at hand.

    Otherwise each sequence is taken to be one document, which is the most there can be.
    """
    settings = config.sparsity.settings
    density, why = settings.expected_density(config.data.seq_len)
    if not config.data.has_documents:
        return Pairs(1.0, density, why)
    if config.data.mode == "exact":
        return Pairs(1.0, density, why, 'each sequence is one: data.mode = "exact"')
    source = selected_source(config.data)
    if not source.has_lengths(config.data):
        unknown = f'data.source = "{config.data.source}" tells no lengths before it is read'
        return Pairs(1.0, density, why, _assumed(unknown))
    try:
        corpus = source.open(config.data, config.model.vocab_size)
        packs = packs_of(corpus, config.data, config.sparsity.block_size)
    except UserError as error:
        return Pairs(1.0, density, why, _assumed(str(error)))
    report = report_on(packs, config.data.seq_len, config.sparsity.block_size)
    # Patterns that choose leave short documents dense; what is replayed is cut, not chosen.
    below = getattr(settings, "dense_below", 0) if settings.chooses and settings.sparse else 0
    causal, density, short = _shares(report, settings, below)
    if below:
        why = f"{why}; {short:.1%} of the pairs lie in documents of less than {below:,} tokens"
    seen = report.ends.size
    of = f"{seen:,} sequences" if seen == report.sequences else f"the first {seen:,} sequences"
    found = f"lengths of {report.lengths.size:,} documents in {of}"
    return Pairs(causal, density, why, found, counted=True)


def _shares(report: PackReport, settings: Settings, below: int) -> tuple[float, float, float]:
    """Pairs within documents over causal ones; of the first, the computed and the short ones'."""
    padded, which = np.unique(report.padded, return_inverse=True)
    size = padded.astype(np.float64)
    pairs = np.bincount(which) * (size * (size + 1) / 2)
    expected = [settings.expected_density(tokens)[0] for tokens in padded.tolist()]
    density = (pairs * np.where(padded < below, 1.0, expected)).sum() / pairs.sum()
    total = report.ends.size * (report.seq_len * (report.seq_len + 1) / 2)
    return pairs.sum() / total, density, pairs[padded < below].sum() / pairs.sum()


def _assumed(reason: str) -> str:
    return (
        f"ASSUMED, each sequence one document: {reason}; python -m mtraining_jax.inspect_data "
        "counts them"
    )
