"""Validation loss during training."""

import contextlib
import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtraining_jax.callbacks import Run
from mtraining_jax.reporting.record import validation_record, validation_text
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.validation import Evaluator
from mtraining_jax.utils.errors import UserError
from tests.training.common import VOCAB, changed, losses, run, written


@pytest.fixture
def held_out(plain_config, tmp_path):
    """One device, dense, with 9 validation sequences of 64; it reads 2 batches of 3."""
    path = tmp_path / "held_out.npy"
    np.save(path, np.random.default_rng(5).integers(0, VOCAB, 9 * 64).astype(np.uint16))
    data = changed(plain_config, data={"paths": (str(path),), "seq_len": 64, "batch_size": 3}).data
    return changed(plain_config, eval={"interval": 2, "num_batches": 2, "data": data})


def test_resumed_run_evaluates_as_one_that_was_not_interrupted(held_out, capsys, watched):
    config = changed(held_out, run={"steps": 5}, checkpoint={"interval": 3})
    whole = run(config)
    assert [("eval_loss" in record) for record in whole] == [False, True, False, True, True]
    before, *records = written(config)
    assert records == whole
    assert watched == [
        "reading the batch of step 1", "the evaluation before step 1",
        "reading the batch of step 2", "the evaluation after step 2", "reading the batch of step 3",
        "saving the checkpoint of step 3", "reading the batch of step 4",
        "the evaluation after step 4", "reading the batch of step 5", "the evaluation after step 5",
        "saving the checkpoint of step 5",
    ]  # fmt: skip
    watched.clear()
    assert before.keys() == {"step", "eval_loss", "eval_loss_by_position", "eval_seconds"}
    # Of random parameters: all tokens are about as likely.
    assert before["step"] == 0 and abs(before["eval_loss"] - np.log(VOCAB)) < 0.2
    means = whole[1]["eval_loss_by_position"]
    counts = np.array([1, 2, 4, 8, 16, 32])  # 63 labels per sequence
    assert np.average(means, weights=counts) == pytest.approx(whole[1]["eval_loss"], rel=1e-6)
    printed = capsys.readouterr().out
    assert f"validation loss {whole[1]['eval_loss']:.4f}" in printed
    first, last = (f"{x['eval_loss']:.4f}" for x in (before, whole[4]))
    assert f"\nstep 0/5  validation loss {first}\n" in printed
    assert f"  validation {first} -> {last}\n" in printed
    assert "tokens: 1 file, 576 tokens" in printed and "  validation " in printed
    # Evaluation at other steps does not change the training metrics.
    shutil.rmtree(checkpoint_folder(config) / "5")
    rest = run(changed(config, eval={"interval": 5}))
    assert "note: " not in capsys.readouterr().err  # such as on missing lines
    assert [x["step"] for x in written(config)] == [0, 1, 2, 3, 4, 5]  # not evaluated again
    np.testing.assert_array_equal(losses(rest), losses(whole[3:]))
    assert watched[0] == "reading the checkpoint of step 3"
    assert "eval_loss" not in rest[0]
    for name in ("eval_loss", "eval_loss_by_position"):
        assert rest[1][name] == whole[4][name]


def test_losses_are_those_of_the_model_and_dense_and_sparse_differ(config, tmp_path):
    """Compares with the full logits, also of each part of a mixture."""
    tokens = np.random.default_rng(5).integers(0, VOCAB, (4, 128))
    parts = {}
    for name, rows, weight in (("one", tokens[:3], 1), ("two", tokens[3:], 3)):
        np.save(tmp_path / f"{name}.npy", rows.astype(np.uint16))
        path = str(tmp_path / f"{name}.npy")
        parts[name] = {"source": "tokens", "paths": [path], "weight": weight}
    mixture = {"source": "mixture", "parts": parts, "batch_size": 4, "shuffle": False}
    data = changed(config, data=mixture).data
    asked = {"interval": 1, "num_batches": 4, "attention": "both", "data": data}
    config = changed(config, parallel={"nodes": 1, "devices_per_node": 1}, eval=asked)
    mesh = build_mesh(config)
    builder = StateBuilder(config, mesh)
    state = builder.fresh()
    evaluation = Evaluator(config, builder, mesh)
    evaluation.start(Run(config, mesh, True, print), state)
    first, again = (evaluation.with_state(step, state) for step in (1, 2))
    evaluation.close()
    names = {"eval_loss", "eval_loss_dense"}
    assert {name for name in first if name in names} == names
    assert all(first[name] == again[name] for name in first if name != "eval_seconds")
    assert first["eval_loss"] != first["eval_loss_dense"]

    def attention(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(np.tri(128, dtype=bool), logits, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), {}

    one = jax.device_put(state.parameters, jax.devices()[0])

    @jax.jit
    def log_probabilities(parameters):
        model = nnx.merge(builder.graphdef, builder.unflatten(parameters))
        hidden, _ = model(jnp.asarray(tokens), jnp.arange(128), attention)
        return jax.nn.log_softmax(model.logits(hidden))[:, :-1]

    found = log_probabilities(one)
    each = -np.take_along_axis(np.asarray(found), tokens[:, 1:, None], -1)[..., 0]
    # By weight: a quarter of 16 sequences are those of the first part, one of them twice.
    expected = each[[0, 1, 2, 0, *[3] * 12]]
    assert first["eval_loss_dense"] == pytest.approx(expected.mean(), rel=1e-5)
    for name, rows in (("one", each[:3]), ("two", each[3:])):  # each sequence once
        assert first[f"eval_loss_dense/{name}"] == pytest.approx(rows.mean(), rel=1e-5)
    third = expected[:, 3:7].mean()  # labels at positions 4 to 7
    assert first["eval_loss_dense_by_position"][2] == pytest.approx(third, rel=1e-5)
    assert evaluation.description.endswith("; epochs in 4 batches: 1.33 of one, 12 of two")


def test_all_validation_data_is_read_whatever_the_batch_size(held_out):
    """Batches of 4 end with one of a single sequence, and a batch of 10 has 9."""
    found = []
    for batch_size, num_batches in ((3, 3), (3, 4), (4, 3), (10, 1)):
        data = held_out.eval.data
        data = dataclasses.replace(data, batch_size=batch_size, shuffle=True)
        config = changed(held_out, eval={"data": data, "num_batches": num_batches})
        mesh = build_mesh(config)
        builder = StateBuilder(config, mesh)
        with contextlib.closing(Evaluator(config, builder, mesh)) as evaluation:
            evaluation.start(Run(config, mesh, True, print), state := builder.fresh())
            found.append(evaluation.with_state(1, state) | {"eval_seconds": 0})
            fewer = "; 3 of eval.num_batches = 4 batches" in evaluation.description
            assert fewer == (num_batches == 4) and "of them" not in evaluation.description
    for others in found[1:]:
        assert others.keys() == found[0].keys()
        for name, value in others.items():
            np.testing.assert_allclose(value, found[0][name], rtol=1e-6, err_msg=name)
    with contextlib.closing(Evaluator(held_out, builder, mesh)) as evaluation:
        assert evaluation.description.endswith("; eval.num_batches = 2 reads 6 of them")
        evaluation.start(Run(held_out, mesh, True, print), state)
        few = evaluation.with_state(1, state)["eval_loss"]
    assert abs(few - found[0]["eval_loss"]) > 1e-5


def test_validation_data_that_cannot_be_read_is_refused(held_out):
    data = changed(held_out, data={"paths": ("nowhere.npy",)}).data
    with pytest.raises(UserError, match='^eval.data.paths: "nowhere.npy" does not exist'):
        run(changed(held_out, eval={"data": data}))
    assert not (held_out.run.folder / "metrics.jsonl").exists()


def test_a_record_of_an_evaluation():
    sums = {"eval_loss": (np.array([2.0, 6.0, 0.0]), np.array([1, 2, 0]))}
    found = validation_record(sums, 1.5)
    assert found == {
        "eval_loss": 8 / 3,
        "eval_loss_by_position": [2.0, 3.0, None],
        "eval_seconds": 1.5,
    }
    assert validation_text(found) == "2.6667"
    assert validation_text({"eval_loss_dense": 1.0}) == "dense 1.0000"
    assert validation_text(found | {"eval_loss_dense": None}) == "2.6667, dense not finite"
    assert validation_text({"loss": 1.0}) is None
    sums = {name: (np.array([x]), np.ones(1)) for name, x in (("eval_loss", 2), ("eval_loss/a", 3))}
    assert validation_text(validation_record(sums, 1.5)) == "2.0000, a 3.0000"
