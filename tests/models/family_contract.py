"""Requirements for every family: a class of tests that each family subclasses."""

import json
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mtraining_jax.models.families.family import family_of
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.names import checkpoint_tensors
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.models.transformer import abstract_state, graph_definition, param_shardings
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.tools.export.write import assembled, save_hf
from tests.models.common import (
    CHECKPOINTS,
    assert_states_close,
    equations,
    next_token_loss,
    tiny_spec,
)

TOKENS = 16  # of a traced program
EVERY = 8  # the golden logits are those of every eighth position


class FamilyContract:
    """Comparison with transformers in fp32: the golden file has its outputs on the same weights.

    Attributes:
        family: a name of `models.families`.
        checkpoint: folder of a small checkpoint with golden.npz, in the test data.
        gradients: tensors with golden gradients.
        sizes: further fields of the smallest model.
    """

    family: str
    checkpoint: str
    gradients: tuple[str, ...]
    sizes: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls):
        return CHECKPOINTS / cls.checkpoint

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, directory):
        return read_hf_config(directory, dtype="float32", remat="none")

    @pytest.fixture(scope="class")
    @classmethod
    def state(cls, directory, spec):
        return load_hf(directory, spec)

    @pytest.fixture(scope="class")
    @classmethod
    def golden(cls, directory):
        return np.load(directory / "golden.npz")

    @pytest.fixture(scope="class")
    @classmethod
    def outcome(cls, spec, state, golden):
        """Loss, logits and gradients, in one compilation."""
        graphdef = graph_definition(spec)

        @jax.jit
        def run(state, tokens):
            return jax.value_and_grad(
                lambda state: next_token_loss(graphdef, state, tokens), has_aux=True
            )(state)

        (loss, (logits, _)), gradients = run(state, jnp.asarray(golden["input_ids"]))
        return loss, logits, gradients

    def test_the_checkpoint_is_of_this_family(self, spec):
        assert spec.family == self.family == family_of(self.family).model_type

    def test_logits(self, outcome, golden):
        _, logits, _ = outcome
        assert np.abs(logits[:, ::EVERY] - golden["logits"]).max() <= 2e-4

    def test_loss(self, outcome, golden):
        np.testing.assert_allclose(outcome[0], golden["loss"], rtol=1e-6)

    def test_gradients(self, outcome, golden, spec):
        gradients = by_name(outcome[2])
        tensors = {tensor.name: tensor for tensor in checkpoint_tensors(spec)}
        for name in self.gradients:
            parts = [gradients[p.parameter][p.index] for p in tensors[name].parts]
            found, expected = assembled(tensors[name], parts), golden[f"grad:{name}"]
            np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-4, err_msg=name)
            assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()

    def test_a_round_trip_has_the_same_bits(self, spec, state, directory, tmp_path):
        dtype = json.loads((directory / "config.json").read_text())["dtype"]
        out = save_hf(tmp_path / "out", spec, state, dtype=dtype, like=directory)
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
        ours, theirs = (load_file(path / "model.safetensors") for path in (out, directory))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
        ours, theirs = (json.loads((x / "config.json").read_text()) for x in (out, directory))
        assert_contains(ours, theirs)

    def test_config_json_needs_nothing_of_the_old_one(self, spec, state, tmp_path):
        out = save_hf(tmp_path / "out", spec, state, dtype="float32")
        assert read_hf_config(out, dtype="float32", remat="none") == spec
        # Without these fields, transformers would use its own numbers, such as 32000.
        written = json.loads((out / "config.json").read_text())
        assert written["pad_token_id"] is None and written["eos_token_id"] is None

    def test_shards_hold_their_slices_of_it(self, spec, state, directory):
        shardings = param_shardings(spec, make_mesh(1, 2, 4), fsdp=True)
        sharded = load_hf(directory, spec, shardings)
        assert_states_close(sharded, state, tolerance=0)
        assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_decoder_has_what_the_table_lists(self, tied):
        spec = tiny_spec(family=self.family, tie_word_embeddings=tied, **self.sizes)
        state = abstract_state(spec)
        found = {name: leaf.shape for name, leaf in by_name(state).items()}
        assert found == {name: entry.shape for name, entry in spec.parameters.items()}
        for name, entry in spec.parameters.items():
            assert len(entry.axes) == len(entry.shape), name
        assert ("lm_head.weight" in found) is not tied

    def test_products_are_those_of_the_traced_program(self):
        spec = tiny_spec(family=self.family, **self.sizes)
        graphdef, tokens = graph_definition(spec), jnp.zeros((1, TOKENS), jnp.int32)

        def logits(state):
            model = nnx.merge(graphdef, state)
            hidden, _ = model(tokens, tokens, lambda q, k, v, *_: (q, {}))
            return model.logits(hidden)

        jaxpr = jax.make_jaxpr(logits)(abstract_state(spec)).jaxpr
        layer = [e for e in jaxpr.eqns if e.primitive.name == "scan"][0].params["jaxpr"].jaxpr
        assert products(layer) == sum(family_of(self.family).layer_products(spec).values())
        outside = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        assert sum(map(weights_of, outside)) == spec.vocab_size * spec.hidden_size


def by_name(state):
    """The leaves of a state by dotted name."""
    names = jax.tree.leaves(parameter_names(state))
    return dict(zip(names, jax.tree.leaves(state), strict=True))


def assert_contains(whole, part):
    """Checks that every entry of `part` is in `whole`, also in nested tables."""
    for key, value in part.items():
        if isinstance(value, dict):
            assert_contains(whole[key], value)
        else:
            assert whole[key] == value, key


def products(jaxpr):
    """Multiplications per token with the matrices of a traced program."""
    return sum(map(weights_of, equations(jaxpr)))


def weights_of(product):
    if product.primitive.name == "ragged_dot_general":  # of experts: each row takes one
        rows, (_, *matrix) = (x.aval.shape for x in product.invars[:2])
        return rows[0] // TOKENS * np.prod(matrix)
    if product.primitive.name != "dot_general":
        return 0
    shapes = [x.aval.shape for x in product.invars]
    return min(np.prod(shape) for shape in shapes if len(shape) == 2)
