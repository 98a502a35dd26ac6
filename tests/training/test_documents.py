"""Training on packed documents: the same losses and gradients as for separate documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.parallel.mesh import DOCUMENTS, TOKENS
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step, positions_and_lengths
from mtraining_jax.utils.errors import UserError
from tests.training.common import VOCAB, changed, tiny_config

pytestmark = pytest.mark.usefixtures("drawn_alone")

SEQ_LEN, BLOCK = 128, 8
LENGTHS = [[30, 1, 57], [8, 64, 17, 20]]  # the second sequence is full
SPARSE = {"kind": "sampled_rows", "tau": 0.6, "probe_queries_per_block": 2, "min_sparse_tokens": 40}


class Run:
    """A step on some mesh, and handmade batches.

    With `weighted`, all labels have weight 1, so losses do not change.
    """

    def __init__(self, folder, rows, weighted=False, **sections):
        self.weighted = weighted
        self.config = tiny_config(
            folder,
            data={"batch_size": rows, "mode": "pack", "shuffle": False},
            sparsity=SPARSE | sections.pop("sparsity", {}),
            **sections,
        )
        self.mesh, self.layout = build_mesh(self.config), build_layout(self.config)
        self.builder = StateBuilder(self.config, self.mesh)
        pattern = build_pattern(self.config)
        attention = build_attention(self.config, self.mesh, self.layout, pattern)
        self.step = make_train_step(self.config, self.builder, attention, self.mesh)
        self._start = self.builder.fresh()

    def start(self):
        """A new state, because a step donates its argument."""
        return jax.tree.map(jnp.copy, self._start)

    def batch(self, lengths):
        """A batch with documents of these lengths; their tokens do not depend on their position."""
        tokens, labels = (np.zeros((len(lengths), SEQ_LEN), np.int32) for _ in range(2))
        labels -= 100
        documents = Documents.from_lengths(lengths, SEQ_LEN, BLOCK)
        for row, own in enumerate(lengths):
            start = 0
            for n in own:
                ids = np.random.default_rng(n).integers(VOCAB, size=n)
                tokens[row, start : start + n] = ids
                labels[row, start : start + n - 1] = ids[1:]
                start += -(-n // BLOCK) * BLOCK
        order, tokens_at = self.layout.permutation(), jax.NamedSharding(self.mesh, TOKENS)
        arrays = dict(tokens=tokens, labels=labels)
        if self.weighted:
            arrays["weights"] = np.where(labels == -100, 0, 1).astype(np.float32)
        batch = {name: jax.device_put(x[:, order], tokens_at) for name, x in arrays.items()}
        at = jax.NamedSharding(self.mesh, DOCUMENTS)
        return batch | {"documents": jax.device_put(documents, at)}

    def first(self, lengths):
        """Metrics of one step from the start, and the parameters after it."""
        state, metrics = self.step(self.start(), self.batch(lengths))
        return jax.device_get((metrics, state.parameters))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    # Documents that cross nodes are in tests/attention/test_documents.py.
    mesh = {"nodes": 1, "devices_per_node": 2}
    # One program for all tests; the reference has no weights.
    return Run(tmp_path_factory.mktemp("packed"), 2, weighted=True, parallel=mesh)


def test_a_step_on_packs_is_a_step_on_each_document_alone(packed, tmp_path):
    metrics, parameters = packed.first(LENGTHS)
    # Replicas and micro-batches are in finetuning/test_masks.py.
    alone = Run(tmp_path, 8, parallel={"nodes": 1, "devices_per_node": 1})
    each = [[n] for own in LENGTHS for n in own]
    wanted, expected = alone.first([*each, []])
    assert metrics["labels"] == wanted["labels"] == sum(n - 1 for (n,) in each)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-5)
    for name, x in parameters.items():
        np.testing.assert_allclose(x, expected[name], atol=2e-4, err_msg=name)
    padded = [[-(-n // BLOCK) * BLOCK for n in own] for own in LENGTHS]
    pairs = np.mean([sum(n * (n + 1) / 2 for n in own) for own in padded])
    share = metrics["layers"]["document_pairs"]
    np.testing.assert_allclose(share, pairs / (SEQ_LEN * (SEQ_LEN + 1) / 2), rtol=1e-6)
    density = metrics["layers"]["density"]
    assert (density > 0.5).all() and (density < 0.999).all()
    # Pairs add up over any packing; mean densities do not.
    of_layers = metrics["layers"], wanted["layers"]
    for name in ("computed_pairs", "executed_pairs"):
        packs, documents = (x[name] * n for x, n in zip(of_layers, (2, 8), strict=True))
        np.testing.assert_allclose(packs, documents, rtol=1e-5)


def test_packs_may_change_places_in_a_batch(packed):
    one, other = packed.first(LENGTHS), packed.first(LENGTHS[::-1])
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(one[0][name], other[0][name], rtol=1e-6)


def test_documents_may_weigh_as_much_as_each_other(packed):
    batch = packed.batch(LENGTHS)
    labels, order = batch["labels"], packed.layout.permutation()
    weights = np.zeros(labels.shape, np.float32)
    for row, own in enumerate(LENGTHS):
        for n, start in zip(
            own, np.cumsum([0, *(-(-n // BLOCK) * BLOCK for n in own[:-1])]), strict=True
        ):
            weights[row, start : start + n - 1] = 1 / max(n - 1, 1)
    batch["weights"] = jax.device_put(weights[:, order], labels.sharding)
    _, metrics = packed.step(packed.start(), batch)
    each = [packed.first([[n], []])[0]["loss"] for own in LENGTHS for n in own if n > 1]
    np.testing.assert_allclose(metrics["loss"], np.mean(each), rtol=1e-5)
    assert abs(metrics["loss"] - packed.first(LENGTHS)[0]["loss"]) > 1e-3


def test_weights_of_untrained_tokens_do_not_count_and_have_any_unit(packed):
    """The loss is a weighted mean over labels: batches from Python may have such weights."""
    batch = packed.batch(LENGTHS)
    labels = batch["labels"]
    weights = np.random.default_rng(0).uniform(0.5, 1, labels.shape).astype(np.float32)
    found = []
    for unit, others in ((1, 0), (1, 1), (1e-3, 1)):  # the last ones sum to less than 1
        own = unit * np.where((np.asarray(labels) != -100) | (others > 0), weights, 0)
        given = {"weights": jax.device_put(own.astype(np.float32), labels.sharding)}
        metrics = packed.step(packed.start(), batch | given)[1]
        found.append([metrics["loss"], metrics["grad_norm"]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


def test_batches_of_the_loader_say_where_documents_are_and_count_positions_in_them(packed):
    lengths = np.array([30, 57, 5, 100, 64, 40, 20, 17])
    path = packed.config.data.source_options.paths[0]
    ids = np.load(path)[: lengths.sum()]
    np.save(path, ids)
    with open(f"{path}.lengths", "wb") as file:
        np.save(file, lengths)
    batches = DeviceBatches(packed.config, packed.mesh, packed.layout)
    batch = next(batches)
    batches.close()
    back = packed.layout.inverse()
    of_rope = jax.jit(lambda batch: positions_and_lengths(batch, packed.layout, packed.mesh))
    arrays = batch["tokens"], batch["labels"], *of_rope(batch)
    tokens, labels, positions, found = (np.asarray(x)[:, back] for x in arrays)
    documents = batch["documents"]
    first, tokens_of = (np.repeat(x, BLOCK, 1) for x in (documents.first, documents.tokens))
    places = np.arange(SEQ_LEN) - first * BLOCK
    np.testing.assert_array_equal(positions, np.where(tokens_of > 0, places, 0))
    np.testing.assert_array_equal(found, tokens_of)
    counted = (tokens_of > 0) & (places < tokens_of - 1)
    np.testing.assert_array_equal(labels != -100, counted)
    following = np.roll(tokens, -1, axis=1)
    np.testing.assert_array_equal(labels[counted], following[counted])
    weighted = changed(packed.config, loss={"weighting": "document"})
    batches = DeviceBatches(weighted, packed.mesh, packed.layout)
    by_document = next(batches)
    batches.close()
    state, metrics = packed.step(packed.start(), by_document)
    assert np.isfinite(metrics["loss"]) and metrics["labels"] == counted.sum()
    weights = np.asarray(by_document["weights"])
    np.testing.assert_allclose(weights[:, back][counted], 1 / (tokens_of[counted] - 1))
    assert (weights > 0).sum() == counted.sum()


def test_patterns_that_cannot_keep_documents_apart_are_refused(tmp_path):
    message = (
        'data.mode = "pack" cannot be combined with sparsity.kind = '
        '"examples.strided_pattern:Strided": Strided does not support'
    )
    with pytest.raises(UserError, match=message):
        Run(tmp_path, 2, sparsity={"kind": "examples.strided_pattern:Strided"})
    with pytest.raises(UserError, match='loss.weighting = "document" needs documents, and data.mo'):
        build_mesh(tiny_config(tmp_path, loss={"weighting": "document"}))
