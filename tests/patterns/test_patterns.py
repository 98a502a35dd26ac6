"""Every built-in pattern, and that of the example, fulfills the contract."""

import json
import sys

import jax
import numpy as np
import pytest

from examples.strided_pattern import Strided
from mtraining_jax.patterns.base import Pattern, Traced, register_pytrees
from mtraining_jax.patterns.block_topk import BlockTopK
from mtraining_jax.patterns.budgets import FixedBudget, MInference
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.flex_prefill import FlexPrefill
from mtraining_jax.patterns.moba import MoBA
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.utils.fields import options
from tests.patterns.contract import BLOCK, HEADS, LAYERS, ChoiceContract, PatternContract

SMALL = dict(
    max_verticals=24, max_slashes=12, num_probe_queries=8, block_size=BLOCK,
    sink_tokens=2, local_blocks=1,
    min_verticals=4, min_slashes=2,
)  # fmt: skip


class TestDense(PatternContract):
    settings = Dense(block_size=BLOCK)


class TestSafe(PatternContract):
    settings = VerticalSlash(top_p=0.4, **SMALL)


class TestPaper(ChoiceContract):
    settings = VerticalSlash(top_p=0.4, preset="paper", **SMALL)
    rows_may_be_empty = True


class TestFixed(ChoiceContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("budgets") / "budgets.json"
        heads = [["vertical_and_slash", 5 * head, 3 + head, 1.0] for head in range(HEADS)]
        path.write_text(json.dumps([heads] * LAYERS))
        cls.settings = FixedBudget(
            budget_file=str(path),
            num_probe_queries=8,
            sink_tokens=2,
            sliding_window=4,
            block_size=BLOCK,
        )


class TestMInference(ChoiceContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("budgets") / "budgets.json"
        heads = [["vertical_and_slash", 40, 60, 1.0]] * 2 + [["stream_llm", 10, 20, 1.0]] * 4
        path.write_text(json.dumps([heads] * LAYERS))
        cls.settings = MInference(
            budget_file=str(path),
            num_probe_queries=8,
            sink_tokens=2,
            sliding_window=4,
            block_size=BLOCK,
        )


class TestXAttention(PatternContract):
    settings = XAttention(tau=0.6, stride=4, local_blocks=1, block_size=BLOCK)


class TestMoBA(ChoiceContract):
    settings = MoBA(chunk_size=2 * BLOCK, top_k=3, block_size=BLOCK)


# The following differ in their scores only and share the rest with XAttention.
class TestSampledRows(ChoiceContract):
    settings = SampledRows(tau=0.6, probe_queries_per_block=3, block_size=BLOCK)


class TestSampledRowsWithColumns(PatternContract):
    settings = SampledRows(
        tau=0.6,
        probe_queries_per_block=3,
        columns=12,
        sink_blocks=0,
        local_blocks=1,
        block_size=BLOCK,
    )


class TestSampledRowsWithoutTopP(ChoiceContract):
    settings = SampledRows(
        tau=1.0,
        min_block_mass=0.03,
        random_block_prob=0.2,
        dense_suffix_tokens=BLOCK + 1,
        probe_queries_per_block=2,
        block_size=BLOCK,
    )


class TestFlexPrefill(ChoiceContract):
    # Heads of both kinds: distances of these queries and keys are 0.08 to 0.22.
    settings = FlexPrefill(gamma=0.5, js_threshold=0.15, min_budget=16, block_size=BLOCK)


class TestBlockTopK(ChoiceContract):
    settings = BlockTopK(top_blocks=5, block_size=BLOCK)


class TestOwn(PatternContract):
    settings = Strided(window=2, stride=3, block_size=BLOCK)


def test_a_pattern_from_before_jax_was_loaded_becomes_a_pytree(monkeypatch):
    @options
    class Early(Pattern):
        arrays = ("widths",)
        widths: Traced = None
        block_size: int = BLOCK

    with monkeypatch.context() as before:
        before.delitem(sys.modules, "jax")
        early = Early(widths=np.arange(3))
    assert jax.tree.leaves(early) == [early]
    register_pytrees()  # as attention does when it is imported
    assert len(jax.tree.leaves(early)) == 1 and jax.tree.leaves(early)[0] is early.widths


def test_every_registered_pattern_is_tested_here():
    tested = [
        Dense,
        VerticalSlash,
        FixedBudget,
        XAttention,
        SampledRows,
        MInference,
        FlexPrefill,
        MoBA,
        BlockTopK,
    ]
    for name in PATTERNS.names:
        assert any(issubclass(cls, PATTERNS.get(name)) for cls in tested), name
