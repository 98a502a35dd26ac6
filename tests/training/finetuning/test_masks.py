"""Label masks: loss and gradients are those of transformers on any mesh, packed or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.config import Config
from mtraining_jax.models.huggingface.names import checkpoint_tensors
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step
from tests.models.common import CHECKPOINTS

pytestmark = pytest.mark.usefixtures("drawn_alone")

FOLDER = CHECKPOINTS / "qwen2_tiny"


@pytest.fixture(scope="module")
def golden():
    """Documents with masks, and what transformers computes for them (make_checkpoints.py)."""
    return np.load(FOLDER / "golden.npz")


class Run:
    """A step on some mesh, and the first batch of the documents."""

    def __init__(self, folder, golden, seq_len, batch_size, mesh, **sections):
        for ending, name in (("", "ids"), (".lengths", "lengths"), (".mask", "trained")):
            with open(folder / f"a.npy{ending}", "wb") as file:
                np.save(file, golden[f"masked_{name}"])
        table = {
            "run": {"steps": 1},
            "model": {"init_from": str(FOLDER), "dtype": "float32", "remat": "none"},
            "data": {"source": "tokens", "paths": [str(folder)], "mode": "pack"}
            | {"seq_len": seq_len, "batch_size": batch_size},
            "sparsity": {"kind": "dense", "block_size": 8},
            "parallel": dict(zip(("replicas", "nodes", "devices_per_node"), mesh, strict=True)),
            "optimizer": {"clip_norm": 0.0} | sections.pop("optimizer", {}),
        }
        config = Config.from_dict(table | sections, "a test")
        mesh, layout = build_mesh(config), build_layout(config)
        batches = DeviceBatches(config, mesh, layout)
        self.batch = next(batches)
        batches.close()
        self.builder = StateBuilder(config, mesh)
        attention = build_attention(config, mesh, layout, build_pattern(config))
        self.step = make_train_step(config, self.builder, attention, mesh)
        self._start = self.builder.fresh()

    def start(self):
        """A new state, because a step donates its argument."""
        return jax.tree.map(jnp.copy, self._start)

    def with_arrays(self, arrays):
        """The batch with some arrays replaced, sharded alike so that nothing is recompiled."""
        put = {x: jax.device_put(array, self.batch[x].sharding) for x, array in arrays.items()}
        return self.batch | put

    def first(self, **arrays):
        """Metrics and gradients of the first step, with some arrays of the batch replaced."""
        state, metrics = self.step(self.start(), self.with_arrays(arrays))
        first_moments = jax.device_get(state.opt_state[0].mu)
        return jax.device_get(metrics), {name: x / 0.1 for name, x in first_moments.items()}


# The documents have 120, 90, 70 and 65 tokens.


@pytest.fixture(scope="module")
def on_one(tmp_path_factory, golden):
    """A document in each sequence."""
    return Run(tmp_path_factory.mktemp("one"), golden, 128, 4, (1, 1, 1))


@pytest.fixture(scope="module")
def packed_on_two(tmp_path_factory, golden):
    return Run(tmp_path_factory.mktemp("two"), golden, 256, 2, (1, 1, 2))


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory, golden):
    """A document in each micro-batch of each replica."""
    return Run(
        tmp_path_factory.mktemp("eight"),
        golden,
        128,
        4,
        (2, 2, 2),
        optimizer={"accumulation_steps": 2},
        loss={"weighting": "document"},
    )


@pytest.mark.parametrize("name", ["on_one", "packed_on_two", "on_eight"])
def test_loss_and_gradients_are_those_of_transformers(name, golden, request):
    run = request.getfixturevalue(name)
    labels = run.batch["labels"]
    # One program for two tests: with these weights, the loss is the mean over labels.
    same = {"weights": (labels != -100).astype(jnp.float32)} if "weights" in run.batch else {}
    metrics, gradients = run.first(**same)
    is_label = golden["masked_trained"].copy()
    is_label[np.cumsum(golden["masked_lengths"]) - golden["masked_lengths"]] = False
    assert metrics["labels"] == is_label.sum() < golden["masked_ids"].size / 3
    np.testing.assert_allclose(metrics["loss"], golden["masked_loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], golden["masked_grad_norm"], rtol=1e-5)
    tensors = {tensor.name: tensor for tensor in checkpoint_tensors(run.builder.spec)}
    for key in (key for key in golden if key.startswith("masked_grad:")):
        parts = tensors[key.removeprefix("masked_grad:")].parts
        found = np.concatenate([gradients[p.parameter][p.layer] for p in parts])
        np.testing.assert_allclose(found, golden[key], atol=1e-5 * np.abs(golden[key]).max())


def test_documents_weigh_the_same_and_parts_of_a_batch_may_have_no_label(on_eight, golden):
    labels, weights = (np.asarray(on_eight.batch[name]) for name in ("labels", "weights"))
    losses = []
    for row in range(4):  # the only micro-batch with labels
        other = np.arange(4)[:, None] != row
        alone = {"labels": np.where(other, -100, labels), "weights": np.where(other, 0, weights)}
        metrics, _ = on_eight.first(**alone)
        assert metrics["labels"] == (labels[row] != -100).sum() > 0
        np.testing.assert_allclose(weights[row].sum(), 1, rtol=1e-6)
        losses.append(metrics["loss"])
    loss = on_eight.first()[0]["loss"]
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-6)
    assert abs(loss - golden["masked_loss"]) > 1e-3


def test_a_batch_without_labels_changes_nothing_and_one_label_does(on_eight):
    state, _ = on_eight.step(on_eight.start(), on_eight.batch)
    labels, weights = on_eight.batch["labels"], on_eight.batch["weights"]
    none = {"labels": jnp.full_like(labels, -100), "weights": jnp.zeros_like(weights)}
    before = jax.device_get(state)
    after, metrics = on_eight.step(state, on_eight.with_arrays(none))
    found = [metrics[name] for name in ("labels", "loss", "grad_norm", "skipped")]
    assert found == [0, 0, 0, 0] and after.step == before.step + 1
    for name, parameter in before.parameters.items():
        np.testing.assert_array_equal(after.parameters[name], parameter)
    for old, new in zip(*map(jax.tree.leaves, (before.opt_state, after.opt_state)), strict=True):
        np.testing.assert_array_equal(old, new)
    one = {name: array.at[0, 5].set(1) for name, array in none.items()}
    moved, metrics = on_eight.step(after, on_eight.with_arrays(one))
    assert metrics["labels"] == 1
    assert any((moved.parameters[name] != x).any() for name, x in before.parameters.items())
