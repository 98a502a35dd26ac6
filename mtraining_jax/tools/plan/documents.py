"""Causal and computed pairs of a planned run, from document lengths if they are known."""

import dataclasses
from collections.abc import Callable

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.data.corpus import packs_of
from mtraining_jax.data.packing.packs import PackArrays
from mtraining_jax.models.spec import layer_windows, windows_text
from mtraining_jax.tools.corpus.pack_report import report_on
from mtraining_jax.tools.plan import pattern_costs
from mtraining_jax.tools.plan.pattern_costs import density_of_window
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.invocation import command_of


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Causal pairs of a sequence and the fraction of them that a step computes."""

    causal: float  # causal pairs within documents over all causal pairs; 1 without documents
    density: float  # computed pairs over causal pairs within documents, mean over layers
    why: str  # explains `density`
    source: str = ""  # explains `causal`; empty without documents
    counted: bool = False  # whether the data source was opened to count
    dense: float = 1.0  # density of dense steps, less with windows


def planned_pairs(config: Config, opened: bool = False) -> Pairs:
    """The pairs of a run, from document lengths if its source knows them without reading the data.

    Otherwise assumes one document per sequence, which is the upper bound. `opened` data has been
    read anyway.
    """
    settings, data = config.sparsity.pattern, config.data
    density, why = pattern_costs.expected_density(settings, data.seq_len)
    whole = _over_layers(config, data.seq_len, 1.0)
    if (windows := windows_text(config.model)) is not None:
        why = f"{why}; {windows}" if None in layer_windows(config.model) else windows
    density = _over_layers(config, data.seq_len, density)
    one_document = Pairs(1.0, density, why, counted=opened, dense=whole)
    if not data.has_documents:
        return one_document
    # Patterns that select pairs keep short documents dense; replayed indices are cut instead.
    below = settings.shortest_sparse_document()
    if data.seq_len < below:
        why = f"documents shorter than {below:,} tokens use dense attention"
        one_document = dataclasses.replace(one_document, density=whole, why=why)
    if data.mode == "exact":
        source = 'one document per sequence: data.mode = "exact"'
        return dataclasses.replace(one_document, source=source)
    source = data.source_options
    try:
        if not opened and not source.has_lengths(data):
            raise UserError(f'data.source = "{data.source}" knows no lengths before it is read')
        corpus = source.open(data, config.model.vocab_size)
        packs = packs_of(corpus, data, config.sparsity.block_size)
    except UserError as error:
        assumed = (
            f"ASSUMED one document per sequence: {error}; {command_of('inspect_data')} counts them"
        )
        return dataclasses.replace(one_document, source=assumed)
    report = report_on(packs, data.seq_len, config.sparsity.block_size)
    padded, kinds = np.unique(report.padded, return_inverse=True)
    # Parts of a mixture are read by weight.
    read = packs.frequencies if isinstance(packs, PackArrays) else np.ones(report.ends.size)
    counts = np.bincount(kinds, np.repeat(read, report.documents_each))
    pairs = counts * (padded * (padded + 1.0) / 2)

    def computed(full: Callable[[int], float]) -> float:
        densities = [_over_layers(config, tokens, full(tokens)) for tokens in padded.tolist()]
        return float(np.sum(pairs * densities) / pairs.sum())

    def pattern_density(tokens: int) -> float:
        return 1.0 if tokens < below else pattern_costs.expected_density(settings, tokens)[0]

    why = one_document.why
    if 0 < below <= data.seq_len:
        short = pairs[padded < below].sum() / pairs.sum()
        why += f"; {short:.1%} of the pairs are in documents shorter than {below:,} tokens"
    seen = report.ends.size
    of = f"{seen:,} sequences" if seen == report.sequences else f"the first {seen:,} sequences"
    return Pairs(
        causal=pairs.sum() / (seen * (report.seq_len * (report.seq_len + 1) / 2)),
        density=computed(pattern_density),
        why=why,
        source=f"lengths of {report.lengths.size:,} documents in {of}",
        counted=True,
        dense=computed(lambda _: 1.0),
    )


def _over_layers(config: Config, tokens: int, full: float) -> float:
    """Mean density over layers in a document, `full` in layers without a window."""
    windows = layer_windows(config.model)
    found = (full if x is None else density_of_window(x, tokens) for x in windows)
    return sum(found) / len(windows)
