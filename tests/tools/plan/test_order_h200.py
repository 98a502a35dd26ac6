"""Training steps are deterministic on GPUs: no float scatter adds with atomics.

In XLA's programs only scatters with repeated indices add in arbitrary order; integer sums do not
depend on it.
"""

import json
import re

import pytest

from mtraining_jax.config import Config
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.tools.plan.compiled import lower_step, missing_plugin
from mtraining_jax.tools.plan.hardware import H200
from mtraining_jax.utils.fields import fields_of

pytestmark = pytest.mark.skipif(missing_plugin() is not None, reason=str(missing_plugin()))

SIZES = {
    "data.seq_len": 32768, "model.num_layers": 2, "model.hidden_size": 256, "model.num_heads": 4,
    "model.num_kv_heads": 2, "model.head_dim": 64, "model.intermediate_size": 256,
    "model.vocab_size": 512, "parallel.devices_per_node": 1, "parallel.fsdp": False,
}  # fmt: skip
REPLAY = "benchmarks.replay:Replay"
OPTIONS = {
    "sampled_rows": [{}, {"columns": 128}],
    "moba": [{"chunk_size": 4096, "top_k": 4}],
    REPLAY: [{"replay_density": 0.3}, {"replay_density": 0.3, "replay_of": "sampled_rows"}],
}
SCATTER = re.compile(
    r'"stablehlo\.scatter".*?unique_indices = (true|false).*?\^bb0\(%\w+: tensor<(\w+)>', re.DOTALL
)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind in (*PATTERNS.names, REPLAY) for options in OPTIONS.get(kind, [{}])],
)
def test_no_scatter_adds_floats_in_arbitrary_order(kind, options, tmp_path):
    budgets = tmp_path / "budgets.json"
    budgets.write_text(json.dumps([[["vertical_and_slash", 100, 500, 1.0]] * 4] * 2))
    fields = SIZES | {"sparsity.kind": kind}
    if "min_sparse_tokens" in fields_of(PATTERNS.get(kind)):
        options = options | {"min_sparse_tokens": 0}
    fields |= {f"sparsity.{name}": value for name, value in options.items()}
    if kind in ("fixed", "minference"):
        fields["sparsity.budget_file"] = budgets
    program = lower_step(Config.load("qwen3b_512k", fields), H200).as_text()
    found = SCATTER.findall(program)
    assert ("true", "f32") in found  # the embedding's gradient
    assert [x for x in found if x[0] == "false" and x[1][0] not in "iu"] == []
