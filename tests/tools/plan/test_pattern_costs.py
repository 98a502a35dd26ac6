"""Costs of a pattern: the methods of its options, else the tables."""

import pytest

from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.tools.plan import pattern_costs
from mtraining_jax.utils.fields import options


@options
class _WithMethods(SampledRows):
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


class _Own(SampledRows):
    """A pattern of a user, without forecasts."""


class _OwnProbes(ProbePattern):
    """Another one."""


@pytest.mark.parametrize("options", [_Own(), _OwnProbes()])
def test_the_density_of_own_patterns_is_not_known(options):
    density, why = pattern_costs.expected_density(options, 4096)
    assert 0 < density < 1 and why.startswith("ASSUMED: not known for this pattern")


@pytest.mark.parametrize(
    ("most", "blocks", "room"), [(24, 64, 128), (128, 64, 128), (129, 64, 256), (129, 16, 128)]
)
def test_the_room_for_columns_is_a_multiple_of_128_up_to_all_tokens(most, blocks, room):
    options = VerticalSlash(
        max_verticals=most, min_verticals=2, sink_tokens=2, num_probe_queries=8, block_size=8
    )
    assert options.list_capacities(blocks)[0] == room
