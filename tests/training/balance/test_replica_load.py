"""Data-parallel replicas with balanced work, in full runs."""

import contextlib
import shutil

import numpy as np
import pytest

from mtraining_jax.config import Config
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.reporting.flops import matrix_flops
from mtraining_jax.tools.balance.replica_load import assumed_densities, balance_of
from mtraining_jax.tools.balance.tuner import Tuner
from mtraining_jax.tools.plan.kernel_times import matmul_rate
from mtraining_jax.tools.plan.pattern_costs import density_of_lists
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.device_batches import DeviceBatches
from tests.training.common import VOCAB, changed, losses, run, tiny_config

pytestmark = pytest.mark.usefixtures("drawn_alone")

S = 128


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A file of documents, from one block up to a full sequence."""
    folder = tmp_path_factory.mktemp("documents")
    path = tiny_config(folder).data.source_options.paths[0]
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(120) < 0.3, S, rng.integers(8, 60, 120))
    with open(f"{path}.lengths", "wb") as file:
        np.save(file, lengths)
    np.save(path, np.resize(np.load(path), lengths.sum()))
    return path


@pytest.fixture
def packed(config, documents):
    """A smaller `--config tiny`: two replicas of two ranks, each with two micro-batches of two."""
    run = config.run
    overrides = {
        "run.steps": 5, "run.output_dir": run.output_dir, "run.log_interval": 1,
        "run.compile_cache_dir": run.compile_cache_dir, "parallel.replicas": 2, "parallel.nodes": 1,
        "parallel.devices_per_node": 2, "data.source": "tokens", "data.paths": f'["{documents}"]',
        "data.mode": "pack", "data.seq_len": S, "data.batch_size": 8, "data.balance": "density",
        "optimizer.accumulation_steps": 2, "sparsity.block_size": 8,
        "sparsity.probe_queries_per_block": 2, "sparsity.tau": 0.6, "sparsity.min_block_mass": 0.0,
        "sparsity.min_sparse_tokens": 40, "sparsity.tune": "mean", "sparsity.tune_min": 0.3,
        "sparsity.tune_max": 0.8, "model.hidden_size": 32, "model.intermediate_size": 48,
        "model.vocab_size": VOCAB, "checkpoint.interval": 3, "audit.interval": 0,
        "optimizer.schedule": "constant", "optimizer.warmup_steps": 0,
        "metrics.tensorboard": "false", "guard.enabled": "false",
    }  # fmt: skip
    return Config.load("tiny", overrides)


@pytest.mark.timeout(120)  # a batch may wait for densities
def test_a_balanced_and_tuned_run_trains_resumes_and_says_how_even_it_is(packed, capsys):
    config = packed
    whole = run(config)
    assert whole[-1]["loss"] < whole[0]["loss"]
    printed = capsys.readouterr().out
    assert "data.balance = density" in printed
    assert "replicas   slowest over mean: attention 1." in printed
    assert f"imbalance {whole[0]['attention_imbalance']:.2f}  " in printed
    # Documents of up to 3 blocks have fewer than 40 tokens: dense. Those of 4 to 7 may be dense.
    assumed = assumed_densities(config)
    assert assumed.tolist() == [1, 1, *3 * [density_of_lists(S, 0.6)]]
    for record in whole:
        found = record["density_by_length"]
        assert len(found) == assumed.size
        assert all(x is None or x == pytest.approx(1, abs=1e-6) for x in found[:2])
        assert 0.1 < found[4] < 0.95
        assert 1 <= record["step_imbalance"] <= record["attention_imbalance"] < 1.3
        assert 1 <= record["step_imbalance_predicted"] <= record["attention_imbalance_predicted"]
        assert len(record["attention_ms_by_group"]) == 2
        # By prediction, tuning never makes replicas less balanced.
        assert record["attention_imbalance_predicted"] <= record["attention_imbalance_untuned"]
        assert record["tuned"] == "tau" and len(record["tuned_per_layer"]) == 2
        assert all(0.3 <= share <= 0.8 for share in record["tuned_by_group"])
        assert record["infeasible"] in (0, 0.5, 1)
    shares = np.array([record["tuned_by_group"] for record in whole])
    # The mean lies between both replicas: where one keeps more, the other keeps less.
    apart = shares != 0.6
    assert apart.any() and ((shares > 0.6).sum(1) == (shares < 0.6).sum(1)).all()
    assert f"tau {shares[0].min():.3f} to {shares[0].max():.3f}" in printed
    tuned = "tuned      tau from 0.3 to 0.8 per data-parallel replica, to match the mean time"
    assert tuned in printed
    assert f"tuned      tau {shares.min():.3f} to {shares.max():.3f}" in printed

    shutil.rmtree(checkpoint_folder(config) / "5")
    rest = run(config)
    assert [record["step"] for record in rest] == [4, 5]
    np.testing.assert_array_equal(losses(rest), losses(whole[3:]))
    for name in ("density_by_length", "attention_imbalance_predicted", "tuned_per_layer"):
        assert [x[name] for x in rest] == [x[name] for x in whole[3:]]


def test_classes_of_only_short_documents_are_assumed_to_be_dense(tmp_path):
    """Of blocks of 8 tokens, the longest documents of a class have 8, 24, 56, 120 and more."""
    for shortest, dense in {24: 1, 25: 2, 120: 3, 121: 4}.items():
        config = tiny_config(tmp_path, sparsity={"min_sparse_tokens": shortest, "tau": 0.1})
        assert (assumed_densities(config) == 1).tolist() == [x < dense for x in range(5)]


def test_fractions_do_not_depend_on_how_early_steps_are_finished(packed):
    config = changed(packed, data={"balance": "length"})
    layout = Layout("striped", S, 2, config.sparsity.block_size)
    with_learned = []
    for early in (False, True):
        mesh = make_mesh(2, 1, 2)
        with contextlib.closing(
            DeviceBatches(config, mesh, layout, balance=balance_of(config))
        ) as batches:
            tuner, fractions = Tuner(config, batches.loader, mesh), []
            for step in range(1, 6):
                batch = tuner.batch(step, next(batches))
                fractions.append(np.asarray(batch["overrides"]["tau"]))
                # The previous step ends while this one runs, or as soon as it was dispatched.
                if (ended := step if early else step - 1) > 0:
                    density = np.array([[0.2, 0.3], [0.5, 0.9]]) / ended
                    tuner.measured({"step": ended, "density_by_group": density, "layers": {}})
        with_learned.append(fractions)
    np.testing.assert_array_equal(*with_learned)
    assert len(np.unique(fractions)) > 5


def test_a_dense_step_is_predicted_to_be_dense(packed):
    config = changed(
        packed,
        run={"steps": 1},
        parallel={"devices_per_node": 1},
        data={"balance": "length", "batch_size": 4},
        sparsity={"tune": "none", "dense_warmup_steps": 1},
        optimizer={"accumulation_steps": 1},
    )
    (record,) = run(config)
    assert record["dense_step"] and record["density"] == pytest.approx(1, abs=1e-6)
    assert record["density_by_length"][4] == pytest.approx(1, abs=1e-6)
    for name in ("attention_imbalance", "step_imbalance"):
        assert record[name] == pytest.approx(record[f"{name}_predicted"], rel=1e-5)
    # A step also has the matrix products, which take every replica the same time.
    attention_ms = np.array(record["attention_ms_by_group"])
    products = matrix_flops(config) * config.tokens_per_step / config.devices
    step_ms = attention_ms + 1e3 * products / matmul_rate(config.model.hidden_size, config.ranks)
    for name, times in (("attention", attention_ms), ("step", step_ms)):
        imbalance = times.max() / times.mean() - 1
        assert record[f"{name}_imbalance"] - 1 == pytest.approx(imbalance, rel=1e-6)
        assert imbalance > 1e-3, name
