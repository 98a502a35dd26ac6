"""What sharing an index between layers loses: the table, and a tiny run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shared_index
from mtraining_jax.sparsity import SampledRows, Shards
from mtraining_jax.sparsity.metrics import attention_recall
from tests.sparsity import inputs

TINY = Path(__file__).parent.parent / "data" / "llama3_tiny"


def test_a_head_under_its_own_pairs_keeps_its_recall():
    pattern = SampledRows(tau=0.5, sampled_rows=2, block_size=16)
    q, k = inputs.random(0, 1, 256, 4, 2, 16)
    blocks, rows = jnp.arange(16), jnp.array([3, 77, 130, 255])

    @jax.jit  # as one program: each operation alone would be compiled as well
    def measured(q, k):
        index = pattern.choose(q, k, Shards(blocks, 16)).index
        wanted = attention_recall(q, k, index, rows, block_ids=blocks)[0]
        return *shared_index.pairs_and_masses(pattern, q, k, rows), wanted

    computed, masses, wanted = measured(q, k)
    found = shared_index.kept(masses, computed)
    np.testing.assert_allclose(np.diagonal(found), wanted, atol=1e-5)
    assert found.shape == (4, 4) and (np.abs(found - found.T) > 1e-3).any()


def cells(text):
    return text.strip("| ").split(" | ")


def test_a_row_maps_heads_on_the_first_text_and_measures_on_the_others():
    # Two layers of two heads; the second layer's heads are the first one's, swapped.
    shared = np.array([[[np.nan] * 2] * 2, [[0.2, 0.9], [0.85, 0.3]]])
    own, density = np.full((2, 2), 0.9), np.full((2, 2), 0.25)
    first, other = (shared, own, density), shared.copy()
    assert cells(shared_index.line(1, [first, first]))[4:] == ["0.050", "0.250", "0.250", "0 of 1"]
    other[1] = [[0.5, 0.895], [0.8, 0.7]]
    found = cells(shared_index.line(1, [first, (other, own, density)]))
    # Mapped: 0.895 and 0.8 of 0.9; without a map 0.5 and 0.7.
    assert found[:5] == ["1", "0.900", "0.052", "0.300", "0.100"] and found[-1] == "0 of 1"
    other[1] = [[0.5, 0.895], [0.9, 0.7]]
    found = cells(shared_index.line(1, [first, (other, own, density)]))
    assert found[4] == "0.005" and found[-1] == "1 of 1"
    # A head that computes too much is not taken, unless it computes least of all.
    dense = np.array([[0.25, 0.5], [0.25, 0.25]])
    found = cells(shared_index.line(1, [(shared, own, dense), (other, own, dense)]))
    assert found[2] == "0.200" and found[6] == "0.250"
    found = cells(shared_index.line(1, [(shared, own, 2 * dense - 0.2 * (dense < 0.3))] * 2))
    assert found[6] == "0.300"


def test_a_run_prints_a_table(tmp_path, capsys):
    tokens = np.random.default_rng(0).integers(0, 288, (2, 256)).astype(np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    options = ["--model", str(TINY), "--texts", str(tmp_path), "--seq-len=256", "--every=1"]
    text = shared_index.main([*options, "--rows=8", "--out", str(tmp_path / "found.md")])
    assert (tmp_path / "found.md").read_text() == text + "\n"
    assert text.splitlines()[-1].startswith("| 1 | ")  # of two layers
