"""Dry run with packed documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.data.corpus import packs_of
from mtraining_jax.parallel.mesh import DOCUMENTS
from mtraining_jax.tools.plan.compiled import abstract_batch
from mtraining_jax.tools.plan.cost import count_flops
from mtraining_jax.tools.plan.documents import planned_pairs
from mtraining_jax.tools.plan.dry_run import report
from mtraining_jax.tools.plan.hardware import H200
from mtraining_jax.tools.plan.memory import estimate_memory, index_bytes
from mtraining_jax.tools.plan.pattern_costs import density_of_lists
from mtraining_jax.training.build import build_mesh
from tests.training.common import VERTICAL_SLASH, changed, tiny_config


def test_abstract_batch_and_index_with_documents(tmp_path):
    config = tiny_config(tmp_path, sparsity={"kind": "dense"})
    assert index_bytes(config) == 0
    config = changed(config, data={"mode": "pack", "eos": 0})
    mesh = build_mesh(config)
    found = abstract_batch(config, mesh)["documents"]
    assert found.block_size == 8 and len(jax.tree.leaves(found)) == 3
    for array in jax.tree.leaves(found):
        assert array.shape == (2, 128 // 8) and array.dtype == jnp.int32
        assert array.sharding == jax.NamedSharding(mesh, DOCUMENTS)
    # Two numbers per block: 16 blocks, 2 sequences, 6 heads, on every rank.
    assert index_bytes(config) == 4 * 2 * 16 * 2 * 6
    assert "documents" not in abstract_batch(changed(config, data={"mode": "concat"}), mesh)


def test_pairs_within_documents_are_counted_if_lengths_are_known(tmp_path):
    config = tiny_config(
        tmp_path, sparsity={"min_sparse_tokens": 40}, data={"mode": "pack", "eos": 0}
    )
    chosen = density_of_lists(128, config.sparsity.pattern.tau)
    unknown = planned_pairs(config)
    assert (unknown.causal, unknown.density, unknown.counted) == (1.0, chosen, False)
    assert unknown.source.startswith('ASSUMED one document per sequence: data.source = "tokens"')
    path, lengths = config.data.source_options.paths[0], np.array([100, 30, 57, 60, 6])
    np.save(path, np.load(path)[: lengths.sum()])
    with open(f"{path}.lengths", "wb") as file:
        np.save(file, lengths)
    found = planned_pairs(config)
    pairs = {n: n * (n + 1) / 2 for n in (104, 32, 64, 8)}
    total = sum(pairs[-(-n // 8) * 8] for n in lengths)
    # The documents fill three sequences.
    assert found.causal == pytest.approx(total / (3 * 128 * 129 / 2))
    short = (pairs[32] + pairs[8]) / total
    assert found.density == pytest.approx(short + (1 - short) * chosen)
    flops = count_flops(config)
    assert flops.attention_dense == pytest.approx(2 * 2 * 6 * 14 * 16 * total / 3)
    assert flops.attention_executed == pytest.approx(found.density * flops.attention_dense)
    lines = "\n".join(report(config, H200, estimate_memory(config), "estimated by formulas", found))
    assert "nothing is trained, data is only counted" in lines
    assert (
        f"documents   {found.causal:.1%} of all causal pairs are within documents (lengths of 5 "
        "documents in 3 sequences)"
    ) in lines
    replay = VERTICAL_SLASH | {"kind": "benchmarks.replay:Replay", "replay_density": 0.3}
    replayed = planned_pairs(changed(config, sparsity=replay))
    assert replayed.density == 0.3 and replayed.causal == found.causal
    short = planned_pairs(changed(config, sparsity={"min_sparse_tokens": 129}))
    assert short.density == 1.0
    assert short.why == "documents shorter than 129 tokens use dense attention"
    missing = changed(config, data={"paths": ["nowhere"]})
    assert "nowhere" in planned_pairs(missing).source and not planned_pairs(missing).counted


def test_parts_of_a_mixture_are_planned_by_weight(tmp_path):
    """One sequence of a long document is read as often as twelve of short ones."""
    parts = {}
    for name, lengths, weight in (("long", [128], 4), ("short", [8] * 48, 1)):
        path = tmp_path / f"{name}.npy"
        np.save(path, np.ones(sum(lengths), np.uint16))
        with open(f"{path}.lengths", "wb") as file:
            np.save(file, lengths)
        parts[name] = {"source": "tokens", "paths": [str(path)], "weight": weight}
    data = {"source": "mixture", "parts": parts, "mode": "pack"}
    config = changed(tiny_config(tmp_path, sparsity={"kind": "dense"}), data=data)
    found = planned_pairs(config)
    whole = 128 * 129 / 2
    assert found.causal == pytest.approx(0.8 + 0.2 * 16 * (8 * 9 / 2) / whole)
    corpus = config.data.source_options.open(config.data, config.model.vocab_size)
    summary = packs_of(corpus, config.data, config.sparsity.block_size).summary
    assert summary == "4.0 documents per sequence, 0.0% padding"


def test_expected_density_falls_with_document_length(tmp_path):
    config = tiny_config(
        tmp_path,
        model={"max_position_embeddings": 2**19},
        sparsity={"block_size": 128, "min_sparse_tokens": 0, "tau": 0.9},
        data={"mode": "pack", "eos": 0, "seq_len": 2**18},
    )
    one = planned_pairs(config)
    assert one.density == pytest.approx((0.113 * 0.085) ** 0.5)  # logarithmic interpolation
    path, lengths = config.data.source_options.paths[0], np.array([2**17, 2**16, 2**16])
    np.save(path, np.ones(lengths.sum(), np.uint16))
    with open(f"{path}.lengths", "wb") as file:
        np.save(file, lengths)
    found = planned_pairs(config)
    # The long document has twice as many pairs as both others together.
    assert found.density == pytest.approx((4 * 0.113 + 2 * 0.138) / 6, rel=1e-4)
    more = planned_pairs(changed(config, sparsity={"tau": 0.95}))
    assert more.density == pytest.approx(1.41 * found.density, rel=0.01)
    columns = VERTICAL_SLASH | {"block_size": 128, "min_sparse_tokens": 0}
    assert planned_pairs(changed(config, sparsity=columns)).density > found.density
