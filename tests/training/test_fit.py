"""Training from Python: own batches, optimizers and callbacks."""

import dataclasses
import itertools
import json
import re
import time
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from mtraining_jax import Callback, Documents, fit
from mtraining_jax.data.given import GivenBatches
from mtraining_jax.data.loader import Loader
from mtraining_jax.reporting import goodput
from mtraining_jax.training.checkpoint import read_record
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.utils.errors import UserError
from tests.training.common import VOCAB, changed, losses, run

ROOT = Path(__file__).resolve().parents[2]
B, S = 2, 128
pytestmark = pytest.mark.usefixtures("drawn_alone")


@pytest.fixture
def config(plain_config):
    return plain_config


class Given:
    """The tokens of the run's own loader, in their order, with a state."""

    def __init__(self, config):
        self.loader = Loader(config.data, permutation=np.arange(S), vocab_size=VOCAB, block_size=8)

    def __next__(self):
        return {"tokens": next(self.loader)["tokens"]}

    def get_state(self):
        return {"read": self.loader.get_state()}

    def set_state(self, state):
        self.loader.set_state(state["read"])


def tokens(value=1, shape=(B, S)):
    return {"tokens": np.full(shape, value)}


def test_own_batches_train_with_the_bits_of_the_same_files(config):
    """On two devices, which hold tokens in another order."""
    config = changed(config, parallel={"devices_per_node": 2})
    expected = run(config)
    found = fit(changed(config, run={"name": "given"}), data=Given(config))
    np.testing.assert_array_equal(losses(found.records), losses(expected))
    assert [x["labels"] for x in found.records] == [B * (S - 1)] * 4
    folder = checkpoint_folder(changed(config, run={"name": "given"}))
    assert read_record(folder, 4)["config"]["data"]["source"] == "given"


def test_labels_follow_from_tokens_and_documents(config):
    """Documents of 12, 20 and 5 tokens in blocks of 8, then padding, are those of the loader."""
    lengths = [12, 20, 5]
    config = changed(
        config, run={"steps": 1}, data={"mask_documents": True}, sparsity={"min_sparse_tokens": 0}
    )
    documents = Documents.from_lengths([lengths] * B, S, 8)
    ids = np.random.default_rng(0).integers(1, VOCAB, (B, S))
    labels = np.full((B, S), -100)
    for begin, length in ((0, 12), (16, 20), (40, 5)):
        labels[:, begin : begin + length - 1] = ids[:, begin + 1 : begin + length]
    given = {"tokens": ids, "documents": documents}
    (derived,) = fit(config, data=iter([given])).records
    config = changed(config, run={"name": "with-labels"})
    (stated,) = fit(config, data=iter([given | {"labels": labels}])).records
    assert derived["labels"] == stated["labels"] == B * (11 + 19 + 4)
    assert derived["real_tokens"] == B * sum(lengths)
    assert derived["loss"] == stated["loss"] and derived["grad_norm"] == stated["grad_norm"]


def test_own_weights_are_read_in_layout_order(config):
    order, columns = np.random.default_rng(0).permutation(S), np.arange(1, S, 2)
    layout = {"permutation": order, "rows": np.arange(B), "columns": columns, "block_size": 8}
    weights = np.arange(B * S).reshape(B, S)
    given = iter([tokens() | {"weights": weights}, tokens()])
    batches = GivenBatches(given, config.data, vocab_size=VOCAB, weighted=True, **layout)
    np.testing.assert_array_equal(next(batches)["weights"], weights[:, order[columns]])
    with pytest.raises(UserError, match="batch 2 of .* has no weights, which loss.weighting = "):
        next(batches)


def test_own_batches_resume_exactly_with_a_state_and_begin_again_without(config, capsys):
    whole = fit(changed(config, run={"name": "whole"}), data=Given(config)).records
    config = changed(config, checkpoint={"interval": 2})
    fit(changed(config, run={"steps": 2}), data=Given(config))
    rest = fit(config, data=Given(config)).records
    np.testing.assert_array_equal(losses(rest), losses(whole)[2:])
    assert "from their start" not in capsys.readouterr().out
    longer = changed(config, run={"steps": 5})
    with pytest.raises(UserError, match="the checkpoint's run had its batches from Python"):
        run(longer)
    fit(longer, data=itertools.repeat(tokens()))
    assert (
        "batches from Python, which a resumed run reads again from their start"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "batch, sentence",
    [
        ({"inputs": np.zeros((B, S), int)}, "has no 'tokens', only 'inputs'"),
        (tokens(shape=(1, S)), "has tokens of shape (1, 128), but this process needs (2, 128)"),
        (tokens(1.5), "has tokens of type float64, but they must be integers"),
        (tokens(VOCAB), f"has {VOCAB} among its tokens, but they must be 0 to {VOCAB - 1} (model"),
        (tokens() | {"labels": np.full((B, S), -1)}, "has -1 among its labels, but they must be"),
        (tokens() | {"documents": 1}, "has documents, which needs data.mask_documents = true"),
    ],
)
def test_a_wrong_batch_ends_in_one_sentence(config, batch, sentence):
    with pytest.raises(UserError, match=rf"^batch 1 of fit\(data=...\) {re.escape(sentence)}"):
        fit(config, data=iter([batch]))


def test_what_own_batches_exclude_is_refused(config):
    with pytest.raises(UserError, match="ended after 1 batches, and the run needs more"):
        fit(config, data=iter([tokens()]))
    with pytest.raises(UserError, match="run.epochs = 1 needs the length of the data"):
        epochs = dataclasses.replace(config.run, epochs=1.0)
        fit(dataclasses.replace(config, run=epochs), data=iter([]))
    with pytest.raises(UserError, match='data.balance = "length" reorders sequences'):
        fit(changed(config, data={"balance": "length"}), data=iter([]))
    with pytest.raises(UserError, match='"given" has its batches from Python: call mtraining_jax'):
        run(changed(config, data={"source": "given", "paths": ()}))


def test_own_optimizer_moves_parameters_as_optax_says(config):
    """AdamW of optax is the built-in one but for rounding; it resumes, and none is mixed up."""
    given = optax.adamw(1e-2, 0.9, 0.95, weight_decay=0.0)
    expected = run(config)
    config = changed(config, run={"name": "given"}, checkpoint={"interval": 2})
    whole = fit(config, optimizer=given).records
    np.testing.assert_allclose(losses(whole), losses(expected), rtol=2e-4)
    assert [x["lr"] for x in whole] == [None] * 4
    again = changed(config, run={"name": "again"})
    fit(changed(again, run={"steps": 2}), optimizer=given)
    np.testing.assert_array_equal(losses(fit(again, optimizer=given).records), losses(whole)[2:])
    with pytest.raises(UserError, match="checkpoint of another optimizer"):
        fit(changed(again, run={"steps": 5}), optimizer=optax.sgd(1.0, momentum=0.9))
    with pytest.raises(UserError, match="optimizer.offload is not possible with fit"):
        fit(changed(config, optimizer={"offload": True}), optimizer=given)


def test_muon_moves_matrices_along_orthogonal_directions(config):
    config = changed(config, run={"steps": 1}, optimizer={"kind": "muon", "lr": 1e-2})
    first = Keeper()
    after = fit(config, callbacks=[first]).state.parameters
    for name, before in first.states[0].items():
        moved = np.asarray(after[name]) - before
        if name.startswith("layers.") and moved.ndim == 3:
            sizes = np.linalg.svd(moved / 1e-2, compute_uv=False)
            # Five steps of Newton-Schulz leave singular values of 0.7 to 1.2 times one size, and
            # smaller ones where the gradient has hardly any.
            expected = 0.2 * max(moved.shape[-2:]) ** 0.5
            assert np.all(sizes < 1.25 * expected), name
            assert np.median(sizes) > 0.6 * expected, name
        else:  # AdamW's first step has the sign of the gradient
            assert np.abs(moved).max() == pytest.approx(1e-2, rel=0.1), name
    text = 'is a checkpoint with another optimizer: it has optimizer.kind = "muon"'
    config = changed(config, checkpoint={"interval": 1}, run={"name": "kept"})
    fit(config)
    with pytest.raises(UserError, match=text):
        fit(changed(config, run={"steps": 2}, optimizer={"kind": "adamw"}))


class Keeper(Callback):
    """Keeps all that it is called with, and the parameters of states."""

    def __init__(self, every=1):
        self.every, self.calls, self.states, self.records = every, [], {}, []

    def restore(self, step, saved):
        self.calls.append(("restore", step, saved))

    def start(self, run, state):
        self.run = run
        self.calls.append("start")

    def batch(self, step, batch):
        self.calls.append(("batch", step))
        return batch

    def measured(self, metrics):
        self.calls.append(("measured", int(metrics["step"])))
        return {}

    def wants_state(self, step):
        return step % self.every == 0

    def with_state(self, step, state):
        assert int(state.step) == step
        self.states[step] = jax.device_get(state.parameters)
        return {"state_of": step}

    def initial(self, record):
        self.calls.append(("initial", record))

    def step(self, record):
        self.records.append(record)
        return {"called": len(self.records)}

    def save(self):
        return len(self.records)

    def saved(self, step):
        self.calls.append(("saved", step))

    def end(self, result):
        self.calls.append(("end", len(result.records)))

    def close(self):
        self.calls.append("close")


def test_callbacks_are_called_in_order_and_their_entries_are_written(config):
    config = changed(config, checkpoint={"interval": 2}, metrics={"jsonl": True})
    keeper = Keeper(every=2)
    fit(changed(config, run={"steps": 2}), callbacks=[keeper])
    reported = [x for x in keeper.calls if x[0] == "measured"]  # in another thread
    assert reported == [("measured", 1), ("measured", 2)]
    assert [x for x in keeper.calls if x not in reported] == [
        ("batch", 1), "start", ("initial", {"step": 0, "state_of": 0}), ("batch", 2),
        ("saved", 2), ("end", 2), "close",
    ]  # fmt: skip
    assert [x.get("state_of") for x in keeper.records] == [None, 2]
    assert sorted(keeper.states) == [0, 2]
    lines = [json.loads(x) for x in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [x.get("called") for x in lines] == [None, 1, 2]
    again = Keeper(every=9)
    fit(config, callbacks=[again])
    assert again.calls[0] == ("restore", 2, 2) and not again.states
    assert [x["step"] for x in again.records] == [3, 4]


def test_a_callback_stops_a_run_which_the_same_call_continues(config, capsys, monkeypatch):
    class Stop(Callback):
        def start(self, run, state):
            self.run = run

        def step(self, record):
            if record["step"] == 2:
                self.run.stop("enough")

    config = changed(config, run={"steps": 6}, checkpoint={"interval": 50})
    result = fit(config, callbacks=[Stop()])
    assert result.stopped == "enough" and [x["step"] for x in result.records] == [1, 2, 3]
    said = capsys.readouterr().out
    assert "stopped early after step 3: enough" in said
    assert "--run.steps=6\n      continue training from step 3\n" in said
    clocks = types.SimpleNamespace(time=lambda: time.time() + 1e6, perf_counter=time.perf_counter)
    monkeypatch.setattr(goodput, "time", clocks)
    records = fit(config).records
    assert [x["step"] for x in records] == [4, 5, 6]
    assert records[-1]["wall_time"] < 1e5  # without the time between the two calls
    assert fit(config) == dataclasses.replace(fit(config), records=[], state=None)


def test_terms_of_callbacks_are_part_of_the_gradient_and_of_the_record(config):
    """A term with the value of the loss doubles the gradient, also over micro-batches."""

    class Again(Callback):
        def loss(self, hidden, lm_head, batch):
            logits = hidden.astype("float32") @ lm_head.T.astype("float32")
            of_labels = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            counted = batch["labels"] >= 0
            again = jax.numpy.where(counted, of_labels, 0).sum() / counted.sum()
            return {"again": again, "constant": jax.lax.stop_gradient(3.0 + 0 * again)}

    config = changed(config, run={"steps": 1})
    (alone,) = run(config)
    config = changed(config, run={"name": "twice"}, optimizer={"accumulation_steps": 2})
    (twice,) = fit(config, callbacks=[Again()]).records
    assert twice["again"] == pytest.approx(alone["loss"], rel=1e-5)
    assert twice["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert twice["grad_norm"] == pytest.approx(2 * alone["grad_norm"], rel=1e-4)
    assert twice["constant"] == 3


class Term(Callback):
    """Adds the mean square of the hidden states to the loss, times a factor."""

    def __init__(self, name, factor=1):
        self.name, self.factor = name, factor

    def loss(self, hidden, lm_head, batch):
        return {self.name: self.factor * jax.numpy.mean(hidden * hidden)}


def test_terms_of_one_name_or_of_a_metric_are_refused(config):
    with pytest.raises(UserError, match="two callbacks add a term 'mine' to the loss: give each"):
        fit(config, callbacks=[Term("mine"), Term("mine")])
    with pytest.raises(UserError, match="a callback adds a term 'loss' to the loss, but the rec"):
        fit(config, callbacks=[Term("loss")])


def test_terms_train_batches_without_labels(config):
    """They have a gradient; without one, nothing changes."""
    config = changed(config, run={"steps": 1}, optimizer={"weight_decay": 0.1})
    given = tokens() | {"labels": np.full((B, S), -100)}
    for factor in (0, 1):
        keeper = Keeper()
        result = fit(
            changed(config, run={"name": f"factor-{factor}"}),
            data=iter([given]),
            callbacks=[keeper, Term("mine", factor)],
        )
        (record,) = result.records
        assert record["loss"] == record["labels"] == 0
        after = jax.device_get(result.state.parameters)
        moved = any(not np.array_equal(x, keeper.states[0][n]) for n, x in after.items())
        assert moved == (record["grad_norm"] > 0) == (record["mine"] > 0) == (factor > 0)


def test_what_callbacks_do_wrong_is_named(config):
    class Taken(Callback):
        def step(self, record):
            return {"loss": 1.0}

    with pytest.raises(UserError, match="the callback Taken returned 'loss', but the record of"):
        fit(config, callbacks=[Taken()])
    with pytest.raises(UserError, match="two callbacks of type Keeper would save under"):
        fit(config, callbacks=[Keeper(9), Keeper(9)])
    with pytest.raises(UserError, match="has an object of type function: it must be a mtraining_"):
        fit(config, callbacks=[tokens])


def test_a_run_starts_from_the_state_of_another(config):
    config = changed(config, run={"steps": 2})
    first = fit(config)
    whole = fit(changed(config, run={"name": "whole", "steps": 4}), data=Given(config))
    rest = Given(config)
    rest.set_state({"read": _after(config, 2)})
    second = fit(changed(config, run={"name": "second"}), data=rest, state=first.state)
    np.testing.assert_array_equal(losses(second.records), losses(whole.records)[2:])
    assert [x["step"] for x in second.records] == [1, 2]
    wider = changed(config, run={"name": "wider"}, model={"intermediate_size": 64})
    with pytest.raises(UserError, match="fit.state=.... is of another model: its parameter layers"):
        fit(wider, state=second.state)
    other = changed(config, run={"name": "muon"}, optimizer={"kind": "muon"})
    with pytest.raises(
        UserError, match="has the state of another optimizer: replace its opt_state"
    ):
        fit(other, state=second.state)
    fresh = dataclasses.replace(second.state, opt_state=())
    assert len(fit(other, state=fresh).records) == 2


def test_a_state_with_frozen_matrices_is_trained_in_fp32(config):
    """Frozen ones are stored in bf16, in which small updates would be lost, and moments round."""
    config = changed(config, run={"steps": 1}, model={"dtype": "bfloat16"})
    frozen = changed(config, run={"name": "frozen"}, optimizer={"trainable": ["norm"]})
    first = fit(frozen).state
    assert first.model["embed_tokens.weight"].dtype == "bfloat16"
    second = fit(config, state=dataclasses.replace(first, opt_state=())).state
    arrays = second.model, second.opt_state
    assert {x.dtype.name for x in jax.tree.leaves(arrays)} == {"float32", "int32"}
    rounded = changed(config, run={"name": "rounded"}, optimizer={"mu_dtype": "bfloat16"})
    third = fit(rounded, state=second).state
    assert {x.dtype.name for x in third.opt_state[0].mu.values()} == {"bfloat16"}
    assert {x.dtype.name for x in third.opt_state[0].nu.values()} == {"float32"}


def _after(config, steps):
    loader = Given(config).loader
    for _ in range(steps):
        next(loader)
    return loader.get_state()


def test_the_recipes_of_the_page_run(config, monkeypatch):
    page = (ROOT / "docs/training-from-python.md").read_text()
    recipes = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(recipes) == 5
    monkeypatch.setattr(
        "mtraining_jax.Config.load",
        lambda name, fields: changed(config, run={"name": fields["run.name"]}),
    )
    for recipe in recipes:
        found = {}
        exec(recipe, found)
        assert [x["step"] for x in found["result"].records] == [1, 2, 3, 4]
    assert found["result"].records[-1]["trained"] == pytest.approx(1 - 1 / S)
