import json

import numpy as np
import pytest

from mtraining_jax.patterns.budgets import load_budgets
from mtraining_jax.utils.errors import UserError

HEAD = ["vertical_and_slash", 1000, 6096, 0.98]


def test_reads_objects_and_lists(tmp_path):
    path = tmp_path / "budgets.json"
    layers = [
        {"1": ["vertical_and_slash", 30, 800, 1.0], "0": HEAD},
        [["stream_llm", 3500, 100, 0.5], ["vertical_and_slash", 0, 7]],
    ]
    path.write_text(json.dumps(layers))
    budgets = load_budgets(path, block_size=64)
    np.testing.assert_array_equal(budgets.verticals, [[1000, 30], [3500, 0]])
    np.testing.assert_array_equal(budgets.slashes, [[6096, 800], [100, 7]])
    assert (budgets.max_verticals, budgets.max_slashes) == (3500, 6096)
    assert (budgets.block_size, budgets.num_probe_queries) == (64, 64)
    assert (budgets.sink_tokens, budgets.sliding_window) == (30, 100)
    assert budgets.verticals.dtype == budgets.slashes.dtype == np.int32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON list with one entry per layer"),
        ('{"0": []}', "must be a JSON list with one entry per layer"),
        ("[[]]", "layer 0 must be an object or a list with one entry per head"),
        ([{"0": HEAD}, {"0": HEAD, "2": HEAD}], "layer 1 has 2 heads but none numbered 1"),
        ([{"0": HEAD}, {"0": HEAD, "1": HEAD}], "layer 1 has 2 heads but layer 0 has 1"),
        ([[HEAD], [HEAD[:2]]], r"layer 1, head 0 is \['vertical_and_slash', 1000\]; it must be"),
        ([[["flex", [0.9, 4096], [0.9, 4096], 1]]], "head 0 holds .* use kind vertical_slash"),
        ([[["fixed", -1, 5, 1]]], "head 0 has budget -1; it must be an integer, at least 0"),
        ([[["fixed", 1, 5.5, 1]]], "head 0 has budget 5.5"),
        ([[["fixed", True, 5, 1]]], "head 0 has budget True"),
    ],
)
def test_an_error_names_the_file(tmp_path, content, message):
    path = tmp_path / "budgets.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=f"budget file {path}.*{message}"):
        load_budgets(path)


def test_a_missing_file_raises(tmp_path):
    with pytest.raises(UserError, match="absent.json cannot be read: No such file"):
        load_budgets(tmp_path / "absent.json")
