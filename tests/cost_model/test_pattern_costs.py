"""Costs of a pattern: the methods of its options, else the tables."""

import dataclasses

from mtraining_jax.cost_model import pattern_costs
from mtraining_jax.patterns.options.rows import SampledRowsOptions


@dataclasses.dataclass(frozen=True)
class _WithMethods(SampledRowsOptions):
    def expected_density(self, tokens):
        return 1 / tokens, "a method"

    def scoring_share(self):
        return 0.25

    def capacities(self, num_blocks, documents=False):
        return num_blocks, int(documents)

    def query_copies(self, num_blocks):
        return num_blocks


def test_methods_take_precedence_over_the_tables():
    options = _WithMethods()
    assert pattern_costs.expected_density(options, 4) == (0.25, "a method")
    assert pattern_costs.scoring_share(options) == 0.25
    assert pattern_costs.capacities(options, 8, True) == (8, 1)
    assert pattern_costs.query_copies(options, 8) == 8
    # The others are those of the base class.
    assert pattern_costs.softmax_share(options) == 16 / 128
